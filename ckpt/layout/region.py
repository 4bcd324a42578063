"""Regions: sets of elements of a tensor, as boxes. What is left of one, and the one way to write it down."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from ckpt.layout.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Spans = tuple[tuple[int, int], ...]
"""A box: (start, stop) in every dimension."""


def region(boxes: Iterable[Box]) -> list[Box]:
    """Return disjoint boxes, in row-major order, that hold the same elements.

    They follow from the elements alone, however these were cut before: along the first dimension the longest runs of
    rows that are alike, each of them written so in the dimensions that remain. Boxes that share elements are welcome.

    >>> [str(b) for b in region([Box((0, 0), (1, 3)), Box((1, 0), (2, 2)), Box((1, 2), (2, 1))])]
    ['[0:3, 0:3]']
    """
    solid = {tuple(zip(box.offsets, box.ends, strict=True)) for box in boxes if box.volume}
    return [Box(tuple(a for a, _ in one), tuple(b - a for a, b in one)) for one in _runs(solid)]


def _runs(boxes: set[Spans]) -> tuple[Spans, ...]:
    if len(boxes) < 2:
        return tuple(boxes)
    rest = sorted(boxes, reverse=True)  # the lowest start last
    found: list[tuple[int, int, tuple[Spans, ...]]] = []
    active: list[Spans] = []
    for low, high in pairwise(sorted({edge for box in boxes for edge in box[0]})):
        active = [box for box in active if box[0][1] > low]
        while rest and rest[-1][0][0] == low:
            active.append(rest.pop())
        alike = _runs({box[1:] for box in active})
        if found and found[-1][1:] == (low, alike):
            found[-1] = (found[-1][0], high, alike)
        elif alike:
            found.append((low, high, alike))
    return tuple(((low, high), *inner) for low, high, alike in found for inner in alike)


def without(box: Box, holes: Sequence[Box]) -> list[Box]:
    """Return disjoint boxes, in row-major order of their corners, that tile what is left of a box without the holes.

    >>> [str(b) for b in without(Box((0,), (9,)), [Box((2,), (3,))])]
    ['[0:2]', '[5:9]']
    """
    left = [box]
    for hole in holes:
        left = [part for one in left for part in _minus(one, hole)]
    return sorted(left)


def _minus(box: Box, hole: Box) -> Iterator[Box]:
    common = box.intersect(hole)
    if common is None:
        yield box
        return
    offsets, sizes = list(box.offsets), list(box.sizes)
    for dim in range(box.ndim):
        low, high, end = common.offsets[dim], common.ends[dim], offsets[dim] + sizes[dim]
        for start, stop in ((offsets[dim], low), (high, end)):
            if start < stop:
                yield Box((*offsets[:dim], start, *offsets[dim + 1 :]), (*sizes[:dim], stop - start, *sizes[dim + 1 :]))
        offsets[dim], sizes[dim] = low, high - low
