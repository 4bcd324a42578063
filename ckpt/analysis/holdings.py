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

from ckpt.layout.box import overlaps
from ckpt.layout.spec import ITEMSIZE, PARAM

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckpt.layout.box import Box
    from ckpt.layout.graph import Cell, ShardGraph
    from ckpt.layout.spec import TensorSpec

Numbers = npt.NDArray[np.int64]

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
    """One role of a tensor. ``scalar``: one value for the whole tensor (Adam's ``step``) whatever the tensor's shape."""

    role: str
    dtype: str
    scalar: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorRows:
    """One tensor of the model with all of its roles.

    ``volume[i]``: elements of row ``i``, int64 ``[rows]``, summing to the tensor's number of elements.
    ``holders[i, c]``: number (in :class:`RankSets`) of the ranks that hold column ``c`` of row ``i``'s elements,
    int64 ``[rows, columns]``. No two rows are equal in all columns. A scalar column is the same in all rows.
    ``derived``: the param is claimed to be cast(master).
    """

    fqn: str
    shape: tuple[int, ...]
    columns: tuple[RoleColumn, ...]
    derived: bool
    volume: Numbers = field(compare=False)
    holders: Numbers = field(compare=False)

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)

    def elements(self, column: int) -> Numbers:
        """Return how many values of this column each row counts for, int64 ``[rows]``: a scalar counts once."""
        if not self.columns[column].scalar:
            return self.volume
        once = np.zeros_like(self.volume)
        once[:1] = 1
        return once


@dataclass(frozen=True, slots=True)
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
    rows, inverse = np.unique(holders, axis=0, return_inverse=True)
    total = np.zeros(len(rows), np.int64)
    np.add.at(total, inverse.reshape(-1), volume)
    return total, rows


def holdings_of(graph: ShardGraph) -> Holdings:
    """Return the holdings of a graph: the roles of each tensor intersected, cell by cell.

    A role whose shape is not the tensor's is a scalar if it has one element; the tensor's shape is that of its param,
    else of its first role.
    """
    sets = RankSets()
    by_fqn: dict[str, list[TensorSpec]] = {}
    for spec in graph.specs:
        by_fqn.setdefault(spec.fqn, []).append(spec)
    tensors = []
    for fqn, specs in sorted(by_fqn.items()):
        main = next((s for s in specs if s.role == PARAM), specs[0])
        columns = tuple(RoleColumn(s.role, s.dtype, s.shape != main.shape) for s in specs)
        volume, holders = _rows(main, specs, graph, sets)
        tensors.append(TensorRows(fqn, main.shape, columns, fqn in graph.derived, volume, holders))
    return Holdings(graph.world, sets, tuple(tensors), dict(graph.aliases))


def _rows(main: TensorSpec, specs: list[TensorSpec], graph: ShardGraph, sets: RankSets) -> tuple[Numbers, Numbers]:
    full = [(c, graph.cells[s]) for c, s in enumerate(specs) if s.shape == main.shape]
    pieces = _common_pieces([cells for _, cells in full], main)
    volume = np.array([box.volume for box in pieces], np.int64)
    holders = np.full((len(pieces), len(specs)), NOBODY, np.int64)
    for c, cells in full:
        for source, piece, _ in overlaps([cell.box for cell in cells], pieces):
            holders[piece, c] = sets.number(cells[source].ranks)
    for c, spec in enumerate(specs):
        if spec.shape != main.shape:
            holders[:, c] = sets.number(sorted({r for cell in graph.cells[spec] for r in cell.ranks}))
    return merged_rows(volume, holders)


def _common_pieces(by_role: list[tuple[Cell, ...]], main: TensorSpec) -> list[Box]:
    """Return boxes that tile the tensor and cross no cell of any role."""
    tilings = sorted({tuple(cell.box for cell in cells) for cells in by_role}, key=len)
    if len(tilings) == 1:
        return list(tilings[0])
    pieces = list(tilings[0])
    for tiling in tilings[1:]:
        pieces = [common for _, _, common in overlaps(list(tiling), pieces)]
    return pieces
