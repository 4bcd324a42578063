"""Reading the records of a rank's log: what its head says, and one record after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.errors import DigestMismatch, MalformedData, MissingChunk, StoreError
from ckpt.format.frames import seal
from ckpt.gradlog.record import VERSION, RankHead, Record, Tensors, decode, decode_record
from ckpt.repo.lineage import log_key
from ckpt.repo.log_files import RANK_HEAD, Place, files_of, places_in, rank_prefix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt.store.base import Store


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
