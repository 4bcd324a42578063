"""Kill sets that are intervals are exact, whatever the domains are called.

The oracle knows the order. What is lost is a row of runs of neighbours, and each run for itself says what it destroys.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.analysis import chance, worst
from ckpt.analysis.chance import NothingLost
from ckpt.analysis.sweep import most_lost, none_lost
from ckpt.analysis.worst import worst_losses

ENOUGH = 2**28


@st.composite
def intervals(draw, domains):
    """(first, end) of some intervals: chains, nested ones, single domains, all of it."""
    pair = st.tuples(st.integers(0, domains - 1), st.integers(1, domains)).map(lambda p: (p[0], min(domains, sum(p))))
    found = set(draw(st.lists(pair, min_size=1, max_size=domains)))
    if draw(st.booleans()):
        length = draw(st.integers(2, 4))
        found |= {(i, i + length) for i in range(0, domains - length + 1, draw(st.integers(1, length)))}
    if draw(st.booleans()):
        found |= {(i, i + 1) for i in range(domains)}
    return sorted(found)


def named(order, spans):
    return [frozenset(order[first:end]) for first, end in spans]


def most_by_runs(spans, amounts, domains):
    """Greatest weight of intervals within any f domains: most[f] of those before ``end``, the last of them kept."""
    gain = np.zeros((domains + 1, domains + 1), np.int64)
    for (first, end), amount in zip(spans, amounts, strict=True):
        gain[: first + 1, end:] += amount
    before = [[0] + [-1] * domains]  # nothing yet; position 0 stands behind a kept domain
    for end in range(1, domains + 2):
        row = [-1] * (domains + 1)
        for start in range(end):  # domains start .. end - 2 are lost, end - 1 is kept (or the end of the line)
            run = end - 1 - start
            for lost, best in enumerate(before[start]):
                if best >= 0 and lost + run <= domains:
                    row[lost + run] = max(row[lost + run], best + int(gain[start, end - 1]))
        before.append(row)
    return before[-1]


def safe_by_runs(spans, domains):
    """Number of sets of f domains that contain no interval."""
    safe = [[1] + [0] * domains]
    for end in range(1, domains + 2):
        row = [0] * (domains + 1)
        for start in range(end):
            if any(start <= first and last <= end - 1 for first, last in spans):
                continue
            for lost, ways in enumerate(safe[start]):
                if ways:
                    row[lost + end - 1 - start] += ways
        safe.append(row)
    return safe[-1]


@settings(deadline=None)
@given(st.integers(2, 8), st.data())
def test_the_oracle_is_what_trying_every_loss_shows(domains, data):
    spans = data.draw(intervals(domains))
    amounts = data.draw(st.lists(st.integers(0, 9), min_size=len(spans), max_size=len(spans)))
    kills = named(range(domains), spans)
    best, safe = most_by_runs(spans, amounts, domains), safe_by_runs(spans, domains)
    for lost in range(domains + 1):
        dead = [[kill <= set(chosen) for kill in kills] for chosen in combinations(range(domains), lost)]
        assert best[lost] == max(sum(a for a, gone in zip(amounts, one, strict=True) if gone) for one in dead)
        assert safe[lost] == sum(not any(one) for one in dead)


@settings(deadline=None)
@given(st.integers(2, 30), st.booleans(), st.data())
def test_intervals_are_exact_without_trying_anything(domains, shuffled, data):
    order = data.draw(st.permutations(range(domains))) if shuffled else list(range(domains))
    spans = data.draw(intervals(domains))
    families = [(kill,) for kill in named(order, spans)]
    amounts = data.draw(st.lists(st.integers(0, 20), min_size=len(spans), max_size=len(spans)))
    weight = np.array([amounts, amounts[::-1]], np.int64).T
    more = data.draw(st.integers(0, 2))  # domains whose loss destroys nothing
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worst, "TRIES", 0)
        patch.setattr(chance, "UNIONS", 1)
        lower, upper = worst_losses(families, weight, domains + more)
        safety = NothingLost(families, domains + more)
    assert safety.exact
    np.testing.assert_array_equal(lower, upper)
    for column, own in enumerate((amounts, amounts[::-1])):
        best = most_by_runs(spans, own, domains)
        assert lower[:, column].tolist() == best + [best[-1]] * more
    safe = safe_by_runs(spans, domains)
    for lost in range(domains + more + 1):
        ways = sum(safe[lost - free] * comb(more, free) for free in range(more + 1) if 0 <= lost - free <= domains)
        share = float(Fraction(ways, comb(domains + more, lost)))
        assert safety.bounds(lost) == (share, share)


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_long_lines_do_not_depend_on_names(data):
    domains = data.draw(st.integers(100, 200))
    length = st.integers(1, data.draw(st.integers(2, 12)))
    starts = data.draw(st.lists(st.integers(0, domains - 1), min_size=1, max_size=2 * domains, unique=True))
    spans = {(first, min(domains, first + data.draw(length))) for first in starts}
    spans |= {(0, domains)} if data.draw(st.booleans()) else set()
    order = list(np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))).permutation(domains).tolist())
    weight = np.array([[1 + first % 7] for first, _ in sorted(spans)], np.int64)
    kept, other = (named(names, sorted(spans)) for names in (range(domains), order))
    found, again = (most_lost([(kill,) for kill in kills], weight, ENOUGH) for kills in (kept, other))
    assert found is not None
    assert again is not None
    np.testing.assert_array_equal(found, again)
    minimal = [i for i, kill in enumerate(kept) if not any(one < kill for one in kept)]
    assert none_lost([kept[i] for i in minimal], ENOUGH) == none_lost([other[i] for i in minimal], ENOUGH)
