"""Numbers in words, the same wherever they are told: sizes and counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def size(nbytes: float) -> str:
    """Return a size in bytes for people.

    >>> [size(n) for n in (0, 999, 1500, 2_000_000, 3_210_000_000)]
    ['0 B', '999 B', '1.50 kB', '2.00 MB', '3.21 GB']
    """
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    value, units = nbytes / 1000, ["kB", "MB", "GB", "TB", "PB"]
    while value >= 999.995 and len(units) > 1:  # 999.999 would be printed as 1000.00
        value /= 1000
        units.pop(0)
    return f"{value:.2f} {units[0]}"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number of things.

    >>> count(1, "host"), count(16384, "rank"), count(2, "copy", "copies")
    ('1 host', '16,384 ranks', '2 copies')
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def listed(things: Sequence[object], most: int) -> str:
    """Return things as text; of many the first ones, and how many more there are.

    >>> listed(["a", "b"], 2), listed(["a", "b", "c", "d"], 2)
    ('a, b', 'a, b and 2 more')
    """
    more = f" and {len(things) - most} more" if len(things) > most else ""
    return ", ".join(map(str, things[:most])) + more


def some(things: Sequence[object], most: int = 6) -> str:
    """Return things as text; of many the first ones, and how many there are.

    >>> some(range(3)), some(range(16384))
    ('0, 1, 2', '0, 1, 2, 3, 4, 5, … (16384 in all)')
    """
    return ", ".join(map(str, things[:most])) + (f", … ({len(things)} in all)" if len(things) > most else "")
