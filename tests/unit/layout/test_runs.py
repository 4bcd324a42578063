from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ckpt.layout.runs import ranks_of, runs_of


@given(st.lists(st.integers(-3, 40)))
def test_runs_are_another_way_to_write_ranks_in_their_order(ranks) -> None:
    assert ranks_of(runs_of(ranks)) == tuple(ranks)


@given(st.lists(st.integers(0, 40), unique=True).map(sorted))
def test_runs_of_ascending_ranks_ascend(ranks) -> None:
    runs = runs_of(ranks)
    assert all(step >= 1 for _, _, step in runs)
    assert all(a[0] + (a[1] - 1) * a[2] < b[0] for a, b in pairwise(runs))


def test_a_mesh_axis_is_one_run() -> None:
    assert runs_of(range(3, 16384, 128)) == ((3, 128, 128),)
    assert runs_of([5]) == ((5, 1, 1),)
    assert runs_of([0, 8]) == ((0, 2, 8),)
    assert runs_of([6, 4, 2, 0]) == ((6, 4, -2),)
