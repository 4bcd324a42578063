"""A named loss: which tensors are gone, and from whom the others can be rebuilt. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ckpt.analysis.combination import Combination, combinations_of, needed_bytes
from ckpt.analysis.domains import RANK, SHOWN, spans, whole_number
from ckpt.analysis.holdings import RankSets
from ckpt.errors import ConfigError
from ckpt.layout.box import Box
from ckpt.layout.region import region
from ckpt.words import count, some

if TYPE_CHECKING:
    from ckpt.analysis.domains import Domains
    from ckpt.analysis.holdings import Holdings, RoleColumn, TensorPieces, TensorRows

Corners = tuple[tuple[int, ...], tuple[int, ...]]
"""A box: offsets and sizes."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Elements that lost a copy and can be rebuilt. ``ranks``: for each role that it takes, who still holds it.

    With pieces these are all who hold ``boxes``. Without them, elements that take the same roles are one source, and
    the ranks are whom to ask: the lowest one that still holds each row.
    """

    elements: int
    ranks: dict[str, str]
    boxes: tuple[Corners, ...] = ()


class TensorLoss(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that the loss touches.

    ``elements``, ``bytes``: what cannot be rebuilt at one step (bytes of the roles that would have to be written).
    ``roles_gone``: role -> elements of it that nobody holds any longer, whether or not that matters. ``boxes``: the
    elements that cannot be rebuilt, if the pieces are known, written as :func:`ckpt.layout.region.region` does. Of a
    buffer whose copies differ each lost copy counts.
    """

    fqn: str
    elements: int
    bytes: int
    roles_gone: dict[str, int]
    rebuild_from: tuple[Source, ...]
    boxes: tuple[Corners, ...] = ()


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """The loss of ``ranks``. ``domains``: those of which no rank is left.

    Tensors that lost no copy of any element are not listed: a scalar that somebody still has is no loss.
    """

    domains: tuple[str, ...]
    ranks: str
    elements: int
    bytes: int
    tensors_gone: int
    tensors: tuple[TensorLoss, ...]

    def title(self, kind: str) -> str:
        """Say what is lost. ``kind``: what the domains are.

        >>> Loss(domains=("3",), ranks="24-31", elements=0, bytes=0, tensors_gone=0, tensors=()).title("host")
        'ranks 24-31 (host 3)'
        """
        runs = self.ranks.split(",")
        shown = ", ".join(runs[:SHOWN]) + (", …" if len(runs) > SHOWN else "")
        ranks = f"rank{'' if self.ranks.isdecimal() else 's'} {shown}"
        if not self.domains or kind == RANK:
            return ranks
        return f"{ranks} ({kind}{'s' * (len(self.domains) > 1)} {some(self.domains)})"


def checked_lost(lost: object) -> str | tuple[int, ...]:
    """Return what is to be lost as text, or as ranks.

    Raises:
        ConfigError: with everything in it that is no rank; names are one text.
    """
    if isinstance(lost, str):
        return lost
    expected = "lose: expected one text of names ('host:a,rank:0-3') or the numbers of ranks"
    if not isinstance(lost, Iterable):
        raise ConfigError(f"{expected}, found {lost!r}")
    given = [(one, whole_number(one)) for one in lost]
    wrong = [repr(one) for one, number in given if number is None]
    if wrong:
        raise ConfigError(f"{expected}, found among them {some(wrong)}")
    return tuple(number for _, number in given if number is not None)


def lose(
    holdings: Holdings, domains: Domains, lost: str | Iterable[int], pieces: Iterable[TensorPieces] | None = None
) -> Loss:
    """Return what the loss of these ranks, all at once, does.

    Args:
        holdings: who holds what.
        domains: names that ``lost`` may use.
        lost: ranks, or text for :meth:`~ckpt.analysis.domains.Domains.parse`.
        pieces: those of which these are the holdings, to say where in a tensor, and all who hold it still.

    Raises:
        ConfigError: with every name or rank that does not exist, or is none.
    """
    given = checked_lost(lost)
    ranks = set(domains.parse(given) if isinstance(given, str) else given)
    unknown = sorted(rank for rank in ranks if not 0 <= rank < holdings.world)
    if unknown:
        raise ConfigError(f"lost ranks {spans(unknown)} are not in this job of {count(holdings.world, RANK)}")
    losing = _Losing(holdings.sets if pieces is None else RankSets(), ranks)
    if pieces is None:
        tensors = [losing.tensor(one) for one in holdings.tensors]
    else:
        tensors = [losing.pieces(one) for one in pieces]
    hit = tuple(one for one in tensors if one.bytes or one.roles_gone or one.rebuild_from)
    whole = [name for name in domains.names if ranks.issuperset(domains.members[name])]
    return Loss(
        domains=tuple(whole),
        ranks=spans(sorted(ranks)),
        elements=sum(one.elements for one in hit),
        bytes=sum(one.bytes for one in hit),
        tensors_gone=len({one.fqn for one in hit if one.bytes}),
        tensors=hit,
    )


class _Losing:
    def __init__(self, sets: RankSets, lost: set[int]) -> None:
        self._sets = sets
        self._lost = lost
        self._left: dict[int, tuple[int, ...]] = {}

    def left(self, number: int) -> tuple[int, ...]:
        """Return the ranks of this set that are not lost."""
        if number not in self._left:
            self._left[number] = tuple(rank for rank in self._sets[number] if rank not in self._lost)
        return self._left[number]

    @cached_property
    def _hit(self) -> np.ndarray:
        """Has each set lost a member, all members? bool ``[2, sets + 1]``; of the empty set, the last one, both."""
        sets = [self._sets[i] for i in range(len(self._sets))]
        some = [not self._lost.isdisjoint(ranks) for ranks in sets]
        every = [hit and self._lost.issuperset(ranks) for ranks, hit in zip(sets, some, strict=True)]
        return np.array([[*some, True], [*every, True]])

    def tensor(self, one: TensorRows) -> TensorLoss:
        some, every = self._hit
        full = [c for c, column in enumerate(one.columns) if not column.scalar]
        hit = some[one.holders[:, full]].any(axis=1) | every[one.holders].any(axis=1)
        rows = np.flatnonzero(hit)
        parts = (one.volume[rows], one.holders[rows], one.rows_derived()[rows])
        listed = zip(*(part.tolist() for part in parts), (None for _ in rows), strict=True)
        return self._loss(one.fqn, one.columns, listed)

    def pieces(self, one: TensorPieces) -> TensorLoss:
        rows = []
        for box, holders, derived in zip(one.boxes, one.holders, one.derived, strict=True):
            hit = any(
                not ranks or (not self._lost.isdisjoint(ranks) and (not column.scalar or self._lost.issuperset(ranks)))
                for column, ranks in zip(one.columns, holders, strict=True)
            )
            if hit:
                rows.append((box.volume, [self._sets.number(ranks) for ranks in holders], derived, box))
        return self._loss(one.fqn, one.columns, rows)

    def _loss(
        self,
        fqn: str,
        columns: tuple[RoleColumn, ...],
        rows: Iterable[tuple[int, list[int], bool, Box | None]],
    ) -> TensorLoss:
        elements, nbytes, gone, lost_boxes = 0, 0, Counter[str](), list[Box]()
        sources: dict[tuple[Combination, tuple[tuple[int, ...], ...]], _Found] = {}
        for volume, row, derived, box in rows:
            boxes = [] if box is None else [box]
            left = [self.left(number) for number in row]
            for column, ranks in zip(columns, left, strict=True):
                if not ranks and column.scalar and column.role not in gone:
                    gone[column.role] = 1
                    nbytes += column.itemsize
                elif not ranks and not column.scalar and volume:
                    gone[column.role] += volume
            alive = next((c for c in combinations_of(columns, derived) if all(left[i] for i in c)), None)
            if not volume:
                continue
            if alive is None:
                elements += volume
                nbytes += volume * needed_bytes(columns, derived)
                lost_boxes += boxes
                continue
            # Without boxes a source could not say which of its elements each of many holders has.
            key = alive, () if box is None else tuple(left[i] for i in alive)
            found = sources.setdefault(key, _Found({columns[i].role: set() for i in alive}))
            found.elements += volume
            found.boxes += boxes
            for i in alive:
                found.ranks[columns[i].role].update(left[i] if boxes else left[i][:1])
        return TensorLoss(
            fqn=fqn,
            elements=elements,
            bytes=nbytes,
            roles_gone=dict(sorted(gone.items())),
            rebuild_from=tuple(found.source() for _, found in sorted(sources.items(), key=lambda item: item[0])),
            boxes=_corners(lost_boxes),
        )


@dataclass
class _Found:
    ranks: dict[str, set[int]]
    elements: int = 0
    boxes: list[Box] = field(default_factory=list)

    def source(self) -> Source:
        ranks = {role: spans(sorted(holders)) for role, holders in self.ranks.items()}
        return Source(elements=self.elements, ranks=ranks, boxes=_corners(self.boxes))


def _corners(boxes: list[Box]) -> tuple[Corners, ...]:
    """Return boxes as plain data that does not show how the ranks have cut them."""
    return tuple((box.offsets, box.sizes) for box in region(boxes))
