"""SavePlan: the chunks of a job's state and who writes each. Pure and deterministic: every rank computes the same.

It is the union of what each group of holders plans for itself (``local_plan.py``), with every chunk numbered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ckpt.layout.spec import MASTER, TensorSpec
from ckpt.plan.local_plan import CHUNK_BYTES, Chunk, GroupPlan, groups_of, plan_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.layout.box import Box
    from ckpt.layout.graph import ShardGraph

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SavePlan:
    """``owners[i]`` writes ``chunks[i]``. ``proofs``: param chunk -> master chunk that its owner holds too and whose
    cast it should equal; if the digests of a save say so, the param chunk is not written.
    """

    world: int
    chunks: tuple[Chunk, ...]
    owners: tuple[int, ...]
    proofs: dict[int, int]
    spec_ids: dict[TensorSpec, int]
    """number of each spec in the index"""
    alone: tuple[range, ...]
    """for each rank the numbers of the chunks that only it holds"""
    shared: tuple[Numbers, ...] = field(compare=False)  # follows from the chunks, and arrays have no single truth
    """for each rank those of the chunks that it shares with others, ascending: their digests are exchanged, in this
    order
    """
    proving: tuple[tuple[int, ...], ...] = field(compare=False)
    """for each rank the shared params whose cast it digests as well"""

    def held(self, rank: int) -> list[int]:
        """Return the numbers of the chunks that a rank holds, ascending."""
        return [*self.alone[rank], *self.shared[rank].tolist()]  # groups of one are numbered first

    def loads(self) -> list[int]:
        """Return the bytes that each rank writes if every proof succeeds and nothing is unchanged."""
        totals = [0] * self.world
        for i, chunk in enumerate(self.chunks):
            if i not in self.proofs:
                totals[self.owners[i]] += chunk.nbytes
        return totals


def build_save_plan(graph: ShardGraph, chunk_bytes: int = CHUNK_BYTES) -> SavePlan:
    """Plan for every group of holders in the job, smallest first, and number the chunks in that order.

    Args:
        graph: a graph without problems (:meth:`ShardGraph.check`).
        chunk_bytes: largest chunk in bytes; one element is never cut.
    """
    groups = groups_of(graph.cells, graph.derived)
    sizes = {ranks: group.nbytes for ranks, group in groups.items()}
    loads = [0] * graph.world
    plans: list[GroupPlan] = []
    by_size = groupby(sorted(groups.values(), key=lambda one: one.order), key=lambda one: len(one.ranks))
    for _, level in by_size:
        planned = [plan_group(one, [loads[r] for r in one.ranks], sizes, chunk_bytes) for one in level]
        for plan in planned:
            for rank, nbytes in zip(plan.ranks, plan.loads, strict=True):
                loads[rank] += nbytes
        plans += planned
    return _union(graph, plans)


def _union(graph: ShardGraph, plans: Sequence[GroupPlan]) -> SavePlan:
    chunks: list[Chunk] = []
    owners: list[int] = []
    proved: list[tuple[int, Box]] = []
    numbers: list[Numbers] = []
    alone = [range(0)] * graph.world
    groups: list[list[int]] = [[] for _ in range(graph.world)]
    proving: list[list[int]] = [[] for _ in range(graph.world)]
    for g, plan in enumerate(plans):
        first = len(chunks)
        chunks += plan.chunks
        owners += plan.owners
        numbers.append(np.arange(first, len(chunks), dtype=np.int64))
        proved += [(first + i, master) for i, master in plan.proofs.items()]
        if len(plan.ranks) == 1:
            alone[plan.ranks[0]] = range(first, len(chunks))
            continue
        for rank in plan.ranks:
            groups[rank].append(g)
        for i in plan.proofs:
            proving[plan.owners[i]].append(first + i)
    masters = {(c.spec.fqn, c.box.offsets): i for i, c in enumerate(chunks) if c.spec.role == MASTER} if proved else {}
    shared: dict[tuple[int, ...], Numbers] = {}  # ranks of the same groups, as in data parallelism, have one array
    for own in map(tuple, groups):
        if own not in shared:
            shared[own] = np.concatenate([np.empty(0, np.int64), *(numbers[g] for g in own)])
    return SavePlan(
        graph.world,
        tuple(chunks),
        tuple(owners),
        {i: masters[chunks[i].spec.fqn, box.offsets] for i, box in proved},
        {spec: i for i, spec in enumerate(graph.specs)},
        tuple(alone),
        tuple(shared[tuple(own)] for own in groups),
        tuple(map(tuple, proving)),
    )
