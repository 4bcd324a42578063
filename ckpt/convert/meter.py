"""How far a conversion is."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Meter:
    """Counts bytes for all workers and tells of them, one at a time.

    Args:
        total: bytes that there will be.
        progress: told of (bytes so far, ``total``).
    """

    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self._total, self._progress, self._done = total, progress, 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Note that bytes are there."""
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(min(self._done, self._total), self._total)
