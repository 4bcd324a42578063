from __future__ import annotations

from math import comb

import numpy as np
import pytest

from ckpt.analysis.chance import NothingLost
from ckpt.analysis.sweep import most_lost, none_lost, steps_of
from ckpt.analysis.worst import worst_losses

ENOUGH = 2**30


def line(domains):
    return [frozenset({i, i + 1}) for i in range(domains - 1)]


def ring(domains):
    return [frozenset({i, (i + 1) % domains}) for i in range(domains)]


def ones(sets):
    return np.ones((len(sets), 1), np.int64)


def alone(sets):
    return [(one,) for one in sets]


@pytest.mark.parametrize(
    ("sets", "ways"),
    [
        (line(300), lambda lost: comb(300 - lost + 1, lost)),
        (ring(300), lambda lost: comb(300 - lost, lost) * 300 // (300 - lost) if lost <= 150 else 0),
    ],
    ids=["line", "ring"],
)
def test_no_two_neighbours(sets, ways):
    safety = NothingLost(alone(sets), 300)
    assert safety.exact
    for lost in (1, 2, 3, 8, 50, 120):
        chance = ways(lost) / comb(300, lost)
        expected = chance if chance >= 1e-30 else 0.0
        assert safety.bounds(lost) == (expected, expected)


def test_neighbours_are_lost_best_in_a_row():
    for sets, all_lost in ((line(300), 299), (ring(300), 300)):
        lower, upper = worst_losses(alone(sets), ones(sets), 300)
        assert lower[:, 0].tolist() == upper[:, 0].tolist() == [0, *range(299), all_lost]


def test_a_chain_of_slices_inside_what_all_hold():
    """Each of 64 hosts has a slice of 10; between neighbours straddles a scalar of 1; 7 are on all of them."""
    sets = [*(frozenset({i}) for i in range(64)), *line(64), frozenset(range(64))]
    weight = np.array([[10]] * 64 + [[1]] * 63 + [[7]], np.int64)
    lower, upper = worst_losses(alone(sets), weight, 64)
    assert lower[:, 0].tolist() == upper[:, 0].tolist() == [0, *(11 * f - 1 for f in range(1, 64)), 64 * 10 + 63 + 7]


def test_a_grid_of_stages_and_tensor_parallel_ranks():
    """Two stages of 8 ranks, each replicated 40 times: what a stage, and what a tensor-parallel rank has in both."""
    cell = {(s, t): frozenset(s * 320 + t + 8 * i for i in range(40)) for s in range(2) for t in range(8)}
    stages = [frozenset().union(*(cell[s, t] for t in range(8))) for s in range(2)]
    ranks = [cell[0, t] | cell[1, t] for t in range(8)]
    sets = [*cell.values(), *ranks, *stages, stages[0] | stages[1]]
    lower, upper = worst_losses(alone(sets), ones(sets), 640)
    np.testing.assert_array_equal(lower, upper)
    assert lower[[0, 39, 40, 79, 80, 160, 319, 320, 640], 0].tolist() == [0, 0, 1, 1, 3, 6, 10, 12, 27]


def test_what_any_of_several_sets_destroys_counts_once():
    families = [(frozenset({i}), frozenset({i + 1})) for i in range(99)]
    lower, upper = worst_losses(families, ones(families), 100)
    assert lower[:, 0].tolist() == upper[:, 0].tolist() == [min(2 * f, 99) for f in range(101)]


def test_by_number_if_that_makes_intervals():
    assert [step.size for step in steps_of([frozenset({0, 1, 2}), frozenset({2, 3})])] == [2, 1, 1]
    shuffled = steps_of([frozenset({7, 2}), frozenset({2, 5}), frozenset({5, 1})])
    assert [step.through for step in shuffled] in ([0b100, 0b110, 0b011, 0b001], [0b001, 0b011, 0b110, 0b100])


def test_more_work_than_allowed_is_refused():
    sets = line(50)
    assert most_lost(alone(sets), ones(sets), 1000) is None
    assert none_lost(sets, 1000) is None
    assert most_lost(alone(sets), ones(sets), ENOUGH) is not None
    assert none_lost(sets, ENOUGH) is not None
