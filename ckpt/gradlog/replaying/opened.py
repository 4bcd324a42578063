"""A record of a log whose words were read: its table and its document. Gradients are read by whoever needs them.

A whole record may be larger than the memory of who reads it. What is said here of a record is not proved yet: its
digest is over every byte, see :mod:`ckpt.gradlog.replaying.streaming`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.errors import MalformedData, ReplayError, StoreError
from ckpt.format.pack import parse_header
from ckpt.gradlog.record import DOCUMENT, MAX_DOCUMENT, VERSION, Call, Record, decode

if TYPE_CHECKING:
    from ckpt.repo.log_files import Place
    from ckpt.store.base import Store

FIRST_READ = 64 << 10
"""Bytes of a record that are read at first: nearly always its header is in them, and a small record whole."""
MOST_HEADER = 64 << 20


class Opened:
    """A record whose document was read. ``where``: for messages.

    Args:
        store: where it is.
        place: of it there.
        rank: whose it must be.

    Raises:
        MalformedData: it is no record, or another one.
        StoreError: the store does not answer.
    """

    def __init__(self, store: Store, place: Place, rank: int) -> None:
        self._store, self.place, self.where = store, place, f"{place.key}: the record of step {place.step}"
        head = self.bytes(0, min(FIRST_READ, place.nbytes))
        length = 8 + int.from_bytes(head[:8], "little")
        if place.nbytes < 8 or length > min(place.nbytes, MOST_HEADER):
            raise MalformedData(f"{self.where}: a header of {length} bytes in a record of {place.nbytes}")
        if length > len(head):
            head = self.bytes(0, length)
        self._table = parse_header(bytes(head[:length]), place.nbytes, self.where)
        self._kept = [(0, head if len(head) == place.nbytes else head[:length])]
        start, stop = self.span(DOCUMENT)
        if stop - start > MAX_DOCUMENT:
            raise MalformedData(f"{self.where}: a document of {stop - start} bytes, at most {MAX_DOCUMENT} are read")
        document = self.kept(start, stop)
        if document is None:
            document = self.bytes(start, stop - start)
            self._kept.append((start, document))
        self.record = decode(bytes(document), Record, self.where)
        said = self.record.format, self.record.step, self.record.rank
        if said != (VERSION, place.step, rank):
            raise MalformedData(
                f"{self.where}: of version {said[0]}, step {said[1]} and rank {said[2]}, expected {VERSION}, "
                f"{place.step} and {rank}"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._table

    def span(self, name: str) -> tuple[int, int]:
        """Return where in the payload the bytes of a tensor begin and end.

        Raises:
            MalformedData: there is none of this name.
        """
        if name not in self._table:
            raise MalformedData(f"{self.where}: tensor {name!r} is not there")
        _, _, start, stop = self._table[name]
        return start, stop

    def spans(self) -> list[tuple[str, int, int]]:
        """Return (name, start, stop) of all tensors, in the order in which they lie behind the header, without gaps."""
        return sorted(((n, start, stop) for n, (_, _, start, stop) in self._table.items()), key=lambda one: one[1:])

    def kept(self, start: int, stop: int) -> memoryview | None:
        """Return bytes of the payload if they were read already."""
        for begin, data in self._kept:
            if begin <= start <= stop <= begin + len(data):
                return data[start - begin : stop - begin]
        return None

    def bytes(self, start: int, nbytes: int) -> memoryview:
        """Return bytes of the payload, in memory of their own."""
        data = memoryview(bytearray(nbytes))
        self.read_into(start, data)
        return data

    def read_into(self, start: int, data: memoryview) -> None:
        """Read bytes of the payload."""
        if data.nbytes and self._store.read_into(self.place.key, self.place.start + start, data) != data.nbytes:
            raise StoreError(f"{self.place.key}: shorter than it was a moment ago", self.place.key)


def only_call(one: Opened) -> Call | None:
    """Return what the optimizers did in a step; None if it was skipped.

    Raises:
        ReplayError: they took several steps at once.
    """
    if len(one.record.calls) > 1:
        raise ReplayError(f"{one.where}: {len(one.record.calls)} steps of the optimizers in one record, expected one")
    return one.record.calls[0] if one.record.calls else None
