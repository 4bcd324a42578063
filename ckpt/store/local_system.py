"""What lies below a local store: the errors of the operating system, and what its file systems can do.

Nothing here is needed for correct bytes: where a question has no answer (another system, an old kernel), the plain way
of reading and writing is taken.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np

from ckpt.errors import AccessDenied, ObjectNotFound, StoreError, StoreFull, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = 4096
"""Direct transfers start and end at multiples of this in the file: no page is written through the cache as well."""
DIRECT_BYTES = 1 << 20
"""Shorter transfers go through the page cache: a direct one waits for the device each time."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_BUSY = {
    errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY,
    errno.EMFILE, errno.ENFILE, errno.ENOMEM,  # this process or host is short of something; the file may be whole
    errno.ENOTCONN, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED,  # a mount whose server is gone
    errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH,
}  # fmt: skip
REFUSED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
"""How a file system says that it has no direct transfers, or none of this alignment."""

_IN_MEMORY = {0x01021994, 0x858458F6}  # tmpfs, ramfs
_STATX_DIOALIGN, _AT_EMPTY_PATH, _SYS_CACHESTAT = 0x2000, 0x1000, 451  # of every architecture
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def mapped(key: str, url: str, doing: str) -> Iterator[None]:
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


class Device:
    """What the file system of a store can do, asked once, of the first large file.

    ``alignment``: to which direct transfers need their memory aligned, in bytes; 0: there are none. ``cached``: has it
    a page cache that is apart from where the bytes lie for good?
    """

    def __init__(self, fd: int) -> None:
        self.cached = hasattr(os, "posix_fadvise") and _magic(fd) not in _IN_MEMORY
        self.alignment = _alignment(fd) if self.cached and _O_DIRECT else 0

    def refuse(self) -> None:
        """Note that a direct transfer was refused."""
        self.alignment = 0

    def next_part(self, view: memoryview, position: int) -> tuple[int, bool]:
        """Return how many of the bytes of ``view``, meant for ``position`` in a file, go next, and whether directly.

        Directly goes what is long enough and lies in memory as it lies in the file, modulo the alignment.
        """
        length = len(view)
        if not self.alignment or length < DIRECT_BYTES:
            return length, False
        edge = -position % PAGE
        address = np.frombuffer(view, np.uint8).ctypes.data
        if (address + edge) % self.alignment or length - edge < DIRECT_BYTES:
            return length, False
        return (edge, False) if edge else (length // PAGE * PAGE, True)


def set_direct(fd: int, on: bool) -> None:
    """Let the transfers of an open file pass by the page cache, or through it. OSError (``REFUSED``): not here."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)


def release(fd: int, start: int, nbytes: int) -> None:
    """Start to write what is dirty in this range of a file, and forget what is not (0 bytes: to the end)."""
    with suppress(OSError):  # only a hint
        os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_DONTNEED)


def mostly_cached(fd: int, start: int, nbytes: int) -> bool:
    """Is at least half of a range of a file in the page cache? False if the system does not say (Linux before 6.5)."""
    where = (ctypes.c_uint64 * 2)(start, nbytes)
    pages = (ctypes.c_uint64 * 5)()
    if _libc.syscall(ctypes.c_long(_SYS_CACHESTAT), ctypes.c_int(fd), where, pages, ctypes.c_uint(0)):
        return False
    return pages[0] * os.sysconf("SC_PAGE_SIZE") * 2 >= nbytes


def _magic(fd: int) -> int:
    """Return the number by which Linux knows the type of a file system; 0 if unknown."""
    answer = ctypes.create_string_buffer(256)
    if not hasattr(_libc, "fstatfs") or _libc.fstatfs(ctypes.c_int(fd), answer):
        return 0
    return int(struct.unpack_from("l", answer.raw)[0]) & 0xFFFFFFFF


def _alignment(fd: int) -> int:
    answer = ctypes.create_string_buffer(256)
    if not hasattr(_libc, "statx") or _libc.statx(
        ctypes.c_int(fd), b"", ctypes.c_int(_AT_EMPTY_PATH), ctypes.c_uint(_STATX_DIOALIGN), answer
    ):
        return PAGE
    (mask,) = struct.unpack_from("I", answer.raw, 0)
    memory, offset = struct.unpack_from("II", answer.raw, 0x98)
    if not mask & _STATX_DIOALIGN:  # before Linux 6.1, or a file system that does not say: what all ask for at most
        return PAGE
    return memory if memory and offset and PAGE % offset == 0 else 0
