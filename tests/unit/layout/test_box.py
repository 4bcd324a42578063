from __future__ import annotations

import pytest

from ckpt.errors import ConfigError
from ckpt.layout.box import Box, boxes_of_range, first_overlap, overlaps


@pytest.mark.parametrize(("offsets", "sizes"), [((0,), (1, 1)), ((-1,), (1,)), ((0, 0), (1, -1)), ((), (1,))], ids=str)
def test_a_box_that_is_none_is_refused(offsets, sizes):
    with pytest.raises(ConfigError, match="box"):
        Box(offsets, sizes)


def test_a_0d_box_has_one_element_and_an_empty_box_none():
    assert Box((), ()).volume == 1
    assert list(Box((), ()).cut(1)) == [Box((), ())]
    assert Box((0, 2), (3, 0)).volume == 0
    assert list(Box((0, 2), (3, 0)).cut(1)) == [Box((0, 2), (3, 0))]


def test_within_needs_the_same_number_of_dimensions():
    assert Box((1,), (2,)).within((3,))
    assert not Box((2,), (2,)).within((3,))
    assert not Box((0,), (1,)).within((3, 1))
    assert not Box((), ()).within((1,))


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 13)])
def test_a_range_outside_of_the_tensor_is_refused(start, stop):
    with pytest.raises(ConfigError, match="flat range"):
        boxes_of_range((3, 4), start, stop)


def test_cut_into_nothing_is_refused():
    with pytest.raises(ConfigError, match="0 elements"):
        list(Box((0,), (3,)).cut(0))


def test_whole_rows_become_one_box_not_one_a_row():
    """A partition of a thousand rows must not cost a thousand entries."""
    assert boxes_of_range((1000, 8), 8, 8 * 999) == [Box((1, 0), (998, 8))]
    assert boxes_of_range((4, 5, 6), 30, 90) == [Box((1, 0, 0), (2, 5, 6))]


def test_empty_boxes_overlap_nothing():
    empty = Box((1,), (0,))
    assert first_overlap([empty, Box((0,), (3,)), empty]) is None
    assert list(overlaps([empty], [Box((0,), (3,))])) == []


def test_the_text_of_a_box_reads_like_a_slice():
    assert str(Box((0, 2), (5, 3))) == "[0:5, 2:5]"
    assert str(Box((), ())) == "[]"
