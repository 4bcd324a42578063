"""From tensors in files to boxes of an index, whatever way they were cut: a box is what lies in one run of bytes."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING

from ckpt.convert.torchfile.stored import add_stored as add_box
from ckpt.errors import MalformedData, UnsupportedFeature
from ckpt.layout.box import Box
from ckpt.layout.region import without
from ckpt.layout.tiling import FlatPart

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt.convert.opened import Builder
    from ckpt.convert.torchfile.names import Stored
    from ckpt.layout.spec import TensorSpec
    from ckpt.layout.tiling import Tiling
    from ckpt.store.base import Store


def add_flat(
    builder: Builder,
    spec: TensorSpec,
    tiling: Tiling,
    start: int,
    stop: int,
    key: str,
    at: int,
    own: Sequence[Box] | None = None,
) -> None:
    """Say where elements ``[start, stop)`` of a flattened local tensor are: from byte ``at`` of file ``key``.

    ``own``: only these boxes of the global tensor count, since others are replicas; None: everything does.
    """
    if own is None and tiling.shape == tiling.local and len(tiling.tiles) == 1:
        builder.add_range(spec, start, stop, key, at)
        return
    for box, part in tiling.of_range(start, stop):
        for run, first in runs_of(box, part):
            if own is None:
                builder.add(spec, run, key, at + first * spec.itemsize)
                continue
            for mine in (common for one in own if (common := run.intersect(one)) is not None):
                for piece, place in runs_of(mine, FlatPart(first, run.sizes, mine.relative_to(run))):
                    builder.add(spec, piece, key, at + place * spec.itemsize)


def runs_of(box: Box, part: FlatPart) -> Iterator[tuple[Box, int]]:
    """Yield the pieces of a box that lie in one run each, and the element of the flat range at which they start."""
    ndim = len(part.sizes)
    strides = [prod(part.sizes[d + 1 :]) for d in range(ndim)]
    lows = [index.start or 0 for index in part.index]
    cut = next((d for d in reversed(range(ndim)) if box.sizes[d] != part.sizes[d]), 0)  # whole behind it
    for way in product(*(range(n) for n in box.sizes[:cut])):
        at = part.start + sum(
            (low + w) * s for low, w, s in zip(lows, (*way, *[0] * (ndim - cut)), strides, strict=True)
        )
        yield (
            Box(
                (*(o + w for o, w in zip(box.offsets, way, strict=False)), *box.offsets[cut:]),
                (*(1,) * cut, *box.sizes[cut:]),
            ),
            at,
        )


def add_stored(
    builder: Builder,
    store: Store,
    spec: TensorSpec,
    tiling: Tiling,
    stored: Stored,
    own: Sequence[Box] | None = None,
) -> None:
    """Say where a whole local tensor is; ``own`` as in :func:`add_flat`.

    Raises:
        MalformedData: it has another shape or dtype.
        UnsupportedFeature: its elements are out of order (a transposed view), and it is a part of a tensor.
    """
    if stored.shape != tiling.local or stored.dtype != spec.dtype:
        raise MalformedData(f"{stored.key}: {spec} is a {stored.dtype}{list(stored.shape)} there")
    if stored.is_contiguous:
        add_flat(builder, spec, tiling, 0, stored.volume, stored.key, stored.start, own)
    elif tiling.shape != tiling.local or len(tiling.tiles) > 1:
        raise UnsupportedFeature(
            f"{stored.key}: {spec} is cut, and was saved with strides {list(stored.strides)}, expected row by row"
        )
    elif own is None:
        add_box(builder, spec, Box.whole(spec.shape), stored, store)


class Claims:
    """Who gives which elements, where several model-parallel ranks have the same: the first one that asks.

    Replicas are cut differently by ZeRO on each rank, so that what they hold must be told apart element by element.
    """

    def __init__(self) -> None:
        self._taken: dict[str, dict[int, tuple[Box, ...]]] = {}

    def own(self, fqn: str, rank: int, tiling: Tiling) -> Sequence[Box] | None:
        """Return the boxes of a tensor that are the rank's to give; None: all that it has."""
        ranks = self._taken.setdefault(fqn, {})
        tiles = tuple(tile.box for tile in tiling.tiles)
        if rank not in ranks:
            others = [box for boxes in ranks.values() for box in boxes]
            ranks[rank] = tuple(part for box in tiles for part in without(box, others)) if others else tiles
        return None if ranks[rank] == tiles else ranks[rank]
