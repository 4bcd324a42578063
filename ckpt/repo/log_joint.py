"""Where the records of several ranks stop being of the same steps, although each rank's own are sound.

Ranks count steps by their calls. One that has called without a step, or forgotten to call around a step that all have
skipped, writes sound records under the wrong numbers until the job notices. If the job dies before, the records alone
tell: a step was taken by all ranks, or skipped by all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ckpt.words import listed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt.repo.log_words import Whose

SHOWN = 8
"""Ranks that are named."""
MOST_BEHIND = 1
"""Records by which one rank's part may end before another's when all are killed at once."""

Run = tuple[int, int]


class Taking(msgspec.Struct, array_like=True):
    """Which steps a rank took. ``skipped``: those that it did not, as ascending runs without a gap in between.
    ``idle``: those of them that show no sign of an overflow. ``steps``: does any record show that it steps anything?
    """

    skipped: list[Run] = []
    idle: list[Run] = []
    steps: bool = False
    engine: bytes = b""

    def add(self, step: int, said: Whose) -> None:
        """Take note of a record; steps ascend."""
        self.steps = self.steps or said.steps
        if not said.taken:
            _add(self.skipped, step)
            if said.engine == self.engine:  # a scaler counts the steps that it skips
                _add(self.idle, step)
        self.engine = said.engine


class Parted(NamedTuple):
    """The first step that the ranks ``took`` have taken and the ranks ``skipped`` have not. ``end``: the last step that
    is the same one on all ranks for sure.
    """

    step: int
    took: list[int]
    skipped: list[int]
    end: int

    def text(self, number: int) -> str:
        """Say what happened in log ``number``."""
        return (
            f"log {number}: step {self.step} was taken on rank {listed(self.took, SHOWN)} and skipped on rank "
            f"{listed(self.skipped, SHOWN)}: some rank has called ckpt.Checkpointer.step() once too often or not often "
            f"enough, so that its records are of other steps than those of the others; the log ends behind step "
            f"{self.end}"
        )


def first_parted(ranks: Mapping[int, Taking], first: int, last: int) -> Parted | None:
    """Return the first step from ``first`` to ``last`` that not all took and not all skipped; None: there is none.

    Args:
        ranks: rank -> which steps it took; one that steps nothing is left out.
        first: of the steps that all these ranks have.
        last: of them.
    """
    patterns: dict[tuple[Run, ...], list[int]] = {}
    for rank, one in ranks.items():
        if one.steps:
            within = [(max(a, first), min(b, last)) for a, b in one.skipped if a <= last and b >= first]
            patterns.setdefault(tuple(within), []).append(rank)
    if len(patterns) < 2:
        return None
    one_of, *others = patterns
    step = min(_difference(one_of, other) for other in others)
    sides: dict[bool, list[int]] = {True: [], False: []}
    for runs, several in patterns.items():
        sides[_has(runs, step)] += several
    end = step - 1
    while end >= first and _has(one_of, end):  # which of several skipped steps a call belongs to, nobody knows
        end -= 1
    if not all(_has(ranks[rank].idle, step) for rank in sides[True]):
        # It was skipped indeed, so others have forgotten a call: perhaps that of the step before, and their record of
        # that one was written behind this one.
        end -= 1
    return Parted(step, sorted(sides[False]), sorted(sides[True]), max(end, first - 1))


def behind_others(number: int, first: int, ends: Mapping[int, int]) -> str:
    """Return what is to be said where some rank's sound records end well before those of others; empty: none do.

    Args:
        number: of the log.
        first: the step at which the records should begin.
        ends: rank -> step of its last sound record without a gap, ``first - 1``: it has none.
    """
    last, far = min(ends.values(), default=0), max(ends.values(), default=0)
    if far - last <= MOST_BEHIND:
        return ""
    short = [rank for rank, end in ends.items() if end == last]
    longest = [rank for rank, end in ends.items() if end == far]
    has = f"end behind step {last}" if last >= first else f"of step {first} and later are not there"
    return (
        f"log {number}: the records of rank {listed(short, SHOWN)} {has}, those of rank {listed(longest, SHOWN)} "
        f"go on to step {far}: its log had ended, its writer was behind when it was killed, or a file of it is gone"
    )


def _add(runs: list[Run], step: int) -> None:
    if runs and runs[-1][1] == step - 1:
        runs[-1] = (runs[-1][0], step)
    else:
        runs.append((step, step))


def _has(runs: Sequence[Run], step: int) -> bool:
    return any(first <= step <= last for first, last in runs)


def _difference(one: Sequence[Run], other: Sequence[Run]) -> int:
    """Return the first step that is in one of two different lists of runs, and not in the other."""
    for (a, b), (c, d) in zip(one, other, strict=False):
        if a != c:
            return min(a, c)
        if b != d:
            return min(b, d) + 1
    return max(one, other, key=len)[min(len(one), len(other))][0]
