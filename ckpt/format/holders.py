"""Who held what when a checkpoint was saved: a table in the index root, optional, read for analysis only.

Its size follows the cuts of the layout: a set of ranks is written once, as a few arithmetic runs, and a cell (a box
that the same ranks hold) names its set by number. Replicas, however many, cost nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ckpt.errors import MalformedData
from ckpt.layout.box import Box, first_overlap
from ckpt.layout.runs import Run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.layout.spec import TensorSpec

MAX_MEMBERS = 1 << 24
"""Ranks of all sets together, and ranks of a job, that a table may name: readers expand them."""
MAX_HOST = 255
"""Characters of a host's name (RFC 1035)."""


class HeldCell(msgspec.Struct, frozen=True, array_like=True):
    """A box of a tensor that exactly the ranks of set number ``holders`` hold."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    holders: int


class HolderTable(msgspec.Struct, frozen=True, kw_only=True):
    """``sets[n]``: the ranks of set ``n``, as ascending runs. ``cells[s]``: cells that tile spec ``s`` of the root.
    ``hosts``: (name, number of consecutive ranks) from rank 0 on; empty if not known.
    """

    sets: tuple[tuple[Run, ...], ...]
    cells: tuple[tuple[HeldCell, ...], ...]
    hosts: tuple[tuple[str, int], ...] = ()


def check_holders(table: HolderTable, specs: Sequence[TensorSpec], world: int, where: str) -> None:
    """Check every number of a table; nothing is expanded before its size is known.

    Raises:
        MalformedData: ``where`` names the file.
    """
    members = sum(count for runs in table.sets for _, count, _ in runs)
    if max(members, world) > MAX_MEMBERS:
        raise MalformedData(f"{where}: holders: {members} ranks in sets of {world}, expected at most {MAX_MEMBERS}")
    for n, runs in enumerate(table.sets):
        last = -1
        for first, count, step in runs:
            if first <= last or count < 1 or step < 1:
                raise MalformedData(f"{where}: holders: set {n} has run ({first}, {count}, {step}) after rank {last}")
            last = first + (count - 1) * step
        if not 0 <= last < world:
            raise MalformedData(f"{where}: holders: set {n} ends at rank {last} of {world}")
    if len(table.cells) != len(specs):
        raise MalformedData(f"{where}: holders of {len(table.cells)} tensors, there are {len(specs)}")
    for spec, cells in zip(specs, table.cells, strict=True):
        _check_cells(spec, cells, len(table.sets), f"{where}: holders of {spec}")
    ranks = sum(count for _, count in table.hosts)
    if any(not 0 < len(name) <= MAX_HOST or count < 1 for name, count in table.hosts) or ranks not in (0, world):
        raise MalformedData(f"{where}: holders: hosts of {ranks} ranks, expected names, of {world} ranks in all")


def _check_cells(spec: TensorSpec, cells: tuple[HeldCell, ...], sets: int, what: str) -> None:
    for cell in cells:
        if not 0 <= cell.holders < sets:
            raise MalformedData(f"{what}: set {cell.holders}, there are {sets}")
        sound = len(cell.offsets) == len(cell.sizes) and min((*cell.offsets, *cell.sizes), default=0) >= 0
        if not sound or not Box(cell.offsets, cell.sizes).within(spec.shape):
            raise MalformedData(f"{what}: box {cell.offsets}+{cell.sizes} does not fit")
    boxes = [Box(cell.offsets, cell.sizes) for cell in cells]
    held, pair = sum(box.volume for box in boxes), first_overlap(boxes)
    if not boxes or held != Box.whole(spec.shape).volume or pair:
        more = f", {pair[0]} and {pair[1]} overlap" if pair else ""
        raise MalformedData(f"{what}: {len(boxes)} boxes of {held} elements do not tile it{more}")
