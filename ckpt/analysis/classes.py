"""Classes of cells: everything that is held equally often, with a verdict in words. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from ckpt.analysis.combination import is_derivable
from ckpt.analysis.holdings import distinct_rows
from ckpt.layout.spec import PARAM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.analysis.blocks import Block, SetTable
    from ckpt.analysis.domains import Domains
    from ckpt.analysis.holdings import Holdings
    from ckpt.analysis.kills import KillTable


class RoleCopies(msgspec.Struct, frozen=True, kw_only=True):
    """How often one role of a class is held: on how many ranks, in how many failure domains.

    ``scalar``: it has one value for the whole tensor, whose bytes are in a class of their own.
    """

    role: str
    scalar: bool
    copies: int
    domains: int


class CellClass(msgspec.Struct, frozen=True, kw_only=True):
    """All elements whose roles are held equally often.

    ``kind``: ``trained``, ``parameter`` (frozen), ``buffer``, ``state`` (of another shape than its parameter) or
    ``scalar``. ``derived``: the param is cast(master). ``tolerance``: how many domains may be lost, whichever they are;
    -1 if some role is held by nobody. ``elements``: of the tensors, or values of scalars. ``bytes``: from which they
    are rebuilt. ``groups``: distinct holders. ``example``: the first FQN.
    """

    kind: str
    derived: bool
    roles: tuple[RoleCopies, ...]
    tolerance: int
    elements: int
    bytes: int
    tensors: int
    groups: int
    example: str
    must_write: bool
    verdict: str


def cell_classes(
    holdings: Holdings, blocks: Sequence[Block], sets: SetTable, table: KillTable, domains: Domains, k: int
) -> tuple[CellClass, ...]:
    """Return the classes of a job, those that must be written first, then by bytes."""
    found: dict[_Key, list[_Part]] = {}
    for block, family, spread in zip(blocks, table.of_group, table.spread, strict=True):
        per_group = np.concatenate([table.tolerance[family][:, None], sets.size[block.holders], spread], axis=1)
        which, rows = distinct_rows(per_group)
        elements = np.zeros(len(rows), np.int64)
        np.add.at(elements, which, block.elements)
        holders: list[set[tuple[int, ...]]] = [set() for _ in rows]
        for number, held_by in zip(which.tolist(), block.holders.tolist(), strict=True):
            holders[number].add(tuple(held_by))
        _, pairs = distinct_rows(np.stack([which[block.group], block.tensor], axis=1))
        tensors = np.bincount(pairs[:, 0], minlength=len(rows)).tolist()
        first = np.full(len(rows), len(holdings.tensors), np.int64)
        np.minimum.at(first, pairs[:, 0], pairs[:, 1])
        for number, (tolerance, *counts) in enumerate(rows.tolist()):
            key = _Key(block.kind, is_derivable(block.columns, block.derived), _roles(block, counts), tolerance)
            values = int(elements[number])
            part = _Part(values, values * block.needed, tensors[number], holders[number], int(first[number]))
            found.setdefault(key, []).append(part)
    words = _Words(holdings.world, domains.kind, k)
    classes = [_cell_class(key, parts, holdings, words) for key, parts in found.items()]
    return tuple(sorted(classes, key=lambda one: (one.tolerance, -one.bytes, one.kind, one.example, one.verdict)))


class _Key(NamedTuple):
    kind: str
    derived: bool
    roles: tuple[RoleCopies, ...]
    tolerance: int


class _Part(NamedTuple):
    """The share that one block has in a class."""

    elements: int
    nbytes: int
    tensors: int
    holders: set[tuple[int, ...]]
    first: int


def _roles(block: Block, counts: list[int]) -> tuple[RoleCopies, ...]:
    width = len(block.columns)
    return tuple(
        RoleCopies(role=column.role, scalar=column.scalar, copies=copies, domains=domains)
        for column, copies, domains in zip(block.columns, counts[:width], counts[width:], strict=True)
    )


def _cell_class(key: _Key, parts: list[_Part], holdings: Holdings, words: _Words) -> CellClass:
    return CellClass(
        kind=key.kind,
        derived=key.derived,
        roles=key.roles,
        tolerance=key.tolerance,
        elements=sum(part.elements for part in parts),
        bytes=sum(part.nbytes for part in parts),
        tensors=sum(part.tensors for part in parts),
        groups=len(set().union(*(part.holders for part in parts))),
        example=holdings.tensors[min(part.first for part in parts)].fqn,
        must_write=key.tolerance < words.k,
        verdict=words.verdict(key),
    )


class _Words(NamedTuple):
    world: int
    domain: str
    k: int

    def verdict(self, key: _Key) -> str:
        """Say what is held where, and what follows."""
        if key.tolerance < 0:
            return f"{self._held(key)}: cannot be rebuilt"
        if key.tolerance == 0:
            return f"{self._held(key)}: must be written"
        survived = f"survives any {key.tolerance} {self.domain}{'s' * (key.tolerance > 1)}"
        if key.tolerance < self.k:
            return f"{self._held(key)}: {survived}, must be written against {self.k}"
        elsewhere = all(one.domains > 1 for one in key.roles)
        return f"{'every copy elsewhere' if elsewhere else self._held(key)}: {survived}"

    def _held(self, key: _Key) -> str:
        param = next((one for one in key.roles if one.role == PARAM), None)
        optimizer = [one for one in key.roles if one.role != PARAM]
        said = [] if param is None else [f"parameter {self._times(param)}"]
        if optimizer:
            # A scalar that is held less often than its tensor's slices decides their fate; otherwise it says nothing.
            full = [one for one in optimizer if not one.scalar]
            least = min((one.domains for one in full), default=0)
            weak = [one for one in optimizer if one.scalar and (not full or one.domains < least)]
            name = "optimizer state"
            if param is not None and full and all(one.copies < param.copies for one in full):
                name = "optimizer slice"
            said.append(self._weakest("" if key.kind != "trained" else name, weak or full))
        return ", ".join(said)

    def _weakest(self, name: str, roles: list[RoleCopies]) -> str:
        """Say how often the role in the fewest domains is held, and which it is where they differ."""
        weakest = min(roles, key=lambda one: (one.domains, one.copies))
        if not name:
            return f"{weakest.role} {self._times(weakest)}"
        alike = len({(one.domains, one.copies) for one in roles}) == 1 and not weakest.scalar
        return f"{name}{'' if alike else f' ({weakest.role})'} {self._times(weakest)}"

    def _times(self, held: RoleCopies) -> str:
        if held.copies < 2:
            return "once" if held.copies else "nowhere"
        if held.copies == self.world:
            return "everywhere"
        on = f" on {held.domains} {self.domain}{'s' * (held.domains > 1)}" if held.domains != held.copies else ""
        return f"{held.copies} times{on}"
