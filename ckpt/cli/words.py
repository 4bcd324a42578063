"""Numbers of an analysis in words: shares, amounts, ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.cli.render import spans
from ckpt.words import count

if TYPE_CHECKING:
    from collections.abc import Iterable

SHOWN_RUNS = 4
"""Runs of ranks that are listed before the rest is counted."""


def percent(share: float) -> str:
    """Return a share in percent; nothing but all of it is 100 %, nothing but none of it 0 %.

    >>> [percent(share) for share in (0, 0.25, 1 / 3, 0.999999, 1e-9, 1)]
    ['0 %', '25 %', '33.33 %', '>99.99 %', '<0.01 %', '100 %']
    """
    if 0 < share < 0.0001:
        return "<0.01 %"
    if 0.9999 < share < 1:
        return ">99.99 %"
    return f"{f'{100 * share:.2f}'.rstrip('0').rstrip('.')} %"


def between(low: float, high: float) -> str:
    """Return a share that is known, or the bounds within which it lies.

    >>> between(0.25, 0.25), between(0.25, 0.5)
    ('25 %', '25 % to 50 %')
    """
    first, last = percent(low), percent(high)
    return first if first == last else f"{first} to {last}"


def amount(number: int) -> str:
    """Return a number of elements for people.

    >>> [amount(n) for n in (0, 999, 34_388_917_248, 1_500_000)]
    ['0', '999', '34.4 G', '1.5 M']
    """
    if number < 1000:
        return str(number)
    value, units = number / 1000, ["k", "M", "G", "T", "P"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{f'{value:.3g}'} {units[0]}"


def some_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as runs; of many runs the first ones, and how many ranks there are.

    >>> some_ranks([0, 1, 2, 7]), some_ranks(range(0, 1024, 8))
    ('0-2, 7', '0, 8, 16, 24, … (128 ranks)')
    """
    listed = sorted(ranks)
    runs = spans(listed).split(", ")
    if len(runs) <= SHOWN_RUNS:
        return ", ".join(runs)
    return f"{', '.join(runs[:SHOWN_RUNS])}, … ({count(len(listed), 'rank')})"


def ranks_in(text: str) -> list[int]:
    """Return the ranks of a report's text.

    >>> ranks_in("0-3,9")
    [0, 1, 2, 3, 9]
    """
    runs = [run.partition("-") for run in text.split(",") if run]
    return [rank for first, _, last in runs for rank in range(int(first), int(last or first) + 1)]
