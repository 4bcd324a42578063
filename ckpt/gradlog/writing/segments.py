"""Writing a rank's log behind the training: frames, put together in groups, durable one group after the other.

Where a store can append (a file system) a group is written behind the one before and synced; elsewhere each group is an
object of its own. Either way a reader finds files of frames, and the last one may be torn.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ckpt.errors import CkptError
from ckpt.repo.log_files import segment_key
from ckpt.store.base import Appends

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt.format.digest import Buffer
    from ckpt.store.base import Appender, Store

log = logging.getLogger("ckpt")

SEGMENT_BYTES = 256 << 20
"""Bytes after which a new file is begun."""


class _Waiting(NamedTuple):
    step: int
    rotate: bool
    nbytes: int
    frame: Callable[[], list[Buffer]]


class SegmentWriter:
    """A thread that makes records durable.

    Args:
        store: where.
        log_key: folder of the log.
        rank: whose.
        flush_every: records that are made durable together.
        budget: bytes of records that may wait; who submits more waits.
        segment_bytes: after so many bytes a new file is begun.
        copy: called with the step and the frame of each record that has become durable, in order.
    """

    def __init__(
        self,
        store: Store,
        log_key: str,
        rank: int,
        *,
        flush_every: int,
        budget: int,
        segment_bytes: int = SEGMENT_BYTES,
        copy: Callable[[int, list[Buffer]], None] | None = None,
    ) -> None:
        self._store, self._log_key, self._rank = store, log_key, rank
        self._flush_every, self._budget, self._segment_bytes = flush_every, budget, segment_bytes
        self._copy = copy
        self._queue: deque[_Waiting] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._closing = self._flushing = False
        self._appender: Appender | None = None
        self._in_segment = 0
        self._rotating = False
        self.durable: int | None = None
        self.written = 0
        self.failed: BaseException | None = None
        self.waited = 0
        self._thread = threading.Thread(target=self._work, name="ckpt gradient log", daemon=True)
        self._thread.start()

    def submit(self, step: int, nbytes: int, frame: Callable[[], list[Buffer]]) -> None:
        """Hand over a record.

        Args:
            step: of it.
            nbytes: about how many bytes it holds in memory.
            frame: makes the frame; called by the thread, and what it raises ends the log.
        """
        with self._changed:
            while self._bytes and self._bytes + nbytes > self._budget and self.failed is None:
                self.waited += 1
                self._flushing = True  # a group that is not full must not hold up who waits for room
                self._changed.notify_all()
                self._changed.wait(1.0)
            if self.failed is None:
                self._queue.append(_Waiting(step, self._rotating, nbytes, frame))
                self._rotating = False
                self._bytes += nbytes
                self._changed.notify_all()

    def rotate(self) -> None:
        """Begin a new file with the next record."""
        self._rotating = True

    def flush(self) -> None:
        """Wait until all that was submitted is durable, or never will be."""
        with self._changed:
            self._flushing = True
            self._changed.notify_all()
            while (self._queue or self._bytes) and self.failed is None:
                self._changed.wait(1.0)

    def close(self) -> None:
        """Make durable what was submitted, and end the thread. Failures stay in ``failed``."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        try:
            while group := self._next():
                self._write(group)
                with self._changed:
                    self._bytes -= sum(one.nbytes for one in group)
                    self.durable = group[-1].step
                    self._changed.notify_all()
                group.clear()  # else this thread would hold its gradients, and the engine, until the next group
        except BaseException as error:  # whatever ends this thread: who waits for it must not wait for ever
            log.error("the gradient log of rank %d ends behind step %s: %s", self._rank, self.durable, error)
            with self._changed:
                self.failed = error
                self._queue.clear()
                self._bytes = 0
                self._changed.notify_all()
        finally:
            if self._appender is not None:
                with suppress(CkptError):
                    self._appender.close()

    def _next(self) -> list[_Waiting]:
        with self._changed:
            while len(self._queue) < self._flush_every and not self._closing and not (self._flushing and self._queue):
                if not self._queue:
                    self._flushing = False
                self._changed.wait()
            count = min(self._flush_every, len(self._queue))
            count = next((i for i in range(1, count) if self._queue[i].rotate), count)
            self._flushing = self._flushing and len(self._queue) > count
            return [self._queue.popleft() for _ in range(count)]

    def _write(self, group: list[_Waiting]) -> None:
        frames = [one.frame() for one in group]
        buffers = [part for frame in frames for part in frame]
        nbytes = sum(memoryview(part).nbytes for part in buffers)
        key = segment_key(self._log_key, self._rank, group[0].step)
        if isinstance(self._store, Appends):
            full = self._in_segment + nbytes > self._segment_bytes
            if self._appender is not None and (full or group[0].rotate):
                self._appender.close()
                self._appender = None
            if self._appender is None:
                self._appender, self._in_segment = self._store.appender(key), 0
            self._appender.append(buffers)
        else:
            self._store.put(key, b"".join(buffers), overwrite=True)
        self._in_segment += nbytes
        self.written += nbytes
        if self._copy is not None:
            for one, frame in zip(group, frames, strict=True):
                self._copy(one.step, frame)
