"""Counts of what a store was asked for."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.store.forward import Forward, ForwardWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt.store.base import Buffer, ObjectInfo, ObjectWriter, Store
    from ckpt.store.blocks import Blocks

OPERATIONS = ("put", "writer", "write", "finish", "get", "read_into", "size", "walk", "children", "delete")


@dataclass(frozen=True, slots=True)
class Tally:
    """Of one operation: calls, of those the ones that raised, bytes moved by the others, seconds in all of them."""

    calls: int = 0
    errors: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class Metered(Forward):
    """A store that counts its calls, in all threads. ``writer`` is the opening of a stream, ``write`` and ``finish``
    are the rest of it. Bytes are those that were stored, and those that came back.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._lock = threading.Lock()
        self._counts: dict[str, Tally] = {}

    def snapshot(self) -> dict[str, Tally]:
        """Return the counts of all operations until now; later calls do not change them."""
        with self._lock:
            return {name: self._counts.get(name, Tally()) for name in OPERATIONS}

    def reset(self) -> None:
        """Count from zero."""
        with self._lock:
            self._counts.clear()

    @property
    def bytes_read(self) -> int:
        """Bytes that ``get`` and ``read_into`` returned."""
        now = self.snapshot()
        return now["get"].nbytes + now["read_into"].nbytes

    @property
    def bytes_written(self) -> int:
        """Bytes that ``put``, ``write`` and ``finish`` stored."""
        now = self.snapshot()
        return now["put"].nbytes + now["write"].nbytes + now["finish"].nbytes

    def add(self, name: str, seconds: float, nbytes: int = 0, *, calls: int = 1, errors: int = 0) -> None:
        """Add to the counts of an operation."""
        with self._lock:
            old = self._counts.get(name, Tally())
            self._counts[name] = Tally(
                old.calls + calls, old.errors + errors, old.nbytes + nbytes, old.seconds + seconds
            )

    @contextmanager
    def counted(self, name: str, calls: int = 1) -> Iterator[list[int]]:
        """Count the body as a call; it appends the bytes that it moved to the list."""
        moved: list[int] = []
        began = time.perf_counter()
        try:
            yield moved
        except BaseException:
            self.add(name, time.perf_counter() - began, calls=calls, errors=1)
            raise
        self.add(name, time.perf_counter() - began, sum(moved), calls=calls)

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> None:
        """See :class:`~ckpt.store.base.Store`."""
        with self.counted("put") as moved:
            self.inner.put(key, data, overwrite=overwrite)
            moved.append(memoryview(data).nbytes)

    def writer(self, key: str, *, head: int = 0, size: int = 0, blocks: Blocks | None = None) -> ObjectWriter:
        """See :class:`~ckpt.store.base.Store`."""
        with self.counted("writer"):
            return MeteredWriter(self.inner.writer(key, head=head, size=size, blocks=blocks), self)

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """See :class:`~ckpt.store.base.Store`."""
        with self.counted("get") as moved:
            data = self.inner.get(key, start, nbytes)
            moved.append(len(data))
            return data

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """See :class:`~ckpt.store.base.Store`."""
        with self.counted("read_into") as moved:
            count = self.inner.read_into(key, start, buffer)
            moved.append(count)
            return count

    def size(self, key: str) -> int | None:
        """See :class:`~ckpt.store.base.Store`."""
        with self.counted("size"):
            return self.inner.size(key)

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """See :class:`~ckpt.store.base.Store`. The time of a listing is that between its first and last object."""
        self.add("walk", 0.0)
        with self.counted("walk", calls=0):
            found = iter(self.inner.walk(prefix))
        while True:
            with self.counted("walk", calls=0):
                info = next(found, None)
            if info is None:
                return
            yield info

    def children(self, prefix: str) -> list[str]:
        """See :class:`~ckpt.store.base.Store`."""
        with self.counted("children"):
            return self.inner.children(prefix)

    def delete(self, key: str) -> None:
        """See :class:`~ckpt.store.base.Store`."""
        with self.counted("delete"):
            self.inner.delete(key)


class MeteredWriter(ForwardWriter):
    """See :class:`~ckpt.store.base.ObjectWriter`."""

    def __init__(self, writer: ObjectWriter, meter: Metered) -> None:
        super().__init__(writer)
        self._meter = meter

    def write(self, data: Buffer) -> None:
        """Append bytes."""
        with self._meter.counted("write") as moved:
            self.inner.write(data)
            moved.append(memoryview(data).nbytes)

    def finish(self, head: Buffer = b"") -> None:
        """Publish."""
        with self._meter.counted("finish") as moved:
            self.inner.finish(head)
            moved.append(memoryview(head).nbytes)
