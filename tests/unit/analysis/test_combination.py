from __future__ import annotations

import pytest

from ckpt.analysis.combination import combinations_of, kill_sets, minimal, needed_bytes
from ckpt.analysis.holdings import RoleColumn
from ckpt.layout.spec import MASTER, PARAM

M, P, Q = RoleColumn(MASTER, "float32"), RoleColumn(PARAM, "bfloat16"), RoleColumn(PARAM, "float32")
V, S = RoleColumn("exp_avg", "float32"), RoleColumn("step", "float32", scalar=True)


@pytest.mark.parametrize(
    ("columns", "derived", "combinations", "needed"),
    [
        ((V, M, P, S), True, ((0, 1, 3),), 8),
        ((V, M, P, S), False, ((0, 1, 2, 3),), 10),
        ((V, M, Q), True, ((0, 1), (0, 2)), 8),  # the cast is the identity: either of the two
        ((P,), False, ((0,),), 2),
        ((V, Q), True, ((0, 1),), 8),  # nothing to derive it from
    ],
)
def test_combinations(columns, derived, combinations, needed):
    assert combinations_of(columns, derived) == combinations
    assert needed_bytes(columns, derived) == needed


def test_kill_sets():
    slice_, everyone, other = frozenset({1}), frozenset({0, 1, 2}), frozenset({2, 3})
    assert kill_sets([slice_, everyone], [(0, 1)]) == (slice_,), "ZeRO-1: the slice decides"
    assert kill_sets([slice_, other], [(0, 1)]) == (slice_, other), "either loss destroys it"
    assert kill_sets([slice_, other], [(0,), (1,)]) == (frozenset({1, 2, 3}),), "either copy saves it"
    assert kill_sets([everyone, slice_, other], [(0, 1), (0, 2)]) == (everyone, frozenset({1, 2, 3}))
    assert kill_sets([slice_, frozenset()], [(0, 1)]) == (frozenset(),), "a role that nobody holds"


def test_minimal():
    a, b, c = frozenset({1}), frozenset({1, 2}), frozenset({0, 3})
    assert minimal([b, c, a, a]) == (a, c)
    assert minimal([]) == ()
