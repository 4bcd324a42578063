"""What is left of a job's claims where the bytes say otherwise: redundant only if equal in every probe. Pure.

An audit and a save find the same two things. *Copies that differ*: in general one side is kept, the one that a save
keeps (:func:`~ckpt.analysis.audit.elect`); the others hold something, but not the state. Where a save keeps all copies,
each distinct one is state of its own: of buffers, which differ by right, and of what may be slices or was to be kept by
``on_divergence="keep-all"``. *Params that are not cast(master)*: they are state like any other. Both are told by box (a
chunk of the save plan), so what is left is exact to the chunk.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from ckpt.analysis.audit import elect, sides_of
from ckpt.analysis.claims import DERIVATION
from ckpt.analysis.combination import is_derivable
from ckpt.analysis.holdings import Holdings, RoleColumn, TensorPieces, holdings_of, pieces_of
from ckpt.layout.box import Box, overlaps
from ckpt.layout.region import without
from ckpt.layout.spec import BUFFER, MASTER, PARAM

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckpt.analysis.claims import Finding
    from ckpt.layout.graph import ShardGraph

Sides = tuple[tuple[int, ...], ...]
"""Ranks with equal bytes, the side of the lowest rank first."""
Row = tuple[Box, tuple[tuple[int, ...], ...], bool]
"""A piece: its box, the holders of each column, and whether its param is cast(master)."""


class Redundancy(msgspec.Struct, frozen=True, kw_only=True):
    """How far the redundancy that a job claims can be relied on, in bytes.

    ``claimed``: all copies but one of everything, and one copy of each param that should be cast(master).
    ``refuted``: of these, what the report does not count as redundant. ``proved``: equal, and not constant in every
    probe. ``unproved``: the rest, of which equal bytes say nothing (zeros, a single number), or which is in a piece
    that was refuted in part. Both are None where only differences were recorded, as in a checkpoint.
    """

    claimed: int
    refuted: int
    proved: int | None = None
    unproved: int | None = None


@dataclass(frozen=True, slots=True)
class Refutations:
    """``copies``: (FQN, role) -> box -> the sides that differ. ``underived``: FQN -> boxes of params that are not
    cast(master). The boxes of one tensor are disjoint. ``all_kept``: (FQN, role) -> those boxes of ``copies`` of which
    a save keeps every side; of buffers it is all of them, listed or not.
    """

    copies: Mapping[tuple[str, str], Mapping[Box, Sides]]
    underived: Mapping[str, Collection[Box]]
    all_kept: Mapping[tuple[str, str], Collection[Box]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Left:
    """What is left of a job's claims, in the forms that a report is made of."""

    pieces: tuple[TensorPieces, ...]
    holdings: Holdings
    redundancy: Redundancy


def left_of(graph: ShardGraph, refuted: Refutations, proved: int | None = None) -> Left:
    """Return what is left of a job's claims.

    Args:
        graph: what the ranks declare, without problems.
        refuted: what the bytes say.
        proved: redundant bytes that are proved (:meth:`~ckpt.analysis.claims.AuditReport.redundant`), if that is known.
    """
    pieces = tuple(refute(pieces_of(graph), refuted))
    claimed = graph.bytes_held() - graph.bytes_unique()
    wrong = claimed - sum(map(_redundant, pieces))
    unproved = None if proved is None else claimed - wrong - proved
    numbers = Redundancy(claimed=claimed, refuted=wrong, proved=proved, unproved=unproved)
    return Left(pieces, holdings_of(graph, pieces), numbers)


def _redundant(one: TensorPieces) -> int:
    total = 0
    for c, column in enumerate(one.columns):
        if column.scalar:
            total += column.itemsize * (len(one.holders[0][c]) - 1)
            continue
        for box, held, derived in zip(one.boxes, one.holders, one.derived, strict=True):
            needed = 0 if column.role == PARAM and is_derivable(one.columns, derived) else 1
            total += box.volume * column.itemsize * (len(held[c]) - needed)
    return total


def kept_side(sides: Sides) -> tuple[int, ...]:
    """Return the ranks whose bytes a save keeps."""
    content = {rank: number for number, ranks in enumerate(sides) for rank in ranks}
    return sides[content[elect(content)]]


def refutations_of(findings: Iterable[Finding]) -> Refutations:
    """Return what the findings of one audit, or of several combined, refute.

    Ranks are on one side if they were in every probe. A derivation is refuted if it was, in any probe, of a rank of the
    kept side: what the others hold does not matter any more.
    """
    copies: dict[tuple[str, str], dict[Box, Sides]] = {}
    all_kept: dict[tuple[str, str], set[Box]] = {}
    wrong: dict[tuple[str, Box], set[int]] = {}
    for one in findings:
        if one.kind == DERIVATION:
            wrong.setdefault((one.fqn, one.box), set()).update(one.sides[1])
        else:
            found = copies.setdefault((one.fqn, one.role), {})
            found[one.box] = _refined(found[one.box], one.sides) if one.box in found else one.sides
            if one.all_kept:
                all_kept.setdefault((one.fqn, one.role), set()).add(one.box)
    underived: dict[str, list[Box]] = {}
    for (fqn, box), ranks in wrong.items():
        sides = copies.get((fqn, PARAM), {}).get(box)
        if sides is None or not ranks.isdisjoint(kept_side(sides)):
            underived.setdefault(fqn, []).append(box)
    return Refutations(copies, underived, all_kept)


def _refined(first: Sides, second: Sides) -> Sides:
    """Return the sides of ranks that are together in both."""
    one, other = ({rank: number for number, ranks in enumerate(sides) for rank in ranks} for sides in (first, second))
    return tuple(sides_of({rank: (number, other.get(rank)) for rank, number in one.items()}).values())


def refute(pieces: Iterable[TensorPieces], refuted: Refutations) -> Iterator[TensorPieces]:
    """Yield the pieces of a job with what was refuted taken out.

    A piece is cut where only a part of it was refuted. Holders whose copy is not the kept one are left out. Of a buffer
    each distinct copy becomes a piece. Of another role the other copies become a tensor of their own, with that role
    alone, if all are kept (not of a scalar): with whose other roles they go is not for this table to say. Params that
    are not cast(master) are no longer derived; nor are those whose masters differ, because it was one rank's master
    that the cast was made of.
    """
    for one in pieces:
        rows: list[Row] = list(zip(one.boxes, one.holders, one.derived, strict=True))
        claimed = len(rows)
        for c, column in enumerate(one.columns):
            found = refuted.copies.get((one.fqn, column.role), {})
            if found and column.scalar:
                (sides,) = found.values()
                rows = [(box, _with(held, c, kept_side(sides)), derived) for box, held, derived in rows]
            elif found:
                rows = list(_narrowed(rows, c, found, column.role == BUFFER))
        derivable = any(one.derived) and any(c.role == MASTER and not c.scalar for c in one.columns)
        for where in (refuted.underived.get(one.fqn, ()), refuted.copies.get((one.fqn, MASTER), ())):
            if where and derivable:
                cut = _cut(rows, sorted(where))
                rows = [(box, held, derived and hit is None) for (box, held, derived), hit in cut]
        boxes, holders, derived = zip(*rows, strict=True) if claimed else ((), (), ())
        yield replace(one, boxes=boxes, holders=holders, derived=derived)
        for column in one.columns:
            kept = refuted.all_kept.get((one.fqn, column.role), ())
            if kept and column.role != BUFFER and not column.scalar:
                yield _other_copies(one, column, refuted.copies[one.fqn, column.role], kept)


def _other_copies(
    one: TensorPieces, column: RoleColumn, found: Mapping[Box, Sides], kept: Collection[Box]
) -> TensorPieces:
    rows = [(box, ranks) for box in sorted(kept) for ranks in found[box] if ranks != kept_side(found[box])]
    holders = tuple((ranks,) for _, ranks in rows)
    return TensorPieces(one.fqn, one.shape, (column,), tuple(box for box, _ in rows), holders, (False,) * len(rows))


def _narrowed(rows: list[Row], c: int, found: Mapping[Box, Sides], all_kept: bool) -> Iterator[Row]:
    where = sorted(found)
    for (box, held, derived), hit in _cut(rows, where):
        sides = (held[c],) if hit is None else found[where[hit]] if all_kept else (kept_side(found[where[hit]]),)
        yield from ((box, _with(held, c, ranks), derived) for ranks in sides)


def _with(held: tuple[tuple[int, ...], ...], c: int, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return (*held[:c], ranks, *held[c + 1 :])


def _cut(rows: list[Row], where: list[Box]) -> Iterator[tuple[Row, int | None]]:
    """Cut rows at the borders of disjoint boxes; yield each part with the number of the box in which it lies."""
    inside: dict[int, list[tuple[Box, int]]] = {}
    for source, target, common in overlaps(where, [row[0] for row in rows]):
        inside.setdefault(target, []).append((common, source))
    for number, (box, held, derived) in enumerate(rows):
        hits = sorted(inside.get(number, ()))
        yield from (((common, held, derived), source) for common, source in hits)
        if not hits:
            yield (box, held, derived), None
        elif sum(common.volume for common, _ in hits) < box.volume:
            yield from (((rest, held, derived), None) for rest in without(box, [common for common, _ in hits]))
