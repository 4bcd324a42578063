"""Kill sets that overlap, exactly: one sweep over the domains. Pure.

Flat partitions make chains: a tensor that straddles two slices dies with hosts A and B, the next with B and C. Neither
disjoint nor nested, but intervals, if the domains are taken in the right order. So one domain after the other is lost
or kept, and all that must be remembered of the past is how many were lost, and which of the kill sets that are not over
yet are lost so far. For intervals that follows from where the last kept domain is, so there are few cases; often there
are few elsewhere too (rings, grids). This is the frontier method of counting subgraphs (Kawahara et al., IEICE Trans.
Fundamentals, 2017), with kill sets for edges. Domains in the same kill sets are one step.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt.analysis.combination import Kill
    from ckpt.analysis.holdings import Numbers
    from ckpt.analysis.kills import Family

UNREACHED = -(2**60)
"""Weight of what cannot be: more lost domains than were counted. Weights add up to less."""

CALL = 2**12
"""What handling a vector of int64 costs beyond its entries, in entries."""

WIDE = 2**22
"""Most int64 entries to keep at a time: 32 MiB, and twice that for what follows from them. Long integers: an eighth."""


class Step(NamedTuple):
    """Domains in the same kill sets: bit sets of all of these, of those that begin here, of those that end here."""

    size: int
    through: int
    first: int
    last: int


def most_lost(families: Sequence[Family], weight: Numbers, work: int) -> Numbers | None:
    """Return the greatest weight lost with any ``f`` domains, for every ``f`` from 0 to all that are in a kill set.

    Args:
        families: for each kind of state its minimal kill sets, none empty.
        weight: int64 ``[families, weights]``; each weight is maximised for itself.
        work: most vector entries to compute.

    Returns:
        int64 ``[domains + 1, weights]``, or None if it were more work.
    """
    kills = sorted({kill for family in families for kill in family}, key=sorted)
    number = {kill: i for i, kill in enumerate(kills)}
    several = [i for i, family in enumerate(families) if len(family) > 1]
    gone = {i: 1 << (len(kills) + j) for j, i in enumerate(several)}  # that one of its kill sets was lost, in a state
    of_kill: list[list[int]] = [[] for _ in kills]
    for i, family in enumerate(families):
        for kill in family:
            of_kill[number[kill]].append(i)
    real = (1 << len(kills)) - 1
    columns = weight.shape[1]
    states: dict[int, Numbers] = {0: np.zeros((1, columns), np.int64)}
    for step in steps_of([*kills, *(frozenset().union(*families[i]) for i in several)]):
        entries = columns * (len(states[0]) + step.size)
        work -= 2 * len(states) * (entries + CALL)
        if work < 0 or len(states) * entries > WIDE:
            return None
        unlost = step.through & real | step.last
        following: dict[int, Numbers] = {}
        for state, gains in states.items():
            kept = np.concatenate([gains, np.repeat(gains[-1:], step.size, axis=0)])
            _merge(following, state & ~unlost, kept, np.maximum)
            after = state | step.first & real
            gain = np.zeros(columns, np.int64)
            for i in (i for kill in _bits(after & step.last & real) for i in of_kill[kill]):
                if not after & gone.get(i, 0):
                    gain += weight[i]
                    after |= gone.get(i, 0)
            lost = np.full_like(kept, UNREACHED)
            lost[step.size :] = gains + gain
            _merge(following, after & ~step.last, lost, np.maximum)
        states = following
    gained: Numbers = np.maximum.accumulate(states[0], axis=0)
    return gained


def none_lost(kills: Sequence[Kill], work: int) -> list[int] | None:
    """Return the coefficients of the chance that none of these sets is lost entirely.

    Args:
        kills: none within another, none empty.
        work: most coefficients to compute.

    Returns:
        ``c``, such that the chance is ``sum c[s] z**s`` where every domain is lost with chance ``z`` for itself; then
        the sets of ``f`` of ``N`` domains that contain none of these number ``sum c[s] C(N - s, f - s)``. None if it
        were more work.
    """
    states: dict[int, Any] = {0: np.ones(1, object)}
    for step in steps_of(kills):
        entries = len(states) * (len(states[0]) + step.size)
        work -= 2 * entries
        if work < 0 or entries > WIDE // 8:
            return None
        following: dict[int, Any] = {}
        padding = np.zeros(step.size, object)
        for state, chance in states.items():
            lost = np.concatenate([padding, chance])
            _merge(following, state & ~step.through, np.concatenate([chance, padding]) - lost, np.add)
            intact = state | step.first
            if not intact & step.last:
                _merge(following, intact, lost, np.add)
        states = following
    return [int(c) for c in states[0]]


def steps_of(kills: Sequence[Kill]) -> list[Step]:
    """Return the sweep over the domains of these sets: by number if that makes them intervals, else a narrow one."""
    within: dict[int, int] = {}
    for i, kill in enumerate(kills):
        for domain in kill:
            within[domain] = within.get(domain, 0) | 1 << i
    size: dict[int, int] = {}
    for domain in sorted(within):
        size[within[domain]] = size.get(within[domain], 0) + 1
    steps = _swept(list(size), size)
    if _changes(steps) <= 2 * len(kills):
        return steps
    return min(steps, _swept(_narrow(list(size), len(kills)), size), key=_width)


def _swept(order: list[int], size: dict[int, int]) -> list[Step]:
    met = 0
    first = []
    for through in order:
        first.append(through & ~met)
        met |= through
    ahead = 0
    last = []
    for through in reversed(order):
        last.append(through & ~ahead)
        ahead |= through
    return [Step(size[t], t, opened, closed) for t, opened, closed in zip(order, first, reversed(last), strict=True)]


def _changes(steps: Sequence[Step]) -> int:
    """How often a kill set begins or ends along the sweep: twice each, if they are intervals."""
    edges = [0, *(step.through for step in steps), 0]
    return sum((one ^ other).bit_count() for one, other in pairwise(edges))


def _width(steps: Sequence[Step]) -> int:
    """Kill sets that have to be remembered, added up over the sweep."""
    total = begun = 0
    for step in steps:
        begun = (begun | step.first) & ~step.last
        total += begun.bit_count()
    return total


def _narrow(steps: Sequence[int], kills: int) -> list[int]:
    """Order steps, bit sets of kill sets, so that few kill sets are begun and not over at a time: greedily.

    Next comes what is in most of those that are begun (of intervals, that is in all), then what adds the fewest.
    """
    within: list[list[int]] = [[] for _ in range(kills)]
    for i, through in enumerate(steps):
        for kill in _bits(through):
            within[kill].append(i)
    left = list(map(len, within))
    wide = sum(1 << kill for kill in range(kills) if left[kill] > 1)  # others are over where they begin
    more = [(through & wide).bit_count() for through in steps]
    begun = [0] * len(steps)
    heap = [(0, more[i], i) for i in range(len(steps))]
    heapify(heap)
    order: list[int] = []
    taken: set[int] = set()
    while heap:
        *known, one = heappop(heap)
        if one in taken or known != [-begun[one], more[one]]:
            continue  # its place in the queue has changed
        taken.add(one)
        order.append(steps[one])
        changed = set()
        for kill in _bits(steps[one] & wide):
            left[kill] -= 1
            begins = left[kill] == len(within[kill]) - 1
            if begins or left[kill] == 1:
                for i in within[kill]:
                    more[i] -= begins + (left[kill] == 1)
                    begun[i] += begins
                changed.update(within[kill])
        for i in changed - taken:
            heappush(heap, (-begun[i], more[i], i))
    return order


def _merge(states: dict[int, Any], state: int, values: Any, how: Any) -> None:
    states[state] = how(states[state], values) if state in states else values


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
