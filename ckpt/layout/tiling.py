"""Tiling: which elements of a global tensor a local tensor holds, and where in it. Pure, no torch.

Whatever a framework calls its way of cutting (column parallel, fused QKV, ``Shard(0)``, ``_StridedShard``, a padded
vocabulary), per dimension it comes to *runs*: consecutive indexes of the global dimension, one behind the other in the
local one. The product over dimensions are the tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from ckpt.errors import LayoutError
from ckpt.layout.box import Box, boxes_of_range

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Runs = tuple[tuple[int, int], ...]
"""(first global index, count), in the order of the local dimension."""


def take(runs: Runs, start: int, stop: int) -> Runs:
    """Return what positions ``[start, stop)`` of a local dimension hold, runs that touch put together.

    >>> take(((0, 4), (8, 4)), 2, 6)
    ((2, 2), (8, 2))
    """
    found: list[tuple[int, int]] = []
    at = 0
    for first, count in runs:
        low, high = max(start, at), min(stop, at + count)
        if low < high:
            begin = first + low - at
            if found and sum(found[-1]) == begin:
                found[-1] = (found[-1][0], found[-1][1] + high - low)
            else:
                found.append((begin, high - low))
        at += count
    return tuple(found)


def length(runs: Runs) -> int:
    """Return the number of indexes."""
    return sum(count for _, count in runs)


def chunked(runs: Runs, parts: int, index: int) -> Runs:
    """Return part ``index`` of ``parts`` by the rule of ``torch.chunk``: equal parts, the last ones short or empty.

    >>> [chunked(((0, 5),), 4, i) for i in range(4)]
    [((0, 2),), ((2, 2),), ((4, 1),), ()]
    """
    size = -(-length(runs) // parts)
    return take(runs, index * size, (index + 1) * size)


def balanced(runs: Runs, parts: int, index: int) -> Runs:
    """Return part ``index`` of ``parts`` that differ by one at most, the first ones longer (DeepSpeed's AutoTP).

    >>> [balanced(((0, 5),), 4, i) for i in range(4)]
    [((0, 2),), ((2, 1),), ((3, 1),), ((4, 1),)]
    """
    size, longer = divmod(length(runs), parts)
    start = index * size + min(index, longer)
    return take(runs, start, start + size + (index < longer))


def strided(runs: Runs, parts: int, index: int, factor: int) -> Runs:
    """Return part ``index`` where the dimension is first cut into ``factor`` chunks and each of those into ``parts``.

    This is DTensor's ``_StridedShard(dim, split_factor=factor)``: FSDP inside of tensor parallelism.

    >>> strided(((0, 8),), 2, 1, factor=2)
    ((2, 2), (6, 2))
    """
    pieces = [chunked(chunked(runs, factor, f), parts, index) for f in range(factor)]
    joined = tuple(run for piece in pieces for run in piece)
    return take(joined, 0, length(joined))


def fused(sizes: Sequence[tuple[int, int]], degree: int, rank: int) -> Runs:
    """Return what ``rank`` of ``degree`` holds of a dimension of several matrices one behind the other.

    Args:
        sizes: for each matrix its size along the dimension and the number of units that it can be cut into at most
            (its heads); with fewer units than ranks, neighbouring ranks hold the same unit (GQA).
        degree: number of tensor-parallel ranks.
        rank: which of them.

    Raises:
        LayoutError: a size that its parts do not divide, or units and ranks of which neither divides the other.

    >>> fused([(8, 4), (4, 2), (4, 2)], degree=4, rank=1)
    ((2, 2), (8, 2), (12, 2))
    """
    joined: list[tuple[int, int]] = []
    start = 0
    for size, units in sizes:
        parts = min(degree, units)
        what = f"size {size}" if units == size else f"{units} heads"
        if parts < 1 or units % parts:
            raise LayoutError(f"tp {degree} does not divide {what}")
        if degree % parts:
            raise LayoutError(f"tp {degree} is no multiple of {what}")
        if size % parts:
            raise LayoutError(f"size {size} cannot be cut into {parts} equal parts")
        joined.append((start + rank * parts // degree * (size // parts), size // parts))
        start += size
    return take(tuple(joined), 0, length(tuple(joined)))


@dataclass(frozen=True, slots=True)
class Tile:
    """``box`` of the global tensor, found at offsets ``at`` of the local one."""

    box: Box
    at: tuple[int, ...]

    @property
    def local(self) -> Box:
        """The same elements as a box of the local tensor."""
        return Box(self.at, self.box.sizes)


@dataclass(frozen=True, slots=True)
class Tiling:
    """``shape``: of the global, unpadded tensor; ``local``: of the tensor that a rank holds, padding included.

    ``tiles`` are disjoint on both sides; ``padding``: boxes of the local tensor that are no state of anybody.
    """

    shape: tuple[int, ...]
    local: tuple[int, ...]
    tiles: tuple[Tile, ...]
    padding: tuple[Box, ...] = ()

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Tiling:
        """Return the tiling of a tensor that is held as a whole."""
        shape = tuple(shape)
        return cls(shape, shape, (Tile(Box.whole(shape), (0,) * len(shape)),))

    @classmethod
    def of_runs(cls, shape: Sequence[int], runs: Mapping[int, Runs], local: Sequence[int] | None = None) -> Tiling:
        """Return the tiling with these runs per dimension; dimensions that are not named are whole.

        Args:
            shape: of the global tensor.
            runs: dimension -> what the local tensor holds of it.
            local: shape of the local tensor if it is larger than its runs (padded at the end of a dimension).

        Raises:
            LayoutError: a run that leaves the tensor, or more runs than ``local`` has room for.
        """
        shape = tuple(shape)
        full = [runs.get(d, ((0, n),) if n else ()) for d, n in enumerate(shape)]
        held = tuple(length(one) for one in full)
        local = held if local is None else tuple(local)
        for d, one in enumerate(full):
            if any(first < 0 or first + count > shape[d] for first, count in one) or held[d] > local[d]:
                raise LayoutError(f"dimension {d}: runs {one} do not fit a tensor of shape {shape}, local {local}")
        placed = [list(_placed(one)) for one in full]
        tiles = [
            Tile(Box(tuple(f for _, f, _ in way), tuple(n for _, _, n in way)), tuple(at for at, _, _ in way))
            for way in product(*placed)
        ]
        if not tiles and 0 in shape:
            return cls(shape, local, cls.whole(shape).tiles)
        padding = []
        for d in range(len(shape)):  # a grid: before dimension d only what is held, behind it everything
            if held[d] < local[d]:
                offsets = (*(0 for _ in range(d)), held[d], *(0 for _ in shape[d + 1 :]))
                sizes = (*held[:d], local[d] - held[d], *local[d + 1 :])
                padding.append(Box(offsets, sizes))
        return cls(shape, local, tuple(tiles), tuple(box for box in padding if box.volume))

    @property
    def numel(self) -> int:
        """Elements of the local tensor, padding included."""
        return prod(self.local)

    @property
    def is_whole(self) -> bool:
        """Are the global tensor and the local one the same?"""
        return self.shape == self.local and len(self.tiles) == 1 and self.tiles[0].box.sizes == self.shape

    def of_range(self, start: int, stop: int) -> Iterator[tuple[Box, FlatPart]]:
        """Yield global boxes and their places for elements ``[start, stop)`` of the flattened local tensor."""
        for part_start, local in _flat_boxes(self.local, start, stop):
            for tile in self.tiles:
                common = local.intersect(tile.local)
                if common is not None:
                    offsets = tuple(
                        g + c - a for g, c, a in zip(tile.box.offsets, common.offsets, tile.at, strict=True)
                    )
                    yield Box(offsets, common.sizes), FlatPart(part_start, local.sizes, common.relative_to(local))

    def boxes(self, start: int, stop: int) -> Iterator[Box]:
        """Yield the global boxes of :meth:`of_range`, without their places."""
        if self.is_whole:
            yield from boxes_of_range(self.local, start, stop)
        else:
            yield from (box for box, _ in self.of_range(start, stop))

    def padding_of_range(self, start: int, stop: int) -> Iterator[FlatPart]:
        """Yield the places of the padding among elements ``[start, stop)`` of the flattened local tensor."""
        for part_start, local in _flat_boxes(self.local, start, stop) if self.padding else ():
            for hole in self.padding:
                common = local.intersect(hole)
                if common is not None:
                    yield FlatPart(part_start, local.sizes, common.relative_to(local))


@dataclass(frozen=True, slots=True)
class FlatPart:
    """A place in a flat range: view ``[start, start + prod(sizes))`` of it as ``sizes`` and take ``index`` of that."""

    start: int
    sizes: tuple[int, ...]
    index: tuple[slice, ...]


def _flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, Box]]:
    at = 0
    for box in boxes_of_range(shape, start, stop):
        yield at, box
        at += box.volume


def _placed(runs: Runs) -> Iterator[tuple[int, int, int]]:
    """Yield (local offset, first global index, count)."""
    at = 0
    for first, count in runs:
        yield at, first, count
        at += count
