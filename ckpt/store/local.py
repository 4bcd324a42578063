"""Local (or mounted) file system.

A file becomes visible under its name only when its bytes are on the disk, and its name is on the disk (fsync of the
directory, and of every directory made on the way) before the call returns. A rename alone is not enough: after a power
loss an unsynced rename can be undone, or worse, leave an empty file under the final name.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ckpt.errors import AccessDenied, ObjectExists, ObjectNotFound, StoreError, StoreFull, StoreUnavailable
from ckpt.store.base import Buffer, ObjectInfo, check_head, check_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt.store.blocks import Blocks

TEMP = ".tmp-"
"""Prefix of the last part of a temporary file's name: garbage if its writer is dead."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_BUSY = {
    errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY,
    errno.EMFILE, errno.ENFILE, errno.ENOMEM,  # this process or host is short of something; the file may be whole
    errno.ENOTCONN, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED,  # a mount whose server is gone
    errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH,
}  # fmt: skip
_KINDS = {
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "FIFO",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
    stat.S_IFSOCK: "socket",
}


@contextmanager
def _mapped(key: str, url: str, doing: str) -> Iterator[None]:
    """The seam at which operating-system errors become ours."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        text = f"{doing} {key!r} in {url}: {error.strerror or error}"
        if error.errno in _FULL:
            raise StoreFull(f"{text} (disk or quota full)", key) from error
        if error.errno in _DENIED:
            raise AccessDenied(text, key) from error
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise ObjectNotFound(text, key) from error
        if error.errno in _BUSY:
            raise StoreUnavailable(text, key) from error
        raise StoreError(text, key) from error


def _sync_dir(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems have no fsync for directories; there the server orders metadata itself.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


class LocalStore:
    """Keys are paths below ``root`` (made on the first write); links on the way to it are followed once, here."""

    def __init__(self, root: str) -> None:
        # One folder has one name: ranks compare what they were given, some through a link and some directly.
        self.root = os.path.realpath(root)
        # For messages and other ranks: a name that is not UTF-8 is lone surrogates in Python, which cannot be sent.
        self.url = self.root.encode("utf-8", "backslashreplace").decode()
        self._synced: set[str] = set()

    def _path(self, key: str) -> str:
        return os.path.join(self.root, *check_key(key).split("/"))

    def _folder(self, prefix: str) -> str:
        return self._path(prefix) if prefix else self.root

    def _make_parent(self, path: str, *, again: bool = True) -> str:
        """Make the directory of ``path`` and sync every directory entry that this adds."""
        parent = os.path.dirname(path)
        made = []
        probe = parent
        while not os.path.isdir(probe):
            made.append(probe)
            probe = os.path.dirname(probe)
        for directory in reversed(made):
            try:
                os.mkdir(directory)
            except FileExistsError:  # another rank was quicker; on some shared file systems it is not visible yet
                if os.path.lexists(directory) and not os.path.isdir(directory):
                    raise
            except FileNotFoundError:  # somebody has just removed the folder above, because it was empty
                if not again:
                    raise
                return self._make_parent(path, again=False)
            # Also when another rank made it: its sync may not have happened yet, and ours must not depend on it.
            _sync_dir(os.path.dirname(directory))
        return parent

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> None:
        """See :class:`~ckpt.store.base.Store`."""
        path = self._path(key)
        with LocalWriter(self, key) as out:
            out.write(data)
            out.sync()
            with _mapped(key, self.url, "publish"):
                if overwrite:
                    os.replace(out.temp, path)
                else:
                    self._link(out.temp, path, key)
                out.published = True
                _sync_dir(os.path.dirname(path))
                self._sync_up(os.path.dirname(path))

    def _sync_up(self, path: str) -> None:
        """Sync the directories above, once each: one that a crashed process made may not be on the disk yet."""
        while path != self.root:
            path = os.path.dirname(path)
            if path not in self._synced:
                _sync_dir(path)
                self._synced.add(path)

    def _link(self, temp: str, path: str, key: str) -> None:
        """Publish ``temp`` as ``path`` if nothing is there (rename would silently replace what a rival published)."""
        try:
            os.link(temp, path)
        except FileExistsError as error:
            raise ObjectExists(f"{key!r} exists already in {self.url}", key) from error
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                raise
            # No hard links here (FAT, some FUSE and SMB mounts): two racing writers could both pass this check.
            if os.path.lexists(path):
                raise ObjectExists(f"{key!r} exists already in {self.url}", key) from error
            os.rename(temp, path)
        else:
            os.unlink(temp)

    def writer(self, key: str, *, head: int = 0, size: int = 0, blocks: Blocks | None = None) -> LocalWriter:
        """See :class:`~ckpt.store.base.Store`."""
        return LocalWriter(self, key, head)

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """See :class:`~ckpt.store.base.Store`."""
        with _mapped(key, self.url, "read"), open(self._open(key), "rb") as file:
            file.seek(start)
            # A number from a file may be of any size; Python would allocate that much before it reads.
            left = max(0, os.fstat(file.fileno()).st_size - start)
            return file.read() if nbytes is None else file.read(min(nbytes, left))

    def _open(self, key: str) -> int:
        """Open a file for reading. Whatever else stands there would block, never end, or be no bytes at all."""
        path = self._path(key)
        try:
            # O_NONBLOCK: a FIFO without a writer must not hang the reader; it means nothing to a file.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a socket, or a device without a driver
                self._refuse(key, os.stat(path).st_mode)
            raise
        try:
            self._refuse(key, os.fstat(fd).st_mode)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _refuse(self, key: str, mode: int) -> None:
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "special file")
            raise StoreError(f"read {key!r} in {self.url}: a {kind} is there, expected a file", key)

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """See :class:`~ckpt.store.base.Store`."""
        with _mapped(key, self.url, "read"):
            fd = self._open(key)
            try:
                done = 0
                while done < len(buffer):
                    count = os.preadv(fd, [buffer[done:]], start + done)
                    if not count:
                        break
                    done += count
                return done
            finally:
                os.close(fd)

    def size(self, key: str) -> int | None:
        """See :class:`~ckpt.store.base.Store`."""
        with _mapped(key, self.url, "stat"):
            try:
                return os.stat(self._path(key)).st_size
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                return 0  # a link to itself: something has this name, and it has no bytes

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """See :class:`~ckpt.store.base.Store`."""
        with _mapped(prefix, self.url, "list"):
            for folder, _, names in os.walk(self._folder(prefix), onerror=_raise_unless_gone):
                for name in names:
                    path = os.path.join(folder, name)
                    with suppress(FileNotFoundError):  # removed between listing and stat
                        key = os.path.relpath(path, self.root).replace(os.sep, "/")
                        found = os.lstat(path)
                        # A copy may keep the old mtime; that it was made now is only in the ctime.
                        yield ObjectInfo(key, found.st_size, max(found.st_mtime, found.st_ctime))

    def children(self, prefix: str) -> list[str]:
        """See :class:`~ckpt.store.base.Store`."""
        with _mapped(prefix, self.url, "list"):
            try:
                return os.listdir(self._folder(prefix))
            except FileNotFoundError:
                return []

    def delete(self, key: str) -> None:
        """See :class:`~ckpt.store.base.Store`."""
        with _mapped(key, self.url, "delete"), suppress(FileNotFoundError):
            os.unlink(self._path(key))

    def remove_folder(self, prefix: str) -> None:
        """See :class:`~ckpt.store.base.HasFolders`."""
        with _mapped(prefix, self.url, "remove"):
            try:
                os.rmdir(self._path(prefix))
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST):
                    raise


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError) and error.errno != errno.ELOOP:  # nothing is below a link to itself
        raise error


class LocalWriter:
    """A temporary file beside the final name; see :class:`~ckpt.store.base.ObjectWriter`."""

    def __init__(self, store: LocalStore, key: str, head: int = 0) -> None:
        self.key, self.store, self.head = key, store, head
        self.path = store._path(key)
        self.published = False
        with _mapped(key, store.url, "create"):
            parent = store._make_parent(self.path)
            # The name must be unique across hosts; os.urandom, because a save must not move the user's RNG streams.
            name = f"{TEMP}{os.urandom(8).hex()}-{os.path.basename(self.path)}"
            self.temp = os.path.join(parent, name[:255])
            self.fd = os.open(self.temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            os.lseek(self.fd, head, os.SEEK_SET)

    def write(self, data: Buffer) -> None:
        """Append all of ``data`` (a short write is continued)."""
        with _mapped(self.key, self.store.url, "write"):
            view = memoryview(data).cast("B")
            while view:
                view = view[os.write(self.fd, view) :]

    def sync(self) -> None:
        """Bring the bytes to the disk and close."""
        with _mapped(self.key, self.store.url, "sync"):
            os.fsync(self.fd)
            fd, self.fd = self.fd, -1
            os.close(fd)  # a network file system may report a lost write only here

    def finish(self, head: Buffer = b"") -> None:
        """Publish under the final name, durably."""
        check_head(head, self.head, self.key)
        if head:
            with _mapped(self.key, self.store.url, "write"):
                os.lseek(self.fd, 0, os.SEEK_SET)
            self.write(head)
        self.sync()
        with _mapped(self.key, self.store.url, "publish"):
            os.rename(self.temp, self.path)
            self.published = True
            _sync_dir(os.path.dirname(self.path))

    def __enter__(self) -> LocalWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.fd >= 0:
            with suppress(OSError):
                os.close(self.fd)
        if not self.published:
            with suppress(OSError):
                os.unlink(self.temp)
