"""Holdings: who holds how much of what, the form that every analysis reads. Pure.

A live job, a checkpoint and a described layout all come to this. Of each tensor the elements are sorted into *rows* by
who holds them: all elements of a row have, role by role, the same holders. Where an element lies in the tensor is
forgotten, which is what keeps the table small: its size follows the number of distinct groups of ranks, not the number
of cells, so that a layout of 16,384 ranks fits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ckpt.layout.box import Box, overlaps
from ckpt.layout.spec import ITEMSIZE, PARAM

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckpt.layout.graph import Cell, ShardGraph
    from ckpt.layout.spec import TensorSpec

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

NOBODY = -1
"""Number of the empty set of holders."""


class RankSets:
    """Sets of ranks, numbered in the order in which they were first seen."""

    def __init__(self) -> None:
        self._number: dict[tuple[int, ...], int] = {}
        self._sets: list[tuple[int, ...]] = []

    def number(self, ranks: Iterable[int]) -> int:
        """Return the number of a set of ranks (ascending, without repeats), :data:`NOBODY` for the empty one."""
        key = tuple(ranks)
        if not key:
            return NOBODY
        found = self._number.get(key)
        if found is None:
            found = self._number[key] = len(self._sets)
            self._sets.append(key)
        return found

    def __getitem__(self, number: int) -> tuple[int, ...]:
        return self._sets[number] if number != NOBODY else ()

    def __len__(self) -> int:
        return len(self._sets)


@dataclass(frozen=True, slots=True)
class RoleColumn:
    """One role of a tensor. ``scalar``: one value for the whole tensor (Adam's ``step``), whatever its shape."""

    role: str
    dtype: str
    scalar: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True, eq=False)
class TensorRows:
    """One tensor of the model with all of its roles. Compared by identity: sets have another number elsewhere.

    ``volume[i]``: elements of row ``i``, int64 ``[rows]``, summing to the tensor's number of elements.
    ``holders[i, c]``: number (in :class:`RankSets`) of the ranks that hold column ``c`` of row ``i``'s elements,
    int64 ``[rows, columns]``. No two rows are equal in all columns. A scalar column is the same in all rows. A tensor
    without elements has one row of volume 0, because its scalars are state all the same.
    ``derived``: the param is claimed to be cast(master). ``underived``: bool ``[rows]``, rows of which an audit has
    refuted that; None if it has of none. They may be equal in all columns to a row that is derived. Of a buffer whose
    copies were found to differ there are more rows than elements: each copy is state of its own.
    """

    fqn: str
    shape: tuple[int, ...]
    columns: tuple[RoleColumn, ...]
    derived: bool
    volume: Numbers
    holders: Numbers
    underived: Flags | None = None

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)

    def rows_derived(self) -> Flags:
        """Return whether each row's param is cast(master), bool ``[rows]``."""
        everywhere = np.full(len(self.volume), self.derived)
        return everywhere if self.underived is None else everywhere & ~self.underived

    def elements(self, column: int) -> Numbers:
        """Return how many values of this column each row counts for, int64 ``[rows]``: a scalar counts once."""
        if not self.columns[column].scalar:
            return self.volume
        once = np.zeros_like(self.volume)
        once[:1] = 1
        return once


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """All tensors of a job, by FQN, ascending. ``aliases``: tied name -> listed name."""

    world: int
    sets: RankSets
    tensors: tuple[TensorRows, ...]
    aliases: dict[str, str] = field(default_factory=dict)


def merged_rows(volume: Numbers, holders: Numbers) -> tuple[Numbers, Numbers]:
    """Return (volume, holders) with equal rows put together, in a canonical order (ascending by holders)."""
    if len(volume) < 2:
        return volume, holders
    number, rows = distinct_rows(holders)
    total = np.zeros(len(rows), np.int64)
    np.add.at(total, number, volume)
    return total, rows


def distinct_rows(table: Numbers) -> tuple[Numbers, Numbers]:
    """Return (number of each row among the distinct rows, the distinct rows) of an int64 table of numbers >= -1.

    Distinct rows are in ascending order. Columns are folded into one number, which sorts much faster than rows do.
    """
    code = np.zeros(len(table), np.int64)
    codes = 1
    for c in range(table.shape[1]):
        if c and np.array_equal(table[:, c], table[:, c - 1]):
            continue
        base = int(table[:, c].max(initial=0)) + 2
        if codes * base >= 2**62:
            _, code = np.unique(code, return_inverse=True)
            codes = len(table)
        code, codes = code * base + table[:, c] + 1, codes * base
    _, first, number = np.unique(code, return_index=True, return_inverse=True)
    return number.reshape(-1), table[first]


@dataclass(frozen=True, slots=True)
class TensorPieces:
    """Where the rows of a tensor lie: boxes that cross no cell of any role.

    ``holders[p][c]``: ranks, ascending, that hold column ``c`` of ``boxes[p]``. ``derived[p]``: is the param there
    cast(master)? A box of a buffer whose copies were found to differ is listed once for each copy.
    """

    fqn: str
    shape: tuple[int, ...]
    columns: tuple[RoleColumn, ...]
    boxes: tuple[Box, ...]
    holders: tuple[tuple[tuple[int, ...], ...], ...]
    derived: tuple[bool, ...]


def pieces_of(graph: ShardGraph) -> Iterator[TensorPieces]:
    """Yield the pieces of every tensor, by FQN: its roles intersected, cell by cell. The graph must have no problems.

    The tensor's shape is that of its param, else of its first role. A role of another shape is a scalar of the tensor
    if it has one element, otherwise (a factored second moment) a tensor of its own under the same FQN: which of its
    elements belongs to which of the param's is known to the optimizer alone.
    """
    by_fqn: dict[str, list[TensorSpec]] = {}
    for spec in graph.specs:
        by_fqn.setdefault(spec.fqn, []).append(spec)
    for fqn, specs in sorted(by_fqn.items()):
        main = next((s for s in specs if s.role == PARAM), specs[0])
        scalars = [s for s in specs if s.shape != main.shape and prod(s.shape) == 1]
        yield _pieces(fqn, main, [s for s in specs if s.shape == main.shape or s in scalars], graph)
        yield from (_pieces(fqn, s, [s], graph) for s in specs if s.shape != main.shape and s not in scalars)


def holdings_of(graph: ShardGraph, pieces: Iterable[TensorPieces] | None = None) -> Holdings:
    """Return the holdings of a graph without problems.

    Args:
        graph: what the ranks declare.
        pieces: what is left of it where claims were refuted (:func:`ckpt.analysis.refuting.refute`); by default its own
            (:func:`pieces_of`).
    """
    sets = RankSets()
    tensors = [_rows(one, sets, graph.derived) for one in (pieces_of(graph) if pieces is None else pieces)]
    return Holdings(graph.world, sets, tuple(tensors), dict(graph.aliases))


def _rows(one: TensorPieces, sets: RankSets, claimed: frozenset[str]) -> TensorRows:
    volume = np.array([box.volume for box in one.boxes], np.int64)
    numbers = [[sets.number(ranks) for ranks in piece] for piece in one.holders]
    holders = np.array(numbers, np.int64).reshape(len(volume), len(one.columns))
    derived = one.fqn in claimed and any(column.role == PARAM for column in one.columns)
    if not derived or all(one.derived):
        return TensorRows(one.fqn, one.shape, one.columns, derived, *merged_rows(volume, holders))
    refuted = np.array([[not right] for right in one.derived], np.int64)
    volume, table = merged_rows(volume, np.concatenate([refuted, holders], axis=1))
    return TensorRows(one.fqn, one.shape, one.columns, derived, volume, table[:, 1:], table[:, 0] == 1)


def _pieces(fqn: str, main: TensorSpec, specs: list[TensorSpec], graph: ShardGraph) -> TensorPieces:
    columns = tuple(RoleColumn(s.role, s.dtype, s.shape != main.shape) for s in specs)
    # One element, or none: it lies nowhere in particular, and all who hold any of it hold all of it.
    spread = [c for c, s in enumerate(specs) if s.shape != main.shape or not prod(main.shape)]
    full = {c: graph.cells[s] for c, s in enumerate(specs) if c not in spread}
    boxes = _common_boxes(list(full.values())) if full else [Box.whole(main.shape)]
    holders: list[list[tuple[int, ...]]] = [[()] * len(specs) for _ in boxes]
    for c, cells in full.items():
        for source, piece, _ in overlaps([cell.box for cell in cells], boxes):
            holders[piece][c] = cells[source].ranks
    for c in spread:
        everyone = tuple(sorted({r for cell in graph.cells[specs[c]] for r in cell.ranks}))
        for row in holders:
            row[c] = everyone
    derived = fqn in graph.derived and any(s.role == PARAM for s in specs)
    return TensorPieces(fqn, main.shape, columns, tuple(boxes), tuple(map(tuple, holders)), (derived,) * len(boxes))


def _common_boxes(by_role: list[tuple[Cell, ...]]) -> list[Box]:
    """Return boxes that tile the tensor and cross no cell of any role."""
    tilings = sorted({tuple(cell.box for cell in cells) for cells in by_role})
    common = list(tilings[0])
    for tiling in tilings[1:]:
        common = [box for _, _, box in overlaps(list(tiling), common)]
    return common
