"""Tensors in files of ``torch.save``, for readers: as boxes of a checkpoint, or small ones as they are.

A tensor that does not lie row by row in its file (a transposed weight, a slice, one that repeats its elements) is given
to the planner as objects that do, parts of it of bounded size, each put together when it is read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ckpt.convert.torchfile.file import Inert, Stored
from ckpt.errors import MalformedData, UnsupportedFeature
from ckpt.layout.box import Box, boxes_of_range
from ckpt.layout.spec import ITEMSIZE
from ckpt.runtime.reading import GAP_BYTES
from ckpt.runtime.staging import as_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from ckpt.convert.opened import Builder
    from ckpt.layout.spec import TensorSpec
    from ckpt.store.base import Store

ELEMENTS = 1 << 17
"""Elements that are put together at once."""
WINDOW = 1 << 20
"""Bytes of the file that are read at once for it, those between included."""
ROWS_BYTES = 8 << 20
"""Bytes of the rows of a tensor from which a part is made: what is written at once with the least memory. A part that
went through all rows would be read anew for each of them.
"""
RUN_BYTES, MORE_ROWS = 4 << 10, 4
"""Rows are so many that the file has this many bytes of each part together, since fewer take as long to read; at most
this many times as many rows for it.
"""
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
    for offsets, slab in _parts(stored, (0,) * box.ndim):
        part = Box(tuple(a + b for a, b in zip(box.offsets, offsets, strict=True)), slab.shape)
        if slab.is_contiguous:
            builder.add(spec, part, slab.key, slab.start)
        else:
            builder.add_virtual(spec, part, Gathered(store, slab))


def _parts(stored: Stored, offsets: tuple[int, ...], dim: int = 0) -> Iterator[tuple[tuple[int, ...], Stored]]:
    """Yield parts of a few rows, since rows are what is asked for, and each as it lies in the file."""
    while dim < len(stored.shape) and stored.shape[dim] == 1:
        dim += 1
    if stored.nbytes <= ROWS_BYTES or dim == len(stored.shape):
        yield from _slabs(stored, offsets)
        return
    size, step = stored.shape[dim], stored.strides[dim] * ITEMSIZE[stored.dtype]
    fitting = max(1, size * ROWS_BYTES // stored.nbytes)
    rows = max(fitting, min(-(-RUN_BYTES // step), fitting * MORE_ROWS)) if step else fitting
    for at, part in _cut(stored, dim, rows):
        here = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        yield from _parts(part, here, dim + 1) if rows == 1 else _slabs(part, here)


def _slabs(stored: Stored, offsets: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Stored]]:
    """Yield parts of at most :data:`ELEMENTS`, cut as the tensor lies in the file, so that none is read for another's
    sake.
    """
    if stored.volume <= ELEMENTS:
        yield offsets, stored
        return
    dim = max((d for d, size in enumerate(stored.shape) if size > 1), key=lambda d: stored.strides[d])
    for at, part in _cut(stored, dim, max(1, stored.shape[dim] * ELEMENTS // stored.volume)):
        yield from _slabs(part, (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :]))


def _cut(stored: Stored, dim: int, rows: int) -> Iterator[tuple[int, Stored]]:
    """Yield (first, part) of so many along a dimension."""
    for at in range(0, stored.shape[dim], rows):
        shape = (*stored.shape[:dim], min(rows, stored.shape[dim] - at), *stored.shape[dim + 1 :])
        yield at, _within(stored, (*(0,) * dim, at, *(0,) * (len(shape) - dim - 1)), shape)


def _within(stored: Stored, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Stored:
    first = sum(at * step for at, step in zip(offsets, stored.strides, strict=True))
    return replace(stored, shape=shape, start=stored.start + first * ITEMSIZE[stored.dtype])


_Items = np.ndarray[Any, np.dtype[Any]]
_ITEMS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""What is copied for elements of so many bytes, bit for bit."""
Place = tuple[str, tuple[int, ...], tuple[int, ...], str, int]
"""The fields of a :class:`~ckpt.convert.torchfile.file.Stored`."""


class Gathered:
    """The bytes of a tensor row by row, each part read from the file when it is asked for: ``gathered[start:stop]``."""

    def __init__(self, store: Store, stored: Stored) -> None:
        self._store, self._stored = store, stored
        self._width = ITEMSIZE[stored.dtype]
        # A request of a disk costs little; one of a store that is far away, as much as many bytes.
        self._gap = GAP_BYTES if hasattr(store, "root") else WINDOW

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
        stop = max(start, stop)
        first, last = start // self._width, -(-stop // self._width)
        if self._stored.is_contiguous:
            return self._read(first, last - first).tobytes()[start - first * self._width :][: stop - start]
        found: _Items = np.empty(last - first, _ITEMS[self._width])
        at = 0
        for box in boxes_of_range(self._stored.shape, first, last):
            self._fill(_within(self._stored, box.offsets, box.sizes), found[at : at + box.volume].reshape(box.sizes))
            at += box.volume
        return found.tobytes()[start - first * self._width :][: stop - start]

    def _fill(self, part: Stored, target: _Items) -> None:
        """Read a part into ``target``, of its shape."""
        long = [step for n, step in zip(part.shape, part.strides, strict=True) if n > 1]
        order = sorted(range(len(long)), key=lambda d: -long[d])
        lines = target[(*(0 if n == 1 else slice(None) for n in part.shape), ...)]
        first = (part.start - self._stored.start) // self._width
        self._fill_from(first, [long[d] for d in order], lines.transpose(order))

    def _fill_from(self, first: int, strides: list[int], target: _Items) -> None:
        """Read elements from the file's ``first`` on; ``strides`` descend, as ``target``'s dimensions do."""
        spans = [1]  # elements of the file that the last, the last two, … dimensions go over
        for size, step in zip(reversed(target.shape), reversed(strides), strict=True):
            spans.append(spans[-1] + (size - 1) * step)
        whole, inner = spans[-1], spans[-2] if strides else 1
        if strides and (inner * self._width > WINDOW or (strides[0] - inner) * self._width > self._gap):
            for n in range(len(target)):
                self._fill_from(first + n * strides[0], strides[1:], target[n, ...])
        elif whole * self._width > WINDOW:
            together = max(1, 1 + (WINDOW // self._width - inner) // strides[0])
            for n in range(0, len(target), together):
                self._fill_from(first + n * strides[0], strides, target[n : n + together])
        else:
            read = self._read(first, whole).reshape(-1).view(target.dtype)
            target[...] = as_strided(read, target.shape, [step * self._width for step in strides])

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
