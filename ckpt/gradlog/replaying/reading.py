"""Reading the records of a rank's log: what its head says, and one record after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ckpt.errors import MalformedData, MissingChunk, ObjectNotFound
from ckpt.gradlog.record import VERSION, RankHead, decode
from ckpt.repo.lineage import log_key, read_head
from ckpt.repo.log_files import RANK_HEAD, Place, files_of, places_in, rank_prefix
from ckpt.repo.log_words import check_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpt.gradlog.copies.near import Near
    from ckpt.gradlog.replaying.opened import Opened
    from ckpt.store.base import Store

T = TypeVar("T", bound="Opened")


def run_of(store: Store, number: int) -> str:
    """Return what ``log.json`` says of a log's run, which its heads and records must say too.

    Raises:
        MalformedData, UnsupportedVersion: it says what this release cannot read.
    """
    head = read_head(store, number)
    return "" if head is None else head.run


def read_rank_head(store: Store, number: int, rank: int, run: str | None = None) -> RankHead:
    """Return what a rank says of its part of a log. ``run``: of the log; None: ``log.json`` is asked.

    Raises:
        MissingChunk: nothing.
        MalformedData: what this release cannot read, or what is another log's.
    """
    key = f"{rank_prefix(log_key(number), rank)}/{RANK_HEAD}"
    try:
        data = store.get(key)
    except ObjectNotFound as error:
        raise MissingChunk(f"{key} is not there: rank {rank} has no part in log {number}") from error
    head = decode(data, RankHead, key)
    if head.format != VERSION or head.rank != rank:
        raise MalformedData(f"{key}: of version {head.format} and rank {head.rank}, expected {VERSION} and {rank}")
    check_run(head.run, run_of(store, number) if run is None else run, key)
    return head


class RankReader:
    """Reads the records of one rank of one log in order.

    Args:
        store: the repository's.
        number: of the log.
        rank: whose records.
        first: the first step that will be asked for.
        near: records that need not be read from the store, but for their headers.
        run: of the log; None: ``log.json`` is asked.
    """

    def __init__(
        self, store: Store, number: int, rank: int, first: int, near: Near | None = None, run: str | None = None
    ) -> None:
        self.store, self.number, self.rank, self.near = store, number, rank, near
        self._places = self._walk(first)
        self._run = run
        self.bytes_read = self.bytes_from_memory = 0

    def _walk(self, first: int) -> Iterator[Place]:
        files = files_of(self.store, self.number, self.rank)
        for i, (_, key) in enumerate(files):
            if i + 1 < len(files) and files[i + 1][0] <= first:
                continue
            for place in places_in(self.store, key):
                if not isinstance(place, str) and place.step >= first:
                    yield place

    def open(self, step: int, kind: Callable[[Store, Place, int], T]) -> T:
        """Return the record of a step as ``kind`` makes it of store, place and rank; steps come in ascending order.

        Raises:
            MissingChunk: there is none.
            MalformedData: it is none, or another one.
        """
        if self._run is None:
            self._run = run_of(self.store, self.number)
        store, place = self._find(step, self._run)
        if self.near is not None and self.near.memory is not None and store is self.near.memory.store:
            self.bytes_from_memory += place.nbytes
        else:
            self.bytes_read += place.nbytes
        found = kind(store, place, self.rank)
        check_run(found.record.run, self._run, found.where)
        return found

    def _find(self, step: int, run: str) -> tuple[Store, Place]:
        """Return where the record of a step is, and in which store."""
        for place in self._places:
            if place.step > step:
                break
            if place.step == step:
                found = None if self.near is None else self.near.find(run, self.rank, place)
                return (self.store, place) if found is None else found
        raise MissingChunk(f"log {self.number} of rank {self.rank} has no record of step {step}")
