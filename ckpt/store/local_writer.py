"""Writing a file at the speed of the device, with as few copies as there can be (docs/adr/0007-local-io.md).

Bytes that lie in memory as they will lie in the file (modulo the device's alignment) are written directly from there:
no copy, no page cache. All others go through the page cache in windows: each is on its way to the device while the next
one is copied, and is forgotten once it is there, so that a save neither piles up dirty memory, nor pushes out what
training has cached, nor pays for ever new pages. In memory (tmpfs) a write is one copy, and nothing is to be gained.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from ckpt.store.base import Buffer, check_head
from ckpt.store.local_system import REFUSED, Device, mapped, release, set_direct

if TYPE_CHECKING:
    from ckpt.store.local import LocalStore

TEMP = ".tmp-"
"""Prefix of the last part of a temporary file's name: garbage if its writer is dead."""
WINDOW = 4 << 20
"""Bytes after which writing to the device is started."""
BEHIND = 32 << 20
"""How far behind the end pages are forgotten: by then the device has them."""


def sync_dir(path: str) -> None:
    """Bring the entries of a directory to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems have no fsync for directories; there the server orders metadata itself.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


class LocalWriter:
    """A temporary file beside the final name; see :class:`~ckpt.store.base.ObjectWriter`.

    ``position``: where the next byte goes. Memory that holds what is written next is written without a copy if its
    address is ``position`` modulo 4096: who copies into blocks anyway starts at that offset of the block.
    """

    def __init__(self, store: LocalStore, key: str, head: int = 0) -> None:
        self.key, self.store, self.head = key, store, head
        self.path = store._path(key)
        self.published = False
        self.position = head
        self._direct = False
        self._started = head // WINDOW * WINDOW  # before this, every window is on its way to the device
        with mapped(key, store.url, "create"):
            parent = store._make_parent(self.path)
            # The name must be unique across hosts; os.urandom, because a save must not move the user's RNG streams.
            name = f"{TEMP}{os.urandom(8).hex()}-{os.path.basename(self.path)}"
            self.temp = os.path.join(parent, name[:255])
            self.fd = os.open(self.temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, data: Buffer) -> None:
        """Append all of ``data`` (a short write is continued)."""
        with mapped(self.key, self.store.url, "write"):
            view = memoryview(data).cast("B")
            device = self.store.device(self.fd) if view else None
            while view and device:
                view = view[self._write_some(view, device) :]

    def _write_some(self, view: memoryview, device: Device) -> int:
        length, direct = device.next_part(view, self.position)
        try:
            if direct != self._direct:
                set_direct(self.fd, direct)
                self._direct = direct
            done = os.pwritev(self.fd, [view[: length if direct else min(length, WINDOW)]], self.position)
        except OSError as error:
            if not direct or error.errno not in REFUSED:
                raise
            device.refuse()  # it promised more than it has
            return 0
        self.position += done
        if device.cached and not direct:
            self._release(device)
        return done

    def _release(self, device: Device) -> None:
        while self.position - self._started >= WINDOW:
            release(self.fd, self._started, WINDOW)
            if self._started >= BEHIND:
                release(self.fd, self._started - BEHIND, WINDOW)
            self._started += WINDOW

    def sync(self) -> None:
        """Bring the bytes to the disk and close."""
        with mapped(self.key, self.store.url, "sync"):
            os.fsync(self.fd)
            if self._started and self.store.device(self.fd).cached:
                release(self.fd, 0, 0)
            fd, self.fd = self.fd, -1
            os.close(fd)  # a network file system may report a lost write only here

    def finish(self, head: Buffer = b"") -> None:
        """Publish under the final name, durably."""
        check_head(head, self.head, self.key)
        if head:
            self.position = 0
            self.write(head)
        self.sync()
        with mapped(self.key, self.store.url, "publish"):
            os.rename(self.temp, self.path)
            self.published = True
            sync_dir(os.path.dirname(self.path))

    def __enter__(self) -> LocalWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.fd >= 0:
            with suppress(OSError):
                os.close(self.fd)
        if not self.published:
            with suppress(OSError):
                os.unlink(self.temp)
