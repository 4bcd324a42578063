"""A file that grows: what was appended is on the disk when the call returns."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from ckpt.errors import ObjectExists, ObjectNotFound
from ckpt.store.local_system import PAGE, mapped, release
from ckpt.store.local_writer import sync_dir

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.store.base import Buffer
    from ckpt.store.local import LocalStore

_MOST = 1024
"""Buffers that one call of the system takes (``IOV_MAX``)."""


class LocalAppender:
    """See :class:`~ckpt.store.base.Appender`. The file is there from the beginning, and grows in place."""

    def __init__(self, store: LocalStore, key: str) -> None:
        self.key, self.store = key, store
        self.path = store._path(key)
        with mapped(key, store.url, "create"):
            store._make_parent(self.path)
            try:
                self.fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_APPEND, 0o666)
            except FileExistsError as error:
                raise ObjectExists(f"{key!r} exists already in {store.url}", key) from error
            with suppress(OSError):  # where the file system has no locks, nobody can ask who writes
                fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            sync_dir(os.path.dirname(self.path))
        self._clean = self._size = 0

    def append(self, data: Sequence[Buffer]) -> None:
        """Write all buffers behind what is there, then sync (a short write is continued).

        Raises:
            ObjectNotFound: the file is not there any more under its name; what was written is nowhere.
        """
        with mapped(self.key, self.store.url, "write"):
            left = [view for part in data if (view := memoryview(part).cast("B")).nbytes]
            while left:
                done = os.writev(self.fd, left[:_MOST])
                while left and done >= left[0].nbytes:
                    done -= left.pop(0).nbytes
                if done:
                    left[0] = left[0][done:]
            os.fdatasync(self.fd)
            self._forget(sum(memoryview(part).nbytes for part in data))
            self._check_there()

    def _check_there(self) -> None:
        """Check that a reader would find what was written: somebody may have removed or moved the folder of a job that
        runs, and the file lives on without a name as long as it is open.
        """
        mine = os.fstat(self.fd)
        try:
            named = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            named = None
        if not mine.st_nlink or named is None or (named.st_dev, named.st_ino) != (mine.st_dev, mine.st_ino):
            raise ObjectNotFound(
                f"{self.key!r} in {self.store.url} was removed or moved while it was being written to", self.key
            )

    def _forget(self, nbytes: int) -> None:
        """Give back the pages that are on the disk: a page that was used before costs less than a new one, step by
        step, and a log does not push out what the training has cached. The last page is written to again.
        """
        self._size += nbytes
        whole = self._size // PAGE * PAGE
        if whole > self._clean and self.store.device(self.fd).cached:
            release(self.fd, self._clean, whole - self._clean)
            self._clean = whole

    def close(self) -> None:
        """Close the file; a network file system may report a lost write only here."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            with mapped(self.key, self.store.url, "close"):
                os.close(fd)
