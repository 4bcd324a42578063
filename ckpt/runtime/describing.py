"""From an adapter's description to what a rank tells the others: the first step of a save, an audit, an analysis."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ckpt.errors import ConfigError
from ckpt.format.holders import MAX_HOST
from ckpt.layout.spec import RankLayout, Shard
from ckpt.runtime.agree import Hello, JobPlan, cached_plan, exchange_hellos, job_plan, layout_digest
from ckpt.runtime.guard import check_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from ckpt.runtime.comm import Comm
    from ckpt.runtime.pieces import Piece

HOST_VARIABLE = "CKPT_HOST"


class State(Protocol):
    """What an adapter says that a rank holds (``ckpt.engine.base.EngineState``; runtime does not know engine)."""

    @property
    def shards(self) -> Sequence[Piece]:
        """Every piece."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied name -> listed name."""

    @property
    def derived(self) -> set[str]:
        """FQNs whose param should be cast(master)."""

    @property
    def groups(self) -> Mapping[str, tuple[int, ...]]:
        """Axis -> ranks of the process group along it."""

    @property
    def unused(self) -> set[str]:
        """Rules that fit nothing here."""

    @property
    def assumed(self) -> set[str]:
        """FQNs that count as whole on all tensor-parallel ranks though no framework says so."""


class Adapter(Protocol):
    """The part of ``ckpt.engine.base.EngineAdapter`` that tells what is held."""

    @property
    def kind(self) -> str:
        """Name of the adapter."""

    def describe(self) -> Any:
        """Return a :class:`State`."""

    def module(self) -> torch.nn.Module | None:
        """Return the module that runs forward."""


def layout_of(rank: int, state: State) -> RankLayout:
    """Return what a rank declares to hold, without the memory that holds it."""
    return RankLayout(
        rank,
        tuple(Shard(s.spec, s.box) for s in state.shards),
        tuple(sorted(state.aliases.items())),
        tuple(sorted(state.derived)),
        tuple(sorted(state.groups.items())),
        tuple(sorted(state.unused)),
    )


def claims_of(rank: int, state: State) -> RankLayout:
    """Return what a rank declares beside its shards: with whom it shares an axis, and rules that fit nothing here."""
    return RankLayout(rank, groups=tuple(sorted(state.groups.items())), unused=tuple(sorted(state.unused)))


@dataclass(frozen=True, slots=True)
class Met:
    """A job whose ranks have described themselves. ``hosts``: of each rank. ``state``: this rank's live memory."""

    job: JobPlan
    hosts: tuple[str, ...]
    state: State


def meet(comm: Comm, call: str, adapter_of: Callable[[], Adapter], options: tuple[str, ...] = ()) -> Met:
    """Describe an engine and agree on the job, for an operation that needs no store. Collective.

    Args:
        comm: all ranks of the job.
        call: name of the operation.
        adapter_of: gives this rank's adapter.
        options: what all ranks must have asked for alike, in words.

    Raises:
        ConfigError, UnsupportedLayout: the engine is not at a moment, or not of a kind, that can be described.
        LayoutError: the shards do not form a whole.
    """
    kept: list[tuple[RankLayout, State]] = []
    cached = cached_plan()

    def describe() -> Hello:
        adapter = adapter_of()
        check_whole(adapter.module())
        state: State = adapter.describe()
        layout = layout_of(comm.rank, state)
        kept.append((layout, state))
        return Hello(
            call=call,
            root="",
            step=None,
            options=options,
            engine=adapter.kind,
            layout=layout_digest(layout),
            cached=cached.layout if cached else b"",
            host=host_name(),
        )

    hellos = exchange_hellos(comm, describe)
    layout, state = kept[0]
    return Met(job_plan(comm, layout, hellos, cached), tuple(h.host for h in hellos), state)


def host_name() -> str:
    """Return the name of this rank's host, which stands for what can fail at once: ``CKPT_HOST``, else the system's.

    Raises:
        ConfigError: ``CKPT_HOST`` is set to nothing, or to what cannot be a name.
    """
    given = os.environ.get(HOST_VARIABLE)
    if given is None:
        return socket.gethostname()[:MAX_HOST] or "localhost"
    if not given or len(given) > MAX_HOST or not given.isprintable():
        raise ConfigError(f"{HOST_VARIABLE}={given[:80]!r}: expected a host's name of 1 to {MAX_HOST} characters")
    return given
