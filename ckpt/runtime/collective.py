"""One rank's part in reading a checkpoint by collective broadcasts: from a unit's reader to all that need it at once.

All ranks walk the units in the plan's one order. The reader of a unit has read ahead into host memory and copies it
into a buffer on its device. All that need it issue the broadcast, in the group of exactly those ranks, into a buffer of
their own, from which they place it, or straight into the live tensor. A few are on their way at a time.

Nobody can wait in a circle: of all units that are not done, the first is the next that each of its ranks issues, all
that came before it has left their windows, and its reader was the first to read it. Communicators cannot either: a
device runs them in the order in which they were issued, which is the same everywhere.

A rank that cannot read a unit broadcasts what is in its buffer instead. On a CPU receivers check digests, as in
:mod:`ckpt.runtime.broadcast`. On a device they do not: what is wrong may be placed before all learn of it, at the end
of the stage, and raise (:func:`~ckpt.runtime.cargo.settle`). The engine counts as half-loaded all that time.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from ckpt.errors import to_wire
from ckpt.plan.read_plan import Unit
from ckpt.runtime.cargo import Cargo, Outcome
from ckpt.runtime.groups import LOOK_SECONDS, blame
from ckpt.runtime.watching import Watch
from ckpt.store.blocks import DEFAULT_BUDGET

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from ckpt.runtime.comm import Comm
    from ckpt.runtime.groups import Groups

READERS = 4
"""Threads that read from the store."""
AHEAD, WINDOW = 8, 4
"""Most units that are read ahead, and most broadcasts on their way; fewer if the budget does not allow as much."""
SHORT, LONG = 0.0001, 0.002
"""How soon this rank looks again whether something has arrived, in seconds: at first, and after a while."""
END_SECONDS = 5.0
"""How long a rank that gives up waits until nothing writes into live memory any more."""


class DeviceCargo(Cargo, Protocol):
    """A cargo that can be placed from where it arrives."""

    def live_on(self, unit: Unit, device: torch.device) -> torch.Tensor | None:
        """Return the memory where the bytes are to be in the end (1-D ``uint8``), if it is one piece on ``device``."""

    def place(self, unit: Unit, raw: torch.Tensor) -> None:
        """Bring bytes on a device to where they are to be."""


class _Device:
    """What differs between a CPU and a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        self.checks = not self.cuda
        """Does a receiver digest what has come? From a device it would have to come back to the host first."""

    def current(self) -> AbstractContextManager[object]:
        """Work on this device: ``current_stream`` and NCCL go by the thread's current one."""
        return torch.cuda.device(self.device) if self.cuda else nullcontext()

    def on_host(self, nbytes: int) -> torch.Tensor:
        """Return host memory; pinned for CUDA, or copies from it would not run beside anything else."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.cuda)

    def on_device(self, nbytes: int) -> torch.Tensor:
        """Return memory of the device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def bring(self, data: torch.Tensor, block: torch.Tensor) -> torch.cuda.Event | None:
        """Begin to copy from host memory, which is free when the device has passed the point that is returned."""
        data.copy_(block, non_blocking=True)  # a copy between host memories is over when the call is
        if not self.cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream())
        return event

    def in_order(self, work: Any) -> None:
        """Let what is issued from now on run behind ``work``, a broadcast of another group.

        NCCL runs each communicator on a stream of its own, which waits for the current one; ``wait`` lets the current
        one wait for the broadcast, and not the host. gloo's groups share nothing, and its ``wait`` would block.
        """
        if self.cuda:
            work.wait()

    def finish(self) -> None:
        """Wait until all that was copied is in its place."""
        if self.cuda:
            torch.cuda.current_stream().synchronize()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy().data).cast("B")


class _Pool:
    """Equal buffers, made when they are first needed and used again; larger ones of which each comes alone."""

    def __init__(self, count: int, size: int, make: Callable[[int], torch.Tensor]) -> None:
        self.count, self.size, self._make = count, size, make
        self._free: list[torch.Tensor] = []
        self._out = 0

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Return a buffer of at least so many bytes, or None while there is no room."""
        if self._out >= self.count or (nbytes > self.size and self._out):
            return None
        self._out += self.count if nbytes > self.size else 1
        if nbytes > self.size:
            self._free.clear()  # the budget holds either
            return self._make(nbytes)
        return self._free.pop() if self._free else self._make(self.size)

    def give(self, buffer: torch.Tensor) -> None:
        """Give back what was taken."""
        large = len(buffer) > self.size
        self._out -= self.count if large else 1
        if not large:
            self._free.append(buffer)


@dataclass(eq=False, slots=True)
class _Read:
    """A unit that this rank reads."""

    unit: Unit
    block: torch.Tensor
    done: bool = False
    good: bool = False


@dataclass(eq=False, slots=True)
class _Flight:
    """A unit whose broadcast was issued."""

    unit: Unit
    data: torch.Tensor
    buffer: torch.Tensor | None
    good: bool
    work: Any


class CollectiveTransfer:
    """Carries out this rank's share of a read plan; :meth:`run` once. Takes the place of ``broadcast.Transfer``.

    Args:
        comm: all ranks; looked at for ranks that are gone.
        groups: of all sets of ranks that share a unit.
        cargo: what the units are.
        span: most bytes of an ordinary unit.
        budget: bytes of host memory for what is on its way; half of it is for what was read ahead. As much as the other
            half at most is taken on the device.
    """

    def __init__(
        self, comm: Comm, groups: Groups, cargo: DeviceCargo, *, span: int, budget: int = DEFAULT_BUDGET
    ) -> None:
        self.comm, self.groups, self.cargo = comm, groups, cargo
        self._device = _Device(groups.device)
        fit = max(2, budget // 2 // span)
        self._host = _Pool(min(AHEAD, fit), span, self._device.on_host)
        self._window = _Pool(min(WINDOW, fit), span, self._device.on_device)
        self._changed = threading.Condition()
        self._to_read: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._todo: deque[Unit] = deque()
        self._reads: dict[int, _Read] = {}
        self._flights: deque[_Flight] = deque()
        self._copying: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()
        self._last: tuple[dist.ProcessGroup, Any] | None = None
        self._stop = self._spoilt = False
        self._looked = 0.0
        self._moves = self._moves_told = 0
        self.outcome = Outcome()

    def run(self, name: str, units: Sequence[Unit]) -> Outcome:
        """Do all that this rank has to do for ``units`` (in the plan's order; others' units are skipped).

        Returns how it ended; for a cause of this rank's own it does not raise.

        Raises:
            RankFailure: another rank is gone.
        """
        me = self.comm.rank
        mine = [unit for unit in units if me in unit.chain]
        self._todo.extend(unit for unit in mine if unit.chain[0] == me)
        self._watch = Watch(self.comm, name)
        threads = [threading.Thread(target=self._read_all, daemon=True) for _ in range(min(READERS, len(self._todo)))]
        for thread in threads:
            thread.start()
        try:
            with self._device.current():
                for unit in mine:
                    self._issue(unit)
                self._until(lambda: not self._flights)
                self._device.finish()
        except BaseException:
            self.groups.abort()
            self._let_go()
            raise
        finally:
            self._stop, self._last = True, None
            for _ in threads:
                self._to_read.put(None)
            for thread in threads:
                thread.join()
        return self.outcome

    # -- the calling thread ---------------------------------------------------------------------------------------

    def _issue(self, unit: Unit) -> None:
        """Bring a unit on its way as soon as there is room for it and, if it is this rank's to read, as it is read."""
        data, buffer = self.cargo.live_on(unit, self._device.device), None
        self._until(lambda: len(self._flights) < WINDOW)
        if data is None:
            buffer = self._buffer(unit.nbytes)
            data = buffer[: unit.nbytes]
        good = True
        if unit.chain[0] == self.comm.rank:
            self._until(lambda: unit.number in self._reads and self._reads[unit.number].done)
            read = self._reads.pop(unit.number)
            good = read.good
            self._copying.append((read.block, self._device.bring(data, read.block[: unit.nbytes])))
        flight = _Flight(unit, data, buffer, good, None)
        if len(unit.chain) > 1:
            flight.work = self._broadcast(unit, data)
        self._flights.append(flight)

    def _buffer(self, nbytes: int) -> torch.Tensor:
        found: list[torch.Tensor] = []

        def taken() -> bool:
            found.extend([one] if (one := self._window.take(nbytes)) is not None else [])
            return bool(found)

        self._until(taken)
        return found[0]

    def _broadcast(self, unit: Unit, data: torch.Tensor) -> Any:
        ranks = tuple(sorted(unit.chain))
        try:
            group = self.groups.of(ranks)
            if self._last is not None and self._last[0] is not group:
                self._device.in_order(self._last[1])
            work = dist.broadcast(data, unit.chain[0], group=group, async_op=True)
        except RuntimeError as error:
            blame(self._watch, ranks, error)
        self._last = (group, work)
        return work

    def _until(self, true: Callable[[], bool]) -> None:
        """Do what can be done, until ``true()``, and look after the others meanwhile.

        Waits are polled: one inside gloo or NCCL could not be ended when a rank is gone, nor would this rank beat.
        """
        pause = SHORT
        while True:
            self._read_ahead()
            moved = self._land()
            self._look()
            if true():
                return
            if moved:
                pause = SHORT
                continue
            with self._changed:
                self._changed.wait(pause)
            pause = min(2 * pause, LONG)

    def _read_ahead(self) -> None:
        while self._copying and (self._copying[0][1] is None or self._copying[0][1].query()):
            self._host.give(self._copying.popleft()[0])
        while self._todo and (block := self._host.take(self._todo[0].nbytes)) is not None:
            unit = self._todo.popleft()
            self._reads[unit.number] = read = _Read(unit, block)
            self._to_read.put(read)

    def _land(self) -> bool:
        """Place what has arrived, in the order of the plan. Has anything?"""
        before = self._moves
        while self._flights:
            one = self._flights[0]
            if one.work is not None:
                try:
                    if not one.work.is_completed():
                        break
                    one.work.wait()  # raises what went wrong, and on CUDA lets the current stream wait for it
                except RuntimeError as error:
                    blame(self._watch, one.unit.chain, error)
            self._flights.popleft()
            self._place(one)
            if one.buffer is not None:
                self._window.give(one.buffer)  # whoever writes into it next does so on the stream that reads it now
            with self._changed:
                self._moves += 1
        return self._moves != before

    def _place(self, one: _Flight) -> None:
        received = one.unit.chain[0] != self.comm.rank
        unchecked = received and not self._device.checks
        self.outcome.received += one.unit.nbytes if received else 0
        if not one.good or self._spoilt or (received and not unchecked and not self._check(one)) or one.buffer is None:
            return
        try:
            self.cargo.place(one.unit, one.data)
        except Exception as error:
            if not unchecked or self._check(one):  # else it is no wonder
                self._failed(one.unit, error)

    def _check(self, one: _Flight) -> bool:
        try:
            self.cargo.check(one.unit, _bytes_of(one.data.cpu()))
        except Exception as error:
            if self.outcome.spoilt is None:
                self.outcome.spoilt = to_wire(error)
            return False
        return True

    def _look(self) -> None:
        """See that the others can go on, and say that this rank does."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        if self._moves != self._moves_told or all(read.done for read in self._reads.values()):
            self._moves_told = self._moves  # a store that never answers is no sign of life
            self.comm.beat()
        if not self._spoilt and self._watch.noted():
            self._spoilt = True
        self._watch.look({rank for one in self._flights for rank in one.unit.chain} - {self.comm.rank})

    def _let_go(self) -> None:
        """After an abort, wait for what was on its way: it must not write into live memory later."""
        deadline = time.monotonic() + END_SECONDS
        while any(one.work is not None and not one.work.is_completed() for one in self._flights):
            if time.monotonic() > deadline:
                return
            time.sleep(SHORT)

    # -- readers --------------------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        while (read := self._to_read.get()) is not None and not self._stop:
            try:
                if not self._spoilt:
                    self.cargo.read(read.unit, _bytes_of(read.block[: read.unit.nbytes]))
                    read.good = True
            except Exception as error:
                self._failed(read.unit, error)
            with self._changed:
                self.outcome.read += read.unit.stored if read.good else 0
                self._moves += 1
                read.done = True
                self._changed.notify_all()

    def _failed(self, unit: Unit, error: Exception) -> None:
        """Note the first failure, and tell the others that reading the rest is in vain."""
        with self._changed:
            if self.outcome.error is None or unit.number < self.outcome.failed:
                self.outcome.failed, self.outcome.error = unit.number, to_wire(error)
            tell = not self._spoilt
            self._spoilt = True
        if tell:
            self._watch.note()
