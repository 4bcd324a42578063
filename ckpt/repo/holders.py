"""The shard graph to and from a checkpoint's index: a checkpoint is analyzed like the job that wrote it. Pure."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from ckpt.analysis.holdings import Holdings, holdings_of
from ckpt.errors import LayoutError
from ckpt.format.holders import MAX_HOST, MAX_MEMBERS, HeldCell, HolderTable, check_holders, ranks_of, runs_of
from ckpt.layout.box import Box
from ckpt.layout.graph import Cell, ShardGraph

if TYPE_CHECKING:
    from collections.abc import Sequence

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
