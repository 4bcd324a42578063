"""Copies of log records in this host's memory: they outlive the processes that made them, and spare reads of the store.

A copy is a file in tmpfs that holds one frame. It counts only beside the store's own: a reader takes the header of a
record from the store, and its payload from here if a sound copy has the same digest. So whatever lies here, and whoever
removes it, nothing can come out wrong, and nothing is lost that was durable.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from ckpt.errors import CkptError, ConfigError, MalformedData, StoreError
from ckpt.format.digest import raw_digest
from ckpt.format.frames import HEADER, parse_frame
from ckpt.repo.log_files import SUFFIX, Place, damage_of, segment_key
from ckpt.runtime.describing import host_name
from ckpt.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckpt.format.digest import Buffer

VARIABLE = "CKPT_PEER_MEMORY"
SHARED_MEMORY = "/dev/shm"  # noqa: S108  # a folder below it, which is checked to be this user's alone
STALE_SECONDS = 24 * 3600.0
"""What no job has touched for so long was left behind by one that has ended. Nothing durable is lost with it."""


def base_folder() -> str:
    """Return the folder of all copies of this user on this host: ``CKPT_PEER_MEMORY``, or one in ``/dev/shm``."""
    given = os.environ.get(VARIABLE)
    return given or os.path.join(SHARED_MEMORY, f"ckpt-{os.getuid()}")


def folder_for(url: str) -> str:
    """Return the folder of the copies of a repository's logs."""
    return os.path.join(base_folder(), raw_digest(f"{host_name()} {url}".encode()).hex())


class HostMemory:
    """The copies of a repository's records on this host, whoever made them.

    Args:
        folder: where; see :func:`folder_for`.
    """

    def __init__(self, folder: str) -> None:
        self.folder, self.store = folder, LocalStore(folder)

    @classmethod
    def there(cls, url: str) -> HostMemory | None:
        """Return what this host has of a repository's records, None if nothing, or nothing that is only ours."""
        folder = folder_for(url)
        return cls(folder) if _is_ours(os.path.dirname(folder)) and _is_ours(folder) else None

    @classmethod
    def make(cls, url: str) -> HostMemory:
        """Return the place for a repository's records on this host, made if need be.

        Raises:
            ConfigError: there is no memory to be had, or it is not this user's alone.
        """
        folder = folder_for(url)
        try:
            for part in (os.path.dirname(folder), folder):
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700)
                if not _is_ours(part):
                    raise ConfigError(f"{part}: expected a folder that belongs to this user alone (mode 0700)")
        except OSError as error:
            raise ConfigError(
                f"peers: no memory for copies of the log at {folder} ({error.strerror}); {VARIABLE} names another"
            ) from error
        return cls(folder)

    def identity(self) -> str:
        """Return a text that two processes share iff they see the same copies."""
        try:
            found = os.stat(self.folder)
            with open("/proc/sys/kernel/random/boot_id") as file:
                boot = file.read().strip()
        except OSError:
            return ""
        return f"{boot}:{found.st_dev}:{found.st_ino}"

    def held(self) -> dict[tuple[str, int], list[int]]:
        """Return (run, rank) -> steps of the records that there are copies of, ascending."""
        found: dict[tuple[str, int], list[int]] = {}
        for run in self.store.children(""):
            for name in self.store.children(run):
                rank = name.removeprefix("rank")
                if name != rank and _is_number(rank):
                    steps = [one.removesuffix(SUFFIX) for one in self.store.children(f"{run}/{name}")]
                    found[run, int(rank)] = sorted(int(step) for step in steps if _is_number(step))
        return found

    def place(self, run: str, rank: int, step: int) -> Place | None:
        """Return where the copy of a record lies, None if there is none."""
        key = segment_key(run, rank, step)
        try:
            size = self.store.size(key)
            if size is None:
                return None
            frame = parse_frame(self.store.get(key, 0, HEADER), 0, key)
        except (MalformedData, StoreError):  # it was removed a moment ago, or is damaged: there is none
            return None
        if frame.step != step or frame.end > size:
            return None
        return Place(step, key, frame.start, frame.nbytes, frame.digest)

    def twin(self, run: str, rank: int, place: Place) -> Place | None:
        """Return the sound copy of a record of the store, None if there is none."""
        copy = self.place(run, rank, place.step) if run else None
        if copy is None or (copy.nbytes, copy.digest) != (place.nbytes, place.digest):
            return None
        with suppress(CkptError):
            return copy if not damage_of(self.store, copy) else None
        return None

    def remove_left(self, base: int) -> None:
        """Remove what nobody will ask for: records up to step ``base``, and what other jobs have left behind."""
        for (run, rank), steps in self.held().items():
            for step in steps:
                if step <= base:
                    self.remove(run, rank, step)
        # Folders of other repositories: a job that lives touches its own with each record.
        now = time.time()
        for entry in _entries(os.path.dirname(self.folder)):
            with suppress(OSError):
                if entry.path != self.folder and now - _touched(entry.path) > STALE_SECONDS:
                    shutil.rmtree(entry.path)

    def remove(self, run: str, rank: int, step: int) -> None:
        """Remove a copy, and its folder with the last of them."""
        key = segment_key(run, rank, step)
        with suppress(CkptError):
            self.store.delete(key)
        for folder in (os.path.dirname(key), run):
            with suppress(OSError):
                os.rmdir(os.path.join(self.folder, folder))


class Keeper:
    """The copies that one process keeps in its host's memory, the newest that fit. Safe to use from several threads.

    Args:
        memory: where.
        limit: bytes.
    """

    def __init__(self, memory: HostMemory, limit: int) -> None:
        self.memory, self.limit = memory, limit
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, str, int], int] = {}
        self._bytes = 0
        self.dropped = 0
        """copies that gave way to newer ones before a full save made them needless"""

    def keep(self, run: str, rank: int, step: int, parts: Iterable[Buffer]) -> bool:
        """Keep a frame; older ones give way. Returns whether there was room.

        Raises:
            StoreError: the memory cannot be written, for another reason than that it is full.
        """
        parts = list(parts)
        nbytes = sum(memoryview(part).nbytes for part in parts)
        with self._lock:
            while self._bytes + nbytes > self.limit and self._drop():
                pass
            if self._bytes + nbytes > self.limit:
                return False
            while True:
                try:
                    with self.memory.store.writer(segment_key(run, rank, step), size=nbytes) as out:
                        for part in parts:
                            out.write(part)
                        out.finish()
                    break
                except StoreError:
                    if not self._drop():  # others may have taken the room; without anything to give up it is lost
                        raise
            self._kept[step, run, rank] = nbytes
            self._bytes += nbytes
            return True

    def _drop(self) -> bool:
        if not self._kept:
            return False
        oldest = min(self._kept)
        self._forget(oldest)
        self.dropped += 1
        return True

    def _forget(self, which: tuple[int, str, int]) -> None:
        step, run, rank = which
        self._bytes -= self._kept.pop(which)
        self.memory.remove(run, rank, step)

    def trim(self, base: int) -> None:
        """Remove the copies of records up to step ``base``."""
        with self._lock:
            for one in [one for one in self._kept if one[0] <= base]:
                self._forget(one)

    def remove(self) -> None:
        """Remove all of them."""
        with self._lock:
            for one in list(self._kept):
                self._forget(one)
        with suppress(OSError):
            os.rmdir(self.memory.folder)


def free_bytes(folder: str) -> int:
    """Return how many bytes could still be written below a folder."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _is_ours(folder: str) -> bool:
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return [one for one in found if one.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _touched(folder: str) -> float:
    """Return when the newest thing in a folder of copies was made."""
    newest = os.stat(folder).st_mtime
    for run in _entries(folder):
        newest = max([newest, run.stat().st_mtime, *(rank.stat().st_mtime for rank in _entries(run.path))])
    return newest
