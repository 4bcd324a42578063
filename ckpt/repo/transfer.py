"""One pack from store to store: streamed in pieces, every chunk checked on the way, the first bad byte named.

A pack travels whole, with chunks that nobody asked for: so it keeps its key, and references to it, digests and sizes
hold without a change. What is asked for is checked; the rest has no digest that the reader knows, and is only carried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.errors import CkptError, DigestMismatch, MalformedData, MissingChunk, is_damage
from ckpt.format.codec import decode
from ckpt.format.digest import digest
from ckpt.format.manifest import BlobEntry, ChunkEntry
from ckpt.format.pack import MAX_HEADER
from ckpt.store.blocks import Blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckpt.format.manifest import PackRef
    from ckpt.layout.spec import TensorSpec
    from ckpt.store.base import Store

    Entry = ChunkEntry | BlobEntry
    Segment = tuple[int, int, "Held | None"]

AHEAD_BYTES = 16 << 20
"""Host memory of each pack that is being written, for what was read and is not stored yet."""
PIECE = 8 << 20
"""Bytes that are read and written at once, unless one chunk is larger."""
GAP = 64 << 10
"""Bytes that are rather read in vain than skipped, where only some chunks are wanted."""


class Held:
    """One chunk or blob in a pack, and whose it is: a tensor's, an object's (its name), or the pack's own header."""

    __slots__ = ("codec", "entry", "owner")

    def __init__(self, entry: Entry, owner: TensorSpec | str | None, codec: str | None = None) -> None:
        self.entry, self.owner, self.codec = entry, owner, codec

    @property
    def start(self) -> int:
        """First byte in the pack."""
        return self.entry.start

    @property
    def stop(self) -> int:
        """Byte behind the last one in the pack."""
        return self.entry.start + self.entry.length

    @property
    def place(self) -> tuple[int, int, str, str]:
        """What makes two entries one: start, stop, codec, digest."""
        return (self.start, self.stop, self.codec or "", self.entry.digest)

    def __str__(self) -> str:
        if isinstance(self.entry, ChunkEntry):
            return f"{self.owner} chunk {self.entry.box}"
        return "header" if self.owner is None else f"object {self.owner!r}"

    def check(self, data: memoryview, where: str) -> None:
        """Raise unless ``data`` are the bytes that were written; ``where`` names pack and store."""
        if self.codec is not None:
            data = decode(data, self.codec, self.entry.nbytes, f"{self} in {where} at {self.start}")
        found = digest(data)
        if found != self.entry.digest:
            raise DigestMismatch(f"{self} in {where} at {self.start}: expected {self.entry.digest}, found {found}")


def header_of(store: Store, pack: PackRef) -> list[Held]:
    """Return what the index says of a pack's header (nothing, where an early release wrote it).

    Raises:
        MalformedData: the length field is not that of a pack of this size.
        StoreError: it cannot be read.
    """
    if not pack.header:
        return []
    length = int.from_bytes(store.get(pack.key, 0, 8), "little")
    if 8 + length > min(pack.nbytes, 8 + MAX_HEADER):
        raise MalformedData(
            f"header of pack {pack.key} in {store.url}: length {length} does not fit a file of {pack.nbytes} bytes"
        )
    return [Held(BlobEntry(pack.header, 0, 0, 8 + length), None)]


def copy_pack(src: Store, dst: Store, pack: PackRef, held: Iterable[Held], moved: Callable[[int], None]) -> None:
    """Copy a pack, whole or not at all.

    Args:
        src: where it is read.
        dst: where it is written under the same key; what is there is replaced.
        pack: its key, size and header's digest.
        held: what must be in it.
        moved: called with the number of bytes after each piece; what it raises stops the copy.

    Raises:
        MissingChunk: the pack ends too early.
        DigestMismatch, MalformedData: a chunk is not what was written; nothing appears under the key.
    """
    where = f"pack {pack.key} of {src.url}"
    reader = _Reader(src, pack.key, where)
    ordered, late = _ordered([*header_of(src, pack), *held])
    for one in late:  # before the first byte is written: these lie inside others, so they are no piece of their own
        one.check(reader.read(one.start, one.stop), where)
    # A pool of its own, so that what is read next comes while this is written; shared, it could starve other packs.
    with dst.writer(pack.key, size=pack.nbytes, blocks=Blocks(AHEAD_BYTES)) as out:
        for start, stop, inside in _pieces(_segments(ordered, pack.nbytes), whole=True):
            data = reader.read(start, stop)
            for one in inside:
                one.check(data[one.start - start : one.stop - start], where)
            out.write(data)
            moved(stop - start)
        out.finish()


def trouble_with(store: Store, pack: PackRef, held: Iterable[Held], moved: Callable[[int], None]) -> str | None:
    """Return what is wrong with a stored pack, read chunk by chunk, or None.

    Args:
        store: where it is.
        pack: its key, size and header's digest.
        held: what must be in it; only this is read.
        moved: called with the number of bytes after each piece.

    Raises:
        StoreError: the store is busy or refuses this user, which says nothing about the pack.
    """
    where = f"pack {pack.key} of {store.url}"
    reader = _Reader(store, pack.key, where)
    try:
        ordered, late = _ordered([*header_of(store, pack), *held])
        for start, stop, inside in _pieces(_segments(ordered, pack.nbytes), whole=False):
            data = reader.read(start, stop)
            for one in inside:
                one.check(data[one.start - start : one.stop - start], where)
            moved(stop - start)
        for one in late:
            one.check(reader.read(one.start, one.stop), where)
    except CkptError as error:
        if not is_damage(error):
            raise
        return str(error)
    return None


class _Reader:
    """Reads into memory of its own, again and again the same, so that a pack of any size takes one piece of it."""

    def __init__(self, store: Store, key: str, where: str) -> None:
        self.store, self.key, self.where = store, key, where
        self.memory = memoryview(bytearray(0))

    def read(self, start: int, stop: int) -> memoryview:
        """Return these bytes, good until the next call.

        Raises:
            MissingChunk: the pack ends before ``stop``.
        """
        nbytes = stop - start
        if nbytes > len(self.memory):
            self.memory = memoryview(bytearray(nbytes))
        data = self.memory[:nbytes]
        got = self.store.read_into(self.key, start, data)
        if got != nbytes:
            raise MissingChunk(f"{self.where}: ends at {start + got}, expected bytes up to {stop}")
        return data


def _ordered(held: Iterable[Held]) -> tuple[list[Held], list[Held]]:
    """Return entries in file order, each place once, and apart those that begin inside another one.

    No save writes the latter, but a file may say anything, and one piece must not grow over many chunks.
    """
    ordered: list[Held] = []
    late = []
    at = 0
    for one in sorted({one.place: one for one in held}.values(), key=lambda one: one.place):
        if one.start < at:
            late.append(one)
        else:
            ordered.append(one)
            at = one.stop
    return ordered, late


def _segments(ordered: Iterable[Held], nbytes: int) -> Iterator[Segment]:
    """Yield the whole pack as chunks and what lies between them."""
    at = 0
    for one in ordered:
        yield from _between(at, one.start)
        yield one.start, one.stop, one
        at = one.stop
    yield from _between(at, nbytes)


def _between(start: int, stop: int) -> Iterator[Segment]:
    for at in range(start, stop, PIECE):
        yield at, min(stop, at + PIECE), None


def _pieces(segments: Iterable[Segment], *, whole: bool) -> Iterator[tuple[int, int, list[Held]]]:
    """Yield what to read at once, with the chunks inside, in file order; of many small chunks one large piece.

    ``whole``: everything; else only chunks, and what lies between two that are near each other.
    """
    start = stop = 0
    inside: list[Held] = []
    for begin, end, one in segments:
        unwanted = one is None and not whole and (not inside or end - begin > GAP)
        if (stop > start or inside) and (unwanted or end - start > PIECE):
            yield start, stop, inside
            start = stop
            inside = []
        if unwanted:
            start = stop = end
            continue
        if start == stop and not inside:
            start = begin
        stop = end
        if one is not None:
            inside.append(one)
    if stop > start or inside:
        yield start, stop, inside
