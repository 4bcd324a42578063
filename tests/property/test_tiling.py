"""Tilings against an oracle that cuts an array of global indexes the way the framework cuts its tensor."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import ConfigError, LayoutError
from ckpt.layout.rules import Part, Rules, TensorRule, tiling_of
from ckpt.layout.tiling import Tiling, chunked, fused, strided, take


def indexes(shape) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape)


def expand(runs) -> list[int]:
    return [i for first, count in runs for i in range(first, first + count)]


def chunk(array: np.ndarray, parts: int, index: int, axis: int = 0) -> np.ndarray:
    """torch.chunk's rule, written another way: rows i*size … of ceil(n / parts) each."""
    size = math.ceil(array.shape[axis] / parts)
    return np.take(array, range(min(index * size, array.shape[axis]), min((index + 1) * size, array.shape[axis])), axis)


def held(tiling: Tiling, whole: np.ndarray) -> np.ndarray:
    """What the local tensor holds, padding as -1."""
    local = np.full(tiling.local, -1)
    for tile in tiling.tiles:
        source = whole[tile.box.relative_to(type(tile.box).whole(whole.shape))]
        local[tile.local.relative_to(type(tile.box).whole(tiling.local))] = source
    return local


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_chunks_and_strides_are_those_of_the_array(size, parts, outer, factor) -> None:
    whole = np.arange(size)
    for i in range(parts):
        assert expand(chunked(((0, size),), parts, i)) == chunk(whole, parts, i).tolist()
        pieces = [chunk(chunk(whole, factor, f), parts, i) for f in range(factor)]
        assert expand(strided(((0, size),), parts, i, factor)) == np.concatenate(pieces).tolist()
        inner = chunked(chunked(((0, size),), outer, outer - 1), parts, i)
        assert expand(inner) == chunk(chunk(whole, outer, outer - 1), parts, i).tolist()


@given(st.data())
def test_a_flat_range_of_a_tiling_is_where_it_says(data) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    runs = {}
    for d, n in enumerate(shape):
        if data.draw(st.booleans()):
            parts = data.draw(st.integers(1, 3))
            cut = chunked(((0, n),), parts, data.draw(st.integers(0, parts - 1)))
            runs[d] = take(cut, 0, 99) + (((0, 1),) if cut and cut[0][0] > 0 and data.draw(st.booleans()) else ())
    tight = Tiling.of_runs(shape, runs)
    local = tuple(n + data.draw(st.integers(0, 2)) for n in tight.local)
    tiling = Tiling.of_runs(shape, runs, local)
    whole = indexes(shape)
    flat = held(tiling, whole).reshape(-1)
    start = data.draw(st.integers(0, flat.size))
    stop = data.draw(st.integers(start, flat.size))
    memory, seen = flat[start:stop], np.zeros(stop - start, int)
    places = np.arange(stop - start)
    for box, part in tiling.of_range(start, stop):
        window = slice(part.start, part.start + math.prod(part.sizes))
        expected = whole[box.relative_to(type(box).whole(shape))]
        assert (memory[window].reshape(part.sizes)[part.index] == expected).all()
        seen[places[window].reshape(part.sizes)[part.index]] += 1
    assert (seen == (memory >= 0)).all()  # every element of the state once
    for part in tiling.padding_of_range(start, stop):
        window = slice(part.start, part.start + math.prod(part.sizes))
        seen[places[window].reshape(part.sizes)[part.index]] += 1
    assert (seen == 1).all()  # and all the rest is padding
    assert list(tiling.boxes(start, stop)) == [box for box, _ in tiling.of_range(start, stop)]
    if not runs and local == shape:
        assert tiling.is_whole


@given(
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 3),
)
def test_fused_parts_are_cut_one_by_one(parts, degree, width) -> None:
    sizes = [(unit * heads, heads) for unit, heads in parts]
    total = sum(size for size, _ in sizes)
    whole = indexes((total, width))
    rule = TensorRule(match=".*", dim=0, fused=tuple(Part(size, heads) for size, heads in sizes))
    copies = np.zeros(whole.size, int)
    for rank in range(degree):
        expected, at = [], 0
        for size, heads in sizes:
            distinct = min(degree, heads)
            piece = rank // (degree // distinct)
            expected.append(np.split(whole[at : at + size], distinct)[piece])
            at += size
        local = np.concatenate(expected)
        tiling = tiling_of(rule, local.shape, rank, degree)
        assert tiling.shape == whole.shape
        assert (held(tiling, whole) == local).all()
        copies[local.reshape(-1)] += 1
    assert copies.min() >= 1
    first = 0
    for size, heads in sizes:
        assert set(copies[first * width : (first + size) * width]) == {degree // min(degree, heads)}
        first += size


@pytest.mark.parametrize(
    ("size", "padded", "degree"), [(65, 128, 2), (65, 68, 4), (65, 65, 1), (5, 16, 4), (64, 64, 2)]
)
def test_a_padded_vocabulary_is_stored_without_its_padding(size, padded, degree) -> None:
    whole = indexes((size, 3))
    full = np.full((padded, 3), -1)
    full[:size] = whole
    rule = TensorRule(match=".*", dim=0, size=size)
    for rank, local in enumerate(np.split(full, degree)):
        tiling = tiling_of(rule, local.shape, rank, degree)
        assert tiling.shape == (size, 3)
        assert (held(tiling, whole) == local).all()
        assert sum(box.volume for box in tiling.padding) == (local < 0).sum()


def test_stride_is_that_many_equal_parts_and_a_negative_dim_counts_from_the_end() -> None:
    whole = indexes((3, 8))
    rule = TensorRule(match=".*", dim=-1, stride=2)
    for rank in range(2):
        gate, up = np.split(whole, 2, axis=1)
        local = np.concatenate([np.split(gate, 2, axis=1)[rank], np.split(up, 2, axis=1)[rank]], axis=1)
        assert (held(tiling_of(rule, local.shape, rank, 2), whole) == local).all()


def test_a_rule_without_dim_is_a_whole_tensor() -> None:
    assert tiling_of(TensorRule(match=".*"), (4, 2), 3, 8) == Tiling.whole((4, 2))


@pytest.mark.parametrize(
    ("rule", "local", "degree", "message"),
    [
        (TensorRule(match="w", dim=2), (4, 4), 2, "cuts dimension 2"),
        (TensorRule(match="w", dim=0, fused=(6, 3)), (4, 4), 2, "size 3 cannot be cut into 2 equal parts"),
        (TensorRule(match="w", dim=0, fused=(6, 4)), (4, 4), 2, "expected 5 rows on each of 2 ranks, found 4"),
        (TensorRule(match="w", dim=0, size=100), (4, 4), 2, "2 x 4 rows, expected at least the size 100"),
        (TensorRule(match="w", dim=0, stride=3), (4, 4), 2, "4 rows cannot hold 3 equal parts"),
        (TensorRule(match="w", dim=0, heads=3), (4, 4), 2, "tp 2 does not divide 3 heads"),
    ],
)
def test_shape_and_rule_that_do_not_fit(rule, local, degree, message) -> None:
    with pytest.raises(LayoutError, match=message.replace("(", r"\(").replace(")", r"\)")):
        tiling_of(rule, local, 0, degree)


def test_fused_refuses_what_neither_side_divides() -> None:
    with pytest.raises(LayoutError, match="tp 4 is no multiple of 3 heads"):
        fused([(12, 3)], 4, 0)


def test_names_are_mapped_by_the_first_rule_that_matches() -> None:
    rules = Rules.of(
        {
            "names": [
                {"match": r"(\d+)\.(.*)", "name": "blocks.{1-1}.{2}"},
                {"match": r"layers\.(\d+)\.(.*)", "name": "blocks.{1+4}.{2}"},
                {"match": r"layers\..*", "name": "never"},
            ]
        }
    )
    assert rules.rename("3.up.weight") == "blocks.2.up.weight"
    assert rules.rename("layers.0.norm") == "blocks.4.norm"
    assert rules.rename("embed.weight") == "embed.weight"


def test_rules_that_fit_nothing_are_named() -> None:
    rules = Rules.of(
        {
            "tensors": [{"match": "a.*", "dim": 0}, {"match": "typo"}],
            "names": [{"match": "x", "name": "y"}],
            "tied": {"head": "emb"},
        }
    )
    assert rules.unused(["abc"], ["abc"]) == {"tensors: typo", "names: x", "tied: head", "tied to: emb"}


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"tensor": []}, "unknown field `tensor`"),
        ({"tensors": [{"match": "w", "dim": "0"}]}, "Expected `int | null`, got `str`"),
        ({"tensors": [{"match": "(", "dim": 0}]}, "no regular expression"),
        ({"tensors": [{"match": "w", "dim": 0, "size": 0}]}, "size is 0, expected at least 1"),
        (
            {"tensors": [{"match": "w", "dim": 0, "size": 4, "heads": 2}]},
            "expected one of fused, stride, heads and size",
        ),
        ({"tensors": [{"match": "w", "heads": 2}]}, "need dim"),
        ({"tensors": [{"match": "w", "dim": 0, "fused": [0]}]}, "at least one row"),
        ({"names": [{"match": "(a)", "name": "{2}"}]}, r"has 1 group\(s\), '\{2\}' uses 2"),
        ({"tensors": [{"match": "a" * 2000}]}, "2000 characters"),
    ],
)
def test_wrong_rules_are_refused_with_what_is_wrong(plain, message) -> None:
    with pytest.raises(ConfigError, match=message):
        Rules.of(plain)


def test_arithmetic_on_what_is_no_number() -> None:
    rules = Rules.of({"names": [{"match": "(.*)", "name": "{1+1}"}]})
    with pytest.raises(ConfigError, match="no number"):
        rules.rename("abc")
