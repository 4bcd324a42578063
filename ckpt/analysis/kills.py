"""What destroys what: the minimal kill sets of all state, in failure domains, and the bytes behind each. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from ckpt.analysis.combination import Kill
from ckpt.analysis.holdings import Numbers, distinct_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckpt.analysis.blocks import Block, SetTable
    from ckpt.analysis.domains import Domains

Family = tuple[Kill, ...]
"""The minimal kill sets of one element: it is lost with any of them."""


@dataclass(frozen=True)
class KillTable:
    """All state of a job by what destroys it.

    ``families``: distinct, an entry for each kind of fate. ``weight``: int64 ``[families, 2]``, bytes (of what must be
    kept to rebuild the elements) and parameters. ``of_group[b]``: family of each group of block ``b``. ``spread[b]``:
    number of domains that hold each column, int64 ``[groups, columns]``.
    """

    domains: int
    families: tuple[Family, ...]
    weight: Numbers
    of_group: tuple[Numbers, ...]
    spread: tuple[Numbers, ...]

    @property
    def tolerance(self) -> Numbers:
        """How many domains may be lost at once, whichever they are, int64 ``[families]``; -1: lost as it is."""
        return np.array([len(family[0]) - 1 for family in self.families], np.int64)


def kill_table(blocks: Sequence[Block], sets: SetTable, domains: Domains) -> KillTable:
    """Return the kill table of a job's blocks for these failure domains."""
    image, members = sets.images(domains.number)
    size = np.array([len(one) for one in members], np.int64)
    known: dict[Family, int] = {}
    of_group, spread = [], []
    for block in blocks:
        of_row, rows = distinct_rows(image[block.holders])
        numbers = [known.setdefault(block.kill_sets(row, members.__getitem__), len(known)) for row in rows.tolist()]
        of_group.append(np.array(numbers, np.int64)[of_row])
        spread.append(size[image[block.holders]])
    weight = np.zeros((len(known), 2), np.int64)
    for block, family in zip(blocks, of_group, strict=True):
        np.add.at(weight[:, 0], family, block.elements * block.needed)
        if block.has_parameters:
            np.add.at(weight[:, 1], family, block.elements)
    return KillTable(len(domains.names), tuple(known), weight, tuple(of_group), tuple(spread))


def minimal_of_all(families: Iterable[Family]) -> list[Kill]:
    """Return the minimal sets among those of all families: everything survives exactly if none of them is lost."""
    kept: list[Kill] = []
    by_first: dict[int, list[Kill]] = {}  # a part of a set has its least member in that set
    for one in sorted({kill for family in families for kill in family}, key=len):
        if not one:
            return [one]
        if not any(smaller <= one for first in by_first.keys() & one for smaller in by_first[first]):
            by_first.setdefault(min(one), []).append(one)
            kept.append(one)
    return kept


def components(families: Sequence[Family]) -> list[list[int]]:
    """Group families (by number) whose kill sets share domains, directly or through others. None may be empty."""
    label: dict[int, int] = {}
    members: dict[int, list[Kill]] = {}
    fresh = count()

    def join(kills: Family) -> None:
        touched: set[int | None] = set()
        for kill in kills:
            touched.update(map(label.get, kill))
        if len(touched) == 1 and None not in touched:
            return
        parts = [*kills, *(part for old in touched if old is not None for part in members.pop(old))]
        new = next(fresh)
        members[new] = parts
        for part in parts:
            label.update(dict.fromkeys(part, new))

    for family in sorted(families, key=lambda family: -len(family[-1])):  # the widest first: most others lie inside
        join(family)
    found: dict[int, list[int]] = {}
    for number, family in enumerate(families):
        found.setdefault(label[next(iter(family[0]))], []).append(number)
    return list(found.values())
