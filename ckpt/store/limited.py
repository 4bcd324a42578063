"""A limit of bytes per second over whatever moves bytes, because a checkpoint shares its links with the training."""

from __future__ import annotations

import math
import threading
import time
from functools import lru_cache
from typing import TYPE_CHECKING

from ckpt.errors import ConfigError
from ckpt.store.blocks import Blocks
from ckpt.store.forward import Forward, ForwardWriter
from ckpt.store.local_ahead import AheadWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt.store.base import Buffer, ObjectWriter, Store

_BURST_S = 0.125
_LARGEST = 8 << 20


def positive(name: str, value: object) -> float:
    """Return ``value`` if it is a positive, finite number.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{name}={value!r}, expected a positive number")
    return value


class Rate:
    """A token bucket that threads share. An eighth of a second's worth may go at once after a rest.

    Whoever asks first is served first, and asks for a slice at a time: a large transfer keeps no small one waiting.

    Args:
        bytes_per_s: the limit.
        clock: seconds, for tests.
        sleep: waits for seconds, for tests.

    Raises:
        ConfigError: no positive, finite number.
    """

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bytes_per_s = positive("bytes_per_s", bytes_per_s)
        self.slice = min(_LARGEST, max(1, int(bytes_per_s * _BURST_S)))
        """Bytes that are moved in one piece, at most."""
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._free_at = -math.inf

    def take(self, nbytes: int) -> None:
        """Wait until ``nbytes`` may move."""
        while nbytes > 0:
            part = min(nbytes, self.slice)
            with self._lock:  # only to get in line: nobody sleeps in here
                now = self._clock()
                due = max(self._free_at, now - _BURST_S)
                self._free_at = due + part / self.bytes_per_s
            if due > now:
                self._sleep(due - now)
            nbytes -= part

    def give_back(self, nbytes: int) -> None:
        """Tell that of what was taken ``nbytes`` did not move (negative: so many more did)."""
        with self._lock:
            self._free_at -= nbytes / self.bytes_per_s


class Limited(Forward):
    """A store that reads and writes no faster than a rate, all its writers and all threads together.

    Args:
        store: the store below.
        bytes_per_s: the limit, or a :class:`Rate` that several stores share.

    Raises:
        ConfigError: no positive, finite number.
    """

    def __init__(self, store: Store, bytes_per_s: float | Rate) -> None:
        super().__init__(store)
        self.rate = bytes_per_s if isinstance(bytes_per_s, Rate) else Rate(bytes_per_s)

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> None:
        """See :class:`~ckpt.store.base.Store`. One request, which goes when the time of all its bytes has come."""
        self.rate.take(memoryview(data).nbytes)
        self.inner.put(key, data, overwrite=overwrite)

    def writer(self, key: str, *, head: int = 0, size: int = 0, blocks: Blocks | None = None) -> ObjectWriter:
        """See :class:`~ckpt.store.base.Store`. With ``blocks``, bytes wait in them for their time, and not the caller.

        The store below gets a pool of an eighth of them beside: where it keeps up with the rate, little of it is used.
        """
        if blocks is None:
            return LimitedWriter(self.inner.writer(key, head=head, size=size), self.rate)
        below = Blocks(max(2 * blocks.size, blocks.budget // 8), blocks.size)
        writer = self.inner.writer(key, head=head, size=size, blocks=below)
        return AheadWriter(LimitedWriter(writer, self.rate), blocks, head)

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """See :class:`~ckpt.store.base.Store`. More than a second's worth comes in several requests."""
        expected = nbytes
        if expected is None or expected > self.rate.bytes_per_s:
            size = self.inner.size(key)
            left = 0 if size is None else max(0, size - start)  # None: the store below says so in its own words
            expected = left if nbytes is None else min(expected or 0, left)
        if expected <= self.rate.bytes_per_s:
            return self._piece(key, start, nbytes, expected)  # as it was asked: the object may be another by now
        parts, done = [], 0
        while done < expected:
            want = min(self.rate.slice, expected - done)
            part = self._piece(key, start + done, want, want)
            if not part:
                break
            parts.append(part)
            done += len(part)
        return b"".join(parts)

    def _piece(self, key: str, start: int, nbytes: int | None, expected: int) -> bytes:
        ahead = min(expected, self.rate.slice)  # no more: who reads a small object names a large bound
        self.rate.take(ahead)
        moved = 0
        try:
            data = self.inner.get(key, start, nbytes)
            moved = len(data)
            return data
        finally:
            if moved > ahead:
                self.rate.take(moved - ahead)
            else:
                self.rate.give_back(ahead - moved)

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """See :class:`~ckpt.store.base.Store`. In slices, so that a large read is even and others come between."""
        view, done = buffer.cast("B"), 0
        while True:
            want = min(self.rate.slice, len(view) - done)
            self.rate.take(want)
            moved = 0
            try:
                moved = self.inner.read_into(key, start + done, view[done : done + want])
            finally:
                self.rate.give_back(want - moved)
            done += moved
            if moved < want or done == len(view):
                return done


_shared_rate = lru_cache(Rate)


def limited(store: Store, bytes_per_s: float | None) -> Store:
    """Return ``store`` with a limit that all stores of this process with the same number share (None: no limit).

    Raises:
        ConfigError: no positive, finite number.
    """
    return store if bytes_per_s is None else Limited(store, _shared_rate(positive("io_limit", bytes_per_s)))


class LimitedWriter(ForwardWriter):
    """See :class:`~ckpt.store.base.ObjectWriter`."""

    def __init__(self, writer: ObjectWriter, rate: Rate) -> None:
        super().__init__(writer)
        self._rate = rate
        self._given_up = False

    def give_up(self) -> None:
        """See :class:`~ckpt.store.base.CanGiveUp`."""
        self._given_up = True

    def write(self, data: Buffer) -> None:
        """Append bytes, slice by slice."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), self._rate.slice):
            if self._given_up:
                raise InterruptedError("the writer was left before its end")
            piece = view[start : start + self._rate.slice]
            self._rate.take(len(piece))
            self.inner.write(piece)

    def finish(self, head: Buffer = b"") -> None:
        """Publish."""
        self._rate.take(memoryview(head).nbytes)
        self.inner.finish(head)
