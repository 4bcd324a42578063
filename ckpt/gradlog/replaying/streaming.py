"""Reading a whole record once, a few MiB at a time: its digest is proved, and those that need something of it get it.

The digest is known at the end only. What is handed out before may be put into memory that nobody uses yet; when
:func:`read_verified` returns, it is what was written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from ckpt.errors import DigestMismatch
from ckpt.format.frames import seal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckpt.gradlog.replaying.opened import Opened

PIECE = 4 << 20
"""Bytes that are read at once, unless a block of a codec has more."""


class Taker(Protocol):
    """Who needs a tensor of a record."""

    def cuts(self, most: int) -> Iterator[int]:
        """Yield, ascending, where the tensor's bytes may be cut; the last is their end. No two are further apart than
        ``most``, unless nothing smaller can be used.
        """

    def take(self, data: memoryview) -> None:
        """Take the next piece. It is good until this returns."""


class Scratch:
    """Memory for the bytes at hand, used for one piece after the other."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(PIECE))

    def of(self, nbytes: int) -> memoryview:
        """Return so many bytes."""
        if nbytes > len(self._memory):
            self._memory = memoryview(b"")  # first, so that never both are held
            self._memory = memoryview(bytearray(nbytes))
        return self._memory[:nbytes]


class Keeping:
    """Keeps a whole tensor; for small ones. ``data``: its bytes."""

    def __init__(self, nbytes: int) -> None:
        self.data = memoryview(bytearray(nbytes))
        self._at = 0

    def cuts(self, most: int) -> Iterator[int]:
        """Yield where it may be cut: anywhere."""
        return _every(self.data.nbytes, most)

    def take(self, data: memoryview) -> None:
        """Keep the next piece."""
        self.data[self._at : self._at + data.nbytes] = data
        self._at += data.nbytes


class _Range(NamedTuple):
    start: int
    stop: int
    taker: Taker | None


def read_verified(one: Opened, takers: Mapping[str, Taker], scratch: Scratch) -> None:
    """Read a record from end to end.

    Args:
        one: the record. What was read of it to open it is not read again.
        takers: name of a tensor -> who needs it.
        scratch: memory, for any number of records one after the other.

    Raises:
        DigestMismatch: the record is not what was written.
        StoreError: the store does not answer.
        MalformedData: takers', of their tensor.
    """
    running = seal(one.place.step, one.place.nbytes)
    for batch in _batches(one, takers):
        start, stop = batch[0].start, batch[-1].stop
        data = one.kept(start, stop)
        if data is None:
            data = scratch.of(stop - start)
            one.read_into(start, data)
        running.add(data)
        for part in batch:
            if part.taker is not None:
                part.taker.take(data[part.start - start : part.stop - start])
    if running.raw() != one.place.digest:
        raise DigestMismatch(f"{one.where} is not what was written")


def _batches(one: Opened, takers: Mapping[str, Taker]) -> Iterator[list[_Range]]:
    """Yield what is read at once: ranges one behind the other, and what was read already for itself."""
    batch: list[_Range] = []
    for part in _ranges(one, takers):
        known = one.kept(part.start, part.stop) is not None
        if batch and (known or part.stop - batch[0].start > PIECE):
            yield batch
            batch = []
        batch.append(part)
        if known:
            yield batch
            batch = []
    if batch:
        yield batch


def _ranges(one: Opened, takers: Mapping[str, Taker]) -> Iterator[_Range]:
    spans = one.spans()
    yield _Range(0, spans[0][1], None)
    for name, start, stop in spans:
        taker = takers.get(name)
        at = start
        for end in _every(stop - start, PIECE) if taker is None else taker.cuts(PIECE):
            yield _Range(at, start + end, taker)
            at = start + end


def _every(nbytes: int, most: int) -> Iterator[int]:
    yield from range(most, nbytes, most)
    if nbytes:
        yield nbytes
