"""Standard output and standard error as they may be: closed, a pipe whose reader has gone, a full disk. No command
fails in its midst, and its exit code is its own.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Out(io.FileIO):
    """A descriptor that takes whatever is written, so that the work goes on, and keeps why it could not be shown."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self.failure: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        if self.failure is None:
            try:
                return super().write(data)
            except OSError as error:
                self.failure = error
        return memoryview(data).nbytes


class Output:
    """Standard output of this process from now on, and what became of it in the end."""

    def __init__(self) -> None:
        _fill()
        said = getattr(sys.stderr, "encoding", None) or "utf-8"
        sys.stderr = io.TextIOWrapper(_Out(2), said, "backslashreplace", write_through=True)
        self._raw = _Out(1)
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(self._raw), encoding, line_buffering=self._raw.isatty())

    def trouble(self) -> str | None:
        """Return what kept the output from being written; None if nothing did, or if its reader wanted no more."""
        sys.stdout.flush()
        failure = self._raw.failure
        return None if failure is None or isinstance(failure, BrokenPipeError) else str(failure.strerror or failure)


def _fill() -> None:
    """Open closed standard descriptors on nothing: else a file of a checkpoint would get one of their numbers."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
