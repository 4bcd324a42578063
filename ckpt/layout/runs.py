"""Ranks as arithmetic runs: groups on a mesh are one or a few of them, however many ranks they have. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Run = tuple[int, int, int]
"""(first, count, step): the ranks ``first, first + step, …``; the step of a single rank is 1."""


def runs_of(ranks: Sequence[int]) -> tuple[Run, ...]:
    """Return ranks, in any order, as runs in that order, each as long as it can be. Ascending ranks have steps >= 1.

    >>> runs_of([0, 1, 2, 8, 16, 24])
    ((0, 3, 1), (8, 3, 8))
    """
    runs: list[Run] = []
    at = 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 1
        end = at + 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        if end == at + 2 < len(ranks) and step > 1:  # two that are no neighbours: the second may begin a longer run
            end = at + 1
        runs.append((ranks[at], end - at, step if end - at > 1 else 1))
        at = end
    return tuple(runs)


def ranks_of(runs: Iterable[Run]) -> tuple[int, ...]:
    """Return the ranks of checked runs."""
    return tuple(first + i * step for first, count, step in runs for i in range(count))
