"""The files of a log, rank by rank: which records they hold, by their headers alone or with every byte looked at.

A file of a log may end in the middle of a record: its writer was killed, and the log is that much shorter. A record
that is not what was written although others come after it is damage, and is named.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ckpt.errors import CkptError, MalformedData, is_damage
from ckpt.format.frames import HEADER, parse_frame, seal
from ckpt.repo.lineage import log_key, read_head
from ckpt.repo.log_joint import Taking
from ckpt.repo.log_words import FIRST, Whose, check_rank_head, check_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpt.repo.lineage import LogHead
    from ckpt.store.base import Store

RANK_HEAD = "head.json"
DIRECTORY = "directory.json.zst"
"""Beside ``log.json``: which rank has logged what (:mod:`ckpt.repo.log_directory`)."""
DIGITS = 12
SUFFIX = ".log"
PIECE = 8 << 20
"""Bytes that are read at once where a record is only looked at."""


class Place(NamedTuple):
    """Where the payload of a record is. ``said``: what it says of the step, if that was looked at."""

    step: int
    key: str
    start: int
    nbytes: int
    digest: bytes
    said: Whose | None = None


TORN, GAP, DAMAGE = "torn", "gap", "damage"


class Trouble(NamedTuple):
    """What is wrong with a rank's part of a log. ``kind``: ``torn`` (the end of a writer that was killed), ``gap``, or
    ``damage``. ``step``: of the record, if its header says so.
    """

    kind: str
    key: str
    step: int | None
    text: str


class Scan(msgspec.Struct):
    """What one rank's part of a log holds. ``last``: the end of the run of sound records from ``first`` on (``first -
    1``: none). ``trouble``: why it ends there although there is more; empty if that is all there is. ``torn``: why the
    last record was left out, if one was. ``taking``: which of the steps it took.
    """

    rank: int
    first: int
    last: int
    trouble: str = ""
    torn: str = ""
    nbytes: int = 0
    taking: Taking = msgspec.field(default_factory=Taking)


class Runs:
    """Steps of sound records, as runs without a gap."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, int]] = []

    def add(self, step: int) -> None:
        """Take note of a sound record; steps ascend."""
        if self.runs and self.runs[-1][1] == step - 1:
            self.runs[-1] = (self.runs[-1][0], step)
        else:
            self.runs.append((step, step))

    def sound_to(self, first: int) -> int:
        """Return the last step of the records without a gap from ``first`` on; ``first - 1`` if there are none."""
        return next((last for start, last in self.runs if start <= first <= last), first - 1)


def rank_prefix(log_key: str, rank: int) -> str:
    """Return the folder of one rank's part of a log."""
    return f"{log_key}/rank{rank:05d}"


def segment_key(log_key: str, rank: int, step: int) -> str:
    """Return the key of the file whose first record is of ``step``."""
    return f"{rank_prefix(log_key, rank)}/{step:0{DIGITS}d}{SUFFIX}"


def ranks_of(store: Store, number: int) -> set[int]:
    """Return the ranks that have a part in a log."""
    names = [name.removeprefix("rank") for name in store.children(log_key(number)) if name.startswith("rank")]
    return {int(name) for name in names if name.isascii() and name.isdigit() and len(name) <= 18}


def files_of(store: Store, number: int, rank: int) -> list[tuple[int, str]]:
    """Return (first step, key) of the files of a rank's part, in order."""
    prefix = rank_prefix(log_key(number), rank)
    names = [name for name in store.children(prefix) if name.endswith(SUFFIX)]
    steps = [(name.removesuffix(SUFFIX), name) for name in names]
    return sorted(
        (int(step), f"{prefix}/{name}") for step, name in steps if step.isascii() and step.isdigit() and len(step) <= 18
    )


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


def look(
    store: Store,
    number: int,
    rank: int,
    first: int | None = None,
    last: int | None = None,
    *,
    whole: bool = True,
    known: Callable[[Place], bool] | None = None,
    near: Callable[[Place], tuple[Store, Place] | None] | None = None,
    run: str | None = None,
) -> Iterator[Place | Trouble]:
    """Yield the sound records of a rank in order, and in between what is wrong; never stops at the first finding.

    Args:
        store: the repository's.
        number: of the log.
        rank: whose part.
        first: the step of the first record that is wanted, and expected; None: whichever is the first.
        last: of the last one; None: to the end.
        whole: look at every byte; else at headers alone, and a record is taken for sound if all of it is there.
        known: whether a record's bytes are known to be sound without a look at them here.
        near: where else a record that is known can be read, at less cost.
        run: of the log: a record that is looked at must be of this run and of ``rank``; None: whosoever it is.

    Raises:
        StoreError: the store does not answer, or a file is one that it will never give (see :func:`is_damage`).
    """
    before = None if first is None else first - 1
    files = files_of(store, number, rank)
    for i, (_, key) in enumerate(files):
        is_last = i + 1 == len(files)
        if first is not None and not is_last and files[i + 1][0] <= first:
            continue
        for place in places_in(store, key):
            if isinstance(place, str):
                yield Trouble(TORN if is_last else DAMAGE, key, None, place)
                continue
            if first is not None and place.step < first:
                continue
            if last is not None and place.step > last:
                return
            if before is not None and place.step != before + 1:
                yield _out_of_order(key, before, place.step)
            damage = foreign = ""
            if whole:
                data, copy = b"", None
                if known is not None and known(place):
                    copy = None if near is None else near(place)
                else:
                    damage, data = _looked_at(store, place)
                if not damage and run is not None:
                    said = _whose(store, place, rank, run, data, copy)
                    foreign = said if isinstance(said, str) else ""
                    place = place if isinstance(said, str) else place._replace(said=said)
            if damage:
                at_end = is_last and place.start + place.nbytes + 8 > (store.size(key) or 0)
                yield Trouble(TORN if at_end else DAMAGE, key, place.step, damage)
            elif foreign:
                yield Trouble(DAMAGE, key, place.step, foreign)
            elif before is None or place.step > before:
                yield place
            before = place.step


def _out_of_order(key: str, before: int, step: int) -> Trouble:
    """Say what is wrong with a record that does not follow the one before it."""
    if step > before:
        return Trouble(GAP, key, step, f"{key}: behind step {before} comes step {step}: a gap")
    if step == before:
        return Trouble(DAMAGE, key, step, f"{key}: the record of step {step} comes twice")
    return Trouble(DAMAGE, key, step, f"{key}: behind step {before} comes step {step} again")


def _whose(
    store: Store, place: Place, rank: int, run: str, data: bytes, copy: tuple[Store, Place] | None
) -> Whose | str:
    """Return what a record says, every byte of which is as it was written; or why it is none of this log."""
    if copy is not None:
        with suppress(CkptError):  # it may have been removed a moment ago
            return check_record(*copy, rank, run)
    try:
        data = data or store.get(place.key, place.start, min(place.nbytes, FIRST))
        return check_record(store, place, rank, run, data)
    except CkptError as error:
        if not is_damage(error):
            raise
        return str(error)


def scan(
    store: Store,
    number: int,
    rank: int,
    first: int,
    last: int | None,
    known: Callable[[Place], bool] | None = None,
    near: Callable[[Place], tuple[Store, Place] | None] | None = None,
) -> Scan:
    """Look at every record of a rank from step ``first`` to ``last`` (None: to the end), digests included.

    Also at what the rank says of its part, without which no record of it can be read.

    ``known``, ``near``: as in :func:`look`.

    Raises:
        StoreError: the store does not answer.
        MalformedData, UnsupportedVersion: ``log.json`` says what this release cannot read.
    """
    found = Scan(rank, first, first - 1)
    head = read_head(store, number)
    if head is not None and files_of(store, number, rank):
        found.trouble = _trouble_of_head(store, head, rank)
        if found.trouble:
            return found
    run = None if head is None else head.run
    for one in look(store, number, rank, first, last, known=known, near=near, run=run):
        if isinstance(one, Trouble):
            if one.kind == TORN:
                found.torn = one.text
            else:
                found.trouble = one.text
            break
        found.last = one.step
        found.nbytes += one.nbytes
        if one.said is not None:
            found.taking.add(one.step, one.said)
    return found


def _trouble_of_head(store: Store, head: LogHead, rank: int) -> str:
    """Return what is wrong with what a rank says of its part; empty if nothing is."""
    key = f"{rank_prefix(log_key(head.number), rank)}/{RANK_HEAD}"
    try:
        check_rank_head(store.get(key), head, rank, key)
    except CkptError as error:
        if not is_damage(error):
            raise
        return f"what rank {rank} says of its part of log {head.number} cannot be read: {error}"
    return ""


def damage_of(store: Store, place: Place) -> str:
    """Return what is wrong with the bytes of a record; empty if nothing is."""
    return _looked_at(store, place)[0]


def _looked_at(store: Store, place: Place) -> tuple[str, bytes]:
    """Return what is wrong with the bytes of a record (empty: nothing), and the first of them, at most a piece."""
    running, first = seal(place.step, place.nbytes), b""
    for at in range(0, place.nbytes, PIECE):
        data = store.get(place.key, place.start + at, min(PIECE, place.nbytes - at))
        first = data if not at else first
        running.add(data)
    if running.raw() != place.digest:
        return f"{place.key}: the record of step {place.step} is not what was written (its digest differs)", first
    return "", first
