"""One rank's part in reading a checkpoint: units that it reads, hands on, receives and places, many at once.

A few threads read from the store, others wait for what comes from other ranks and what leaves. Whatever has arrived is
handed on before anything else is done with it, then checked against its digests, then placed by the calling thread,
in the order of the plan. Bytes that fill live memory from end to end are read or received right there.

A rank that cannot read a unit sends the bytes that it has in their place: nobody waits in vain, nobody places what does
not fit its digest, and afterwards all learn of the cause (:func:`~ckpt.runtime.cargo.settle`). A rank that is gone ends
it for all.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckpt.errors import CkptError, RankFailure, to_wire
from ckpt.plan.read_plan import Unit
from ckpt.runtime.cargo import Cargo, Outcome
from ckpt.runtime.fabric import Pending
from ckpt.runtime.watching import Watch
from ckpt.store.blocks import DEFAULT_BUDGET, Blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.runtime.comm import Comm
    from ckpt.runtime.fabric import Fabric

READERS = 4
"""Threads that read from the store."""
AHEAD_BYTES, AHEAD = 64 << 20, 32
"""What a rank reads, and what it receives, before it has to place the first of it: bytes, if the budget allows as much,
and units. A chain of many hops is as fast as its links only if that much is on its way."""
SMALL = 8
"""Units of less than this part of a block get memory of their own size."""
LOOK_SECONDS = 0.25
"""How often a rank looks whether the others can go on."""
PATIENCE_SECONDS = 2.0
"""How long a rank whose connection to a peer is lost waits to learn which rank is to blame."""


@dataclass(eq=False, slots=True)
class _Job:
    """A unit on its way through this rank."""

    unit: Unit
    data: memoryview
    block: npt.NDArray[np.uint8] | None
    pool: Blocks
    live: bool
    pending: Pending | None = None
    arrived: bool = False
    good: bool = False
    left: bool = False
    placed: bool = False


@dataclass(slots=True)
class _Flow:
    """Units that come to this rank in one way, in order; ``current``: those that have begun and are not done."""

    todo: deque[Unit]
    pool: Blocks
    leaving: queue.SimpleQueue[tuple[_Job, Pending] | None] = field(default_factory=queue.SimpleQueue)
    current: list[_Job] = field(default_factory=list)
    nbytes: int = 0
    """of these"""
    head: int = -1
    live: memoryview | None = None
    """of the unit of number ``head``, the first to do"""


class Transfer:
    """Carries out this rank's share of a read plan; :meth:`run` once.

    Args:
        comm: all ranks; looked at for ranks that are gone.
        fabric: between them; None if no unit has another rank in its chain.
        cargo: what the units are.
        budget: bytes of host memory for what is on its way.
        span: most bytes of an ordinary unit.
    """

    def __init__(
        self,
        comm: Comm,
        fabric: Fabric | None,
        cargo: Cargo,
        *,
        span: int,
        budget: int = DEFAULT_BUDGET,
    ) -> None:
        self.comm, self.fabric, self.cargo = comm, fabric, cargo
        self._half = max(2 * span, min(AHEAD_BYTES, budget // 2) // span * span)
        self._pools = (Blocks(self._half, span), Blocks(self._half, span))
        self._changed = threading.Condition()
        self._to_read: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._to_come: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._stop = self._spoilt = False
        self._lost: Exception | None = None
        self._looked = 0.0
        self._moves = self._moves_told = 0
        self.outcome = Outcome()
        self.error: Exception | None = None
        """what ``outcome`` tells of this rank's failure"""

    def run(self, name: str, units: Sequence[Unit]) -> Outcome:
        """Do all that this rank has to do for ``units`` (in the plan's order; others' units are skipped).

        Returns how it ended; for a cause of this rank's own it does not raise.

        Raises:
            RankFailure: another rank is gone.
        """
        me = self.comm.rank
        mine = [unit for unit in units if me in unit.chain]
        self._reads = _Flow(deque(u for u in mine if u.chain[0] == me), self._pools[0])
        self._comes = _Flow(deque(u for u in mine if u.chain[0] != me), self._pools[1])
        self._name, self._jobs, self._watch = name, dict[int, _Job](), Watch(self.comm, name)
        threads = [threading.Thread(target=self._read_all, daemon=True) for _ in range(min(READERS, len(mine)))]
        # What comes is handed on when it comes, whatever is still to come before it in the plan: else each unit would
        # wait for the slowest way of the one before. gloo cannot say what has come: each has a thread that waits.
        comes = min(AHEAD, len(self._comes.todo))
        threads += [threading.Thread(target=self._receive_all, daemon=True) for _ in range(comes)]
        if any(len(u.chain) > 1 for u in mine):
            # One for each way in: what was read ahead leaves late, and must not keep back the end of what came.
            flows = (self._reads, self._comes)
            threads += [threading.Thread(target=self._see_off_all, args=(flow,), daemon=True) for flow in flows]
        for thread in threads:
            thread.start()
        try:
            for unit in mine:
                self._place(self._arrival(unit))
            self._until(lambda: not self._reads.current and not self._comes.current)
        except _Enough:
            pass
        except BaseException:
            if self.fabric is not None:
                self.fabric.abort()
            raise
        finally:
            # Readers that are left behind would write into live memory later.
            self._end(threads)
        return self.outcome

    def run_alone(self, name: str, units: Sequence[Unit]) -> None:
        """As :meth:`run`, for units that no other rank has a part in; raises what failed."""
        self.run(name, units)
        if self.error is not None:
            raise self.error

    def _end(self, threads: Sequence[threading.Thread]) -> None:
        self._stop = True
        for _ in threads:
            self._to_read.put(None)
            self._to_come.put(None)
        self._reads.leaving.put(None)
        self._comes.leaving.put(None)
        for thread in threads:
            thread.join()

    # -- the calling thread ---------------------------------------------------------------------------------------

    def _arrival(self, unit: Unit) -> _Job:
        self._until(lambda: unit.number in self._jobs and self._jobs[unit.number].arrived)
        return self._jobs.pop(unit.number)

    def _until(self, true: Any) -> None:
        """Start what can be started, until ``true()``, and look after the others meanwhile."""
        while True:
            with self._changed:
                self._start(self._reads, self._begin_read)
                self._start(self._comes, self._begin_receive)
                if true():
                    return
                if self._lost is None:
                    self._changed.wait(LOOK_SECONDS / 5)
            self._look()

    def _start(self, flow: _Flow, begin: Any) -> None:
        while flow.todo and len(flow.current) < AHEAD:
            unit = flow.todo[0]
            if flow.current and flow.nbytes + unit.nbytes > self._half:
                return  # also for a unit that is larger than all of that: it comes alone
            if flow.head != unit.number:
                flow.head, flow.live = unit.number, self.cargo.live(unit)
            live = flow.live
            block = None
            if live is None and flow.pool.size // SMALL <= unit.nbytes <= flow.pool.size:
                block = flow.pool.take(timeout=0)
                if block is None:
                    return
            if live is not None:
                data = live
            elif block is not None:
                data = block.data.cast("B")
            else:
                data = memoryview(bytearray(unit.nbytes))
            flow.todo.popleft()
            job = _Job(unit, data[: unit.nbytes], block, flow.pool, live is not None)
            flow.current.append(job)
            flow.nbytes += unit.nbytes
            self._jobs[unit.number] = job
            begin(job)

    def _begin_read(self, job: _Job) -> None:
        self._to_read.put(job)

    def _begin_receive(self, job: _Job) -> None:
        chain = job.unit.chain
        try:
            job.pending = self._wire.receive(job.data, chain[chain.index(self.comm.rank) - 1], job.unit.number)
        except RuntimeError as error:
            self._lost = error
            return
        self._to_come.put(job)

    @property
    def _wire(self) -> Fabric:
        if self.fabric is None:
            raise CkptError("a unit has several ranks, and there is no fabric between them")
        return self.fabric

    def _place(self, job: _Job) -> None:
        if job.good and not job.live:
            try:
                self.cargo.put(job.unit, job.data)
            except Exception as error:
                self._failed(job, error)
        job.placed = True
        self._finish(job)

    def _finish(self, job: _Job) -> None:
        """Let go of a job's memory when it is neither to be placed nor to leave any more."""
        with self._changed:
            self._moves += 1
            flow = self._reads if job.unit.chain[0] == self.comm.rank else self._comes
            if job.placed and job.left and job in flow.current:
                flow.current.remove(job)
                flow.nbytes -= job.unit.nbytes
                if job.block is not None:
                    job.pool.give(job.block)
            self._changed.notify_all()

    def _look(self) -> None:
        """See that the others can go on, and say that this rank does."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS and self._lost is None:
            return
        self._looked = now
        if self._moves != self._moves_told or all(job.arrived for job in self._reads.current):
            self._moves_told = self._moves  # a store that never answers is no sign of life
            self.comm.beat()
        if self.fabric is None:
            if self._spoilt:  # nobody depends on the rest
                raise _Enough
            return
        if not self._spoilt and self._watch.noted():
            self._spoilt = True
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            self._watch.look(self._peers())
            if self._lost is None:
                return
            if time.monotonic() > deadline:
                text = f"lost a peer ({str(self._lost).splitlines()[0][:200]})"
                raise RankFailure(self._name, {self.comm.rank: text}) from self._lost
            time.sleep(0.01)

    def _peers(self) -> set[int]:
        with self._changed:
            jobs = [*self._reads.current, *self._comes.current]
        near: set[int] = set()
        for job in jobs:
            at = job.unit.chain.index(self.comm.rank)
            near.update(job.unit.chain[max(at - 1, 0) : at + 2])
        return near - {self.comm.rank}

    # -- the other threads ----------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        while (job := self._to_read.get()) is not None and not self._stop:
            try:
                if not self._spoilt:
                    self.cargo.read(job.unit, job.data)
                    job.good = True
            except Exception as error:
                self._failed(job, error)
            with self._changed:
                self.outcome.read += job.unit.stored if job.good else 0
            self._hand_on(job)
            self._arrived(job)

    def _receive_all(self) -> None:
        while (job := self._to_come.get()) is not None and not self._stop:
            try:
                if job.pending is not None:
                    job.pending.wait()
                self._hand_on(job)
            except (RuntimeError, CkptError) as error:
                self._break(error)
                return
            with self._changed:
                self.outcome.received += job.unit.nbytes
            try:
                if not self._spoilt:
                    self.cargo.check(job.unit, job.data)
                    job.good = True
            except Exception as error:
                if self.outcome.spoilt is None:
                    self.outcome.spoilt = to_wire(error)
            self._arrived(job)

    def _see_off_all(self, flow: _Flow) -> None:
        while (one := flow.leaving.get()) is not None and not self._stop:
            job, pending = one
            try:
                pending.wait()
            except RuntimeError as error:
                self._break(error)
                return
            job.left = True
            self._finish(job)

    def _hand_on(self, job: _Job) -> None:
        chain = job.unit.chain
        at = chain.index(self.comm.rank) + 1
        if at == len(chain):
            job.left = True
            return
        try:
            flow = self._reads if at == 1 else self._comes
            flow.leaving.put((job, self._wire.send(job.data, chain[at], job.unit.number)))
        except RuntimeError as error:
            self._break(error)

    def _arrived(self, job: _Job) -> None:
        with self._changed:
            self._moves += 1
            job.arrived = True
            self._changed.notify_all()

    def _break(self, error: Exception) -> None:
        with self._changed:
            self._lost = self._lost or error
            self._changed.notify_all()

    def _failed(self, job: _Job, error: Exception) -> None:
        """Note the first failure, and tell the others that reading the rest is in vain."""
        with self._changed:
            job.good = False
            if self.outcome.error is None or job.unit.number < self.outcome.failed:
                self.outcome.failed, self.outcome.error, self.error = job.unit.number, to_wire(error), error
            tell = not self._spoilt and self.fabric is not None
            self._spoilt = True
        if tell:
            self._watch.note()


class _Enough(Exception):
    """A rank that reads for itself alone has failed: no need to read the rest."""
