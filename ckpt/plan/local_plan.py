"""What one rank has to do in a save, worked out from its own cells alone. Pure and deterministic.

The unit is the *group*: the ranks of one holder set, with the cells that exactly they hold. Each member knows every
cell of its groups, because it holds them, so a group can cut its cells into chunks and elect their owners by itself,
each member coming to the same answer. A rank's plan is the plans of its groups, the job's plan is the plans of all
groups (``save_plan.py``): the one is a part of the other by construction, and its cost does not know the world's size.

Two small things cross a group's border, and a rank must be told them (``Exchange``, ``RankView.foreign``):

- *Loads.* Groups are planned from small to large, and in a larger one each member starts with the bytes that it owns
  already. Filling from the inside out is optimal, up to one chunk, where holder sets are nested, as on meshes they
  mostly are: one rank, its data-parallel group, its stage, the job.
- *Cuts of masters.* A param is cut along its master's chunks, whoever holds them, so that one rank that holds both can
  prove each piece alone.

A live save does not plan locally yet: every rank gathers all layouts and plans all groups (``build_save_plan``, which
uses ``groups_of`` and ``plan_group``). ``plan_of_rank``, ``RankView`` and ``Exchange`` are called by tests and tools
only, which show that what ranks would plan so is the job's plan, and what it would cost.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING

from ckpt.layout.box import Box, overlaps
from ckpt.layout.graph import Cell
from ckpt.layout.spec import MASTER, PARAM, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK_BYTES = 4 << 20
"""Largest chunk. docs/adr/0003-chunk-size.md has the measurement."""
SHARE = 8
"""A replicated cell is cut fine enough that each holder can get about this many pieces of what its group holds."""
MIN_PIECE = 4 << 10
"""Never cut a replicated cell finer than this many bytes; below it a chunk's entry in the index costs more."""

FEW = 8
"""Ranks of a group that are hashed in no time."""

Holders = tuple[int, ...]
"""The ranks that hold something, ascending."""
Exchange = Callable[[Holders, int], Sequence[int]]
"""``exchange(ranks, mine)``: tell the group ``ranks`` that this rank owns ``mine`` bytes in smaller groups; return what
each member has told, in the order of ``ranks``. All members call it for their common groups in the same order."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A contiguous piece of a cell: the unit of digest, dedup and transfer. ``ranks``: its holders, ascending."""

    spec: TensorSpec
    box: Box
    ranks: Holders

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
class RankView:
    """What a rank must know to plan for itself.

    ``cells``: spec -> cells in row-major order: all that this rank holds, and of every derived param that it holds the
    master's cells in the same place, whoever holds those. ``foreign``: bytes that each group of several ranks, without
    this one, shares out (:attr:`Group.nbytes`), for the groups that hold such masters.
    """

    rank: int
    cells: Mapping[TensorSpec, Sequence[Cell]]
    derived: frozenset[str]
    foreign: Mapping[Holders, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Provable:
    """Boxes of a derived param over one cell of its master. ``provers``: the ranks that hold both."""

    spec: TensorSpec
    boxes: tuple[Box, ...]
    master: Cell
    provers: Holders


@dataclass(slots=True)
class Group:
    """What exactly ``ranks`` hold: ``cells``, each to be written by one of them (``nbytes`` in all), and params that
    should not have to be written because a member can prove them.
    """

    ranks: Holders
    members: frozenset[int]
    cells: list[Cell] = field(default_factory=list)
    provable: list[_Provable] = field(default_factory=list)
    nbytes: int = 0

    @property
    def order(self) -> tuple[int, Holders]:
        """Sorts groups in the order in which they are planned."""
        return len(self.ranks), self.ranks

    def add(self, cell: Cell) -> None:
        """Add a cell that must be written."""
        self.cells.append(cell)
        self.nbytes += cell.nbytes


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """``owners[i]`` writes ``chunks[i]``. ``proofs``: number of a param chunk -> box of the master chunk in which it
    lies, which its owner holds too, and whose cast it should equal. ``loads``: bytes that each rank writes, in the
    order of ``ranks``, if every proof succeeds and nothing is unchanged.
    """

    ranks: Holders
    chunks: tuple[Chunk, ...]
    owners: tuple[int, ...]
    proofs: dict[int, Box]
    loads: tuple[int, ...]


def plan_of_rank(view: RankView, exchange: Exchange, chunk_bytes: int = CHUNK_BYTES) -> tuple[GroupPlan, ...]:
    """Return the plans of all groups that a rank is in, smallest first: every chunk that it holds.

    Args:
        view: what the rank holds; the whole job's must be without problems (:meth:`ShardGraph.check`).
        exchange: brings the loads of a group's members together.
        chunk_bytes: largest chunk in bytes; one element is never cut.
    """
    own = {ranks: group for ranks, group in groups_of(view.cells, view.derived).items() if view.rank in ranks}
    sizes = {**view.foreign, **{ranks: group.nbytes for ranks, group in own.items()}}
    plans = []
    owned = before = level = 0
    for group in sorted(own.values(), key=lambda one: one.order):
        if len(group.ranks) > level:  # groups of one size do not wait for each other
            level, before = len(group.ranks), owned
        asks = level > 1 and group.nbytes  # all members see alike whether there is anything to balance
        loads = exchange(group.ranks, before) if asks else (0,) * level
        plans.append(plan_group(group, loads, sizes, chunk_bytes))
        owned += plans[-1].loads[group.ranks.index(view.rank)]
    return tuple(plans)


def groups_of(cells: Mapping[TensorSpec, Sequence[Cell]], derived: frozenset[str]) -> dict[Holders, Group]:
    """Sort cells by their holder set. Each group lists them by spec, then in the order given."""
    groups: dict[Holders, Group] = {}

    known: dict[int, Group] = {}  # many ranks by identity: to hash them for each of their cells would cost the square

    def group(ranks: Holders) -> Group:
        found = known.get(id(ranks)) if len(ranks) > FEW else None
        if found is None:
            found = groups.get(ranks)
            if found is None:
                found = groups[ranks] = Group(ranks, frozenset(ranks))
            if len(ranks) > FEW:
                known[id(ranks)] = found
        return found

    masters = {spec.fqn: cells[spec] for spec in cells if spec.role == MASTER}
    for spec in sorted(cells):
        if spec.role == PARAM and spec.fqn in derived:
            for ranks, boxes, master in _over_masters(cells[spec], masters[spec.fqn]):
                one = group(ranks)
                both = ranks if ranks == master.ranks else tuple(r for r in master.ranks if r in one.members)
                if both:
                    one.provable.append(_Provable(spec, boxes, master, both))
                else:
                    for box in boxes:
                        one.add(Cell(spec, box, ranks))
        else:
            for cell in cells[spec]:
                if nbytes := cell.nbytes:
                    one = group(cell.ranks)
                    one.cells.append(cell)
                    one.nbytes += nbytes
    return groups


def _over_masters(params: Sequence[Cell], masters: Sequence[Cell]) -> Iterator[tuple[Holders, tuple[Box, ...], Cell]]:
    """Yield ``(ranks, boxes, master cell)``: what these ranks hold of a param over each cell of its master."""
    theirs, ours = [cell.box for cell in masters], [cell.box for cell in params]
    if theirs == ours:  # param and master cut alike, as in FSDP and ZeRO-3
        pairs = zip(params, masters, strict=True)
        yield from ((param.ranks, (param.box,), master) for param, master in pairs if param.box.volume)
        return
    order = sorted({cell.ranks for cell in params})
    number = {ranks: n for n, ranks in enumerate(order)}
    numbers = [number[cell.ranks] for cell in params]
    found: dict[tuple[int, int], list[tuple[int, Box]]] = {}
    for m, p, common in overlaps(theirs, ours):
        found.setdefault((m, numbers[p]), []).append((p, common))
    for m, n in sorted(found):  # the same order in every view, whatever else is in it
        yield order[n], tuple(box for _, box in sorted(found[m, n])), masters[m]


def plan_group(group: Group, loads: Sequence[int], sizes: Mapping[Holders, int], chunk_bytes: int) -> GroupPlan:
    """Cut a group's cells into chunks and elect an owner for each.

    Args:
        group: all that its ranks hold.
        loads: bytes that each of them owns already, in the order of ``group.ranks``.
        sizes: :attr:`Group.nbytes` of this group and of all of several ranks that hold masters of its params.
        chunk_bytes: largest chunk in bytes.
    """
    limit = _cut_limit(group.ranks, sizes, chunk_bytes)
    chunks: list[Chunk] = []
    for cell in group.cells:
        if cell.nbytes <= limit:  # one piece, and no generator for it: of a large job most are
            chunks.append(Chunk(cell.spec, cell.box, group.ranks))
        else:
            pieces = cell.box.cut(max(1, limit // cell.spec.itemsize))
            chunks += [Chunk(cell.spec, piece, group.ranks) for piece in pieces]
    owners, own = _elect(chunks, group, loads)
    proofs: dict[int, Box] = {}
    turns: dict[Holders, Iterator[int]] = {}
    for one in group.provable:
        # Proofs cost a digest and no bytes: the holders of both take turns, which needs no count of anybody's loads.
        turn = turns.setdefault(one.provers, cycle(one.provers))
        limit = _cut_limit(one.master.ranks, sizes, chunk_bytes)
        for master, box in _pieces(one, max(1, limit // one.master.spec.itemsize)):
            proofs[len(chunks)] = master
            chunks.append(Chunk(one.spec, box, group.ranks))
            owners.append(next(turn))
    return GroupPlan(group.ranks, tuple(chunks), tuple(owners), proofs, own)


def _cut_limit(ranks: Holders, sizes: Mapping[Holders, int], chunk_bytes: int) -> int:
    """Return the largest piece, in bytes, that a group cuts: fine enough to share out evenly what it holds in all."""
    if len(ranks) == 1:
        return chunk_bytes
    return max(min(MIN_PIECE, chunk_bytes), min(chunk_bytes, sizes[ranks] // (len(ranks) * SHARE)))


def _elect(chunks: list[Chunk], group: Group, loads: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
    """Elect owners, largest first to the least loaded (LPT; Graham 1969: at most 4/3 of the optimum). Return them and
    the bytes that each rank of the group gets.
    """
    owners = [group.ranks[0]] * len(chunks)
    if len(group.ranks) == 1:
        return owners, (group.nbytes,)
    heap = list(zip(loads, group.ranks, strict=True))
    heapq.heapify(heap)
    nbytes = [chunk.nbytes for chunk in chunks]
    for i in sorted(range(len(chunks)), key=lambda j: -nbytes[j]):  # a stable sort: equal ones in order
        load, owner = heap[0]
        owners[i] = owner
        heapq.heapreplace(heap, (load + nbytes[i], owner))
    after = {rank: load for load, rank in heap}
    return owners, tuple(after[rank] - before for rank, before in zip(group.ranks, loads, strict=True))


def _pieces(one: _Provable, most: int) -> Iterator[tuple[Box, Box]]:
    """Yield ``(master chunk, piece of the param in it)``; the master is cut into chunks of ``most`` elements."""
    cut = one.master.box.cut(most)
    if one.boxes == (one.master.box,):  # the param's cell does not end inside the master's
        yield from ((box, box) for box in cut)
        return
    masters = list(cut)
    yield from ((masters[m], common) for m, _, common in overlaps(masters, one.boxes))
