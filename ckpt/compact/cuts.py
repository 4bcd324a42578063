"""What is stepped together: slices of the log's entries, in bundles that fit the memory. Pure.

An optimizer that works element by element may be given any slice of a tensor. Vectorized kernels compute the elements
at the end of a tensor, which fill no register, by other instructions, with other last bits: so slices are windows of
the tensor as it lay in the job's memory, cut at multiples of :data:`GRAIN`, and only the last one ends where it ended.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import msgspec

from ckpt.layout.box import Box, boxes_of_range

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt.gradlog.record import Entry, Part, RankHead

GRAIN = 1 << 16
"""Elements; a multiple of what every kernel takes at once, on every processor."""
MOST_SLICES = 4096
"""Slices of a bundle: many small parameters make many files otherwise, and too many at once a long header."""


class Slice(msgspec.Struct, array_like=True, frozen=True):
    """Elements ``first`` to ``stop`` of what ``rank`` has logged of an entry, in order. They are stepped in a tensor of
    ``size`` elements, element ``start`` of the job's own being its first (-1: they lie in it one behind the other).
    """

    rank: int
    entry: int
    first: int
    stop: int
    start: int
    size: int


class Bundle(msgspec.Struct, array_like=True, frozen=True):
    """Slices of one rank that are stepped together."""

    number: int
    rank: int
    slices: tuple[Slice, ...]


class Run(msgspec.Struct, array_like=True, frozen=True):
    """A box of a tensor, row by row, from element ``at`` of a slice's tensor on. ``logged``: its place among the
    elements that the entry's rank has logged.
    """

    fqn: str
    shape: tuple[int, ...]
    box: Box
    at: int
    logged: int


def bundles_of(heads: Sequence[RankHead], most: int) -> Iterator[Bundle]:
    """Yield what is to be done, rank after rank.

    Args:
        heads: of the log's ranks.
        most: elements of a bundle, at least :data:`GRAIN`.
    """
    number = 0
    for rank, head in enumerate(heads):
        slices: list[Slice] = []
        filled = 0
        for one in (s for n, entry in enumerate(head.entries) for s in slices_of(rank, n, entry, most)):
            if slices and (filled + one.size > most or len(slices) >= MOST_SLICES):
                yield Bundle(number, rank, tuple(slices))
                number, slices, filled = number + 1, [], 0
            slices.append(one)
            filled += one.size
        if slices:
            yield Bundle(number, rank, tuple(slices))
            number += 1


def slices_of(rank: int, number: int, entry: Entry, most: int) -> Iterator[Slice]:
    """Yield the slices of an entry, each of at most ``most`` elements, rounded down to :data:`GRAIN`."""
    step = max(GRAIN, most // GRAIN * GRAIN)
    total = entry.numel
    if not lies_known(entry):
        for first in range(0, total, step):
            stop = min(total, first + step)
            yield Slice(rank, number, first, stop, -1, stop - first)
        return
    places = [(at, part.box.volume) for at, part in zip(entry.at, entry.parts, strict=True)]
    logged, k = 0, 0
    while k < len(places):
        at, left = places[k]
        start = at // step * step
        end = min(start + step, entry.size)
        first = logged
        while k < len(places) and places[k][0] < end:
            at, left = places[k]
            taken = min(left, end - at)
            logged += taken
            if taken < left:
                places[k] = at + taken, left - taken
                break
            k += 1
        yield Slice(rank, number, first, logged, start, end - start)


def lies_known(entry: Entry) -> bool:
    """Does the log tell where in the stepped tensor each part lies, and can that be?"""
    if not entry.parts or len(entry.at) != len(entry.parts) or min(entry.at) < 0:
        return False
    end = 0
    for at, part in zip(entry.at, entry.parts, strict=True):
        if at < end:
            return False
        end = at + part.box.volume
    return end <= entry.size


def runs_of(entry: Entry, one: Slice, most: int) -> Iterator[Run]:
    """Yield the boxes of a slice in order, each of at most ``most`` elements."""
    begin = 0
    known = one.start >= 0
    for n, part in enumerate(entry.parts):
        volume = part.box.volume
        low, high = max(begin, one.first), min(begin + volume, one.stop)
        if low < high:
            at = entry.at[n] - one.start + low - begin if known else low - one.first
            for box in _boxes(part, low - begin, high - begin, most):
                yield Run(part.fqn, part.shape, box, at, low)
                at, low = at + box.volume, low + box.volume
        begin += volume


def _boxes(part: Part, first: int, stop: int, most: int) -> Iterator[Box]:
    for inner in boxes_of_range(part.sizes, first, stop):
        moved = tuple(a + b for a, b in zip(part.offsets, inner.offsets, strict=True))
        yield from Box(moved, inner.sizes).cut(most)


def strides_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor that lies row by row.

    >>> strides_of((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(prod(sizes[d + 1 :]) for d in range(len(sizes)))
