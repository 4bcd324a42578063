"""Local (or mounted) file system.

A file becomes visible under its name only when its bytes are on the disk, and its name is on the disk (fsync of the
directory, and of every directory made on the way) before the call returns. A rename alone is not enough: after a power
loss an unsynced rename can be undone, or worse, leave an empty file under the final name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from ckpt.errors import ObjectExists, StoreError
from ckpt.store.base import Buffer, ObjectInfo, check_key
from ckpt.store.local_ahead import AheadWriter
from ckpt.store.local_appender import LocalAppender
from ckpt.store.local_system import DIRECT_BYTES, REFUSED, Device, mapped, mostly_cached, set_direct
from ckpt.store.local_writer import LocalWriter, sync_dir

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt.store.blocks import Blocks

_KINDS = {
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "FIFO",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
    stat.S_IFSOCK: "socket",
}


class LocalStore:
    """Keys are paths below ``root`` (made on the first write); links on the way to it are followed once, here."""

    def __init__(self, root: str) -> None:
        # One folder has one name: ranks compare what they were given, some through a link and some directly.
        self.root = os.path.realpath(root)
        # For messages and other ranks: a name that is not UTF-8 is lone surrogates in Python, which cannot be sent.
        self.url = self.root.encode("utf-8", "backslashreplace").decode()
        self._synced: set[str] = set()
        self._device: Device | None = None

    def device(self, fd: int) -> Device:
        """Return what the file system of this store can do; ``fd``: one of its files, asked if none was yet."""
        if self._device is None:
            self._device = Device(fd)
        return self._device

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
            sync_dir(os.path.dirname(directory))
        return parent

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> None:
        """See :class:`~ckpt.store.base.Store`."""
        path = self._path(key)
        with LocalWriter(self, key) as out:
            out.write(data)
            out.sync()
            with mapped(key, self.url, "publish"):
                if overwrite:
                    os.replace(out.temp, path)
                else:
                    self._link(out.temp, path, key)
                out.published = True
                sync_dir(os.path.dirname(path))
                self._sync_up(os.path.dirname(path))

    def _sync_up(self, path: str) -> None:
        """Sync the directories above, once each: one that a crashed process made may not be on the disk yet."""
        while path != self.root:
            path = os.path.dirname(path)
            if path not in self._synced:
                sync_dir(path)
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

    def writer(
        self, key: str, *, head: int = 0, size: int = 0, blocks: Blocks | None = None
    ) -> LocalWriter | AheadWriter:
        """See :class:`~ckpt.store.base.Store`. With ``blocks``, writes return when the bytes are copied."""
        writer = LocalWriter(self, key, head)
        # Where there is no page cache apart from the file's own memory, a copy into it is all that a write is.
        if blocks is None or not self.device(writer.fd).cached:
            return writer
        return AheadWriter(writer, blocks, head)

    def appender(self, key: str) -> LocalAppender:
        """See :class:`~ckpt.store.base.Appends`."""
        appender = LocalAppender(self, key)
        with mapped(key, self.url, "create"):
            self._sync_up(os.path.dirname(appender.path))
        return appender

    def in_use(self, key: str) -> bool:
        """Does somebody append to this file? The lock of a process that was killed is gone with it."""
        with mapped(key, self.url, "lock"):
            fd = self._open(key)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:
                return False
            finally:
                os.close(fd)
        return False

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """See :class:`~ckpt.store.base.Store`."""
        with mapped(key, self.url, "read"), open(self._open(key), "rb") as file:
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
        """See :class:`~ckpt.store.base.Store`.

        Long reads of what the page cache does not have pass by it, without a copy, if the memory lies as the file does:
        its address is ``start`` modulo 4096. To open the file each time costs nothing beside such a read, nothing can
        be stale, and threads do not disturb each other.
        """
        with mapped(key, self.url, "read"):
            fd = self._open(key)
            try:
                return self._fill(fd, start, buffer.cast("B"))
            finally:
                os.close(fd)

    def _fill(self, fd: int, start: int, view: memoryview) -> int:
        device = self.device(fd)
        cold = device.cached and len(view) >= DIRECT_BYTES and not mostly_cached(fd, start, len(view))
        done, is_direct = 0, False
        while done < len(view):
            rest = view[done:]
            length, direct = device.next_part(rest, start + done) if cold else (len(rest), False)
            try:
                # Around an edge of a direct read nothing is worth reading ahead for.
                if cold and not direct and length < DIRECT_BYTES:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
                if direct != is_direct:
                    set_direct(fd, direct)
                    is_direct = direct
                count = os.preadv(fd, [rest[:length]], start + done)
            except OSError as error:
                if error.errno not in REFUSED or not direct:
                    raise
                device.refuse()  # it promised more than it has
                continue
            if not count:
                break
            done += count
        return done

    def size(self, key: str) -> int | None:
        """See :class:`~ckpt.store.base.Store`."""
        with mapped(key, self.url, "stat"):
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
        with mapped(prefix, self.url, "list"):
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
        with mapped(prefix, self.url, "list"):
            try:
                return os.listdir(self._folder(prefix))
            except FileNotFoundError:
                return []

    def delete(self, key: str) -> None:
        """See :class:`~ckpt.store.base.Store`."""
        with mapped(key, self.url, "delete"), suppress(FileNotFoundError):
            os.unlink(self._path(key))

    def remove_folder(self, prefix: str) -> None:
        """See :class:`~ckpt.store.base.HasFolders`."""
        with mapped(prefix, self.url, "remove"):
            try:
                os.rmdir(self._path(prefix))
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST):
                    raise


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError) and error.errno != errno.ELOOP:  # nothing is below a link to itself
        raise error
