"""Copying gradient logs from store to store, with the checkpoints that they lead on from.

A log is copied file by file up to its last whole record, each record checked on the way; what a rank and the log say of
themselves goes along, ``log.json`` last, so that nothing leads to a log of which a part is missing. Logs are known by
numbers: one that means another log at the destination is never mixed with it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

from ckpt.errors import CheckpointExists, DigestMismatch, MalformedData, ObjectNotFound
from ckpt.format.frames import HEADER, seal
from ckpt.repo.lineage import HEAD, MAX_HEAD, commits_of, log_key, ways
from ckpt.repo.log_files import DIRECTORY, PIECE, RANK_HEAD, damage_of, files_of, places_in, rank_prefix, ranks_of
from ckpt.repo.transfer import AHEAD_BYTES
from ckpt.store.blocks import Blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckpt.repo.copying import CopyReport
    from ckpt.repo.log_files import Place
    from ckpt.store.base import Store

MAX_RANK_HEAD = 1 << 30


@dataclass(slots=True)
class LogFile:
    """A file to be copied: its first ``nbytes`` bytes, which are whole records."""

    key: str
    nbytes: int


@dataclass(slots=True)
class LogToCopy:
    """``said``: its ``log.json``, to the byte. ``heads``: keys of its directory and of what its ranks say."""

    number: int
    said: bytes
    heads: list[str] = field(default_factory=list)
    files: list[LogFile] = field(default_factory=list)


def survey_logs(src: Store, dst: Store, steps: Sequence[int]) -> list[LogToCopy]:
    """Return what is to be copied of the logs behind these steps, in the order of the history. Nothing is written.

    Raises:
        CheckpointExists: the destination has other logs, or steps of other logs, under these numbers.
        MalformedData, UnsupportedVersion: a log of the source says of itself what this release cannot read.
    """
    firsts: dict[int, int] = {}
    lasts: dict[int, int | None] = {}
    for way in ways(src):
        if way.step in steps:
            for number, first, last in way.spans:
                firsts[number] = min(first, firsts.get(number, first))
                lasts[number] = last
    found = [_survey(src, number, firsts[number], lasts[number]) for number in sorted(firsts)]
    _check_numbers(src, dst, found, steps)
    return found


def _survey(src: Store, number: int, first: int, last: int | None) -> LogToCopy:
    one = LogToCopy(number, src.get(f"{log_key(number)}/{HEAD}", 0, MAX_HEAD))
    sizes = {info.key: info.nbytes for info in src.walk(log_key(number))}
    one.heads += [key for key in (f"{log_key(number)}/{DIRECTORY}",) if key in sizes]
    for rank in sorted(ranks_of(src, number)):
        head = f"{rank_prefix(log_key(number), rank)}/{RANK_HEAD}"
        if head in sizes:
            one.heads.append(head)
        files = files_of(src, number, rank)
        for i, (begins, key) in enumerate(files):
            is_last = i + 1 == len(files)
            if (is_last or files[i + 1][0] > first) and (last is None or begins <= last):
                nbytes = _whole_bytes(src, key) if is_last else sizes.get(key, 0)
                one.files += [LogFile(key, nbytes)] if nbytes else []
    return one


def _whole_bytes(src: Store, key: str) -> int:
    """Return where the last whole record of a rank's last file ends: its writer may have been killed, or be at work."""
    places = [place for place in places_in(src, key) if not isinstance(place, str)]
    if places and damage_of(src, places[-1]):
        places.pop()
    return min(_end(places[-1]), src.size(key) or 0) if places else 0


def _end(place: Place) -> int:
    return place.start + place.nbytes + -place.nbytes % 8


def _check_numbers(src: Store, dst: Store, logs: Sequence[LogToCopy], steps: Sequence[int]) -> None:
    numbers = {one.number for one in logs}
    for one in logs:
        key = f"{log_key(one.number)}/{HEAD}"
        if dst.size(key) is not None and dst.get(key, 0, MAX_HEAD) != one.said:
            raise CheckpointExists(
                f"{key} in {dst.url} is of another log than the one of {src.url}; copy to another place, or without "
                f"logs (--no-log, logs=False)"
            )
    mine, theirs = (commits_of(store) if numbers else {} for store in (src, dst))
    for step, commit in theirs.items():
        same = step in mine and mine[step].attempt == commit.attempt
        if commit.log in numbers and not same and step not in steps:
            raise CheckpointExists(
                f"step {step} in {dst.url} names a log {commit.log} that is not the one of {src.url}; copy to another "
                f"place, or without logs (--no-log, logs=False)"
            )


def copy_logs(
    src: Store,
    dst: Store,
    logs: Sequence[LogToCopy],
    report: CopyReport,
    *,
    verify: bool,
    threads: int,
    moved: Callable[[int], None],
) -> None:
    """Copy logs; what the destination has whole already stays.

    Args:
        src: where they are.
        dst: where they shall be; both are used by several threads at once.
        logs: of :func:`survey_logs`.
        report: is told.
        verify: read what the destination has; False trusts sizes.
        threads: files that are copied at once.
        moved: called with the number of bytes after each piece, also of what is there already.

    Raises:
        DigestMismatch, MalformedData: a record of the source is damaged; names it. Its file is not copied.
        StoreError: a store refused or failed.
    """
    for one in logs:
        for key in one.heads:
            _put(dst, key, src.get(key, 0, MAX_RANK_HEAD))
        with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-copy-log") as pool:
            futures = {pool.submit(_bring, src, dst, file, verify, moved): file for file in one.files}
            try:
                for future in as_completed(futures):
                    copied, nbytes = future.result(), futures[future].nbytes
                    report.log_files_copied += copied
                    report.log_files_present += not copied
                    report.log_bytes_copied += nbytes if copied else 0
                    report.log_bytes_present += 0 if copied else nbytes
            finally:
                for future in futures:
                    future.cancel()
        _put(dst, f"{log_key(one.number)}/{HEAD}", one.said)
        report.logs.append(one.number)


def _put(dst: Store, key: str, data: bytes) -> None:
    try:
        same = dst.get(key) == data
    except ObjectNotFound:
        same = False
    if not same:
        dst.put(key, data, overwrite=True)


def _bring(src: Store, dst: Store, file: LogFile, verify: bool, moved: Callable[[int], None]) -> bool:
    """Copy a file unless it is there. Returns whether it was copied."""
    found = dst.size(file.key)
    if found is not None and found >= file.nbytes and (_is_same(src, dst, file) if verify else found == file.nbytes):
        moved(file.nbytes)
        return False
    with dst.writer(file.key, size=file.nbytes, blocks=Blocks(AHEAD_BYTES)) as out:
        for place in _places(src, file):
            for data in _checked(src, place, min(_end(place), file.nbytes)):
                out.write(data)
                moved(len(data))
        out.finish()
    return True


def _places(store: Store, file: LogFile) -> Iterator[Place]:
    """Yield the records of a file up to what is to be copied of it.

    Raises:
        MalformedData: it ends in the midst of one.
    """
    at = 0
    for place in places_in(store, file.key):
        if at >= file.nbytes:
            return
        if isinstance(place, str):
            raise MalformedData(f"{place} (in {store.url})")
        yield place
        at = _end(place)


def _checked(src: Store, place: Place, stop: int) -> Iterator[memoryview]:
    """Yield a record's bytes, header and padding included, up to ``stop`` in the file, each piece good until the next.

    Raises:
        DigestMismatch: they are not what was written.
    """
    running, memory = seal(place.step, place.nbytes), memoryview(bytearray(min(PIECE, HEADER + place.nbytes + 8)))
    for at in range(place.start - HEADER, stop, PIECE):
        data = memory[: min(PIECE, stop - at)]
        if src.read_into(place.key, at, data) != len(data):
            raise MalformedData(f"{place.key} in {src.url}: shorter than it was a moment ago")
        running.add(data[max(0, place.start - at) : max(0, place.start + place.nbytes - at)])
        if stop - at <= PIECE and running.raw() != place.digest:
            raise DigestMismatch(f"{place.key} in {src.url}: the record of step {place.step} is not what was written")
        yield data


def _is_same(src: Store, dst: Store, file: LogFile) -> bool:
    """Has the destination these records, all of them sound? It may have more."""
    theirs = (place for place in places_in(dst, file.key) if not isinstance(place, str))
    wanted = list(_places(src, file))
    for mine, other in zip_longest(wanted, theirs):
        if mine is None:
            return True
        if other is None or (mine.step, mine.nbytes, mine.digest) != (other.step, other.nbytes, other.digest):
            return False
        if damage_of(dst, other):
            return False
    return True
