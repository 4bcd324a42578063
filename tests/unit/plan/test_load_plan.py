from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ckpt.errors import LayoutError, MalformedData, MissingChunk, MissingState
from ckpt.format.digest import digest
from ckpt.format.manifest import DERIVED, ChunkEntry, IndexPart, PackRef
from ckpt.layout.box import Box
from ckpt.layout.spec import BUFFER, MASTER, PARAM, Shard, TensorSpec
from ckpt.plan.load_plan import Catalog, Difference, LoadPlan, build_load_plan, check_difference, swap_notes

if TYPE_CHECKING:
    from collections.abc import Sequence

D = digest(b"")
PACK = PackRef(key="steps/1/a/packs/p.safetensors", nbytes=1 << 20)


def spec(fqn: str, role: str = PARAM, dtype: str = "float32", shape: tuple[int, ...] = (4,)) -> TensorSpec:
    return TensorSpec(fqn, role, dtype, shape)


def chunk(number: int, box: Box, itemsize: int = 4, pack: int = 0, ranks: tuple[int, ...] = ()) -> ChunkEntry:
    start = 0 if pack == DERIVED else 64 + 1000 * number + 100 * sum(box.offsets)
    return ChunkEntry(number, box.offsets, box.sizes, D, pack, start, box.volume * itemsize, ranks)


def catalog(
    specs: Sequence[TensorSpec], chunks: Sequence[ChunkEntry] | None = None, derived=(), aliases=None
) -> Catalog:
    if chunks is None:
        chunks = [chunk(i, Box.whole(s.shape), s.itemsize) for i, s in enumerate(specs)]
    return Catalog(specs, [IndexPart(rank=0, packs=(PACK,), chunks=tuple(chunks))], derived, aliases or {})


def plan(cat: Catalog, *wanted: TensorSpec, derived=(), own: int | None = None) -> LoadPlan:
    return build_load_plan(cat, [Shard(s, Box.whole(s.shape)) for s in wanted], derived, own_copies_of=own)


def test_a_slice_reads_only_the_chunks_that_it_needs():
    s = spec("w", shape=(8, 4))
    cat = catalog([s], [chunk(0, Box((r, 0), (2, 4))) for r in (0, 2, 4, 6)])
    found = build_load_plan(cat, [Shard(s, Box((3, 1), (2, 2)))], (), own_copies_of=None)
    assert [(r.entry.offsets, r.uses[0].box) for r in found.first] == [
        ((2, 0), Box((3, 1), (1, 2))),
        ((4, 0), Box((4, 1), (1, 2))),
    ]


def test_a_chunk_that_serves_two_pieces_is_read_once():
    s = spec("w", shape=(8,))
    cat = catalog([s])
    found = build_load_plan(cat, [Shard(s, Box((0,), (3,))), Shard(s, Box((5,), (3,)))], (), own_copies_of=None)
    assert [len(r.uses) for r in found.first] == [2]


@pytest.mark.parametrize(
    ("held", "wanted", "expected"),
    [
        ([spec("w", PARAM, "bfloat16"), spec("w", MASTER)], spec("w", PARAM, "float32"), MASTER),
        ([spec("w", PARAM, "bfloat16"), spec("w", MASTER)], spec("w", PARAM, "bfloat16"), PARAM),
        ([spec("w", PARAM, "float32")], spec("w", MASTER, "float32"), PARAM),
        ([spec("w", PARAM, "float32"), spec("w", MASTER, "float32")], spec("w", MASTER, "float32"), MASTER),
    ],
)
def test_a_weight_is_found_under_either_name_by_dtype(held, wanted, expected):
    found = plan(catalog(held), wanted)
    assert found.sources[0].role == expected
    assert found.difference == Difference((), (), frozenset(), False)


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        (spec("w"), spec("w", BUFFER)),
        (spec("w", BUFFER), spec("w")),
        (spec("w", MASTER), spec("w", BUFFER)),
        (spec("w", BUFFER), spec("w", MASTER)),
    ],
)
def test_a_buffer_stands_in_for_a_weight_that_is_not_there_and_the_reverse(held, wanted):
    found = plan(catalog([held]), wanted)
    assert found.sources[0] == held
    assert found.difference == Difference((), (), frozenset(), False, swapped=("w",))
    assert check_difference(catalog([held]), [found.difference], strict=True, cast=False) == ((), (), ())
    (note,) = swap_notes([found.difference, found.difference])
    assert note.endswith("or the reverse, are one by name and shape: w")
    assert swap_notes([plan(catalog([wanted]), wanted).difference]) == []


def test_what_stands_in_is_of_the_same_shape_and_not_cast_in_silence():
    other = plan(catalog([spec("w", shape=(5,))]), spec("w", BUFFER))
    assert (other.difference.missing, other.difference.unused) == ((str(spec("w", BUFFER)),), {0})
    low = plan(catalog([spec("w", PARAM, "bfloat16")]), spec("w", BUFFER))
    assert low.difference.dtypes == (f"{spec('w', BUFFER)}: the checkpoint has bfloat16 (param)",)
    both = plan(catalog([spec("w", PARAM, "bfloat16"), spec("w", MASTER)]), spec("w", BUFFER))
    assert both.sources[0].role == MASTER
    assert both.difference.unused == frozenset()


def test_the_own_role_comes_first_and_nothing_is_given_twice():
    """A job that keeps averaged weights as buffers may have both under one name."""
    held = [spec("w", BUFFER), spec("w")]
    assert plan(catalog(held), *held).sources == dict(enumerate(held))
    one = plan(catalog(held), spec("w", BUFFER))
    assert (one.sources[0].role, one.difference.unused, one.difference.swapped) == (BUFFER, {1}, ())
    low = plan(catalog([spec("w", BUFFER, "bfloat16"), spec("w")]), spec("w", BUFFER))
    assert (low.sources[0].role, len(low.difference.dtypes)) == (BUFFER, 1)
    lacking = plan(catalog([spec("w")]), spec("w"), spec("w", BUFFER))
    assert lacking.difference.missing == (str(spec("w", BUFFER)),)


def test_a_dtype_is_never_cast_in_silence():
    for held, wanted in (
        (spec("w"), spec("w", dtype="bfloat16")),
        (spec("n", "ids", "int64"), spec("n", "ids", "int32")),
    ):
        cat = catalog([held])
        found = plan(cat, wanted)
        assert found.difference.dtypes == (f"{wanted}: the checkpoint has {held.dtype} ({held.role})",)
        with pytest.raises(MissingState, match="cast=True") as caught:
            check_difference(cat, [found.difference], strict=False, cast=False)
        assert caught.value.dtypes == found.difference.dtypes
        assert check_difference(cat, [found.difference], strict=True, cast=True)[2] == found.difference.dtypes


def test_a_counter_may_change_its_dtype_but_a_0d_weight_may_not():
    counter = plan(catalog([spec("w", "step", "float32", ())]), spec("w", "step", "int64", ()))
    assert counter.difference.dtypes == ()
    weight = plan(catalog([spec("t", PARAM, "float32", ())]), spec("t", PARAM, "float16", ()))
    assert len(weight.difference.dtypes) == 1


def test_missing_and_unexpected_are_judged_over_all_ranks():
    """Under ZeRO-1 each rank wants its own partition's moments: what one rank does not want is not unexpected."""
    cat = catalog([spec("a"), spec("b"), spec("c")])
    ranks = [plan(cat, spec("a"), spec("x")).difference, plan(cat, spec("b"), spec("x")).difference]
    missing, unexpected, _ = check_difference(cat, ranks, strict=False, cast=False)
    assert missing == (str(spec("x")),)
    assert unexpected == (str(spec("c")),)
    with pytest.raises(MissingState, match="strict=False") as caught:
        check_difference(cat, ranks, strict=True, cast=False)
    assert (caught.value.missing, caught.value.unexpected) == (missing, unexpected)
    assert check_difference(cat, [*ranks, plan(cat, spec("c")).difference], strict=False, cast=False)[1] == ()


def test_a_conflict_of_one_rank_is_one_error_with_all_that_differs_on_any():
    """A stage of a pipeline has no place for what belongs to the others: that is not listed."""
    cat = catalog([spec("a"), spec("b")])
    first, second = plan(cat, spec("a")).difference, plan(cat, spec("b"), spec("c")).difference
    ranks = [
        replace(first, unexpected=("state of 'b'", "state of 'z'"), conflicts=("group 0",)),
        replace(second, unexpected=("state of 'a'", "state of 'z'"), conflicts=("group 0", "group 1")),
    ]
    with pytest.raises(LayoutError) as caught:
        check_difference(cat, ranks, strict=True, cast=False)
    (missing,) = second.missing
    assert caught.value.problems == ("group 0", "group 1", f"missing: {missing}", "unexpected: state of 'z'")
    assert check_difference(cat, ranks, strict=False, cast=False)[1] == ("state of 'z'",)


def test_all_tensors_of_another_shape_are_listed():
    cat = catalog([spec("a"), spec("b")])
    with pytest.raises(LayoutError, match="different shape") as caught:
        plan(cat, spec("a", shape=(5,)), spec("b", shape=(2, 2)))
    assert len(caught.value.problems) == 2


def test_a_tied_name_finds_the_tensor_in_either_direction():
    cat = catalog([spec("emb"), spec("emb", "exp_avg")], aliases={"head": "emb"})
    found = plan(cat, spec("head"), spec("head", "exp_avg"))
    assert [s.fqn for s in found.sources.values()] == ["emb", "emb"]
    assert found.difference == Difference((), (), frozenset(), False)
    assert cat.by_fqn()["head"] == cat.by_fqn()["emb"]


def test_an_alias_to_nothing_is_missing_not_a_crash():
    assert plan(catalog([], aliases={"a": "b"}), spec("a")).difference.missing == (str(spec("a")),)


def test_a_derived_param_comes_from_the_master_where_it_was_not_stored():
    held = [spec("w", MASTER), spec("w", PARAM, "bfloat16")]
    chunks = [chunk(0, Box((0,), (4,))), chunk(1, Box((0,), (2,)), 2, DERIVED), chunk(1, Box((2,), (2,)), 2)]
    cat = catalog(held, chunks, derived={"w"})
    found = plan(cat, spec("w", PARAM, "bfloat16"))
    assert [(r.spec.role, r.turn) for r in found.first] == [(MASTER, 0), (PARAM, 1)], "stored bytes overwrite the cast"
    rebuilt = plan(cat, spec("w", MASTER), spec("w", PARAM, "bfloat16"), derived={"w"})
    assert [r.spec.role for r in rebuilt.first] == [MASTER]
    assert [(r.spec.role, r.entry.offsets) for r in rebuilt.after] == [(PARAM, (2,))]


def test_a_param_that_the_engine_rebuilds_is_never_missing():
    assert plan(
        catalog([spec("w", MASTER)]), spec("w", MASTER), spec("w", PARAM, "bfloat16"), derived={"w"}
    ).difference == Difference((), (), frozenset(), False)


def test_each_rank_gets_its_own_copy_where_replicas_differed():
    s = spec("mean", "buffer")
    cat = catalog([s], [chunk(0, Box((0,), (4,))), chunk(0, Box((0,), (4,)), ranks=(1, 3))])
    assert [r.turn for r in plan(cat, s, own=0).first] == [1]
    assert [r.turn for r in plan(cat, s, own=3).first] == [1, 2]
    assert [r.turn for r in plan(cat, s, own=None).first] == [1]


def test_an_index_with_a_hole_is_damage():
    s = spec("w", shape=(8,))
    with pytest.raises(MissingChunk, match="covers 4 of 8"):
        plan(catalog([s], [chunk(0, Box((0,), (4,)))]), s)
    only_own = [chunk(0, Box((0,), (4,))), chunk(0, Box((4,), (4,)), ranks=(0,))]
    with pytest.raises(MissingChunk, match="covers 4 of 8"):
        plan(catalog([s], only_own), s, own=0)


@pytest.mark.parametrize("second", [Box((0,), (4,)), Box((2,), (4,))], ids=["the same", "shifted"])
def test_overlapping_chunks_do_not_count_as_covering_what_they_leave_open(second):
    """A chunk listed twice has as many elements as the tensor: half of it would silently stay what it was."""
    s = spec("w", shape=(8,))
    with pytest.raises(MalformedData, match="overlapping"):
        plan(catalog([s], [chunk(0, Box((0,), (4,))), chunk(0, second)]), s)
