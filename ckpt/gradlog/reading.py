"""Finding the sound records of a rank's log, and reading them: the longest run of steps without a gap.

A file of a log may end in the middle of a record: its writer was killed, and the log is that much shorter. A record
that is not what was written although others come after it is damage, and is named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ckpt.errors import DigestMismatch, MalformedData, MissingChunk, StoreError
from ckpt.format.frames import HEADER, parse_frame, seal
from ckpt.gradlog.lineage import log_key
from ckpt.gradlog.log import RANK_HEAD
from ckpt.gradlog.record import VERSION, RankHead, Record, Tensors, decode, decode_record
from ckpt.gradlog.segments import SUFFIX, rank_prefix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt.store.base import Store

PIECE = 8 << 20
"""Bytes that are read at once where a record is only looked at."""


class Place(NamedTuple):
    """Where the payload of a record is."""

    step: int
    key: str
    start: int
    nbytes: int
    digest: bytes


class Scan(msgspec.Struct):
    """What one rank's part of a log holds. ``last``: the end of the run of sound records from ``first`` on (``first -
    1``: none). ``trouble``: why it ends there although there is more; empty if that is all there is. ``torn``: why the
    last record was left out, if one was.
    """

    rank: int
    first: int
    last: int
    trouble: str = ""
    torn: str = ""
    nbytes: int = 0


def read_rank_head(store: Store, number: int, rank: int) -> RankHead:
    """Return what a rank says of its part of a log.

    Raises:
        MissingChunk: nothing.
        MalformedData: what this release cannot read.
    """
    key = f"{rank_prefix(log_key(number), rank)}/{RANK_HEAD}"
    if store.size(key) is None:
        raise MissingChunk(f"{key} is not there: rank {rank} has no part in log {number}")
    head = decode(store.get(key), RankHead, key)
    if head.format != VERSION or head.rank != rank:
        raise MalformedData(f"{key}: of version {head.format} and rank {head.rank}, expected {VERSION} and {rank}")
    return head


def files_of(store: Store, number: int, rank: int) -> list[tuple[int, str]]:
    """Return (first step, key) of the files of a rank's part, in order."""
    prefix = rank_prefix(log_key(number), rank)
    names = [name for name in store.children(prefix) if name.endswith(SUFFIX)]
    steps = [(name.removesuffix(SUFFIX), name) for name in names]
    return sorted((int(step), f"{prefix}/{name}") for step, name in steps if step.isascii() and step.isdigit())


def places_in(store: Store, key: str) -> Iterator[Place | str]:
    """Yield the records of a file by their headers; a file that ends too early ends in a text that says where."""
    size = store.size(key) or 0
    at = 0
    while at < size:
        try:
            frame = parse_frame(store.get(key, at, HEADER), at, key)
        except MalformedData as error:
            yield str(error)
            return
        if frame.start + frame.nbytes > size:
            yield f"{key}: the record of step {frame.step} is cut off at byte {size}"
            return
        yield Place(frame.step, key, frame.start, frame.nbytes, frame.digest)
        at = frame.end


def scan(store: Store, number: int, rank: int, first: int, last: int | None) -> Scan:
    """Look at every record of a rank from step ``first`` to ``last`` (None: to the end), digests included.

    Raises:
        StoreError: the store does not answer.
    """
    found = Scan(rank, first, first - 1)
    files = files_of(store, number, rank)
    for i, (_, key) in enumerate(files):
        if i + 1 < len(files) and files[i + 1][0] <= first:
            continue
        for place in places_in(store, key):
            if isinstance(place, str):
                if i + 1 == len(files):
                    found.torn = place
                else:
                    found.trouble = place
                    return found
                continue
            if place.step < first:
                continue
            if last is not None and place.step > last:
                return found
            if place.step != found.last + 1:
                found.trouble = f"{key}: behind step {found.last} comes step {place.step}: a gap"
                return found
            trouble = damage_of(store, place)
            if trouble:
                is_end = i + 1 == len(files) and place.start + place.nbytes + 8 > (store.size(key) or 0)
                if is_end:
                    found.torn = trouble
                else:
                    found.trouble = trouble
                return found
            found.last = place.step
            found.nbytes += place.nbytes
    return found


def damage_of(store: Store, place: Place) -> str:
    """Return what is wrong with the bytes of a record; empty if nothing is."""
    running = seal(place.step, place.nbytes)
    for at in range(0, place.nbytes, PIECE):
        data = store.get(place.key, place.start + at, min(PIECE, place.nbytes - at))
        running.add(data)
    if running.raw() != place.digest:
        return f"{place.key}: the record of step {place.step} is not what was written (its digest differs)"
    return ""


class RankReader:
    """Reads the records of one rank of one log in order."""

    def __init__(self, store: Store, number: int, rank: int, first: int) -> None:
        self.store, self.number, self.rank = store, number, rank
        self._places = self._walk(first)
        self.bytes_read = 0

    def _walk(self, first: int) -> Iterator[Place]:
        files = files_of(self.store, self.number, self.rank)
        for i, (_, key) in enumerate(files):
            if i + 1 < len(files) and files[i + 1][0] <= first:
                continue
            for place in places_in(self.store, key):
                if not isinstance(place, str) and place.step >= first:
                    yield place

    def read(self, step: int) -> tuple[Record, Tensors]:
        """Return the record of a step; steps come in ascending order.

        Raises:
            MissingChunk: there is none.
            DigestMismatch, MalformedData: it is not what was written.
        """
        for place in self._places:
            if place.step < step:
                continue
            if place.step > step:
                break
            payload = memoryview(bytearray(place.nbytes))
            if self.store.read_into(place.key, place.start, payload) != place.nbytes:
                raise StoreError(f"{place.key}: shorter than it was a moment ago", place.key)
            running = seal(step, place.nbytes)
            running.add(payload)
            if running.raw() != place.digest:
                raise DigestMismatch(f"{place.key}: the record of step {step} is not what was written")
            self.bytes_read += place.nbytes
            record, tensors = decode_record(payload, place.key)
            if (record.step, record.rank) != (step, self.rank):
                raise MalformedData(f"{place.key}: a record of step {record.step} and rank {record.rank}")
            return record, tensors
        raise MissingChunk(f"log {self.number} of rank {self.rank} has no record of step {step}")
