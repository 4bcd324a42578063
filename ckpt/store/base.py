"""The store contract: a flat map from key to bytes, as little as a checkpoint needs, so that any backend can give it.

Keys are relative, ``/``-separated, without empty, ``.`` or ``..`` parts. Every method may raise a
:class:`~ckpt.errors.StoreError`; a backend maps all of its vendor's errors to that tree at one seam.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckpt.store.blocks import Blocks

Buffer = bytes | bytearray | memoryview

_PART = re.compile(r"[^/\0]+")


def check_key(key: str) -> str:
    """Return ``key`` if it is well-formed, so that no name read from a file leaves the root.

    Raises:
        ConfigError: empty, absolute, or with an empty, ``.`` or ``..`` part.
    """
    parts = key.split("/")
    if not all(_PART.fullmatch(part) and part not in (".", "..") for part in parts):
        raise ConfigError(f"key {key!r} is not a relative path without '.', '..' or empty parts")
    return key


def check_head(head: Buffer, expected: int, key: str) -> Buffer:
    """Return ``head`` if it has the length that the writer of ``key`` was opened with.

    Raises:
        ConfigError: another length; the object would be cut wrongly.
    """
    if len(head) != expected:
        raise ConfigError(f"head of {len(head)} bytes for {key!r}, expected {expected}")
    return head


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a listing says of an object. ``modified``: when it was last changed, in seconds since the epoch; None if the
    store does not tell.
    """

    key: str
    nbytes: int
    modified: float | None = field(default=None, compare=False)


@runtime_checkable
class ObjectWriter(Protocol):
    """An object being written. It appears under its key at :meth:`finish`, whole and durable, or never.

    Use as a context manager: leaving the block without ``finish`` (an error) removes what was written. A writer may
    store in the background; what fails there is raised by the next ``write`` or by ``finish``.
    """

    def write(self, data: Buffer) -> None:
        """Append bytes. On return the caller may change ``data``: it is stored, or copied to the writer's blocks.

        Waits while all blocks are in use: that is the back-pressure of a save.
        """

    def finish(self, head: Buffer = b"") -> None:
        """Make the object visible and durable (file and directory synced) before returning.

        ``head``: the first bytes of the object, exactly as many as the writer was opened with. They come last because
        a pack's header tells the places of chunks whose encoded sizes nobody knows before.

        Raises:
            ConfigError: ``head`` has another length.
        """

    def __enter__(self) -> ObjectWriter: ...

    def __exit__(self, *exc: object) -> None: ...


@runtime_checkable
class WatchedWriter(Protocol):
    """A writer that stores in the background, and says so: who waits in ``finish`` may be waited for himself.

    ``on_part``: called before bytes leave, with how many, by a thread of the writer; and with 0 by the caller's thread
    while that waits for the writer's. What it raises ends the writing.
    """

    on_part: Callable[[int], None] | None


@runtime_checkable
class Store(Protocol):
    """One backend. Safe to use from several processes and threads at once."""

    url: str
    """Where it is, for messages."""

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> None:
        """Store ``data`` durably and atomically. Not idempotent without ``overwrite``.

        Raises:
            ObjectExists: the key exists and ``overwrite`` is false; exactly one of several racing puts succeeds.
        """

    def writer(self, key: str, *, head: int = 0, size: int = 0, blocks: Blocks | None = None) -> ObjectWriter:
        """Open a new object for streaming. Keys of streamed objects are unique by construction (attempt id).

        Args:
            key: name of the object.
            head: bytes at the front that :meth:`ObjectWriter.finish` will bring.
            size: about how many bytes it will have, ``head`` included (a hint for part sizes and preallocation; 0: not
                known). More or fewer may be written.
            blocks: host memory that the writer may hold; a small pool of its own if None. Whoever passes blocks shares
                them between all writers that are open at once.
        """

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """Return ``nbytes`` bytes from ``start`` (all to the end if None). Idempotent.

        Raises:
            ObjectNotFound: no such key. A range past the end is no error: fewer bytes come back.
            StoreError: what is there is no object (a folder, a FIFO); never blocks on it.
        """

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``start``; return how many bytes there were (fewer only at the end). Idempotent."""

    def size(self, key: str) -> int | None:
        """Return the object's size in bytes, or None if nothing has this name. An error is never "none"."""

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield every object whose key starts with ``prefix`` + ``/``, in no particular order; temporary files too."""

    def children(self, prefix: str) -> list[str]:
        """Return the names directly below ``prefix`` (folders and objects), unsorted; empty if there are none."""

    def delete(self, key: str) -> None:
        """Remove an object; no error if it is gone already."""


class Appender(Protocol):
    """An object that grows. What was appended is durable when the call returns; what a crash cuts off is at the end."""

    def append(self, data: Sequence[Buffer]) -> None:
        """Append buffers, one behind the other, and make them durable."""

    def close(self) -> None:
        """Let go of it."""


@runtime_checkable
class Appends(Protocol):
    """A store whose objects can grow in place."""

    def appender(self, key: str) -> Appender:
        """Begin an object that is to grow.

        Raises:
            ObjectExists: the key exists.
        """


@runtime_checkable
class HasFolders(Protocol):
    """A store in which folders are things of their own, and stay when the last object in one is deleted."""

    def remove_folder(self, prefix: str) -> None:
        """Remove a folder if it is empty; no error if it is not, or is gone already."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """An upload that was begun and neither finished nor aborted: invisible as an object, and paid for.

    ``age_s``: seconds since it was begun, by the store's clock. ``nbytes``: bytes that it holds.
    """

    key: str
    upload_id: str
    age_s: float
    nbytes: int


@runtime_checkable
class CanGiveUp(Protocol):
    """A writer whose ``write`` may take long for reasons of its own, and can be told that nobody needs the rest."""

    def give_up(self) -> None:
        """Let ``write`` in another thread end soon, by an error."""


@runtime_checkable
class HasOrphans(Protocol):
    """A store in which a writer that dies leaves something that :meth:`Store.walk` does not show."""

    def orphans(self, prefix: str = "", older_than_s: float = 0.0) -> list[Orphan]:
        """Return the uploads below ``prefix`` that are at least so old; running ones look the same."""

    def abort(self, orphan: Orphan) -> None:
        """Remove what an upload holds; no error if it is gone already. A writer that still runs will fail."""
