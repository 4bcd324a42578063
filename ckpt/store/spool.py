"""A writer for stores that take an object only front to back: its bytes wait in an unnamed file on the local disk.

The head of an object is known last and lies first, so nothing can be sent before the end; and memory for a whole pack
is more than a save may use. The file has no name, so a crash leaves nothing behind.
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

from ckpt.store.base import Buffer, check_head
from ckpt.store.fsspec_errors import mapped

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


class SpoolWriter:
    """See :class:`~ckpt.store.base.ObjectWriter`. Takes no blocks: ``write`` hands the bytes to the file at once.

    Args:
        key: name of the object.
        head: bytes at the front that ``finish`` brings.
        upload: stores the file of the given path (readable only while this writer is open) under the key, whole or not
            at all; raises errors of ours.
    """

    def __init__(self, key: str, head: int, upload: Callable[[str], None]) -> None:
        self.key, self.head, self._upload = key, head, upload
        with self._mapped():
            self._file = tempfile.TemporaryFile(prefix=".tmp-", buffering=0)  # noqa: SIM115 (closed in __exit__)
        self._end = head

    def _mapped(self) -> AbstractContextManager[None]:
        return mapped(self.key, f"the spool on the local disk (TMPDIR={tempfile.gettempdir()})", "write")

    def _put(self, data: Buffer, at: int) -> int:
        view = memoryview(data).cast("B")
        with self._mapped():
            while view:
                done = os.pwrite(self._file.fileno(), view, at)
                view, at = view[done:], at + done
        return at

    def write(self, data: Buffer) -> None:
        """Append all of ``data`` to the spool."""
        self._end = self._put(data, self._end)

    def finish(self, head: Buffer = b"") -> None:
        """Upload and publish."""
        self._put(check_head(head, self.head, self.key), 0)
        self._upload(f"/proc/self/fd/{self._file.fileno()}")
        self._file.close()

    def __enter__(self) -> SpoolWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
