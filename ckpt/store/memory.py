"""A store in a dict: the model that other stores are tested against, and a root for tests (``MemoryStore()``)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ckpt.errors import ObjectExists, ObjectNotFound
from ckpt.store.base import Buffer, ObjectInfo, check_head, check_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt.store.blocks import Blocks


class MemoryStore:
    """See :class:`~ckpt.store.base.Store`. ``objects`` may be looked at and damaged by a test."""

    def __init__(self) -> None:
        self.url = "memory"
        self.objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> None:
        """See :class:`~ckpt.store.base.Store`."""
        value = bytes(data)
        with self._lock:
            if check_key(key) in self.objects and not overwrite:
                raise ObjectExists(f"{key!r} exists already in {self.url}", key)
            self.objects[key] = value

    def writer(self, key: str, *, head: int = 0, size: int = 0, blocks: Blocks | None = None) -> MemoryWriter:
        """See :class:`~ckpt.store.base.Store`."""
        return MemoryWriter(self, check_key(key), head)

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """See :class:`~ckpt.store.base.Store`."""
        if key not in self.objects:
            raise ObjectNotFound(f"read {key!r} in {self.url}: no such object", key)
        return self.objects[key][start : None if nbytes is None else start + nbytes]

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """See :class:`~ckpt.store.base.Store`."""
        data = self.get(key, start, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def size(self, key: str) -> int | None:
        """See :class:`~ckpt.store.base.Store`."""
        return len(self.objects[key]) if key in self.objects else None

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """See :class:`~ckpt.store.base.Store`."""
        head = f"{prefix}/" if prefix else ""
        return (ObjectInfo(k, len(v)) for k, v in list(self.objects.items()) if k.startswith(head))

    def children(self, prefix: str) -> list[str]:
        """See :class:`~ckpt.store.base.Store`."""
        skip = len(prefix) + 1 if prefix else 0
        return list({info.key[skip:].split("/")[0] for info in self.walk(prefix)})

    def delete(self, key: str) -> None:
        """See :class:`~ckpt.store.base.Store`."""
        self.objects.pop(key, None)


class MemoryWriter:
    """See :class:`~ckpt.store.base.ObjectWriter`."""

    def __init__(self, store: MemoryStore, key: str, head: int) -> None:
        self.store, self.key, self.head, self.parts = store, key, head, bytearray()

    def write(self, data: Buffer) -> None:
        """Append bytes."""
        self.parts += data

    def finish(self, head: Buffer = b"") -> None:
        """Publish."""
        self.store.objects[self.key] = bytes(check_head(head, self.head, self.key)) + bytes(self.parts)

    def __enter__(self) -> MemoryWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.parts = bytearray()
