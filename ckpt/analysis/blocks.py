"""Holdings put together over tensors, so that what is looked at one by one is few. Pure.

Rows of all tensors with the same roles form a *block*; within it, rows with the same holders form a *group*. Scalars
(Adam's ``step``) are blocks of their own: their bytes are state of the tensor, not of one of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ckpt.analysis.combination import Combination, Kill, combinations_of, is_derivable, kill_sets, needed_bytes
from ckpt.analysis.holdings import NOBODY, Flags, Holdings, Numbers, RankSets, RoleColumn, TensorRows, distinct_rows
from ckpt.layout.spec import BUFFER, MASTER, PARAM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class SetTable:
    """The members of all :class:`RankSets` in flat arrays; number -1 (nobody) is the last, empty one."""

    def __init__(self, sets: RankSets) -> None:
        self._sets = sets
        self.size: Numbers = np.fromiter((len(sets[i]) for i in (*range(len(sets)), NOBODY)), np.int64, len(sets) + 1)
        self._start = np.cumsum(self.size) - self.size
        self._ranks = np.fromiter((r for i in range(len(sets)) for r in sets[i]), np.int32, int(self.size.sum()))

    def expand(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return (position in ``numbers``, rank) of every member of these sets."""
        size = self.size[numbers]
        position = np.repeat(np.arange(len(numbers)), size)
        inside = np.arange(len(position)) - np.repeat(np.cumsum(size) - size, size)
        return position, self._ranks[self._start[numbers][position] + inside].astype(np.int64)

    def images(self, of_rank: Numbers) -> tuple[Numbers, list[Kill]]:
        """Map ranks to domains: (number of each set's image, indexed like :attr:`size`; the distinct images)."""
        domain = of_rank.tolist()
        known: dict[Kill, int] = {}
        numbers = [
            known.setdefault(frozenset(map(domain.__getitem__, self._sets[i])), len(known))
            for i in (*range(len(self._sets)), NOBODY)
        ]
        return np.array(numbers, np.int64), list(known)


@dataclass(frozen=True)
class Block:
    """Rows of all tensors that have the same roles.

    ``tensor``, ``volume``, ``group``: of each row, int64 ``[rows]``. ``holders``: of each group, int64
    ``[groups, columns]``. Scalar columns of a tensor are listed, but their bytes are in a block of their own.
    """

    columns: tuple[RoleColumn, ...]
    derived: bool
    tensor: Numbers
    volume: Numbers
    group: Numbers
    holders: Numbers
    is_scalar: bool = False

    @cached_property
    def elements(self) -> Numbers:
        """Elements of each group, int64 ``[groups]``."""
        total = np.zeros(len(self.holders), np.int64)
        np.add.at(total, self.group, self.volume)
        return total

    @property
    def combinations(self) -> tuple[Combination, ...]:
        """What rebuilds an element."""
        return combinations_of(self.columns, self.derived)

    def itemsize(self, column: int) -> int:
        """Bytes that one element has in this column."""
        return 0 if self.columns[column].scalar else self.columns[column].itemsize

    def is_derivable(self, column: int) -> bool:
        """Is this column the cast of another one?"""
        return self.columns[column].role == PARAM and is_derivable(self.columns, self.derived)

    @property
    def needed(self) -> int:
        """Bytes from which one element is rebuilt."""
        return needed_bytes(self.columns, self.derived)

    @property
    def kind(self) -> str:
        """``scalar``, ``buffer``, ``parameter`` (frozen: nothing is kept for it), ``trained`` or ``state``."""
        roles = {column.role for column in self.columns}
        if self.is_scalar:
            return "scalar"
        if not roles & {PARAM, MASTER}:
            return BUFFER if BUFFER in roles else "state"
        return "parameter" if roles == {PARAM} else "trained"

    @property
    def has_parameters(self) -> bool:
        """Are its elements parameters of the model?"""
        return self.kind in ("parameter", "trained")

    def copies(self, sets: RankSets, sizes: Numbers) -> Numbers:
        """Return, of each group, the least number of ranks whose loss destroys it, int64 ``[groups]``."""
        if len(self.combinations) == 1:
            least: Numbers = sizes[self.holders[:, list(self.combinations[0])]].min(axis=1)
            return least
        found = [min(map(len, self.kill_sets(row, lambda i: frozenset(sets[i])))) for row in self.holders.tolist()]
        return np.array(found, np.int64)

    def kill_sets(self, row: list[int], members: Callable[[int], Kill]) -> tuple[Kill, ...]:
        """Return the minimal kill sets of a group whose columns are held by these numbered sets."""
        return kill_sets([members(i) for i in row], self.combinations)


def blocks_of(holdings: Holdings) -> list[Block]:
    """Return the blocks of a job, in an order that follows from their roles alone. Rows without values are left out."""
    whole: dict[tuple[tuple[RoleColumn, ...], bool], list[tuple[int, Flags]]] = {}
    single: dict[RoleColumn, list[tuple[int, int]]] = {}
    for number, tensor in enumerate(holdings.tensors):
        if tensor.numel and not all(column.scalar for column in tensor.columns):
            derived = tensor.rows_derived()
            for kind in (True, False):
                if (derived == kind).any():
                    whole.setdefault((tensor.columns, kind), []).append((number, derived == kind))
        for c, column in enumerate(tensor.columns):
            if column.scalar and len(tensor.holders):
                single.setdefault(column, []).append((number, int(tensor.holders[0, c])))
    blocks = []
    for (columns, right), rows_of in sorted(whole.items(), key=lambda item: (_order(item[0][0]), item[0][1])):
        blocks.append(_block(columns, right, [(i, holdings.tensors[i], rows) for i, rows in rows_of]))
    for column, held in sorted(single.items(), key=lambda item: _order([item[0]])):
        tensor, holders = np.array(held, np.int64).T
        group, rows = distinct_rows(holders.reshape(-1, 1))
        value = RoleColumn(column.role, column.dtype)
        blocks.append(Block((value,), False, tensor, np.ones_like(tensor), group, rows, is_scalar=True))
    return blocks


def _order(columns: Iterable[RoleColumn]) -> list[tuple[str, str, bool]]:
    return [(column.role, column.dtype, column.scalar) for column in columns]


def _block(columns: tuple[RoleColumn, ...], derived: bool, parts: list[tuple[int, TensorRows, Flags]]) -> Block:
    """Put together the chosen rows (bool ``[rows]``) of numbered tensors."""
    tensor = np.repeat(np.array([i for i, _, _ in parts], np.int64), [int(rows.sum()) for _, _, rows in parts])
    volume = np.concatenate([t.volume[rows] for _, t, rows in parts])
    solid = volume > 0
    group, rows = distinct_rows(np.concatenate([t.holders[rows] for _, t, rows in parts])[solid])
    return Block(columns, derived, tensor[solid], volume[solid], group, rows)
