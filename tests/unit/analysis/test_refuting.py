"""What is left of declared redundancy once the bytes have spoken."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.analysis.claims import BUFFERS, DERIVATION, REPLICA, Finding
from ckpt.analysis.domains import Domains
from ckpt.analysis.refuting import Left, Refutations, left_of, refutations_of
from ckpt.analysis.report import AnalysisReport, analyze
from ckpt.layout.box import Box, first_overlap
from ckpt.layout.graph import ShardGraph
from ckpt.layout.spec import BUFFER, MASTER, PARAM, RankLayout, Shard, TensorSpec

NOTHING = Refutations({}, {})
SHAPE = (4, 6)


def job(world: int, *, sliced: bool = False) -> ShardGraph:
    """Mixed-precision Adam of one tensor, replicated or (``sliced``) with its state cut by rows, and a buffer."""
    whole = Box.whole(SHAPE)
    layouts = []
    for rank in range(world):
        rows = SHAPE[0] // world
        own = Box((rank * rows, 0), (rows, SHAPE[1])) if sliced else whole
        shards = [
            Shard(TensorSpec("mean", BUFFER, "float32", (6,)), Box((0,), (6,))),
            Shard(TensorSpec("w", "exp_avg", "float32", SHAPE), own),
            Shard(TensorSpec("w", MASTER, "float32", SHAPE), own),
            Shard(TensorSpec("w", PARAM, "bfloat16", SHAPE), whole),
            Shard(TensorSpec("w", "step", "float32", ()), Box((), ())),
        ]
        layouts.append(RankLayout(rank, tuple(shards), (), ("w",)))
    graph = ShardGraph.build(layouts)
    graph.check()
    return graph


def report(left: Left, **options: Any) -> AnalysisReport:
    world = left.holdings.world
    return analyze(left.holdings, Domains.by_rank(world), pieces=left.pieces, redundancy=left.redundancy, **options)


def test_nothing_refuted_leaves_everything():
    graph = job(3)
    left = left_of(graph, NOTHING, proved=100)
    assert report(left).redundancy.refuted == 0
    assert left.redundancy.claimed == graph.bytes_held() - graph.bytes_unique()
    assert left.redundancy.unproved == left.redundancy.claimed - 100
    assert all(all(one.derived) for one in left.pieces if one.fqn == "w")


def test_only_the_kept_side_holds_a_box_whose_copies_differ():
    """Elements 2 to 4 of the second row: the rest of the tensor is cut around it, and stays on all ranks."""
    box = Box((1, 2), (1, 3))
    left = left_of(job(3), Refutations({("w", "exp_avg"): {box: ((0, 2), (1,))}}, {}))
    (one,) = [one for one in left.pieces if one.fqn == "w"]
    held = {b: ranks[0] for b, ranks in zip(one.boxes, one.holders, strict=True)}
    assert one.columns[0].role == "exp_avg"
    assert held.pop(box) == (0, 2)
    assert set(held.values()) == {(0, 1, 2)}
    assert sum(b.volume for b in held) == 24 - 3
    assert first_overlap([box, *held]) is None
    assert left.redundancy.refuted == 3 * 4
    found = report(left, k=2, lost="rank:0,rank:2")
    assert found.must_write[1].parameters == 3, "they survive one loss, not two"
    assert found.must_write[0].parameters == 0
    (lost,) = [one for one in found.loss.tensors if one.bytes]
    assert (lost.elements, lost.boxes) == (3, (((1, 2), (1, 3)),))


def test_two_sides_without_a_majority_keep_the_lowest_rank():
    left = left_of(job(2), Refutations({("w", MASTER): {Box.whole(SHAPE): ((0,), (1,))}}, {}))
    found = report(left, lost=[0])
    assert [(one.fqn, one.elements) for one in found.loss.tensors] == [("mean", 0), ("w", 24)]
    assert report(left, lost=[1]).loss.bytes == 0


def test_a_param_that_is_no_cast_is_state_of_its_own_where_it_is_none():
    box = Box((0, 0), (2, 6))
    left = left_of(job(2, sliced=True), Refutations({}, {"w": [box]}))
    found = report(left, lost=[0])
    roles = {one.role: one for one in found.roles}
    assert (roles[PARAM].bytes_unique, roles[PARAM].bytes_derivable) == (12 * 2, 12 * 2)
    assert left.redundancy.refuted == 12 * 2
    whole = report(left_of(job(2, sliced=True), NOTHING))
    assert found.total.bytes_unique == whole.total.bytes_unique + 12 * 2
    trained = {one.derived: (one.elements, one.bytes) for one in found.classes if one.kind == "trained"}
    assert trained == {True: (12, 12 * 8), False: (12, 12 * 10)}
    assert (found.tensors, found.parameters, found.elements) == (whole.tensors, whole.parameters, whole.elements)
    (lost,) = [one for one in found.loss.tensors if one.bytes]
    assert (lost.elements, lost.bytes) == (12, 12 * 10), "the param of the lost half would have to be written too"


def test_a_param_of_the_masters_own_dtype_gives_back_only_a_master_that_it_equals():
    """fp32 of both: the param alone rebuilds the element, unless it was found to be something else."""
    specs = [TensorSpec("w", role, "float32", (4,)) for role in (MASTER, PARAM)]
    half = Box((0,), (2,))
    layouts = [
        RankLayout(0, (Shard(specs[0], Box((0,), (4,))), Shard(specs[1], Box((0,), (4,)))), (), ("w",)),
        RankLayout(1, (Shard(specs[1], Box((0,), (4,))),), (), ("w",)),
    ]
    left = left_of(ShardGraph.build(layouts), Refutations({}, {"w": [half]}))
    (lost,) = report(left, lost=[0]).loss.tensors
    assert (lost.elements, lost.boxes) == (2, (((0,), (2,)),))
    assert [(s.elements, s.ranks, s.boxes) for s in lost.rebuild_from] == [(2, {PARAM: "1"}, (((2,), (2,)),))]


def test_every_copy_of_a_buffer_is_state():
    box = Box((2,), (4,))
    left = left_of(job(3), Refutations({("mean", BUFFER): {box: ((0, 2), (1,))}}, {}))
    (one,) = [one for one in left.pieces if one.fqn == "mean"]
    assert sorted(zip(one.boxes, one.holders, strict=True)) == [
        (Box((0,), (2,)), ((0, 1, 2),)),
        (box, ((0, 2),)),
        (box, ((1,),)),
    ]
    found = report(left, lost=[1])
    roles = {one.role: one for one in found.roles}
    assert roles[BUFFER].bytes_unique == (6 + 4) * 4
    assert roles[BUFFER].bytes_held == 3 * 6 * 4, "each rank's copy is held for what it is"
    assert left.redundancy.refuted == 4 * 4
    (lost,) = [one for one in found.loss.tensors if one.bytes]
    assert (lost.fqn, lost.elements, lost.roles_gone) == ("mean", 4, {BUFFER: 4})
    assert report(left, lost=[2]).loss.bytes == 0


def test_a_scalar_that_differs_is_held_by_the_kept_side():
    left = left_of(job(3), Refutations({("w", "step"): {Box((), ()): ((0,), (1, 2))}}, {}))
    assert left.redundancy.refuted == 4
    assert report(left, lost=[1, 2]).loss.tensors[-1].roles_gone == {"step": 1}
    assert report(left, lost=[0, 1]).loss.bytes == 0


def test_where_masters_differ_no_cast_proves_a_param():
    box = Box((0, 0), (1, 6))
    left = left_of(job(3), Refutations({("w", MASTER): {box: ((0, 1), (2,))}}, {}))
    (one,) = [one for one in left.pieces if one.fqn == "w"]
    assert [b for b, right in zip(one.boxes, one.derived, strict=True) if not right] == [box]
    assert left.redundancy.refuted == 6 * 4 + 6 * 2


def finding(kind: str, fqn: str, role: str, *sides: tuple[int, ...]) -> Finding:
    return Finding(kind, fqn, role, Box((0, 0), (1, 6)), sides)


def test_ranks_are_on_one_side_if_they_were_in_every_probe():
    first = finding(REPLICA, "w", "exp_avg", (0, 2, 3), (1,))
    second = finding(REPLICA, "w", "exp_avg", (0, 1, 3), (2,))
    sides = ((0, 3), (1,), (2,))
    for order in ((first, second), (second, first), (first, second, first)):
        (found,) = refutations_of(order).copies["w", "exp_avg"].values()
        assert found == sides
    (one,) = [p for p in left_of(job(4), refutations_of((first, second))).pieces if p.fqn == "w"]
    assert one.holders[0][0] == (0, 3), "no side has more than half: the lowest rank's is kept"


@pytest.mark.parametrize(("wrong", "underived"), [((1,), False), ((0, 2), True), ((0, 1, 2), True)])
def test_a_derivation_is_refuted_by_the_side_that_is_kept(wrong, underived):
    differ = finding(REPLICA, "w", PARAM, (0, 2), (1,))
    cast = finding(DERIVATION, "w", PARAM, (0,), wrong)
    assert ("w" in refutations_of((differ, cast)).underived) == underived
    assert "w" in refutations_of((cast,)).underived, "without sides all copies are alike, and wrong"


def test_buffers_are_told_from_replicas_by_their_role():
    found = refutations_of((Finding(BUFFERS, "mean", BUFFER, Box((0,), (6,)), ((0,), (1,))),))
    assert found.copies == {("mean", BUFFER): {Box((0,), (6,)): ((0,), (1,))}}


boxes = st.tuples(st.integers(0, 3), st.integers(0, 5)).flatmap(
    lambda low: st.builds(
        Box, st.just(low), st.tuples(st.integers(1, SHAPE[0] - low[0]), st.integers(1, SHAPE[1] - low[1]))
    )
)


@settings(deadline=None)
@given(st.lists(boxes, max_size=6), st.lists(boxes, max_size=6), st.booleans())
def test_pieces_tile_the_tensor_whatever_is_refuted(differing, underived, sliced):
    """By counting elements: what is redundant is what was claimed without what was refuted."""
    disjoint = [
        [b for i, b in enumerate(some) if not any(b.intersect(a) for a in some[:i])] for some in (differing, underived)
    ]
    copies = {("w", PARAM): dict.fromkeys(disjoint[0], ((0, 1), (2, 3)))} if disjoint[0] else {}
    left = left_of(job(4, sliced=sliced), Refutations(copies, {"w": disjoint[1]}))
    (one,) = [p for p in left.pieces if p.fqn == "w"]
    assert sum(b.volume for b in one.boxes) == 24
    assert first_overlap(list(one.boxes)) is None
    wrong = sum(b.volume for b in disjoint[0]) * 2 * 2 + sum(b.volume for b in disjoint[1]) * 2
    assert left.redundancy.refuted == wrong
    total = report(left).total
    assert total.bytes_held - total.bytes_unique == left.redundancy.claimed - wrong


def test_copies_that_are_all_kept_are_each_state_of_their_own():
    """The other side's param is no cast any more, and what has no other copy is left alone."""
    graph, box = job(3), Box((1, 2), (1, 3))
    found = (Finding(REPLICA, "w", "exp_avg", box, ((0, 2), (1,)), None, True),)
    left = left_of(graph, refutations_of(found))
    one = left_of(graph, refutations_of((Finding(REPLICA, "w", "exp_avg", box, ((0, 2), (1,))),)))
    assert left.redundancy.refuted == one.redundancy.refuted == 3 * 4
    before, after = report(one).total, report(left).total
    assert (after.bytes_held - before.bytes_held, after.bytes_unique - before.bytes_unique) == (12, 12)
    assert after.bytes_held == graph.bytes_held()
    gone = report(left, lost=[1]).loss
    assert [(t.fqn, t.bytes, t.boxes) for t in gone.tensors if t.bytes] == [("w", 12, (((1, 2), (1, 3)),))]
    assert not any(t.bytes for t in report(one, lost=[1]).loss.tensors)
