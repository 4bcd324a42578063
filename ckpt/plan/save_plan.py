"""SavePlan: the chunks of a job's state and who writes each. Pure and deterministic: every rank computes the same.

Owners are elected largest first to the least loaded holder (LPT; Graham 1969: at most 4/3 of the optimum), after the
chunks that only one rank holds have been counted. A big replicated cell is cut among its holders first, so that one
embedding does not make one rank write most of the model.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ckpt.layout.box import Box, overlaps
from ckpt.layout.spec import MASTER, PARAM, TensorSpec

if TYPE_CHECKING:
    from ckpt.layout.graph import Cell, ShardGraph

Numbers = npt.NDArray[np.int64]

CHUNK_BYTES = 4 << 20
"""Largest chunk. docs/adr/0003-chunk-size.md has the measurement."""
SHARE = 8
"""A replicated cell is cut fine enough that each holder can get about this many pieces of what its group holds."""
MIN_PIECE = 4 << 10
"""Never cut a replicated cell finer than this many bytes; below it a chunk's entry in the index costs more."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A contiguous piece of a cell: the unit of digest, dedup and transfer. ``ranks``: its holders, ascending."""

    spec: TensorSpec
    spec_id: int
    box: Box
    ranks: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one copy."""
        return self.box.volume * self.spec.itemsize

    @property
    def name(self) -> str:
        """Name in a pack; unique within a checkpoint, whatever characters FQN and role have."""
        fqn, role = (text.replace("%", "%25").replace("|", "%7C") for text in self.spec.key)
        return f"{fqn}|{role}@{','.join(map(str, self.box.offsets))}"


@dataclass(frozen=True, slots=True)
class SavePlan:
    """``owners[i]`` writes ``chunks[i]``. ``proofs``: param chunk -> master chunk that its owner holds too and whose
    cast it should equal; if the digests of a save say so, the param chunk is not written.
    """

    world: int
    chunks: tuple[Chunk, ...]
    owners: tuple[int, ...]
    proofs: dict[int, int]
    held: tuple[tuple[int, ...], ...]
    """for each rank the numbers of the chunks that it holds, ascending"""
    shared: tuple[Numbers, ...] = field(compare=False)  # follows from the chunks, and arrays have no single truth
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
    """Cut the graph's cells into chunks and elect an owner for each.

    Args:
        graph: a graph without problems (:meth:`ShardGraph.check`).
        chunk_bytes: largest chunk in bytes; one element is never cut.
    """
    limits = _cut_limits(graph, chunk_bytes)
    number = {spec: i for i, spec in enumerate(graph.specs)}
    chunks: list[Chunk] = []
    of_spec: dict[tuple[str, str], range] = {}
    derived: list[TensorSpec] = []
    for spec in graph.specs:
        if spec.role == PARAM and spec.fqn in graph.derived:
            derived.append(spec)
            continue
        first = len(chunks)
        for cell in graph.cells[spec]:
            if cell.nbytes:
                pieces = cell.box.cut(max(1, limits[cell.ranks] // spec.itemsize))
                chunks += [Chunk(spec, number[spec], box, cell.ranks) for box in pieces]
        of_spec[spec.key] = range(first, len(chunks))
    owners = _elect(chunks, graph.world)
    proofs: dict[int, int] = {}
    for spec in derived:
        masters = of_spec[spec.fqn, MASTER]
        _add_derived(spec, number[spec], graph.cells[spec], masters, chunks, owners, proofs)
    held: list[list[int]] = [[] for _ in range(graph.world)]
    for i, chunk in enumerate(chunks):
        for rank in chunk.ranks:
            held[rank].append(i)
    shared = tuple(np.array([i for i in mine if len(chunks[i].ranks) > 1], np.int64) for mine in held)
    proving: list[list[int]] = [[] for _ in range(graph.world)]
    for i in sorted(proofs):
        if len(chunks[i].ranks) > 1:
            proving[owners[i]].append(i)
    return SavePlan(
        graph.world, tuple(chunks), tuple(owners), proofs, tuple(map(tuple, held)), shared, tuple(map(tuple, proving))
    )


def _cut_limits(graph: ShardGraph, chunk_bytes: int) -> dict[tuple[int, ...], int]:
    """Return the largest piece, in bytes, for the cells of each set of holders."""
    totals: dict[tuple[int, ...], int] = {}
    for spec in graph.specs:
        for cell in graph.cells[spec]:
            counted = 0 if spec.role == PARAM and spec.fqn in graph.derived else cell.nbytes
            totals[cell.ranks] = totals.get(cell.ranks, 0) + counted
    return {
        ranks: chunk_bytes
        if len(ranks) == 1
        else max(min(MIN_PIECE, chunk_bytes), min(chunk_bytes, total // (len(ranks) * SHARE)))
        for ranks, total in totals.items()
    }


def _elect(chunks: list[Chunk], world: int) -> list[int]:
    owners = [chunk.ranks[0] for chunk in chunks]
    loads = [0] * world
    shared = []
    for i, chunk in enumerate(chunks):
        if len(chunk.ranks) == 1:
            loads[owners[i]] += chunk.nbytes
        else:
            shared.append(i)
    # One heap per set of holders; an entry is stale if another set's chunk has loaded the rank meanwhile.
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for i in sorted(shared, key=lambda j: (-chunks[j].nbytes, j)):
        ranks = chunks[i].ranks
        if ranks not in heaps:
            heaps[ranks] = [(loads[r], r) for r in ranks]
            heapq.heapify(heaps[ranks])
        heap = heaps[ranks]
        while heap[0][0] != loads[heap[0][1]]:
            heapq.heapreplace(heap, (loads[heap[0][1]], heap[0][1]))
        owner = heap[0][1]
        loads[owner] += chunks[i].nbytes
        heapq.heapreplace(heap, (loads[owner], owner))
        owners[i] = owner
    return owners


def _add_derived(
    spec: TensorSpec,
    spec_id: int,
    cells: tuple[Cell, ...],
    masters: range,
    chunks: list[Chunk],
    owners: list[int],
    proofs: dict[int, int],
) -> None:
    """Cut a derivable param along its master's chunks, so that one rank that holds both can prove each piece alone."""
    master_boxes = [chunks[m].box for m in masters]
    for m, c, common in sorted(overlaps(master_boxes, [cell.box for cell in cells])):
        owner, ranks = owners[masters[m]], cells[c].ranks
        both = [rank for rank in chunks[masters[m]].ranks if rank in ranks]
        if both:
            proofs[len(chunks)] = masters[m]
        chunks.append(Chunk(spec, spec_id, common, ranks))
        owners.append(owner if owner in both else (both or ranks)[0])
