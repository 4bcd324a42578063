"""Graph and save plan against a dict from element to the ranks that hold it."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from ckpt.layout.box import Box, boxes_of_range
from ckpt.layout.graph import ShardGraph
from ckpt.layout.spec import MASTER, PARAM, RankLayout, Shard, TensorSpec
from ckpt.plan.save_plan import build_save_plan
from ckpt.plan.wire import decode_layouts, encode_layout
from tests.property.fake import KINDS, cut

dtypes = st.sampled_from(["float32", "bfloat16", "int64", "bool", "float8_e4m3fn", "complex128"])
shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


def elements(box: Box) -> list[tuple[int, ...]]:
    return list(product(*(range(o, e) for o, e in zip(box.offsets, box.ends, strict=True))))


@st.composite
def jobs(draw, max_world=5):
    """Layouts of one job: random tensors, each cut in its own way, some with a derived param."""
    world = draw(st.integers(1, max_world))
    shards: list[list[Shard]] = [[] for _ in range(world)]
    derived = []
    for i in range(draw(st.integers(1, 4))):
        shape = draw(shapes)
        roles = [("exp_avg", draw(dtypes))]
        if draw(st.booleans()):
            roles = [(MASTER, "float32"), (PARAM, "bfloat16")]
            derived.append(f"t{i}")
        for role, dtype in roles:
            spec = TensorSpec(f"t{i}", role, dtype, shape)
            for rank, own in enumerate(cut(draw(st.sampled_from(KINDS)), shape, world, draw(st.integers(0, 5)))):
                shards[rank] += [Shard(spec, box) for box in own]
    return [RankLayout(rank, tuple(own), (), tuple(derived)) for rank, own in enumerate(shards)]


def holders(layouts) -> dict[TensorSpec, dict[tuple[int, ...], tuple[int, ...]]]:
    found: dict[TensorSpec, dict[tuple[int, ...], list[int]]] = {}
    for layout in layouts:
        for shard in layout.shards:
            for element in elements(shard.box):
                found.setdefault(shard.spec, {}).setdefault(element, []).append(layout.rank)
    return {spec: {e: tuple(sorted(r)) for e, r in by.items()} for spec, by in found.items()}


@given(jobs())
def test_cells_tile_every_tensor_and_know_exactly_who_holds_them(layouts):
    graph = ShardGraph.build(layouts)
    assert graph.problems == ()
    truth = holders(layouts)
    for spec in graph.specs:
        cells = graph.cells[spec]
        listed = [(e, cell.ranks) for cell in cells for e in elements(cell.box)]
        assert len(listed) == len(dict(listed)), "no element in two cells"
        assert dict(listed) == truth.get(spec, {})
        assert len(listed) == Box.whole(spec.shape).volume
    assert graph.bytes_held() == sum(one.nbytes for one in layouts)


@given(jobs(), st.integers(1, 64))
def test_every_element_is_in_exactly_one_chunk_whose_owner_holds_it(layouts, chunk_bytes):
    graph = ShardGraph.build(layouts)
    plan = build_save_plan(graph, chunk_bytes)
    truth = holders(layouts)
    seen: dict[TensorSpec, list[tuple[int, ...]]] = {}
    for number, (chunk, owner) in enumerate(zip(plan.chunks, plan.owners, strict=True)):
        assert owner in chunk.ranks
        assert graph.specs[plan.spec_ids[chunk.spec]] == chunk.spec
        assert chunk.nbytes <= max(chunk_bytes, chunk.spec.itemsize)
        for element in elements(chunk.box):
            assert truth[chunk.spec][element] == chunk.ranks
            seen.setdefault(chunk.spec, []).append(element)
        for rank in range(plan.world):
            assert (number in plan.held(rank)) == (rank in chunk.ranks)
    for spec in graph.specs:
        assert sorted(seen.get(spec, [])) == sorted(elements(Box.whole(spec.shape)))
    for param, master in plan.proofs.items():
        assert plan.chunks[param].spec.role == PARAM
        assert plan.chunks[master].spec.key == (plan.chunks[param].spec.fqn, MASTER)
        assert plan.chunks[master].box.contains(plan.chunks[param].box)
        assert plan.owners[param] in plan.chunks[master].ranks
    provable = {
        i
        for i, chunk in enumerate(plan.chunks)
        if chunk.spec.role == PARAM
        and chunk.spec.fqn in graph.derived
        and set(chunk.ranks)
        & set(truth[TensorSpec(chunk.spec.fqn, MASTER, "float32", chunk.spec.shape)][chunk.box.offsets])
    }
    assert set(plan.proofs) == provable, "where one rank holds both, the cast can be proved"
    assert len({c.name for c in plan.chunks}) == len(plan.chunks), "names in packs are unique"


@given(jobs(), st.randoms(use_true_random=False))
def test_every_rank_computes_the_same_plan_whatever_the_order_of_its_shards(layouts, rng):
    def shuffled(one: RankLayout) -> RankLayout:
        return RankLayout(one.rank, tuple(rng.sample(one.shards, len(one.shards))), one.aliases, one.derived)

    encoded = [encode_layout(one) for one in layouts]
    assert [encode_layout(shuffled(one)) for one in layouts] == encoded
    plan = build_save_plan(ShardGraph.build(decode_layouts(encoded)))
    other = build_save_plan(ShardGraph.build(rng.sample(decode_layouts(encoded), len(layouts))))
    assert plan == other


@given(jobs(max_world=4), st.data())
def test_a_piece_that_nobody_holds_is_always_a_problem(layouts, data):
    """A layout with a hole must never be saved as if it were whole."""
    solid = [(r, i) for r, one in enumerate(layouts) for i, s in enumerate(one.shards) if s.box.volume]
    if not solid:
        return
    rank, index = data.draw(st.sampled_from(solid))
    gone = layouts[rank].shards[index]
    broken = [
        RankLayout(
            one.rank,
            tuple(s for s in one.shards if s.spec != gone.spec or s.box.intersect(gone.box) is None),
            one.aliases,
            one.derived,
        )
        for one in layouts
    ]
    problems = ShardGraph.build(broken).problems
    still_there = any(s.spec.key == gone.spec.key for one in broken for s in one.shards)
    if still_there or gone.spec.role in (MASTER, PARAM):
        assert any(repr(gone.spec.fqn) in problem for problem in problems)


@given(shapes, st.integers(1, 6), st.integers(0, 5), st.sampled_from(KINDS))
def test_the_cuts_of_these_tests_cover_every_element(shape, world, shift, kind):
    """Guards the oracle: a cut that lost elements would make the other tests say nothing."""
    held = {e for boxes in cut(kind, shape, world, shift) for box in boxes for e in elements(box)}
    assert held == set(elements(Box.whole(shape)))
    assert sum(b.volume for b in boxes_of_range(shape, 0, Box.whole(shape).volume)) == Box.whole(shape).volume
