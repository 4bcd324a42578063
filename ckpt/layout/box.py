"""Box: the one geometric primitive, a half-open hyper-rectangle of a global, unpadded tensor.

Everything that a rank can hold of a tensor is a list of boxes: a DTensor shard is one, a ZeRO flat partition is at
most ``2n - 1`` (:func:`boxes_of_range`), an interleaved tensor-parallel weight is several of one local tensor.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from ckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """Elements ``[offsets[d], offsets[d] + sizes[d])`` in every dimension ``d``. A 0-d tensor is ``Box((), ())``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ConfigError(f"box offsets {self.offsets} and sizes {self.sizes} differ in length")
        if min((*self.offsets, *self.sizes), default=0) < 0:
            raise ConfigError(f"box {self.offsets}+{self.sizes} has a negative number")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that covers a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.sizes)

    @property
    def volume(self) -> int:
        """Number of elements (1 for a 0-d box)."""
        return prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """Exclusive upper corner."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the common box, or None if no element is shared.

        >>> Box((0, 0), (4, 4)).intersect(Box((2, 3), (4, 4)))
        Box(offsets=(2, 3), sizes=(2, 1))
        """
        lows, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            low, high = max(a, b), min(a + n, b + m)
            if low >= high:
                return None
            lows.append(low)
            sizes.append(high - low)
        return Box(tuple(lows), tuple(sizes))

    def contains(self, other: Box) -> bool:
        """Is every element of ``other`` in this box?"""
        return all(
            a <= b and b + m <= a + n
            for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )

    def within(self, shape: Sequence[int]) -> bool:
        """Does this box lie inside a tensor of this shape (same number of dimensions included)?"""
        return self.ndim == len(shape) and all(e <= n for e, n in zip(self.ends, shape, strict=True))

    def relative_to(self, origin: Box) -> tuple[slice, ...]:
        """Return the slices that select this box from a tensor that holds exactly ``origin``."""
        return tuple(slice(a - b, a - b + n) for a, n, b in zip(self.offsets, self.sizes, origin.offsets, strict=True))

    def cut(self, max_volume: int) -> Iterator[Box]:
        """Yield row-aligned pieces of at most ``max_volume`` elements that tile this box in row-major order.

        Each piece is contiguous in a row-major tensor that holds this box, which is what lets a piece be read, hashed
        and written without a copy.

        >>> [b.sizes for b in Box((0, 0), (5, 4)).cut(8)]
        [(2, 4), (2, 4), (1, 4)]
        """
        if max_volume < 1:
            raise ConfigError(f"cannot cut a box into pieces of {max_volume} elements")
        if self.volume <= max_volume:
            yield self
            return
        dim = next(d for d in range(self.ndim) if self.sizes[d] > 1)
        row = self.volume // self.sizes[dim]
        rows = max(1, max_volume // row)
        first, end = self.offsets[dim], self.ends[dim]
        before, after = self.offsets[:dim], self.offsets[dim + 1 :]
        ones, inner = self.sizes[:dim], self.sizes[dim + 1 :]
        for start in range(first, end, rows):
            piece = Box((*before, start, *after), (*ones, min(rows, end - start), *inner))
            if rows * row <= max_volume:
                yield piece
            else:  # one row is too large
                yield from piece.cut(max_volume)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{e}" for o, e in zip(self.offsets, self.ends, strict=True)) + "]"


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the boxes, in row-major order, that hold the elements ``[start, stop)`` of the flattened tensor.

    At most ``2n - 1`` boxes for ``n`` dimensions, each a contiguous piece of the range. A 0-d tensor has one element.

    >>> [str(b) for b in boxes_of_range((3, 4), 2, 10)]
    ['[0:1, 2:4]', '[1:2, 0:4]', '[2:3, 0:2]']
    """
    total = prod(shape)
    if not 0 <= start <= stop <= total:
        raise ConfigError(
            f"flat range [{start}, {stop}) does not fit a tensor of shape {tuple(shape)} ({total} elements)"
        )
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and (start % row or stop % row):  # inside one row, not all of it
        return _prefixed(first, boxes_of_range(shape[1:], start - first * row, stop - first * row))
    head: list[Box] = []
    tail: list[Box] = []
    full_from, full_to = first, last + 1
    if start % row:
        head = _prefixed(first, boxes_of_range(shape[1:], start - first * row, row))
        full_from += 1
    if stop % row:
        tail = _prefixed(last, boxes_of_range(shape[1:], 0, stop - last * row))
        full_to -= 1
    middle = []
    if full_from < full_to:
        middle = [Box((full_from, *(0,) * (len(shape) - 1)), (full_to - full_from, *shape[1:]))]
    return head + middle + tail


def _prefixed(index: int, boxes: list[Box]) -> list[Box]:
    return [Box((index, *b.offsets), (1, *b.sizes)) for b in boxes]


def first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that share an element, or None if all are disjoint. Empty boxes share nothing.

    A sweep along the dimension with the most distinct offsets: O(n log n) for the layouts that people use (row- or
    column-cut tensors), quadratic only in how many boxes overlap a single line of that dimension.
    """
    solid = [b for b in boxes if b.volume]
    if len(solid) < 2:
        return None
    if not solid[0].ndim:
        return solid[0], solid[1]
    dim = max(range(solid[0].ndim), key=lambda d: len({b.offsets[d] for b in solid}))
    active: list[Box] = []
    for box in sorted(solid, key=lambda b: b.offsets[dim]):
        active = [a for a in active if a.offsets[dim] + a.sizes[dim] > box.offsets[dim]]
        for other in active:
            if other.intersect(box) is not None:
                return other, box
        active.append(box)
    return None


class Overlaps:
    """Boxes of one tensor, sorted once, so that what they share with others can be asked for again and again.

    n x m pairs are never tried for tensors that both sides cut along the same dimension.
    """

    def __init__(self, sources: Sequence[Box]) -> None:
        self._sources = sources
        self._dim = self._longest = 0
        self._order: Sequence[int] = range(len(sources))
        self._starts: list[int] = []
        if sources and sources[0].ndim:
            dim = max(range(sources[0].ndim), key=lambda d: len({b.offsets[d] for b in sources}))
            self._order = sorted(self._order, key=lambda s: sources[s].offsets[dim])
            self._dim, self._longest = dim, max(b.sizes[dim] for b in sources)
            self._starts = [sources[s].offsets[dim] for s in self._order]

    def of(self, targets: Sequence[Box]) -> Iterator[tuple[int, int, Box]]:
        """Yield ``(source index, target index, common box)`` for every pair that shares an element, as
        :func:`overlaps`.
        """
        sources, order, starts, dim, longest = self._sources, self._order, self._starts, self._dim, self._longest
        if sources and not sources[0].ndim:
            yield from ((s, t, Box((), ())) for t in range(len(targets)) for s in order)
            return
        for t, target in enumerate(targets if sources else ()):
            low, high = target.offsets[dim], target.offsets[dim] + target.sizes[dim]
            # A source that reaches past `low` starts after `low - longest`; one that starts at `high` or later is too
            # far.
            for k in range(bisect_right(starts, low - longest), bisect_left(starts, high)):
                common = sources[order[k]].intersect(target)
                if common is not None:
                    yield order[k], t, common


def overlaps(sources: Sequence[Box], targets: Sequence[Box]) -> Iterator[tuple[int, int, Box]]:
    """Yield ``(source index, target index, common box)`` for every pair that shares an element, targets in order."""
    return Overlaps(sources).of(targets) if sources and targets else iter(())
