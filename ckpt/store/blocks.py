"""Host memory for bytes on their way to a store: page-aligned blocks, reused, and never more than a budget.

Blocks are reused because copying into fresh pages costs three times as much as into warm ones (the kernel zeroes them
first), aligned because direct I/O asks for it, in huge pages where there are any because the device then gets few long
pieces instead of many short ones, and counted because a checkpoint must not push a job out of memory.

The local store writes and reads without a copy what lies in memory as it lies in the file, modulo the page size. So who
fills a block for position ``p`` of an object starts at ``block[p % PAGE]``.
"""

from __future__ import annotations

import mmap
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from ckpt.errors import BudgetTooSmall

if TYPE_CHECKING:
    import numpy.typing as npt

    Block = npt.NDArray[np.uint8]

PAGE = 4096
_HUGE = 2 << 20
BLOCK_BYTES = 4 << 20
DEFAULT_BUDGET = 256 << 20
"""Bytes of host memory that a save or load may use on one rank beside the live state."""


class Blocks:
    """A pool of equal blocks of bytes. Safe to use from several threads.

    Args:
        budget: bytes of all blocks together.
        size: bytes of one block, a multiple of the page size.

    Raises:
        BudgetTooSmall: fewer than two blocks: nothing could overlap.
    """

    def __init__(self, budget: int = DEFAULT_BUDGET, size: int = BLOCK_BYTES) -> None:
        if budget < 2 * size:
            raise BudgetTooSmall(f"a memory budget of {budget} bytes, at least {2 * size} are needed")
        self.budget, self.size = budget, size
        self._free: list[Block] = []
        self._made = 0
        self._changed = threading.Condition()

    @property
    def in_use(self) -> int:
        """Bytes of the blocks that are taken now."""
        with self._changed:
            return (self._made - len(self._free)) * self.size

    def take(self, timeout: float | None = None) -> Block | None:
        """Return a block of ``size`` bytes of any content; waits while all are in use.

        ``timeout``: seconds after which None is returned instead (None: wait for ever).
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                if self._free:
                    return self._free.pop()  # the one that was used last: its pages are the likeliest to be in a cache
                if (self._made + 1) * self.size <= self.budget:
                    block = _new_block(self.size)
                    self._made += 1
                    return block
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)

    def give(self, block: Block) -> None:
        """Give back a block that was taken from this pool."""
        with self._changed:
            self._free.append(block)
            self._changed.notify()


class Part(Blocks):
    """No more than a part of another pool's blocks at a time: for a user that gains nothing from having more.

    Args:
        blocks: the pool.
        budget: bytes of its blocks that may be taken here at a time; at least two, and no more than the pool has.
    """

    def __init__(self, blocks: Blocks, budget: int) -> None:
        super().__init__(min(max(budget, 2 * blocks.size), blocks.budget), blocks.size)
        self._whole = blocks
        self._taken = 0

    @property
    def in_use(self) -> int:
        """Bytes of the blocks that are taken here now."""
        with self._changed:
            return self._taken * self.size

    def take(self, timeout: float | None = None) -> Block | None:
        """See :meth:`Blocks.take`."""
        most = self.budget // self.size
        with self._changed:
            if not self._changed.wait_for(lambda: self._taken < most, timeout):
                return None
            self._taken += 1
        block = self._whole.take(timeout)
        if block is None:
            self._returned()
        return block

    def give(self, block: Block) -> None:
        """See :meth:`Blocks.give`."""
        self._whole.give(block)
        self._returned()

    def _returned(self) -> None:
        with self._changed:
            self._taken -= 1
            self._changed.notify()


def _new_block(size: int) -> Block:
    """Return anonymous memory of its own, which goes back to the system with the last view of it."""
    if size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.frombuffer(mmap.mmap(-1, size), np.uint8)
    # Address space for the alignment costs no memory: what is never touched has no pages.
    memory = mmap.mmap(-1, size + _HUGE)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _HUGE
    return whole[start : start + size]
