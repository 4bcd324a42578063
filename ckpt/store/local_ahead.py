"""Writing behind the caller: bytes are copied into blocks of a bounded pool, and a thread writes those to the file.

A block is filled so that it lies in memory as it will lie in the file, modulo the page size: then the device takes it
from there, without the page cache (``local_writer.py``). The caller waits when all blocks of the pool are on their way.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

import numpy as np

from ckpt.store.base import CanGiveUp
from ckpt.store.blocks import PAGE

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt.store.base import Buffer, ObjectWriter
    from ckpt.store.blocks import Block, Blocks

PATIENCE_SECONDS = 0.2
"""How long a writer waits for a block before it asks whether any of its own is on its way."""


class AheadWriter:
    """A writer whose ``write`` returns when the bytes are copied; see :class:`ckpt.store.base.ObjectWriter`.

    Nobody waits for ever: a writer that gets no block, and has none on its way that will come back, writes without.

    Args:
        writer: what the thread writes to.
        blocks: host memory.
        position: where in the object the first byte goes that is written.
    """

    def __init__(self, writer: ObjectWriter, blocks: Blocks, position: int) -> None:
        self._writer, self._blocks = writer, blocks
        self._block: Block | None = None
        self._start = self._end = 0  # what is filled of the block
        self._position = position  # where the next byte goes in the file
        self._patience = PATIENCE_SECONDS
        self._queue: queue.Queue[tuple[Block, int, int] | None] = queue.Queue()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.on_part: Callable[[int], None] | None = None
        """see :class:`ckpt.store.base.WatchedWriter`"""

    def write(self, data: Buffer) -> None:
        """Append bytes; raises what went wrong with earlier ones."""
        source = np.frombuffer(data, np.uint8)
        while len(source):
            self._raise()
            if self._block is None and not self._take():
                self._writer.write(source.data)
                self._position += len(source)
                return
            count = self._put(source)
            source = source[count:]

    def _put(self, source: Block) -> int:
        """Copy as much as the block takes; return how much that was."""
        block, end = self._block, self._end
        if block is None:
            return 0
        count = min(len(source), len(block) - end)
        np.copyto(block[end : end + count], source[:count])  # without the GIL, which an assignment of views would hold
        self._end += count
        self._position += count
        if self._end == len(block):
            self._send()
        return count

    def _take(self) -> bool:
        """Get a block; False if there is none to wait for, and everything before is in the file."""
        while True:
            block = self._blocks.take(self._patience)
            if block is not None:
                self._block, self._patience = block, PATIENCE_SECONDS
                self._start = self._end = self._position % PAGE
                return True
            self._raise()
            if self.on_part is not None:
                self.on_part(0)
            if not self._queue.unfinished_tasks:
                self._patience = 0.0  # others keep the blocks: waiting anew for every write would take for ever
                return False

    def _send(self) -> None:
        block, self._block = self._block, None
        if block is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ckpt write", daemon=True)
            self._thread.start()
        self._queue.put((block, self._start, self._end))

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            block, start, end = item
            try:
                if self._error is None and self.on_part is not None:
                    self.on_part(end - start)
                if self._error is None:
                    self._writer.write(block[start:end].data)
            except BaseException as error:
                self._error = error
            finally:
                self._blocks.give(block)
                self._queue.task_done()
        self._queue.task_done()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def finish(self, head: Buffer = b"") -> None:
        """Publish, durably."""
        self._send()
        self._stop(self.on_part)
        self._raise()
        self._writer.finish(head)

    def _stop(self, waits: Callable[[int], None] | None = None) -> None:
        if self._thread is not None:
            self._queue.put(None)
            while self._thread.is_alive():
                self._thread.join(PATIENCE_SECONDS)
                if waits is not None:  # the thread may be held up for long, by a limit of its rate
                    waits(0)
            self._thread = None

    def __enter__(self) -> AheadWriter:
        self._writer.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread is not None and self._error is None:
            self._error = InterruptedError("the writer was left before its end")  # nobody needs the rest
            if isinstance(self._writer, CanGiveUp):
                self._writer.give_up()
        self._stop()
        if self._block is not None:
            self._blocks.give(self._block)
            self._block = None
        self._writer.__exit__(*exc)
