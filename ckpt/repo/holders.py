"""The shard graph to and from a checkpoint's index: a checkpoint is analyzed like the job that wrote it. Pure.

The save has put the job's claims to the test as an audit does, and recorded what differed: divergences in the index
root, and params that are not cast(master) by storing them. It does not record which equal copies were constant.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from ckpt.analysis.holdings import Holdings, holdings_of
from ckpt.analysis.refuting import Refutations, Sides
from ckpt.errors import LayoutError, MalformedData
from ckpt.format.holders import MAX_HOST, MAX_MEMBERS, HeldCell, HolderTable, check_holders
from ckpt.format.manifest import DERIVED
from ckpt.layout.box import Box, first_overlap, overlaps
from ckpt.layout.graph import Cell, ShardGraph
from ckpt.layout.runs import ranks_of, runs_of
from ckpt.layout.spec import MASTER, PARAM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.format.manifest import Divergence
    from ckpt.layout.spec import TensorSpec
    from ckpt.repo.repository import Index


def holder_table(graph: ShardGraph, hosts: Sequence[str] = ()) -> HolderTable | None:
    """Return the table to be stored, or None if it would be larger than a reader accepts.

    Args:
        graph: of the job, without problems.
        hosts: name of each rank's host, if known.
    """
    number: dict[tuple[int, ...], int] = {}
    cells = tuple(
        tuple(HeldCell(c.box.offsets, c.box.sizes, number.setdefault(c.ranks, len(number))) for c in graph.cells[spec])
        for spec in graph.specs
    )
    if max(sum(map(len, number)), graph.world) > MAX_MEMBERS:
        return None
    runs = tuple((name[:MAX_HOST], len(list(same))) for name, same in groupby(hosts))
    return HolderTable(sets=tuple(map(runs_of, number)), cells=cells, hosts=runs)


def graph_of_index(index: Index) -> ShardGraph:
    """Return the graph of the job that wrote a checkpoint, equal to the one that it had itself.

    Raises:
        LayoutError: the checkpoint does not tell; earlier releases did not record it.
        MalformedData: it tells what cannot be.
    """
    root, table = index.root, _table(index)
    sets = [ranks_of(runs) for runs in table.sets]
    cells = {
        spec: tuple(Cell(spec, Box(c.offsets, c.sizes), sets[c.holders]) for c in mine)
        for spec, mine in zip(index.specs, table.cells, strict=True)
    }
    return ShardGraph(root.world, index.specs, cells, dict(root.aliases), frozenset(root.derived), ())


def holdings_of_index(index: Index) -> Holdings:
    """Return the holdings of the job that wrote a checkpoint. Errors as in :func:`graph_of_index`."""
    return holdings_of(graph_of_index(index))


def refutations_of_index(index: Index, graph: ShardGraph) -> Refutations:
    """Return what the save itself found: the same as an audit of the job would have at that moment, and all copies that
    the save kept.

    Args:
        index: with the parts of all ranks.
        graph: of :func:`graph_of_index`.

    Raises:
        MalformedData: what is recorded cannot be.
    """
    where = index.commit.index.key
    specs = {spec.key: spec for spec in graph.specs}
    copies: dict[tuple[str, str], dict[Box, Sides]] = {}
    for one in index.root.divergences:
        box = _checked_box(one, specs.get((one.fqn, one.role)), where)
        copies.setdefault((one.fqn, one.role), {})[box] = tuple(one.copies.values())
    for spec in graph.specs:
        if spec.key in copies:
            _check_sides(spec, copies[spec.key], graph.cells[spec], where)
    all_kept: dict[tuple[str, str], set[Box]] = {}
    for chunk in (chunk for part in index.parts for chunk in part.chunks if chunk.ranks):
        key = index.specs[chunk.spec].key
        if chunk.box in copies.get(key, ()):
            all_kept.setdefault(key, set()).add(chunk.box)
    return Refutations(copies, _underived(index, graph, where), all_kept)


def _checked_box(one: Divergence, spec: TensorSpec | None, where: str) -> Box:
    sound = len(one.offsets) == len(one.sizes) and min((*one.offsets, 0)) >= 0 and min((*one.sizes, 1)) >= 1
    if spec is None or not sound or not Box(one.offsets, one.sizes).within(spec.shape):
        raise MalformedData(
            f"{where}: divergence of {one.fqn[:200]!r} ({one.role[:200]}), box {one.offsets}+{one.sizes}: not there"
        )
    return Box(one.offsets, one.sizes)


def _check_sides(spec: TensorSpec, found: dict[Box, Sides], cells: Sequence[Cell], where: str) -> None:
    boxes = list(found)
    pair = first_overlap(boxes)
    if pair:
        raise MalformedData(f"{where}: divergences of {spec}: boxes {pair[0]} and {pair[1]} overlap")
    for c, b, common in overlaps([cell.box for cell in cells], boxes):
        listed = sorted(rank for side in found[boxes[b]] for rank in side)
        if common != boxes[b] or tuple(listed) != cells[c].ranks or not all(found[boxes[b]]):
            raise MalformedData(
                f"{where}: divergence of {spec}, box {boxes[b]}: found copies of rank(s) {listed[:8]}, expected those "
                f"of the holders of one cell, {list(cells[c].ranks[:8])} hold {cells[c].box}"
            )


def _underived(index: Index, graph: ShardGraph, where: str) -> dict[str, list[Box]]:
    """Return the boxes of params that some rank could have proved to be cast(master), and that were stored."""
    masters = {(spec.fqn, spec.shape): graph.cells[spec] for spec in graph.specs if spec.role == MASTER}
    stored: dict[TensorSpec, list[Box]] = {}
    for chunk in (chunk for part in index.parts for chunk in part.chunks):
        spec = index.specs[chunk.spec]
        claimed = spec.role == PARAM and spec.fqn in graph.derived and (spec.fqn, spec.shape) in masters
        if claimed and chunk.pack != DERIVED and not chunk.ranks:
            stored.setdefault(spec, []).append(chunk.box)
    found = {}
    for spec, boxes in stored.items():
        pair = first_overlap(boxes)
        if pair:
            raise MalformedData(f"{where}: {spec}: chunks {pair[0]} and {pair[1]} overlap")
        both = (_holders(graph.cells[spec], boxes), _holders(masters[spec.fqn, spec.shape], boxes))
        found[spec.fqn] = [box for box, *ranks in zip(boxes, *both, strict=True) if set.intersection(*ranks)]
    return found


def _holders(cells: Sequence[Cell], boxes: list[Box]) -> list[set[int]]:
    """Return who holds any of each box."""
    found: list[set[int]] = [set() for _ in boxes]
    for c, b, _ in overlaps([cell.box for cell in cells], boxes):
        found[b].update(cells[c].ranks)
    return found


def hosts_of_index(index: Index) -> tuple[str, ...]:
    """Return the name of each rank's host when a checkpoint was saved. Errors as in :func:`graph_of_index`."""
    hosts = _table(index).hosts
    if not hosts:
        raise LayoutError(f"step {index.root.step}: hosts not recorded")
    return tuple(name for name, count in hosts for _ in range(count))


def _table(index: Index) -> HolderTable:
    table = index.root.holders
    if table is None:
        by = index.commit.software.get("ckpt", "of an unknown release")
        raise LayoutError(f"step {index.root.step}: layout not recorded (saved by ckpt {by})")
    check_holders(table, index.specs, index.root.world, index.commit.index.key)
    return table
