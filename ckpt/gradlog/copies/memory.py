"""Copies of log records in this host's memory: they outlive the processes that made them, and spare reads of the store.

A copy is a file in tmpfs that holds one frame. It counts only beside the store's own: a reader takes the header of a
record from the store, and its payload from here if a sound copy has the same digest. So whatever lies here, and whoever
removes it, nothing can come out wrong, and nothing is lost that was durable.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt.errors import CkptError, ConfigError, MalformedData, StoreError
from ckpt.format.digest import raw_digest
from ckpt.format.frames import HEADER, parse_frame
from ckpt.repo.log_files import Place, damage_of, segment_key
from ckpt.runtime.describing import host_name
from ckpt.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckpt.format.digest import Buffer
    from ckpt.store.base import ObjectWriter

VARIABLE = "CKPT_PEER_MEMORY"
SHARED_MEMORY = "/dev/shm"  # noqa: S108  # a folder below it, which is checked to be this user's alone
_RUN, _RANK = re.compile(r"[0-9a-f]{32}"), re.compile(r"rank[0-9]{5,7}")
_STEP = re.compile(r"[0-9]{1,18}\.log")
STALE_SECONDS = 24 * 3600.0
"""What no job has touched for so long was left behind by one that has ended. Nothing durable is lost with it."""


def base_folder() -> str:
    """Return the folder of all copies of this user on this host: in ``CKPT_PEER_MEMORY``, else in ``/dev/shm``."""
    return os.path.join(os.environ.get(VARIABLE) or SHARED_MEMORY, f"ckpt-{os.getuid()}")


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
            base = os.path.dirname(folder)
            for part in (os.path.dirname(base), base, folder):
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700)
                if part != os.path.dirname(base) and not _is_ours(part):
                    raise ConfigError(f"{part}: expected a folder that belongs to this user alone (mode 0700)")
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"peers: no memory for copies of the log at {folder} ({error}); {VARIABLE} names another"
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
        """Return (run, rank) -> steps of the records that there are copies of, ascending. Whatever else lies there is
        none of ours.
        """
        found: dict[tuple[str, int], list[int]] = {}
        for run in _entries(self.folder):
            for rank in _entries(run.path) if _RUN.fullmatch(run.name) else ():
                if _RANK.fullmatch(rank.name):
                    steps = sorted(int(one.stem) for one in _files(rank.path) if _STEP.fullmatch(one.name))
                    found[run.name, int(rank.name.removeprefix("rank"))] = steps
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
        copy = self.alike(run, rank, place)
        with suppress(CkptError):
            return copy if copy is not None and not damage_of(self.store, copy) else None
        return None

    def alike(self, run: str, rank: int, place: Place) -> Place | None:
        """Return what says that it is the copy of a record of the store, without a look at its bytes."""
        copy = self.place(run, rank, place.step) if run else None
        return copy if copy is not None and (copy.nbytes, copy.digest) == (place.nbytes, place.digest) else None

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
                is_old = now - _touched(entry.path) > STALE_SECONDS
                if is_old and _RUN.fullmatch(entry.name) and entry.path != self.folder:
                    shutil.rmtree(entry.path)

    def remove_oldest(self) -> bool:
        """Remove the copy of the oldest record that anybody has left here. Returns whether there was one."""
        left = [(steps[0], *key) for key, steps in self.held().items() if steps]
        if left:
            step, run, rank = min(left)
            self.remove(run, rank, step)
        return bool(left)

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
        """Keep a frame; older ones give way. Returns whether there was room."""
        parts = list(parts)
        nbytes = sum(memoryview(part).nbytes for part in parts)
        while True:
            with self.begin(run, rank, step, nbytes) as copy:
                for part in parts:
                    copy.write(part)
            if copy.kept or not copy.failed or not self.make_room():
                return copy.kept

    def begin(self, run: str, rank: int, step: int, nbytes: int) -> Copying:
        """Begin to keep a frame of ``nbytes`` bytes that comes in parts; older ones give way."""
        with self._lock:
            while self._bytes + nbytes > self.limit and self._drop():
                pass
            fits = self._bytes + nbytes <= self.limit
        return Copying(self, (step, run, rank), nbytes, fits=fits)

    def add(self, which: tuple[int, str, int], nbytes: int) -> None:
        """Take note of a copy that is there."""
        with self._lock:
            self._kept[which] = nbytes
            self._bytes += nbytes

    def make_room(self) -> bool:
        """Give up the oldest copy, one that an earlier job has left if there is none of this one's."""
        with self._lock:
            return self._drop() or self.memory.remove_oldest()

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


class Copying:
    """A copy that is being made, part by part. ``kept``: it is there. ``failed``: the memory did not take it (others
    may have used the room); else it is larger than all that may be used.
    """

    def __init__(self, keeper: Keeper, which: tuple[int, str, int], nbytes: int, *, fits: bool) -> None:
        self._keeper, self._which, self._nbytes, self._left = keeper, which, nbytes, nbytes
        self._writer: ObjectWriter | None = None
        self.kept = self.failed = False
        step, run, rank = which
        if fits:
            try:
                self._writer = keeper.memory.store.writer(segment_key(run, rank, step), size=nbytes)
            except StoreError:
                self.failed = True

    def write(self, data: Buffer) -> None:
        """Take the next bytes."""
        self._left -= memoryview(data).nbytes
        if self._writer is not None:
            try:
                self._writer.write(data)
            except StoreError:
                self._give_up()

    def _give_up(self) -> None:
        if self._writer is not None:
            writer, self._writer, self.failed = self._writer, None, True
            writer.__exit__(None, None, None)

    def __enter__(self) -> Copying:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._writer is None:
            return
        if self._left or exc[0] is not None:
            self._give_up()
            return
        try:
            with self._writer as writer:
                writer.finish()
        except StoreError:
            self.failed = True
            return
        self._keeper.add(self._which, self._nbytes)
        self.kept = True


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


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return [one for one in found if one.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _files(folder: str) -> list[Path]:
    try:
        return [one for one in Path(folder).iterdir() if one.is_file() and not one.is_symlink()]
    except OSError:
        return []


def _touched(folder: str) -> float:
    """Return when the newest thing in a folder of copies was made."""
    newest = os.stat(folder).st_mtime
    for run in _entries(folder):
        newest = max([newest, run.stat().st_mtime, *(rank.stat().st_mtime for rank in _entries(run.path))])
    return newest
