from __future__ import annotations

import pytest

from ckpt.errors import LayoutError
from ckpt.layout.box import Box
from ckpt.layout.graph import ShardGraph
from ckpt.layout.spec import MASTER, PARAM, RankLayout, Shard, TensorSpec

W = TensorSpec("w", PARAM, "float32", (4, 4))


def rows(spec: TensorSpec, low: int, high: int) -> Shard:
    return Shard(spec, Box((low, 0), (high - low, spec.shape[1])))


def problems(*layouts: RankLayout) -> tuple[str, ...]:
    return ShardGraph.build(layouts).problems


def one(line: str, found: tuple[str, ...]) -> None:
    assert len([p for p in found if line in p]) == 1, found


def test_every_problem_is_reported_at_once():
    """A layout error found one at a time costs a job start each."""
    gap, own, out = (TensorSpec(n, PARAM, "float32", (4, 4)) for n in ("gap", "own", "out"))
    narrow = TensorSpec("types", PARAM, "bfloat16", (4, 4))
    wide = TensorSpec("types", PARAM, "float32", (4, 4))
    flat = TensorSpec("shapes", PARAM, "float32", (16,))
    square = TensorSpec("shapes", PARAM, "float32", (4, 4))
    found = problems(
        RankLayout(
            0,
            (
                rows(gap, 0, 1), rows(own, 0, 3), rows(own, 2, 4), rows(out, 0, 4), rows(out, 3, 5),
                rows(narrow, 0, 4), Shard(flat, Box((0,), (16,))),
            ),
            (("tied", "nobody"),),
            ("gap",),
        ),
        RankLayout(1, (rows(gap, 2, 4), rows(wide, 0, 4), rows(square, 0, 4)), (("tied", "gap"),)),
    )  # fmt: skip
    one("'gap' (param) float32[4, 4]: 4 element(s) held by no rank, the first in box [1:2, 0:4]", found)
    one("'own' (param) float32[4, 4]: rank 0 holds overlapping boxes", found)
    one("'out' (param) float32[4, 4]: rank(s) 0 hold box [3:5, 0:4], which is out of bounds", found)
    one("'types' (param): ranks disagree on dtype or shape: bfloat16[4, 4] on rank(s) 0, float32[4, 4] on rank", found)
    one("'shapes' (param): ranks disagree on dtype or shape", found)
    one("alias 'tied': rank 1 ties it to 'gap', another rank to 'nobody'", found)
    one("alias 'tied' points to 'nobody', which no rank holds", found)
    one("tensor 'gap' is declared as derived but no rank holds its master", found)
    assert len(found) == 8


def test_check_raises_all_of_them():
    graph = ShardGraph.build([RankLayout(0, (rows(W, 0, 2),), (("a", "b"),))])
    with pytest.raises(LayoutError, match="held by no rank") as caught:
        graph.check()
    assert caught.value.problems == graph.problems
    assert len(graph.problems) == 2
    ShardGraph.build([RankLayout(0, (rows(W, 0, 4),))]).check()


def test_the_same_box_twice_on_one_rank_is_a_problem():
    """Which of the two memories would be the state?"""
    one("list box [0:4, 0:4] twice", problems(RankLayout(0, (rows(W, 0, 4), rows(W, 0, 4)))))


def test_another_number_of_dimensions_is_out_of_bounds_not_a_crash():
    found = problems(RankLayout(0, (Shard(W, Box((0,), (16,))),)))
    one("out of bounds", found)
    one("16 element(s) held by no rank", found)


def test_a_0d_tensor_that_nobody_holds_rightly_is_a_gap():
    scalar = TensorSpec("s", "step", "float32", ())
    found = problems(RankLayout(0, (Shard(scalar, Box((0,), (1,))),)))
    one("1 element(s) held by no rank, the first in box []", found)


def test_a_derived_param_of_another_shape_than_its_master_is_a_problem():
    """Cut along the master's chunks it would be garbage, or crash every rank."""
    master = TensorSpec("w", MASTER, "float32", (16,))
    param = TensorSpec("w", PARAM, "bfloat16", (4, 4))
    layout = RankLayout(0, (Shard(master, Box((0,), (16,))), rows(param, 0, 4)), (), ("w",))
    one("'w' is declared as derived but its param has shape [4, 4] and its master [16]", problems(layout))


def test_empty_and_0d_tensors_and_idle_ranks_are_ordinary():
    empty = TensorSpec("e", "buffer", "float32", (0, 3))
    scalar = TensorSpec("s", "step", "float32", ())
    graph = ShardGraph.build(
        [
            RankLayout(0, (Shard(empty, Box.whole((0, 3))), Shard(scalar, Box((), ())))),
            RankLayout(1),
            RankLayout(2, (Shard(scalar, Box((), ())),)),
        ]
    )
    assert graph.problems == ()
    assert graph.cells[scalar][0].ranks == (0, 2)
    assert graph.bytes_held() == 8
    assert graph.bytes_unique() == 4


def test_the_graph_does_not_depend_on_the_order_of_ranks():
    layouts = [RankLayout(r, (rows(W, 0, 2 + r),), (("t", "w"),)) for r in range(3)]
    assert ShardGraph.build(layouts) == ShardGraph.build(layouts[::-1])


def test_derived_params_are_not_counted_as_unique():
    master, param = TensorSpec("w", MASTER, "float32", (4, 4)), TensorSpec("w", PARAM, "bfloat16", (4, 4))
    graph = ShardGraph.build([RankLayout(r, (rows(master, 0, 4), rows(param, 0, 4)), (), ("w",)) for r in range(2)])
    assert (graph.bytes_held(), graph.bytes_unique()) == (192, 64)
