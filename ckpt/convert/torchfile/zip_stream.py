"""A zip archive written from front to back, as torch lays its files out: nothing compressed, each record at a multiple
of 64 bytes, checksums behind the data. Names and sizes are known before the first byte, so the archive's size is too.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckpt.store.base import Buffer

ALIGNMENT = 64
LIMIT = 0xFFFFFFFF
"""From this size or offset on a number does not fit the classic fields, and stands in a zip64 field."""
_MARK, _SHORT = 0xFFFFFFFF, 0xFFFF
"""What stands in a classic field whose number is in a zip64 field."""
_FLAGS = 0x0808
"""UTF-8 names; checksum and sizes stand behind the data (so it can be written to a store that only appends)."""
_DATE = 0x21
"""1980-01-01: the same state gives the same bytes."""


@dataclass(frozen=True, slots=True)
class Record:
    """One file in the archive. ``start``: of its header, ``data``: of its bytes; ``large``: needs zip64 fields."""

    name: bytes
    nbytes: int
    start: int
    data: int

    @property
    def large(self) -> bool:
        """Is it too large for the classic size fields?"""
        return self.nbytes >= LIMIT

    @property
    def end(self) -> int:
        """Where the next record starts."""
        return self.data + self.nbytes + (24 if self.large else 16)

    def header(self) -> bytes:
        """Return what stands before the data."""
        mark = _MARK if self.large else 0
        extra = struct.pack("<HHQQ", 1, 16, 0, 0) if self.large else b""
        pad = self.data - self.start - 30 - len(self.name) - len(extra)
        if pad:
            extra += struct.pack("<2sH", b"FB", pad - 4) + b"Z" * (pad - 4)
        version = 45 if self.large else 20
        fixed = (version, _FLAGS, 0, 0, _DATE, 0, mark, mark, len(self.name), len(extra))
        return struct.pack("<4s5H3L2H", b"PK\3\4", *fixed) + self.name + extra

    def descriptor(self, crc: int) -> bytes:
        """Return what stands behind the data."""
        return struct.pack("<4sLQQ" if self.large else "<4sLLL", b"PK\7\x08", crc, self.nbytes, self.nbytes)

    def entry(self, crc: int) -> bytes:
        """Return its line in the central directory."""
        far = self.start >= LIMIT
        wide = ([self.nbytes] * 2 if self.large else []) + ([self.start] if far else [])
        extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        size, start, version = _MARK if self.large else self.nbytes, _MARK if far else self.start, 45 if wide else 20
        fixed = (version, version, _FLAGS, 0, 0, _DATE, crc, size, size, len(self.name), len(extra), 0, 0, 0, 0, start)
        return struct.pack("<4s6H3L5H2L", b"PK\1\2", *fixed) + self.name + extra


class Archive:
    """Args: ``sizes``: (name, bytes) of each record in order."""

    def __init__(self, sizes: Iterable[tuple[str, int]]) -> None:
        self.records: list[Record] = []
        at = 0
        for name, nbytes in sizes:
            encoded = name.encode()
            bare = at + 30 + len(encoded) + (20 if nbytes >= LIMIT else 0)
            pad = -bare % ALIGNMENT
            record = Record(encoded, nbytes, at, bare + (pad + ALIGNMENT if 0 < pad < 4 else pad))
            self.records.append(record)
            at = record.end
        self._directory = at
        self.nbytes = at + len(self._end([0] * len(self.records)))

    def write(self, write: Callable[[Buffer], None], content: Callable[[int], Iterable[Buffer]]) -> None:
        """Write the archive.

        Args:
            write: takes the bytes, front to back.
            content: returns the buffers of a record, by its number; together as long as was said.
        """
        checksums = []
        for number, record in enumerate(self.records):
            write(record.header())
            crc = 0
            for data in content(number):
                crc = zlib.crc32(data, crc)
                write(data)
            write(record.descriptor(crc))
            checksums.append(crc)
        write(self._end(checksums))

    def _end(self, checksums: list[int]) -> bytes:
        entries = b"".join(record.entry(crc) for record, crc in zip(self.records, checksums, strict=True))
        start, count, size = self._directory, len(self.records), len(entries)
        wide = b""
        if start >= LIMIT or count >= _SHORT or size >= LIMIT:
            wide = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
            wide += struct.pack("<4sLQL", b"PK\6\7", 0, start + size, 1)
        short = min(count, _SHORT)
        size, start = _MARK if size >= LIMIT else size, _MARK if start >= LIMIT else start
        return entries + wide + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, short, short, size, start, 0)
