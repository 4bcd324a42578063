"""Units on their way through a rank, and the memory that they have meanwhile."""

from __future__ import annotations

import queue
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ckpt.plan.read_plan import Unit
from ckpt.runtime.fabric import Pending
from ckpt.runtime.routes import Route
from ckpt.runtime.sharing import Block, Sharing, Slots, Told, block_bytes, place_in_page
from ckpt.store.blocks import PAGE, Blocks

if TYPE_CHECKING:
    from ckpt.runtime.cargo import Cargo

SMALL = 8
"""Units of less than this part of a block get memory of their own size."""
COPIED_BYTES = 1 << 20
"""Copied at once: longer copies pass by the processor's cache, where the digest is to find the bytes."""


@dataclass(eq=False, slots=True)
class Job:
    """A unit on its way through this rank."""

    unit: Unit
    route: Route
    data: memoryview
    block: Block | None = None
    live: memoryview | None = None
    """live memory that the bytes fill: ``data`` itself, or where they are copied to when they have arrived"""
    flow: Flow | None = None
    told: Told | None = None
    """whose memory ``data`` is, unless this rank's"""
    pending: Pending | None = None
    owed: int = 0
    """ranks that do not have it from this one yet"""
    arrived: bool = False
    good: bool = False
    placed: bool = False

    def settle(self) -> None:
        """Copy what has arrived to live memory."""
        if self.live is not None and self.live is not self.data:
            copy(self.live, self.data)


@dataclass(eq=False, slots=True)
class Flow:
    """Units that come to this rank in one way, in order; ``current``: those that have begun and are not done.

    ``limit``: bytes of these, unless one has more.
    """

    todo: deque[tuple[Unit, Route]]
    pool: Blocks | Slots
    limit: int
    leaving: queue.SimpleQueue[tuple[Job, Pending] | None] = field(default_factory=queue.SimpleQueue)
    current: list[Job] = field(default_factory=list)
    nbytes: int = 0
    """of these"""
    head: int = -1
    live: memoryview | None = None
    """of the unit of number ``head``, the first to do"""

    def begin(self, cargo: Cargo, ahead: int) -> Job | None:
        """Return the next unit, with memory; None if there is none, or no room yet.

        Args:
            cargo: knows the live memory.
            ahead: most units that are on their way.
        """
        if not self.todo or len(self.current) >= ahead:
            return None
        unit, route = self.todo[0]
        if self.current and self.nbytes + unit.nbytes > self.limit:
            return None  # also for a unit that is larger than all of that: it comes alone
        if self.head != unit.number:
            self.head, self.live = unit.number, cargo.live(unit)
        live, block, at = self.live, None, place_in_page(unit)
        lent = bool(route.mates)
        if (
            (live is None or lent)
            and at + unit.nbytes <= self.pool.size
            and (lent or unit.nbytes * SMALL >= self.pool.size - 2 * PAGE)
        ):
            block = self.pool.take(timeout=0)
            if block is None:
                return None
        if block is not None:
            data = block.data.cast("B")[at : at + unit.nbytes]
        else:
            data = memoryview(bytearray(unit.nbytes)) if live is None else live
        self.todo.popleft()
        job = Job(unit, route, data, block, live, self, owed=len(route.mates) + (route.onward is not None))
        self.current.append(job)
        self.nbytes += unit.nbytes
        return job

    def end(self, job: Job) -> None:
        """Let go of a unit that is placed, and that all who get it from this rank have."""
        self.current.remove(job)
        self.nbytes -= job.unit.nbytes
        if job.block is not None:
            self.pool.give(job.block)


def pools_for(sharing: Sharing | None, count: int, span: int) -> tuple[Blocks | Slots, Blocks | Slots]:
    """Return memory for what a rank reads and for what comes: ``count`` units of ``span`` bytes each, or shared."""
    shared = sharing.pools() if sharing is not None else None
    size = block_bytes(span)
    return shared or (Blocks(count * size, size), Blocks(count * size, size))


def copy(into: memoryview, source: memoryview) -> None:
    """Copy bytes without holding up other threads."""
    left, right = np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8)
    for at in range(0, len(right), COPIED_BYTES):
        np.copyto(left[at : at + COPIED_BYTES], right[at : at + COPIED_BYTES])
