"""Ranks by layers: how often what a rank holds of a layer is held. Pure."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from ckpt.analysis.domains import spans
from ckpt.analysis.holdings import distinct_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.analysis.blocks import Block, SetTable
    from ckpt.analysis.holdings import Holdings, Numbers
    from ckpt.analysis.kills import KillTable

EVERY_RANK = 512
"""Up to this world each rank has a column; beyond, ranks that differ in nothing but bytes share one."""
FEW = 4
"""Names of domains that a column lists."""
ABSENT = -1
"""Copies, domains or number of what is not held."""


class HeatRole(msgspec.Struct, frozen=True, array_like=True):
    """One role that a rank holds of a layer. ``copies``, ``domains``: of those of its elements that have fewest."""

    role: str
    copies: int
    domains: int


class HeatCell(msgspec.Struct, frozen=True, array_like=True):
    """What the ranks of a column hold of one layer.

    ``copies``, ``domains``: the least number of ranks, and of failure domains, whose loss destroys some of it.
    ``held``: number of the held roles in :attr:`HeatMap.held`. Bytes of the rank that holds least and most.
    """

    layer: int
    copies: int
    domains: int
    held: int
    least_bytes: int
    most_bytes: int


class HeatColumn(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that hold alike, or neighbours. Layers of which they hold nothing have no cell.

    ``ranks``, ``domains``: as text, runs of numbers as ranges; of more than a few domains the first ones.
    """

    ranks: str
    count: int
    domains: str
    cells: tuple[HeatCell, ...]


class HeatMap(msgspec.Struct, frozen=True, kw_only=True):
    """Data of the heat map.

    ``layers``: in the order of the model, as far as names tell; ``held``: the distinct lists of roles held.
    """

    layers: tuple[str, ...]
    held: tuple[tuple[HeatRole, ...], ...]
    columns: tuple[HeatColumn, ...]


def layer_of(fqn: str) -> str:
    """Return the layer that a tensor belongs to: its name up to the first number, else at most two components of its
    module's name.

    >>> [layer_of(name) for name in ("model.layers.3.mlp.weight", "model.norm.weight", "lm_head.weight", "scale")]
    ['model.layers.3', 'model.norm', 'lm_head', 'scale']
    """
    parts = fqn.split(".")
    numbered = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return ".".join(parts[: numbered + 1] if numbered is not None else parts[:-1][:2] or parts)


_NUMBERED = re.compile(r"(^|\.)\d+$")
_OUTPUT = re.compile(r"head|output|embed_out|unembed|logits|classifier|lm_out")
_INPUT = re.compile(r"emb|\bwte\b|\bwpe\b|patch|stem")


def _in_order(layer: str) -> tuple[int, list[tuple[int, int, str]]]:
    """Return the place of a layer in its model, as far as names tell: a live job and a description know no more.

    Embeddings come first, then numbered layers, the others (final norms), and heads.
    """
    natural = [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in layer.split(".")]
    if _NUMBERED.search(layer):
        return 1, natural
    name = layer.lower()
    return 3 if _OUTPUT.search(name) else 0 if _INPUT.search(name) else 2, natural


def heat_map(
    holdings: Holdings, blocks: Sequence[Block], sets: SetTable, table: KillTable, of_rank: Sequence[str]
) -> HeatMap:
    """Return the heat map of a job; ``of_rank``: name of each rank's domain."""
    of_tensor = [layer_of(tensor.fqn) for tensor in holdings.tensors]
    names = sorted(set(of_tensor), key=_in_order)
    roles = sorted({column.role for block in blocks for column in block.columns})
    number = {name: i for i, name in enumerate(names)}
    facts = _facts(blocks, holdings, sets, table, np.array([number[name] for name in of_tensor], np.int64), roles)
    edges = np.searchsorted(facts[:, 0], np.arange(len(names) + 1))
    layers = [_of_ranks(facts[a:b], sets, holdings.world, len(roles)) for a, b in pairwise(edges.tolist())]
    column = _alike(layers, holdings.world)
    count = int(column.max(initial=-1)) + 1
    merged = layers if count == holdings.world else [_of_columns(layer, column, count) for layer in layers]
    nothing = np.zeros((0, 2 * len(roles)), np.int64)
    which, distinct = distinct_rows(np.concatenate([nothing, *(layer.held for layer in merged)]))
    order = sorted(row for row in distinct.tolist() if max(row, default=ABSENT) > ABSENT)  # whatever the sets' numbers
    place = {tuple(row): i for i, row in enumerate(order)}
    numbers = np.array([place.get(tuple(row), ABSENT) for row in distinct.tolist()], np.int64)[which]
    return HeatMap(
        layers=tuple(names),
        held=tuple(_held(row, roles) for row in order),
        columns=_columns(column, merged, numbers.reshape(len(names), count), of_rank),
    )


class _Layer(NamedTuple):
    """One layer by ranks, or by columns of them: int64 ``[ranks]``, of ``held`` ``[ranks, 2 x roles]``.

    ``held``: copies, then domains, of each role. :data:`ABSENT` copies, domains and roles where nothing is held.
    """

    copies: Numbers
    domains: Numbers
    held: Numbers
    least: Numbers
    most: Numbers


def _facts(
    blocks: Sequence[Block], holdings: Holdings, sets: SetTable, table: KillTable, layer: Numbers, roles: list[str]
) -> Numbers:
    """Return (layer, holders, copies, domains, role, domains of the role, bytes) of all that is held, by layer."""
    domains = table.tolerance + 1
    found = [np.zeros((0, 7), np.int64)]
    for block, family, spread in zip(blocks, table.of_group, table.spread, strict=True):
        which, pairs = distinct_rows(np.stack([layer[block.tensor], block.group], axis=1))
        volume = np.zeros(len(pairs), np.int64)
        np.add.at(volume, which, block.volume)
        at, group = pairs.T
        copies = block.copies(holdings.sets, sets.size)[group]
        for c, column in enumerate(block.columns):
            if column.scalar:  # in a block of its own
                continue
            role = np.full(len(pairs), roles.index(column.role))
            holders, nbytes = block.holders[group, c], volume * block.itemsize(c)
            found.append(
                np.stack([at, holders, copies, domains[family][group], role, spread[group, c], nbytes], axis=1)
            )
    return _merged(np.concatenate(found), len(roles), len(holdings.sets) + 1)


def _merged(facts: Numbers, roles: int, sets: int) -> Numbers:
    """Put together what the same holders hold of a role of a layer, before it is told of each of them."""
    key = (facts[:, 0] * roles + facts[:, 4]) * sets + facts[:, 1] + 1
    order = np.argsort(key, kind="stable")
    facts = facts[order]
    first = np.flatnonzero(np.diff(key[order], prepend=-1))
    if not len(first):
        return facts
    merged = facts[first]
    for c in (2, 3):
        merged[:, c] = np.minimum.reduceat(facts[:, c], first)
    merged[:, 6] = np.add.reduceat(facts[:, 6], first)
    return merged


def _of_ranks(facts: Numbers, sets: SetTable, world: int, roles: int) -> _Layer:
    position, rank = sets.expand(facts[:, 1])
    _, _, copies, domains, role, role_domains, nbytes = facts[position].T
    slot = rank * (2 * roles) + role
    held = _least(slot, sets.size[facts[position, 1]], world * 2 * roles)
    held = np.where(held == ABSENT, _least(slot + roles, role_domains, world * 2 * roles), held)
    total = np.zeros(world, np.int64)
    np.add.at(total, rank, nbytes)
    return _Layer(
        _least(rank, copies, world), _least(rank, domains, world), held.reshape(world, 2 * roles), total, total
    )


def _least(where: Numbers, values: Numbers, length: int) -> Numbers:
    """Return the least value at each of ``length`` places, :data:`ABSENT` where there is none."""
    most = np.iinfo(np.int64).max
    found = np.full(length, most, np.int64)
    np.minimum.at(found, where, values)
    found[found == most] = ABSENT
    return found


def _alike(layers: list[_Layer], world: int) -> Numbers:
    """Return the number of each rank's column, int64 ``[world]``."""
    ranks = np.arange(world)
    if world <= EVERY_RANK:
        return ranks
    column = np.zeros(world, np.int64)
    for layer in layers:
        seen = np.concatenate([column[:, None], layer.copies[:, None], layer.domains[:, None], layer.held], axis=1)
        column, distinct = distinct_rows(seen)
        if len(distinct) > EVERY_RANK:  # nothing that an eye could tell apart: neighbours share a column
            return ranks * EVERY_RANK // world
    return column


def _of_columns(layer: _Layer, column: Numbers, count: int) -> _Layer:
    held = np.flatnonzero(layer.copies != ABSENT)
    where = column[held]
    width = layer.held.shape[1]
    rank, role = np.nonzero(layer.held != ABSENT)
    most = np.zeros(count, np.int64)
    np.maximum.at(most, where, layer.most[held])
    return _Layer(
        _least(where, layer.copies[held], count),
        _least(where, layer.domains[held], count),
        _least(column[rank] * width + role, layer.held[rank, role], count * width).reshape(count, width),
        _least(where, layer.least[held], count),
        most,
    )


def _held(row: list[int], roles: list[str]) -> tuple[HeatRole, ...]:
    copies, domains = row[: len(roles)], row[len(roles) :]
    return tuple(HeatRole(*one) for one in zip(roles, copies, domains, strict=True) if one[1] != ABSENT)


def _columns(column: Numbers, layers: list[_Layer], numbers: Numbers, of_rank: Sequence[str]) -> tuple[HeatColumn, ...]:
    count = numbers.shape[1]
    cells: list[list[HeatCell]] = [[] for _ in range(count)]
    for place, (layer, held) in enumerate(zip(layers, numbers, strict=True)):
        for one in np.flatnonzero(layer.copies != ABSENT).tolist():
            copies, domains, least, most = (int(v[one]) for v in (layer.copies, layer.domains, layer.least, layer.most))
            cells[one].append(HeatCell(place, copies, domains, int(held[one]), least, most))
    members = [np.flatnonzero(column == one).tolist() for one in range(count)]
    made = [
        HeatColumn(ranks=spans(ranks), count=len(ranks), domains=_names(ranks, of_rank), cells=tuple(cells[one]))
        for one, ranks in sorted(enumerate(members), key=lambda item: item[1][0])
    ]
    return tuple(made)


def _names(ranks: Sequence[int], of_rank: Sequence[str]) -> str:
    names = list(dict.fromkeys(of_rank[rank] for rank in ranks))
    if all(name.isdecimal() and name.isascii() and len(name) < 10 for name in names):
        return spans(sorted(map(int, names)))
    return ", ".join(names[:FEW]) + (f", … ({len(names)} in all)" if len(names) > FEW else "")
