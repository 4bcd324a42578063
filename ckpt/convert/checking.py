"""Comparing a source with the checksums that its own format has, before anything is made from it.

``torch.save`` writes a CRC-32 of every record of its archives, which nobody compares who maps a file, or reads parts of
it. A conversion reads ranges of records, as the target needs them; so whoever wants to know reads each record once
more, from end to end.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING
from zlib import crc32

from ckpt.convert.assemble import FAR_READERS, READERS
from ckpt.convert.meter import Meter
from ckpt.convert.opened import INLINE
from ckpt.convert.torchfile.file import where_of
from ckpt.convert.torchfile.zip_read import RangeFile, TorchZip, mismatch
from ckpt.errors import DigestMismatch, MalformedData
from ckpt.words import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpt.convert.opened import Opened
    from ckpt.convert.options import Span
    from ckpt.store.base import Store

BLOCK = 2 << 20
"""Bytes that each reader holds."""
SHOWN = 8


@dataclass(frozen=True, slots=True)
class Checked:
    """What was compared, and was right: ``records`` of ``files``, ``nbytes`` together. ``unsaid``: a line for each kind
    of thing that has no checksums, of which nothing can be said.
    """

    files: int = 0
    records: int = 0
    nbytes: int = 0
    unsaid: tuple[str, ...] = ()


def check_source(opened: Opened, seen: set[Span], progress: Callable[[int, int], None] | None = None) -> Checked:
    """Compare an opened checkpoint with the checksums that its files have.

    Args:
        opened: the checkpoint.
        seen: the archives that were read while it was opened (``ReadOptions.seen``).
        progress: called with (bytes compared, bytes to compare), by one thread at a time.

    Raises:
        DigestMismatch: records that differ, by file and name, all of them.
        MalformedData, StoreError: a file is cut off, or cannot be read.
    """
    if opened.format == "ckpt":
        digests = "chunks of ckpt have digests, each is compared when it is read (of all at once: ckpt verify)"
        return Checked(unsaid=(digests,))
    found, silent = _check(opened.store, seen, progress)
    with_sums = {key for key, _, _ in seen}
    others = {p.key for part in opened.parts for p in part.packs if not p.key.startswith(INLINE)} - with_sums
    unsaid = [f"{count(silent, 'record')} of torch.save without checksums: not checked"] if silent else []
    unsaid += [f"{count(len(others), 'file')} without checksums ({opened.format}): not checked"] if others else []
    return Checked(len(with_sums), found["records"], found["bytes"], tuple(unsaid))


def check_archives(store: Store, seen: set[Span]) -> None:
    """Raise what :func:`check_source` does of these archives."""
    _check(store, seen, None)


def _check(store: Store, seen: set[Span], progress: Callable[[int, int], None] | None) -> tuple[Counter[str], int]:
    """Return what was compared, and of how many records there is no checksum."""
    meter = Meter(sum(nbytes for _, _, nbytes in seen), progress)
    total: Counter[str] = Counter()
    wrong: list[str] = []
    stop = threading.Event()

    def check(span: Span) -> tuple[Counter[str], list[str]]:
        return _check_archive(store, span, meter, stop)

    with ThreadPoolExecutor(READERS if hasattr(store, "root") else FAR_READERS, "ckpt-check") as pool:
        try:
            for compared, differing in pool.map(check, sorted(seen)):
                total.update(compared)
                wrong += differing
        finally:
            stop.set()
    if wrong:
        more = [f"… and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        raise DigestMismatch("\n  - ".join(["bytes are not the ones that were written", *wrong[:SHOWN], *more]))
    return total, total.pop("silent", 0)


def _check_archive(store: Store, span: Span, meter: Meter, stop: threading.Event) -> tuple[Counter[str], list[str]]:
    key, start, nbytes = span
    where = where_of(store, key, start)
    reader = _Reader(store, key, where, start, nbytes)
    compared: Counter[str] = Counter()
    wrong: list[str] = []
    left = nbytes
    for record in TorchZip(RangeFile(store, key, where, start, nbytes)).records():
        found = 0
        for piece in reader.read(record.start, record.nbytes):
            if stop.is_set():
                return compared, wrong
            found = crc32(piece, found)
            left -= len(piece)
            meter.add(len(piece))
        if record.crc is None:
            compared["silent"] += 1
            continue
        compared.update(records=1, bytes=record.nbytes)
        if found != record.crc:
            wrong.append(mismatch(where, record.name, record.crc, found))
    meter.add(left)
    return compared, wrong


class _Reader:
    """Reads ascending ranges of one object, those that lie close together at once."""

    def __init__(self, store: Store, key: str, where: str, start: int, nbytes: int) -> None:
        self._store, self._key, self._where, self._end = store, key, where, start + nbytes
        self._block = memoryview(bytearray(min(BLOCK, nbytes)))
        self._from = self._to = 0

    def read(self, start: int, nbytes: int) -> Iterator[memoryview]:
        """Yield the bytes of a range; each piece is valid until the next one is asked for."""
        while nbytes:
            if not self._from <= start < self._to:
                room = self._block[: self._end - start]
                got = self._store.read_into(self._key, start, room)
                if got < min(len(room), nbytes):
                    raise MalformedData(f"{self._where}: {got} bytes at {start}, expected {len(room)}")
                self._from, self._to = start, start + got
            piece = self._block[start - self._from : min(self._to, start + nbytes) - self._from]
            yield piece
            start, nbytes = start + len(piece), nbytes - len(piece)
