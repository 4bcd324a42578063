"""One rank's part in reading a checkpoint: units that it reads, hands on, receives and places, many at once.

A few threads read from the store, others wait for what comes from other ranks and what leaves. Whatever has arrived is
handed on before anything else is done with it, then checked against its digests, then placed by the calling thread,
in the order of the plan. Bytes that fill live memory from end to end are read or received right there.

Ranks of one host that share memory (:mod:`~ckpt.runtime.sharing`) send each other nothing: the first that has a unit
has it in a slot and tells the others, each copies it from there to live memory, checks its copy, and says so.

A rank that cannot read a unit sends the bytes that it has in their place: nobody waits in vain, nobody places what does
not fit its digest, and afterwards all learn of the cause (:func:`~ckpt.runtime.cargo.settle`). A rank that is gone ends
it for all.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from ckpt.errors import CkptError, RankFailure, to_wire
from ckpt.runtime.cargo import Cargo, Outcome
from ckpt.runtime.flows import Flow, Job, pools_for
from ckpt.runtime.routes import Route, Routes
from ckpt.runtime.sharing import DONE, HERE, SPOILT, STOP, Sharing, Slots, Told
from ckpt.runtime.watching import Watch
from ckpt.store.blocks import DEFAULT_BUDGET

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.plan.read_plan import Unit
    from ckpt.runtime.comm import Comm
    from ckpt.runtime.fabric import Fabric

READERS, TAKERS = 4, 2
"""Threads that read from the store, and that copy what neighbours have."""
AHEAD_BYTES, AHEAD = 64 << 20, 32
"""What a rank reads, and what it receives, before it has to place the first of it: bytes, if the budget allows as much,
and units. A chain of many hops is as fast as its links only if that much is on its way."""
LOOK_SECONDS = 0.25
"""How often a rank looks whether the others can go on."""
PATIENCE_SECONDS = 2.0
"""How long a rank whose connection to a peer is lost waits to learn which rank is to blame."""


class Transfer:
    """Carries out this rank's share of a read plan; :meth:`run` once.

    Args:
        comm: all ranks; looked at for ranks that are gone.
        fabric: between them; None if no unit has another rank in its chain.
        cargo: what the units are.
        budget: bytes of host memory for what is on its way.
        span: most bytes of an ordinary unit.
        sharing: memory that ranks of a host share, None if no rank has any. Its size bounds what is on its way there.
    """

    def __init__(
        self,
        comm: Comm,
        fabric: Fabric | None,
        cargo: Cargo,
        *,
        span: int,
        budget: int = DEFAULT_BUDGET,
        sharing: Sharing | None = None,
    ) -> None:
        self.comm, self.fabric, self.cargo, self._sharing = comm, fabric, cargo, sharing
        count = max(2, min(AHEAD_BYTES, budget // 2) // span)
        self._half = count * span
        self._pools = pools_for(sharing, count, span)
        self._changed = threading.Condition()
        self._to_read: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._to_come: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._to_take: queue.SimpleQueue[Told | None] = queue.SimpleQueue()
        self._stop = self._spoilt = False
        self._lost: Exception | None = None
        self._looked = 0.0
        self._moves = self._moves_told = 0
        self._listening = False
        self._routes = Routes(comm.rank, sharing)
        self.outcome = Outcome()
        self.error: Exception | None = None
        """what ``outcome`` tells of this rank's failure"""

    def run(self, name: str, units: Sequence[Unit]) -> Outcome:
        """Do all that this rank has to do for ``units`` (in the plan's order; others' units are skipped).

        Returns how it ended; for a cause of this rank's own it does not raise.

        Raises:
            RankFailure: another rank is gone.
        """
        mine = [(unit, self._routes.of(unit)) for unit in units if self.comm.rank in unit.chain]
        self._name, self._jobs, self._watch = name, dict[int, Job](), Watch(self.comm, name)
        self._near = {unit.number: unit for unit, route in mine if route.near}
        self._lent: dict[int, Job] = {}
        reads = deque(one for one in mine if one[1].source is None)
        comes = deque(one for one in mine if one[1].source is not None and not one[1].near)
        self._reads = Flow(reads, self._pools[0], self._half)
        self._comes = Flow(comes, self._pools[1], self._half)
        threads = self._threads([route for _, route in mine])
        for thread in threads:
            thread.start()
        try:
            for unit, _ in mine:
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

    def _threads(self, routes: Sequence[Route]) -> list[threading.Thread]:
        work: list[tuple[Any, ...]] = [(self._read_all,)] * min(READERS, len(self._reads.todo))
        # What comes is handed on when it comes, whatever is still to come before it in the plan: else each unit would
        # wait for the slowest way of the one before. gloo cannot say what has come: each has a thread that waits.
        work += [(self._receive_all,)] * min(AHEAD, len(self._comes.todo))
        if any(route.onward is not None for route in routes):
            # One for each way in: what was read ahead leaves late, and must not keep back the end of what came.
            work += [(self._see_off_all, self._reads), (self._see_off_all, self._comes)]
        self._listening = any(route.near or route.mates for route in routes)
        if self._sharing is not None:
            # Also by a rank that has no part in this round: it must know the number of the next one as the others do.
            self._sharing.round += 1
        if self._listening:
            work += [(self._listen,), *[(self._take_all,)] * min(TAKERS, len(self._near))]
        return [threading.Thread(target=call, args=args, daemon=True) for call, *args in work]

    def _end(self, threads: Sequence[threading.Thread]) -> None:
        self._stop = True
        for _ in threads:
            self._to_read.put(None)
            self._to_come.put(None)
            self._to_take.put(None)
        self._reads.leaving.put(None)
        self._comes.leaving.put(None)
        if self._listening:
            self._shared.stop()
        for thread in threads:
            thread.join()
        if self._sharing is not None:  # errors hold the frames that they went through, and those shared memory
            self._lost = self.error = None
            for flow in (self._reads, self._comes):
                flow.current.clear()

    # -- the calling thread ---------------------------------------------------------------------------------------

    def _arrival(self, unit: Unit) -> Job:
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

    def _start(self, flow: Flow, begin: Any) -> None:
        while (job := flow.begin(self.cargo, AHEAD)) is not None:
            self._jobs[job.unit.number] = job
            if job.route.mates:
                self._lent[job.unit.number] = job
            begin(job)

    def _begin_read(self, job: Job) -> None:
        self._to_read.put(job)

    def _begin_receive(self, job: Job) -> None:
        try:
            job.pending = self._wire.receive(job.data, job.route.source or 0, job.unit.number)
        except RuntimeError as error:
            self._lost = error
            return
        self._to_come.put(job)

    @property
    def _wire(self) -> Fabric:
        if self.fabric is None:
            raise CkptError("a unit has several ranks, and there is no fabric between them")
        return self.fabric

    @property
    def _shared(self) -> Sharing:
        if self._sharing is None:
            raise CkptError("a unit is in shared memory, and there is none")
        return self._sharing

    def _place(self, job: Job) -> None:
        if job.good and job.live is None:
            try:
                self.cargo.put(job.unit, job.data)
            except Exception as error:
                self._failed(job, error)
        if job.live is None and job.told is not None:
            self._tell(job.told.sender, job.told.number, job.told.slot, DONE)
        job.placed = True
        self._finish(job)

    def _finish(self, job: Job) -> None:
        """Let go of a job's memory when it is neither to be placed nor to leave any more."""
        with self._changed:
            self._moves += 1
            if job.flow is not None and job.placed and not job.owed and job in job.flow.current:
                job.flow.end(job)
                self._lent.pop(job.unit.number, None)
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
        peers = {peer for job in jobs for peer in (job.route.source, job.route.onward) if peer is not None}
        return peers | (self._shared.mates if self._listening else set())

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
            self._send_on(job)
            self._lend(job)
            if job.good:
                job.settle()
            self._arrived(job)

    def _receive_all(self) -> None:
        while (job := self._to_come.get()) is not None and not self._stop:
            try:
                if job.pending is not None:
                    job.pending.wait()
                self._send_on(job)
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
                self.outcome.spoils(error)
            self._lend(job)
            if job.good:
                job.settle()
            self._arrived(job)

    def _listen(self) -> None:
        while True:
            try:
                heard = self._shared.hear()
            except OSError as error:
                self._break(error)
                return
            for told in heard:
                if told.what == STOP:
                    return
                if told.round != self._shared.round:
                    continue
                if told.what != DONE:
                    self._to_take.put(told)
                elif (job := self._lent.get(told.number)) is not None:
                    self._had(job)

    def _take_all(self) -> None:
        while (told := self._to_take.get()) is not None and not self._stop:
            unit = self._near[told.number]
            lent = self._shared.look(told, unit)
            job = Job(unit, self._routes.of(unit), lent, told=told)
            try:
                job.live = self.cargo.live(unit)
                if told.what == HERE and not self._spoilt:
                    job.settle()
                    self.cargo.check(unit, lent if job.live is None else job.live)
                    job.good = True
            except Exception as error:
                self.outcome.spoils(error)
            with self._changed:
                self.outcome.received += unit.nbytes
            if job.live is not None:
                self._tell(told.sender, told.number, told.slot, DONE)
            self._jobs[unit.number] = job
            self._arrived(job)

    def _tell(self, rank: int, number: int, slot: int, what: int) -> None:
        try:
            self._shared.tell(rank, number, slot, what)
        except RuntimeError as error:
            self._break(error)

    def _see_off_all(self, flow: Flow) -> None:
        while (one := flow.leaving.get()) is not None and not self._stop:
            job, pending = one
            try:
                pending.wait()
            except RuntimeError as error:
                self._break(error)
                return
            self._had(job)

    def _had(self, job: Job) -> None:
        """One of those who get a unit from this rank has it."""
        with self._changed:
            job.owed -= 1
        self._finish(job)

    def _send_on(self, job: Job) -> None:
        if job.route.onward is None or job.flow is None:
            return
        try:
            job.flow.leaving.put((job, self._wire.send(job.data, job.route.onward, job.unit.number)))
        except RuntimeError as error:
            self._break(error)

    def _lend(self, job: Job) -> None:
        if not job.route.mates or job.flow is None or job.block is None or not isinstance(job.flow.pool, Slots):
            return
        slot = job.flow.pool.number(job.block)
        for rank in job.route.mates:
            self._tell(rank, job.unit.number, slot, HERE if job.good else SPOILT)

    def _arrived(self, job: Job) -> None:
        with self._changed:
            self._moves += 1
            job.arrived = True
            self._changed.notify_all()

    def _break(self, error: Exception) -> None:
        with self._changed:
            self._lost = self._lost or error
            self._changed.notify_all()

    def _failed(self, job: Job, error: Exception) -> None:
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
