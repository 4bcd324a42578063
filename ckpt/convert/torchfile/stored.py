"""Tensors in files of ``torch.save``, for readers: as boxes of a checkpoint, or small ones as they are.

A tensor that does not lie row by row in its file (a transposed weight, a slice, one that repeats its elements) is given
to the planner as objects that do, parts of it of bounded size, each put together when it is read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt.convert.torchfile.file import Inert, Stored
from ckpt.errors import MalformedData, UnsupportedFeature
from ckpt.layout.box import Box
from ckpt.layout.spec import ITEMSIZE
from ckpt.runtime.staging import as_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from ckpt.convert.opened import Builder
    from ckpt.layout.spec import TensorSpec
    from ckpt.store.base import Store

ELEMENTS = 1 << 17
"""Elements that are put together at once; each costs some 40 bytes of memory."""
WINDOW = 1 << 20
"""Bytes of the file that are read at once for it."""
PLAIN_OBJECTS = ("argparse.Namespace", "types.SimpleNamespace")
"""Classes whose objects are nothing but their attributes."""
MAX_LOADED = 64 << 20
"""Bytes of tensors among plain values that are taken into memory."""


def add_stored(builder: Builder, spec: TensorSpec, box: Box, stored: Stored, store: Store) -> None:
    """Say where a box of a tensor is, however it lies there.

    Raises:
        MalformedData: the file's tensor is no such box.
    """
    if stored.shape != box.sizes or stored.dtype != spec.dtype:
        raise MalformedData(f"{spec} {box}: {stored.key!r} has {stored.dtype}{list(stored.shape)}")
    if stored.is_contiguous:
        builder.add(spec, box, stored.key, stored.start)
        return
    for offsets, slab in _slabs(stored, (0,) * box.ndim):
        part = Box(tuple(a + b for a, b in zip(box.offsets, offsets, strict=True)), slab.shape)
        if slab.is_contiguous:
            builder.add(spec, part, slab.key, slab.start)
        else:
            builder.add_virtual(spec, part, Gathered(store, slab))


def _slabs(stored: Stored, offsets: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Stored]]:
    """Yield parts of at most :data:`ELEMENTS`, cut as the tensor lies in the file, so that none is read for another's
    sake.
    """
    if stored.volume <= ELEMENTS:
        yield offsets, stored
        return
    dim = max((d for d, size in enumerate(stored.shape) if size > 1), key=lambda d: stored.strides[d])
    rows = max(1, stored.shape[dim] * ELEMENTS // stored.volume)
    for at in range(0, stored.shape[dim], rows):
        size = min(rows, stored.shape[dim] - at)
        shape = (*stored.shape[:dim], size, *stored.shape[dim + 1 :])
        start = stored.start + at * stored.strides[dim] * ITEMSIZE[stored.dtype]
        here = (*offsets[:dim], at, *offsets[dim + 1 :])
        yield from _slabs(replace(stored, shape=shape, start=start), here)


Place = tuple[str, tuple[int, ...], tuple[int, ...], str, int]
"""The fields of a :class:`~ckpt.convert.torchfile.file.Stored`."""


class Gathered:
    """The bytes of a tensor row by row, each part read from the file when it is asked for: ``gathered[start:stop]``."""

    def __init__(self, store: Store, stored: Stored) -> None:
        self._store, self._stored = store, stored
        self._width = ITEMSIZE[stored.dtype]

    @classmethod
    def of(cls, store: Store, row: Place) -> Gathered:
        """Return it in another process, from :attr:`row` there."""
        return cls(store, Stored(*row))

    @property
    def row(self) -> Place:
        """What another process needs to know."""
        stored = self._stored
        return stored.dtype, stored.shape, stored.strides, stored.key, stored.start

    def __len__(self) -> int:
        return self._stored.nbytes

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(len(self))
        first, last = start // self._width, -(-stop // self._width)
        if self._stored.is_contiguous:
            return self._read(first, last - first).tobytes()[start - first * self._width :][: max(0, stop - start)]
        blocks = (self._block(at, min(at + ELEMENTS, last)) for at in range(first, last, ELEMENTS))
        return b"".join(blocks)[start - first * self._width :][: max(0, stop - start)]

    def _block(self, first: int, last: int) -> bytes:
        places = self._places(first, last)
        order = np.argsort(places, kind="stable")
        ascending = places[order]
        found = np.empty((last - first, self._width), np.uint8)
        at = 0
        while at < len(order):
            low = int(ascending[at])
            end = int(np.searchsorted(ascending, low + WINDOW // self._width))
            count = int(ascending[end - 1]) + 1 - low
            found[order[at:end]] = self._read(low, count)[ascending[at:end] - low]
            at = end
        return found.tobytes()

    def _places(self, first: int, last: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the element of the file at which each element ``[first, last)``, counted row by row, stands."""
        left = np.arange(first, last, dtype=np.int64)
        places = np.zeros(last - first, np.int64)
        for size, stride in zip(reversed(self._stored.shape), reversed(self._stored.strides), strict=True):
            left, here = np.divmod(left, size)
            places += here * stride
        return places

    def _read(self, first: int, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        start = self._stored.start + first * self._width
        data = self._store.get(self._stored.key, start, count * self._width)
        if len(data) != count * self._width:
            raise MalformedData(
                f"{self._stored.key!r} in {self._store.url}: {len(data)} bytes at {start}, expected "
                f"{count * self._width}"
            )
        return np.frombuffer(data, np.uint8).reshape(count, self._width)


def equal_bytes(store: Store, one: Stored, other: Stored) -> bool:
    """Have two tensors of one dtype and shape the same elements, bit for bit?"""
    sides = Gathered(store, one), Gathered(store, other)
    return all(sides[0][at : at + WINDOW] == sides[1][at : at + WINDOW] for at in range(0, one.nbytes, WINDOW))


def load_stored(store: Store, stored: Stored) -> torch.Tensor:
    """Return a tensor in memory, row by row.

    Raises:
        MalformedData: the file has fewer bytes.
    """
    return as_tensor(memoryview(bytearray(Gathered(store, stored)[:])), stored.dtype, stored.shape)


def loaded(store: Store, tree: Any, limit: int = MAX_LOADED) -> Any:
    """Return a tree with real tensors where ``Stored`` stood; namespaces become ``dict``.

    Raises:
        UnsupportedFeature: they have more than ``limit`` bytes together, or the tree has an
            :class:`~ckpt.convert.torchfile.file.Inert`, which no tree of ours can have.
    """
    room = [limit]

    def visit(value: Any) -> Any:
        if isinstance(value, Stored):
            room[0] -= value.nbytes
            if room[0] < 0:
                raise UnsupportedFeature(f"tensors of more than {limit} bytes among plain values")
            return load_stored(store, value)
        if isinstance(value, Inert) and value.name in PLAIN_OBJECTS:
            return visit(value.attributes)
        if isinstance(value, Inert):
            raise UnsupportedFeature(f"an object of the class {value.name}")
        if isinstance(value, dict):
            return {key: visit(one) for key, one in value.items()}
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(visit(one) for one in value)
        return value

    return visit(tree)
