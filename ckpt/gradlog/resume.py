"""From a checkpoint that is loaded to the last logged step: the stretches of a recovery, one log after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ckpt.engine.base import ReplayableAdapter
from ckpt.errors import ReplayError
from ckpt.gradlog.log import loose_of
from ckpt.gradlog.replay import Outcome, Replay, update_group
from ckpt.runtime.extras import ENGINE, EXTRA, RNG, VALUE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt.engine.base import EngineState
    from ckpt.gradlog.recover import Recovery
    from ckpt.runtime.comm import Comm
    from ckpt.runtime.revive import Saved
    from ckpt.store.base import Store


def replay_on(comm: Comm, store: Store, adapter: object, way: Recovery, state: EngineState, saved: Saved) -> Outcome:
    """Replay what was logged behind the checkpoint that the engine has just got. A collective of the engine's.

    Args:
        comm: all ranks.
        store: the repository's.
        adapter: of the engine, whose load is finished.
        way: what to replay.
        state: what is loaded on this rank.
        saved: objects of the checkpoint; those that the log has newer ones of are replaced.

    Raises:
        ReplayError: the engine cannot repeat steps, or the log is not of what it steps.
        IntegrityError, FormatError: damage.
    """
    if not isinstance(adapter, ReplayableAdapter):
        raise ReplayError(f"steps cannot be replayed with an adapter of {type(adapter).__name__}; replay=False")
    stepped = adapter.stepped()
    loose = loose_of(state, stepped)
    whole = Outcome()
    for one in way.stretches:
        replay = Replay(store, one.number, comm.rank, comm.world, stepped, loose, one.world)
        done = replay.run(one.first, one.last, comm.beat)
        whole.steps += done.steps
        whole.skipped += done.skipped
        whole.bytes_read += done.bytes_read
        whole.exact, whole.deviation = done.exact, done.deviation
        whole.kinds |= done.kinds
        whole.notes += done.notes
        saved.rng_is_own = saved.rng_is_own and comm.rank < one.world
    counters: dict[str, Any] = {}
    for (kind, name), tree in whole.kinds.items():
        if kind == ENGINE:
            counters[name] = tree
        elif kind == RNG:
            saved.rng = tree
        elif kind == EXTRA:
            saved.states[name] = tree
        elif kind == VALUE:
            saved.values[name] = tree
    first = {**(saved.engine[0] if saved.engine else {}), **counters}
    optimizers = dict.fromkeys(one for s in stepped for one in (s.optimizer, s.shown))
    groups = [group for one in optimizers for group in one.param_groups]
    settings = [_copied(group) for group in groups]
    whole.notes += adapter.replayed([first, *saved.engine[1:]])
    # The groups of the checkpoint were put back with the counters: those behind the last step are the right ones.
    for group, options in zip(groups, settings, strict=True):
        update_group(group, options)
    return whole


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group as they are now; a learning rate may be a tensor."""
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
