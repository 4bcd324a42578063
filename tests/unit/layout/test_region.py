from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from ckpt.layout.box import Box, first_overlap
from ckpt.layout.region import region, without

SHAPE = (3, 4, 3)


@st.composite
def boxes(draw, ndim=3):
    low = [draw(st.integers(0, n - 1)) for n in SHAPE[:ndim]]
    return Box(tuple(low), tuple(draw(st.integers(1, n - a)) for a, n in zip(low, SHAPE, strict=False)))


def elements(some):
    return {e for box in some for e in product(*(range(a, b) for a, b in zip(box.offsets, box.ends, strict=True)))}


@given(st.lists(boxes(), max_size=8), st.data())
def test_a_region_follows_from_its_elements_alone(some, data):
    found = region(some)
    assert elements(found) == elements(some)
    assert first_overlap(found) is None
    assert found == sorted(found)
    assert region(Box(e, (1, 1, 1)) for e in elements(some)) == found, "cut as finely as can be"
    assert region(data.draw(st.permutations([*some, *found]))) == found


def test_regions_of_numbers_and_of_nothing():
    assert region([Box((), ()), Box((), ())]) == [Box((), ())]
    assert region([]) == region([Box((2,), (0,))]) == []
    assert region([Box((0,), (2,)), Box((3,), (1,))]) == [Box((0,), (2,)), Box((3,), (1,))], "a gap stays one"


@given(boxes(), st.lists(boxes(), max_size=5))
def test_what_is_left_of_a_box(box, holes):
    left = without(box, holes)
    assert elements(left) == elements([box]) - elements(holes)
    assert first_overlap(left) is None
