"""Ranks by layers: how often what a rank holds of a layer is held. Pure."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from ckpt.analysis.blocks import Block, SetTable, distinct_rows
from ckpt.analysis.domains import spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.analysis.holdings import Holdings, Numbers
    from ckpt.analysis.kills import KillTable

EVERY_RANK = 512
"""Up to this world each rank has a column; beyond, ranks that differ in nothing but bytes share one."""


class HeatCell(msgspec.Struct, frozen=True, array_like=True):
    """What the ranks of a column hold of one layer.

    ``copies``, ``domains``: the least number of ranks, and of failure domains, whose loss destroys some of it.
    ``roles``: number of the held roles in :attr:`HeatMap.roles`. Bytes of the rank that holds least and most.
    """

    layer: int
    copies: int
    domains: int
    roles: int
    least_bytes: int
    most_bytes: int


class HeatColumn(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that hold alike; ``domain``: that of the lowest of them. Layers of which they hold nothing have no cell."""

    ranks: str
    count: int
    domain: str
    cells: tuple[HeatCell, ...]


class HeatMap(msgspec.Struct, frozen=True, kw_only=True):
    """Data of the heat map. ``layers``: in the order of the model; ``roles``: the distinct lists of roles held."""

    layers: tuple[str, ...]
    roles: tuple[tuple[str, ...], ...]
    columns: tuple[HeatColumn, ...]


def layer_of(fqn: str) -> str:
    """Return the layer that a tensor belongs to: its name up to the first number, else its first component.

    >>> layer_of("model.blocks.3.mlp.weight"), layer_of("embed.weight")
    ('model.blocks.3', 'embed')
    """
    parts = fqn.split(".")
    numbered = next((i for i, part in enumerate(parts) if part.isdecimal()), 0)
    return ".".join(parts[: numbered + 1])


def _natural(layer: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in layer.split(".")]


def heat_map(
    holdings: Holdings, blocks: Sequence[Block], sets: SetTable, table: KillTable, of_rank: Sequence[str]
) -> HeatMap:
    """Return the heat map of a job; ``of_rank``: name of each rank's domain."""
    of_tensor = [layer_of(tensor.fqn) for tensor in holdings.tensors]
    names = sorted(set(of_tensor), key=_natural)
    roles = sorted({column.role for block in blocks for column in block.columns})
    number = {name: i for i, name in enumerate(names)}
    facts = _facts(holdings, blocks, sets, table, np.array([number[name] for name in of_tensor], np.int64), roles)
    edges = np.searchsorted(facts[:, 0], np.arange(len(names) + 1))
    layers = [_of_ranks(facts[a:b], sets, holdings.world) for a, b in pairwise(edges.tolist())]
    column = _alike(layers, holdings.world)
    masks = sorted({m for layer in layers for m in np.unique(layer.mask).tolist() if m})
    return HeatMap(
        layers=tuple(names),
        roles=tuple(tuple(role for bit, role in enumerate(roles) if mask >> bit & 1) for mask in masks),
        columns=_columns(column, layers, masks, of_rank),
    )


class _Layer(NamedTuple):
    """One layer by ranks, each int64 ``[world]``. ``mask``: a bit for each role held, 0 if nothing is."""

    copies: Numbers
    domains: Numbers
    mask: Numbers
    least: Numbers
    most: Numbers


def _facts(
    holdings: Holdings, blocks: Sequence[Block], sets: SetTable, table: KillTable, layer: Numbers, roles: list[str]
) -> Numbers:
    """Return (layer, holders, copies, domains, role's bit, bytes) of everything held, ascending by layer."""
    domains = table.tolerance + 1
    found = [np.zeros((0, 6), np.int64)]
    for block, family in zip(blocks, table.of_group, strict=True):
        which, pairs = distinct_rows(np.stack([layer[block.tensor], block.group], axis=1))
        volume = np.zeros(len(pairs), np.int64)
        np.add.at(volume, which, block.volume)
        at, group = pairs.T
        copies = block.copies(holdings.sets, sets.size)[group]
        for c, column in enumerate(block.columns):
            bit = np.full(len(pairs), 1 << min(roles.index(column.role), 62))
            nbytes = volume * block.itemsize(c)
            found.append(np.stack([at, block.holders[group, c], copies, domains[family][group], bit, nbytes], axis=1))
    facts = np.concatenate(found)
    return facts[np.argsort(facts[:, 0], kind="stable")]


def _of_ranks(facts: Numbers, sets: SetTable, world: int) -> _Layer:
    position, rank = sets.expand(facts[:, 1])
    copies, domains = np.full((2, world), np.iinfo(np.int64).max)
    mask, nbytes = np.zeros((2, world), np.int64)
    np.minimum.at(copies, rank, facts[position, 2])
    np.minimum.at(domains, rank, facts[position, 3])
    np.bitwise_or.at(mask, rank, facts[position, 4])
    np.add.at(nbytes, rank, facts[position, 5])
    return _Layer(copies, domains, mask, nbytes, nbytes)


def _alike(layers: list[_Layer], world: int) -> Numbers:
    """Return the number of each rank's column, int64 ``[world]``."""
    ranks = np.arange(world)
    if world <= EVERY_RANK:
        return ranks
    column = np.zeros(world, np.int64)
    for layer in layers:
        _, held = np.unique(layer.mask, return_inverse=True)
        column, distinct = distinct_rows(np.stack([column, layer.copies, layer.domains, held.reshape(-1)], axis=1))
        if len(distinct) > EVERY_RANK:  # nothing that an eye could tell apart: neighbours share a column
            return ranks * EVERY_RANK // world
    return column


def _columns(column: Numbers, layers: list[_Layer], masks: list[int], of_rank: Sequence[str]) -> tuple[HeatColumn, ...]:
    count = int(column.max(initial=-1)) + 1
    number = {mask: i for i, mask in enumerate(masks)}
    cells: list[list[HeatCell]] = [[] for _ in range(count)]
    for place, layer in enumerate(layers):
        values = []
        for per_rank, combine, start in (
            (layer.copies, np.minimum, np.iinfo(np.int64).max),
            (layer.domains, np.minimum, np.iinfo(np.int64).max),
            (layer.mask, np.bitwise_or, 0),
            (layer.least, np.minimum, np.iinfo(np.int64).max),
            (layer.most, np.maximum, 0),
        ):
            whole = np.full(count, start, np.int64)
            combine.at(whole, column, per_rank)
            values.append(whole)
        for one in np.flatnonzero(values[2]).tolist():
            copies, domains, mask, least, most = (int(value[one]) for value in values)
            cells[one].append(HeatCell(place, copies, domains, number[mask], least, most))
    members = [np.flatnonzero(column == one).tolist() for one in range(count)]
    made = [
        HeatColumn(ranks=spans(ranks), count=len(ranks), domain=of_rank[ranks[0]], cells=tuple(cells[one]))
        for one, ranks in sorted(enumerate(members), key=lambda item: item[1][0])
    ]
    return tuple(made)
