"""Boxes against brute force over the elements that they hold."""

from __future__ import annotations

from itertools import product
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from ckpt.layout.box import Box, boxes_of_range, first_overlap, overlaps

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def elements(box: Box) -> list[tuple[int, ...]]:
    """All element positions of a box, in row-major order."""
    return list(product(*(range(o, e) for o, e in zip(box.offsets, box.ends, strict=True))))


@st.composite
def boxes(draw, shape):
    lows = [draw(st.integers(0, n)) for n in shape]
    sizes = [draw(st.integers(0, n - low)) for n, low in zip(shape, lows, strict=True)]
    return Box(tuple(lows), tuple(sizes))


@st.composite
def shape_and_boxes(draw, lists=1):
    shape = draw(shapes)
    return shape, *(draw(st.lists(boxes(shape), max_size=7)) for _ in range(lists))


@given(shapes, st.data())
def test_a_flat_range_becomes_at_most_2n_minus_1_boxes_that_hold_its_elements_in_order(shape, data):
    total = prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    found = boxes_of_range(shape, start, stop)
    everything = elements(Box.whole(shape))
    assert [e for box in found for e in elements(box)] == everything[start:stop]
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert all(box.volume for box in found)


@given(shapes, st.data())
def test_cut_pieces_tile_the_box_in_order_and_each_is_contiguous_in_it(shape, data):
    box = data.draw(boxes(shape))
    limit = data.draw(st.integers(1, max(1, box.volume + 1)))
    pieces = list(box.cut(limit))
    inside = elements(box)
    position = {element: i for i, element in enumerate(inside)}
    assert [e for piece in pieces for e in elements(piece)] == inside
    for piece in pieces:
        assert piece.volume <= limit
        places = [position[e] for e in elements(piece)]
        assert places == list(range(places[0], places[0] + len(places))) if places else True


@given(shape_and_boxes(lists=2))
def test_overlaps_equals_trying_all_pairs(case):
    _, sources, targets = case
    expected = [
        (s, t, tuple(sorted(set(elements(a)) & set(elements(b)))))
        for t, b in enumerate(targets)
        for s, a in enumerate(sources)
        if set(elements(a)) & set(elements(b))
    ]
    found = list(overlaps(sources, targets))
    assert sorted((s, t, tuple(elements(c))) for s, t, c in found) == sorted(expected)
    assert [t for _, t, _ in found] == sorted(t for _, t, _ in found), "targets in order"


@given(shape_and_boxes())
def test_first_overlap_finds_a_pair_exactly_if_there_is_one(case):
    _, mine = case
    pairs = {
        (a, b) for i, a in enumerate(mine) for j, b in enumerate(mine) if i != j and set(elements(a)) & set(elements(b))
    }
    found = first_overlap(mine)
    assert (found is not None) == bool(pairs)
    assert found is None or found in pairs


@given(shape_and_boxes(lists=2))
def test_intersect_contains_and_within_agree_with_the_elements(case):
    shape, left, right = case
    whole = set(elements(Box.whole(shape)))
    for a in left:
        assert a.within(shape)
        assert set(elements(a)) <= whole
        for b in right:
            common = a.intersect(b)
            assert set(elements(common) if common else ()) == set(elements(a)) & set(elements(b))
            if b.volume:
                assert a.contains(b) == (set(elements(b)) <= set(elements(a)))
