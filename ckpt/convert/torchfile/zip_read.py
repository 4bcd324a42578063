"""The zip archive that ``torch.save`` writes: where each record's bytes are, read through ranges of a store."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from ckpt.errors import DigestMismatch, MalformedData, UnsupportedFeature

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt.store.base import Store

WINDOW = 64 << 10
"""Bytes of one read: the directory of most files, and the headers of many small records."""
MAX_READ = 256 << 20
"""Bytes of the directory, or of the pickle: what a file can make us allocate at once."""
_LOCAL = 30
"""Bytes of the header before a record, without the name and the extra field."""


class RangeFile:
    """A part of an object as a seekable file: position 0 is byte ``start`` of the object.

    Raises:
        MalformedData: a read of more than :data:`MAX_READ` bytes, which only a forged length asks for.
    """

    def __init__(self, store: Store, key: str, where: str, start: int, nbytes: int) -> None:
        self.key, self.where, self.start, self.nbytes = key, where, start, nbytes
        self._store, self._position = store, 0
        self._window, self._window_at = b"", 0

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a position and return it, as files do."""
        self._position = offset + {0: 0, 1: self._position, 2: self.nbytes}[whence]
        if self._position < 0:
            raise OSError(f"{self.where}: seek before the start")  # what zipfile expects of a file
        return self._position

    def read(self, count: int = -1) -> bytes:
        """Return the next ``count`` bytes, all if negative; fewer at the end."""
        left = max(0, self.nbytes - self._position)
        count = left if count < 0 else min(count, left)
        if count > MAX_READ:
            raise MalformedData(f"{self.where}: asks for {count} bytes at once, expected at most {MAX_READ}")
        at = self._position - self._window_at
        if at < 0 or at + count > len(self._window):
            # The end of the file in one piece: that is where a zip archive's directory is.
            self._window_at = min(self._position, max(0, self.nbytes - WINDOW))
            at = self._position - self._window_at
            wanted = min(max(at + count, WINDOW), self.nbytes - self._window_at)
            self._window = self._store.get(self.key, self.start + self._window_at, wanted)
            if len(self._window) < wanted:
                raise MalformedData(
                    f"{self.where}: has {len(self._window)} bytes at {self.start + self._window_at}, expected {wanted}"
                )
        self._position += count
        return self._window[at : at + count]

    def readline(self) -> bytes:
        """Return the bytes up to and with the next line end."""
        line = b""
        while not line.endswith(b"\n"):
            byte = self.read(1)
            if not byte or len(line) >= WINDOW:
                break
            line += byte
        return line


class Record(NamedTuple):
    """``nbytes`` bytes from byte ``start`` of the object. ``crc``: their CRC-32, None where the archive says none."""

    name: str
    start: int
    nbytes: int
    crc: int | None


class TorchZip:
    """The records of one archive, by their names without the folder that all of them are in.

    Raises:
        MalformedData: no such archive, or records outside the file, over each other, or named twice.
    """

    def __init__(self, file: RangeFile) -> None:
        self._file, self.where = file, file.where
        try:
            self._zip = zipfile.ZipFile(file)  # what it needs of a file is here
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise MalformedData(f"{self.where}: no readable archive of torch.save, truncated? ({error})") from error
        infos = sorted(self._zip.infolist(), key=lambda info: info.header_offset)
        if not infos:
            raise MalformedData(f"{self.where}: an archive without records")
        if infos and infos[0].header_offset < 0:  # what zipfile makes of a directory that is not where it is said to be
            raise MalformedData(f"{self.where}: the archive's directory is not where its end says")
        ends = [info.header_offset for info in infos[1:]] + [self._zip.start_dir]
        self._ends = {info.filename: end for info, end in zip(infos, ends, strict=True)}
        self._infos = {info.filename: info for info in infos}
        if len(self._infos) < len(infos):
            raise MalformedData(f"{self.where}: a record of the archive is there twice")
        self._folder = self._find_folder()

    def _find_folder(self) -> str:
        found = [name for name in self._infos if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(found) != 1:
            raise MalformedData(f"{self.where}: an archive with {len(found)} records <name>/data.pkl, expected one")
        folder = found[0].removesuffix("data.pkl")
        odd = [n for n in self._infos if not n.startswith(folder) or any(p in ("", ".", "..") for p in n.split("/"))]
        if odd:
            raise MalformedData(f"{self.where}: a record named {odd[0]!r:.200}, expected names below {folder!r:.200}")
        if f"{folder}constants.pkl" in self._infos:
            raise UnsupportedFeature(f"{self.where}: a TorchScript archive holds a program, not a state dict")
        return folder

    def has(self, name: str) -> bool:
        """Is there such a record?"""
        return self._folder + name in self._infos

    def place(self, name: str) -> tuple[int, int]:
        """Return where the bytes of a record start in the *object*, and how many they are."""
        info = self._infos.get(self._folder + name)
        if info is None:
            raise MalformedData(f"{self.where}: has no record {name!r:.200}")
        if not _is_plain(info):
            raise UnsupportedFeature(
                f"{self.where}: record {name!r:.200} is compressed or encrypted, torch.save does neither"
            )
        self._file.seek(info.header_offset)
        head = self._file.read(_LOCAL)
        extra = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        start = info.header_offset + _LOCAL + extra
        if head[:4] != b"PK\3\4" or start + info.file_size > self._ends[info.filename]:
            raise MalformedData(
                f"{self.where}: record {name!r:.200} of {info.file_size} bytes at {start} does not fit before "
                f"{self._ends[info.filename]}"
            )
        return self._file.start + start, info.file_size

    def read(self, name: str) -> bytes:
        """Return the bytes of a small record; its checksum is checked."""
        start, nbytes = self.place(name)
        self._file.seek(start - self._file.start)
        data = self._file.read(nbytes)
        expected, found = _crc_of(self._infos[self._folder + name]), crc32(data)
        if expected is not None and found != expected:
            raise DigestMismatch(mismatch(self.where, name, expected, found))
        return data

    def records(self) -> Iterator[Record]:
        """Yield all records in the order of their bytes. What is compressed is nothing that torch reads, and left out.

        Raises:
            MalformedData: as :meth:`place`.
        """
        for full, info in self._infos.items():
            if _is_plain(info):
                name = full.removeprefix(self._folder)
                yield Record(name, *self.place(name), _crc_of(info))


def _is_plain(info: zipfile.ZipInfo) -> bool:
    return info.compress_type == zipfile.ZIP_STORED and info.file_size == info.compress_size and not info.flag_bits & 1


def _crc_of(info: zipfile.ZipInfo) -> int | None:
    """Return the CRC-32 of a record; ``torch.serialization.set_crc32_options(False)`` leaves zeros in its place."""
    return info.CRC if info.CRC or not info.file_size else None


def mismatch(where: str, name: str, expected: int, found: int) -> str:
    """Return what there is to say of a record whose bytes are not those that were written."""
    return f"{where}: record {name!r:.200}: expected CRC-32 {expected:#010x}, found {found:#010x}"
