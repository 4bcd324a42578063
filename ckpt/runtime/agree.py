"""How the ranks of a job come to one view: what is asked for, who holds what, and the plan that follows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt.errors import ConfigError
from ckpt.format.digest import raw_digest
from ckpt.layout.graph import ShardGraph
from ckpt.plan.save_plan import SavePlan, build_save_plan
from ckpt.plan.wire import combined, decode_layouts, encode_layout
from ckpt.runtime.behind import raise_unheard, unheard
from ckpt.runtime.settling import Routes

if TYPE_CHECKING:
    from ckpt.layout.spec import RankLayout
    from ckpt.runtime.comm import Comm


class Hello(msgspec.Struct, kw_only=True):
    """What each rank says of itself when an operation begins."""

    call: str
    root: str
    step: int | None
    options: tuple[str, ...]
    engine: str
    layout: bytes = b""
    """digest of this rank's layout"""
    cached: bytes = b""
    """digest of the job layout that this rank has a plan for"""
    objects: dict[str, str] = {}
    """object -> identity of its content"""
    host: str = ""
    """name of this rank's host"""
    failed: bytes = b""
    """failure of the asynchronous save before, which nobody on this rank has heard of"""


def hello_of(call: str) -> Hello:
    """Return what a rank says that has come to talk about the asynchronous save before, or the first one."""
    return Hello(call=call, root="", step=None, options=(), engine="", failed=unheard())


def exchange_hellos(comm: Comm, make: Any) -> list[Hello]:
    """Run ``make`` on every rank, exchange what it returns, and check that all ranks ask for the same.

    Raises:
        ConfigError: ranks disagree; the same error on every rank says who wants what.
        CkptError: the asynchronous save before has failed, and a rank has not heard of it.
    """
    encoded = comm.gather("describe", lambda: msgspec.msgpack.encode(make()))
    hellos = [msgspec.msgpack.decode(data, type=Hello) for data in encoded]
    raise_unheard([h.failed for h in hellos])
    said_of: dict[str, list[Any]] = {
        "call": [f"ckpt.{h.call}" for h in hellos],
        "root": [h.root for h in hellos],
        "step": [h.step for h in hellos],
        "options": [h.options for h in hellos],
        "engine kind": [h.engine for h in hellos],
    }
    for what, values in said_of.items():
        sides: dict[Any, list[int]] = {}
        for rank, value in enumerate(values):
            sides.setdefault(value, []).append(rank)
        if len(sides) > 1:
            said = "; ".join(f"{v!r} on rank(s) {', '.join(map(str, r[:8]))}" for v, r in sides.items())
            raise ConfigError(f"ranks disagree on the {what}: {said}")
    return hellos


@dataclass(frozen=True, eq=False)
class JobPlan:
    """A plan and the layout of the whole job (digest over all ranks) that it was made for."""

    layout: bytes
    graph: ShardGraph
    plan: SavePlan

    def routes(self, rank: int) -> Routes:
        """Return whose digests go where, for one rank; worked out once."""
        return self._for_rank(rank)[0]

    def held_bytes(self, rank: int) -> int:
        """Return the bytes of all chunks that a rank holds."""
        return self._for_rank(rank)[1]

    @cached_property
    def _of_rank(self) -> dict[int, tuple[Routes, int]]:
        return {}

    def _for_rank(self, rank: int) -> tuple[Routes, int]:
        if rank not in self._of_rank:
            nbytes = sum(self.plan.chunks[i].nbytes for i in self.plan.held(rank))
            self._of_rank[rank] = Routes.of(self.plan, rank), nbytes
        return self._of_rank[rank]


_cached: JobPlan | None = None


def cached_plan() -> JobPlan | None:
    """Return the job layout and plan that this process made last."""
    return _cached


def layout_digest(layout: RankLayout) -> bytes:
    """Return the raw digest of one rank's layout."""
    return raw_digest(encode_layout(layout))


def job_plan(comm: Comm, layout: RankLayout, hellos: list[Hello], cached: JobPlan | None) -> JobPlan:
    """Return the plan for the job's layout: ``cached`` if nothing has changed on any rank, else a new one.

    ``cached``: what this rank's hello has told the others of. Not looked up again, because another thread may have
    planned for another engine since, and a rank that does not find what it has promised would leave the others alone.

    Raises:
        LayoutError: the shards do not form a whole; all problems at once, the same on every rank.
    """
    global _cached
    job = combined([h.layout for h in hellos])
    # The cache counts only if *all* ranks have this plan: a hit decided locally would leave the others alone in the
    # exchange below.
    if cached is not None and all(h.cached == job for h in hellos):
        return cached
    layouts = decode_layouts(comm.gather("layout", lambda: encode_layout(layout)))
    graph = ShardGraph.build(layouts)
    graph.check()
    _cached = JobPlan(job, graph, build_save_plan(graph))
    return _cached
