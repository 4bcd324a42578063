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
    from collections.abc import Iterable

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
    # What follows from the chunks is not compared: arrays have no single truth.
    held: tuple[Numbers, ...] = field(compare=False)
    """for each rank the numbers of the chunks that it holds, ascending"""
    shared: tuple[Numbers, ...] = field(compare=False)
    """for each rank those of them that other ranks hold too: their digests are exchanged, in this order"""
    proving: tuple[tuple[int, ...], ...] = field(compare=False)
    """for each rank the shared params whose cast it digests as well"""

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
            for rank, nbytes in plan.loads().items():
                loads[rank] += nbytes
        plans += planned
    return _union(graph, plans)


def _union(graph: ShardGraph, plans: Iterable[GroupPlan]) -> SavePlan:
    chunks: list[Chunk] = []
    owners: list[int] = []
    proved: list[tuple[int, Box]] = []
    alone: list[list[Numbers]] = [[] for _ in range(graph.world)]
    common: list[list[Numbers]] = [[] for _ in range(graph.world)]
    proving: list[list[int]] = [[] for _ in range(graph.world)]
    for plan in plans:
        first = len(chunks)
        chunks += plan.chunks
        owners += plan.owners
        numbers = np.arange(first, len(chunks), dtype=np.int64)
        for rank in plan.ranks:
            (common if len(plan.ranks) > 1 else alone)[rank].append(numbers)
        for i, master in plan.proofs.items():
            proved.append((first + i, master))
            if len(plan.ranks) > 1:
                proving[plan.owners[i]].append(first + i)
    masters = {(c.spec.fqn, c.box): i for i, c in enumerate(chunks) if c.spec.role == MASTER} if proved else {}
    return SavePlan(
        graph.world,
        tuple(chunks),
        tuple(owners),
        {i: masters[chunks[i].spec.fqn, box] for i, box in proved},
        {spec: i for i, spec in enumerate(graph.specs)},
        tuple(_joined((*a, *c)) for a, c in zip(alone, common, strict=True)),  # groups of one are planned first
        tuple(map(_joined, common)),
        tuple(map(tuple, proving)),
    )


def _joined(parts: Iterable[Numbers]) -> Numbers:
    return np.concatenate((np.empty(0, np.int64), *parts))
