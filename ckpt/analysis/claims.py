"""What an audit says: of every claim of redundancy how much is proved, and each finding to the element. Pure.

A claim is *proved* where its holders had equal bytes, *refuted* where they did not, and *unproved* where equal bytes
say nothing: all elements of the piece were bitwise the same (moments before the first step, weights at their constant
initial value, a single number). Two ranks that do not replicate each other at all agree on zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from ckpt.errors import ConfigError
from ckpt.layout.box import Box
from ckpt.words import count, size, some

if TYPE_CHECKING:
    from collections.abc import Sequence

REPLICA, BUFFERS, DERIVATION = "replica", "buffer", "derivation"
"""Kinds of finding. ``buffer``: replicas of a buffer, which may differ by right (BatchNorm statistics of each rank's
own batches). ``derivation``: a param that is not cast(master); of a job with stochastic rounding that is legal."""

UNPROVED, PROVED, REFUTED = 0, 1, 2
"""States of one piece of a claim. The larger one counts when probes are combined: one refutation refutes for good, and
one proof is enough if nothing refutes it."""

SHOWN = 8
"""Findings and ranks that a text lists."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How copies of one box differ, of those that were compared: elements may differ as well in copies that were not.

    ``box``: the smallest box that holds every element in which the compared copies differ. ``elements``: how many do,
    in any bit. ``unordered``: how many of those have no distance, because a copy is NaN or infinite there. ``max_abs``:
    the largest distance of two compared copies of one element, in float64 (of complex numbers: of a component); None if
    none has a distance. ``compared``: number of distinct copies that were compared (of a ``derivation``: the cast, and
    those that are not it).
    """

    box: Box
    elements: int
    unordered: int = 0
    max_abs: float | None = None
    compared: int = 2

    def __str__(self) -> str:
        by = "" if self.max_abs is None else f", by at most {self.max_abs:.6g}"
        odd = f", {self.unordered} of them NaN or infinite" if self.unordered else ""
        return f"{count(self.elements, 'element')} in {self.box}{by}{odd}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One refuted piece of a claim.

    ``box``: the piece that was compared. ``sides``: ranks with equal bytes, the side of the lowest rank first; of a
    ``derivation`` the first side is the rank whose master was cast, the second the ranks whose param is not that.
    ``difference``: between so many of the sides as it says; None if the piece was not looked at element by element
    (only so many are). ``all_kept``: a save keeps every side, because buffers differ by right, and because what only
    counts as whole (:attr:`ckpt.engine.base.EngineState.assumed`) may be slices.
    """

    kind: str
    fqn: str
    role: str
    box: Box
    sides: tuple[tuple[int, ...], ...]
    difference: Difference | None = None
    all_kept: bool = False

    def __str__(self) -> str:
        sides = "; ".join(f"rank(s) {some(ranks, SHOWN)}" for ranks in self.sides[:SHOWN])
        more = f"; … ({len(self.sides)} sides)" if len(self.sides) > SHOWN else ""
        what = "param is not cast(master)" if self.kind == DERIVATION else f"{self.kind} copies differ"
        where = f"box {self.box}" if self.difference is None else str(self.difference)
        if self.difference is not None and self.kind != DERIVATION and self.difference.compared < len(self.sides):
            where += f" ({self.difference.compared} of {len(self.sides)} sides compared)"
        return f"tensor {self.fqn!r} ({self.role}): {what}: {where}: {sides}{more}"

    def plain(self) -> dict[str, Any]:
        """Return the finding as JSON-able values; ``box`` is the tight one where it is known."""
        found = self.difference
        return {
            "kind": self.kind,
            "fqn": self.fqn,
            "role": self.role,
            "box": _plain_box(self.box if found is None else found.box),
            "compared": _plain_box(self.box),
            "all_kept": self.all_kept,
            "sides": [list(ranks) for ranks in self.sides],
            "elements": None if found is None else found.elements,
            "unordered": None if found is None else found.unordered,
            "max_abs": None if found is None else found.max_abs,
            "sides_compared": None if found is None else found.compared,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """One claim over pieces of a tensor: that ``ranks`` hold the same (``replica``, ``buffer``), or that their param is
    cast(master) (``derivation``; refuted as well where the masters differ).

    ``nbytes``: bytes of one copy of each piece, int64 ``[pieces]``. ``states``: uint8 ``[pieces]``. Pieces are chunks
    of the save plan: one differing element refutes its whole piece, ``Finding.difference`` is exact. Claims are equal
    if all of this is.
    """

    kind: str
    fqn: str
    role: str
    ranks: tuple[int, ...]
    nbytes: npt.NDArray[np.int64]
    states: npt.NDArray[np.uint8]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Claim):
            return NotImplemented
        same = self.key == other.key and np.array_equal(self.states, other.states)
        return same and np.array_equal(self.nbytes, other.nbytes)

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def key(self) -> tuple[str, str, str, tuple[int, ...]]:
        """What the claim is about."""
        return (self.kind, self.fqn, self.role, self.ranks)

    def total(self, state: int) -> int:
        """Return the bytes (of one copy) of all pieces in a state."""
        return int(self.nbytes[self.states == state].sum())

    @property
    def spared(self) -> int:
        """How many copies of each piece are redundant if the claim is true."""
        return 1 if self.kind == DERIVATION else len(self.ranks) - 1


@dataclass(frozen=True, slots=True)
class AuditReport:
    """One audit, or several of the same layout combined; the same on every rank.

    ``layout``: digest of the job's layout. ``probes``: how many audits this is. ``detailed``: findings that carry a
    difference.
    """

    layout: str
    world: int
    claims: tuple[Claim, ...]
    findings: tuple[Finding, ...]
    probes: int = 1

    @property
    def clean(self) -> bool:
        """Was no claim refuted? What is unproved does not count: see :meth:`total`."""
        return not self.findings

    def __bool__(self) -> bool:
        """Raise :class:`TypeError`: whether a refuted or an unproved claim is bad is for the caller to say."""
        raise TypeError("an audit is neither true nor false: ask report.clean (nothing refuted)")

    @property
    def detailed(self) -> int:
        """Number of findings that say which elements differ."""
        return sum(f.difference is not None for f in self.findings)

    def total(self, state: int) -> int:
        """Return the bytes (of one copy) of all pieces of all claims in a state."""
        return sum(claim.total(state) for claim in self.claims)

    def redundant(self, state: int) -> int:
        """Return the bytes that pieces in a state would not need: of replicas all copies but one, of params the one
        that could be cast from a master.
        """
        return sum(claim.spared * claim.total(state) for claim in self.claims)

    def __and__(self, other: AuditReport) -> AuditReport:
        return AuditReport.combine([self, other])

    @classmethod
    def combine(cls, reports: Sequence[AuditReport]) -> AuditReport:
        """Return what several audits of one layout prove together: redundant only if equal in every probe.

        Raises:
            ConfigError: no report, or reports of different layouts.
        """
        layouts = list(dict.fromkeys((r.layout, r.world) for r in reports))
        if len(layouts) != 1:
            raise ConfigError(
                f"audits to be combined must be of one layout, found {len(layouts)}: "
                + ", ".join(f"{layout} of {world} rank(s)" for layout, world in layouts[:SHOWN])
            )
        first = reports[0]
        claims = []
        for k, claim in enumerate(first.claims):
            states = claim.states
            for report in reports[1:]:
                states = np.maximum(states, report.claims[k].states)
            claims.append(Claim(*claim.key, claim.nbytes, states))
        findings = tuple(dict.fromkeys(f for report in reports for f in report.findings))
        return cls(first.layout, first.world, tuple(claims), findings, sum(r.probes for r in reports))

    def to_json(self) -> bytes:
        """Return the report as one JSON document, the same bytes on every rank; no number in it is NaN."""
        return msgspec.json.encode(self.plain(), order="sorted")

    def plain(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        claims = [
            {
                "kind": c.kind,
                "fqn": c.fqn,
                "role": c.role,
                "ranks": list(c.ranks),
                "proved": c.total(PROVED),
                "refuted": c.total(REFUTED),
                "unproved": c.total(UNPROVED),
            }
            for c in self.claims
        ]
        return {
            "layout": self.layout,
            "world": self.world,
            "probes": self.probes,
            "bytes": {
                "proved": self.total(PROVED),
                "refuted": self.total(REFUTED),
                "unproved": self.total(UNPROVED),
            },
            "claims": claims,
            "findings": [f.plain() for f in self.findings],
        }

    def __str__(self) -> str:
        head = (
            f"{count(len(self.claims), 'claim')} in {count(self.probes, 'probe')}: {size(self.total(PROVED))} proved, "
            f"{size(self.total(REFUTED))} refuted, {size(self.total(UNPROVED))} unproved"
        )
        lines = [str(f) for f in self.findings[:SHOWN]]
        if len(self.findings) > SHOWN:
            lines.append(f"… and {len(self.findings) - SHOWN} more findings")
        return "\n  ".join([head, *lines])


def _plain_box(box: Box) -> dict[str, list[int]]:
    return {"offsets": list(box.offsets), "sizes": list(box.sizes)}
