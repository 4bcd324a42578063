"""The survival table: what is left of the training state after f simultaneous losses. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ckpt.analysis.chance import NothingLost, expected_share, lost_terms
from ckpt.analysis.worst import worst_losses

if TYPE_CHECKING:
    from ckpt.analysis.kills import KillTable

DIGITS = 9
"""Significant digits of every fraction in a report: the same on every machine."""


def rounded(value: float) -> float:
    """Return ``value`` with :data:`DIGITS` significant digits."""
    return float(f"{value:.{DIGITS}g}")


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What is still wholly held, of bytes or of parameters.

    ``worst``: whichever domains are lost, at least this much is held; ``worst_upper``: some loss leaves no more than
    this (equal where ``exact``). Shares are of the whole; ``expected_share`` is exact and every choice of domains is
    equally likely.
    """

    worst: int
    worst_upper: int
    worst_share: float
    expected_share: float


class SurvivalRow(msgspec.Struct, frozen=True, kw_only=True):
    """``lost`` domains at once. ``nothing_lost``: lower and upper bound of the chance that everything survives.

    ``exact``: the worst case is a number, not a bound; ``nothing_lost_exact`` likewise. A chance below 1e-30 is 0.
    """

    lost: int
    bytes: Held
    parameters: Held
    exact: bool
    nothing_lost: float
    nothing_lost_upper: float
    nothing_lost_exact: bool


def losses_of_interest(domains: int) -> list[int]:
    """Return 0 to 8, then powers of two, then all: how many losses a table has rows for.

    >>> losses_of_interest(40)
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 40]
    """
    listed = list(range(min(domains, 8) + 1))
    while listed[-1] * 2 <= domains and domains > 8:
        listed.append(listed[-1] * 2)
    return listed if listed[-1] == domains else [*listed, domains]


def survival_table(table: KillTable) -> tuple[SurvivalRow, ...]:
    """Return the survival table of a job."""
    lower, upper = worst_losses(table.families, table.weight, table.domains)
    terms = lost_terms(table.families, table.weight)
    total = [int(one) for one in table.weight.sum(axis=0)]
    chance = NothingLost(table.families, table.domains)
    rows = []
    for lost in losses_of_interest(table.domains):
        held = [
            Held(
                worst=total[w] - int(upper[lost, w]),
                worst_upper=total[w] - int(lower[lost, w]),
                worst_share=rounded((total[w] - int(upper[lost, w])) / total[w]) if total[w] else 1.0,
                expected_share=rounded(expected_share(terms[w], total[w], table.domains, lost)),
            )
            for w in range(len(total))
        ]
        low, high = chance.bounds(lost)
        rows.append(
            SurvivalRow(
                lost=lost,
                bytes=held[0],
                parameters=held[1],
                exact=bool((lower[lost] == upper[lost]).all()),
                nothing_lost=rounded(low),
                nothing_lost_upper=rounded(high),
                nothing_lost_exact=low == high,
            )
        )
    return tuple(rows)
