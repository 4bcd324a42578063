"""From a checkpoint that is loaded to the last logged step: the stretches of a recovery, one log after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ckpt.engine.base import ReplayableAdapter
from ckpt.errors import ReplayError
from ckpt.gradlog.copies.bringing import Wanted, spans_of
from ckpt.gradlog.replaying.replay import Outcome, Replay, update_group
from ckpt.gradlog.writing.log import loose_of
from ckpt.layout.spec import PARAM
from ckpt.runtime.extras import ENGINE, EXTRA, RNG, VALUE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckpt.engine.base import EngineState, Stepped
    from ckpt.gradlog.copies.near import Near
    from ckpt.gradlog.replaying.recover import Recovery
    from ckpt.runtime.revive import Saved
    from ckpt.store.base import Store


class Replays:
    """What is to be replayed on one rank, checked before anything of the engine is touched.

    Args:
        store: the repository's.
        adapter: of the engine that is being loaded.
        way: what to replay.
        state: what is loaded on this rank.
        rank, world: of this process.
        strict: a step that does not come out as it was is an error, where the same code repeats it.
        near: records that need not be read from the store.

    Raises:
        ReplayError: the engine cannot repeat steps, or the log is not of what it steps.
        IntegrityError, FormatError: damage.
    """

    def __init__(
        self,
        store: Store,
        adapter: object,
        way: Recovery,
        state: EngineState,
        rank: int,
        world: int,
        *,
        strict: bool = True,
        near: Near | None = None,
    ) -> None:
        if not isinstance(adapter, ReplayableAdapter):
            raise ReplayError(f"steps cannot be replayed with an adapter of {type(adapter).__name__}; replay=False")
        self._adapter, self._way, self._rank = adapter, way, rank
        self._stepped = adapter.stepped()
        loose = loose_of(state, self._stepped)
        # Under Megatron's distributed optimizer a rank holds parameters of which others step every element: what is
        # trained here is stepped by somebody.
        held = {
            shard.spec.fqn
            for shard in state.shards
            if shard.spec.role == PARAM and (shard.owner is None or not shard.owner.requires_grad)
        }
        self._replays = [
            Replay(store, one.number, rank, world, self._stepped, loose, one.world, strict=strict, near=near)
            for one in way.stretches
        ]
        for replay in self._replays:
            replay.check_stepped(held)

    def wanted(self) -> list[Wanted]:
        """Return the records that this rank will read."""
        pairs = zip(self._way.stretches, self._replays, strict=True)
        return [Wanted(one.run, spans_of(replay.ranks), one.first, one.last) for one, replay in pairs if one.run]

    def run(self, saved: Saved, beat: Callable[[], None]) -> Outcome:
        """Repeat the steps on the engine, whose load of the checkpoint is finished. Nothing here is collective.

        Args:
            saved: objects of the checkpoint.
            beat: called behind each step.

        Raises:
            ReplayError, IntegrityError, FormatError: the log does not have the steps, or not as they were written.
        """
        whole = Outcome()
        for one, replay in zip(self._way.stretches, self._replays, strict=True):
            done = replay.run(one.first, one.last, beat)
            whole.steps += done.steps
            whole.skipped += done.skipped
            whole.bytes_read += done.bytes_read
            whole.bytes_from_memory += done.bytes_from_memory
            whole.exact, whole.deviation = done.exact, done.deviation
            whole.kinds |= done.kinds
            whole.notes += done.notes
            saved.rng_is_own = saved.rng_is_own and self._rank < one.world
        return whole

    def put_back(self, saved: Saved, whole: Outcome) -> None:
        """Make of what was repeated the engine's state. A collective of the engine's: no rank may have failed.

        Args:
            saved: objects of the checkpoint; those that the log has newer ones of are replaced.
            whole: what :meth:`run` returned.
        """
        _put_back(self._adapter, self._stepped, saved, whole)


def _put_back(adapter: ReplayableAdapter, stepped: Sequence[Stepped], saved: Saved, whole: Outcome) -> None:
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


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group as they are now; a learning rate may be a tensor."""
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
