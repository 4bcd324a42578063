"""Ranks that do something together: every step succeeds on all of them or raises the same error on all of them.

Two transports. A key-value store (the one that the job's own rendezvous uses) carries arrival, failure and liveness:
it can say *who* is missing, it needs no peer to answer, and a rank that gives up leaves it usable. A process group of
our own (:mod:`ckpt.runtime.torch_comm`) carries bulk data, and is entered only after every rank has arrived, so that a
collective never waits for a rank that will not come.

How a step ends is decided once, by compare-and-set on its ``done`` key: complete, by the last rank to arrive, or
failed, by the first to give up. A rank that comes later finds the decision, so no two ranks hold different views of it.
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ckpt.errors import CkptError, ConfigError, LayoutError, RankFailure, from_wire, to_wire, with_all_problems
from ckpt.runtime.keyvalue import StepOutcome
from ckpt.runtime.liveness import host_of, identity, is_dead, silent
from ckpt.runtime.timeout import checked_timeout, default_timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ckpt.runtime.keyvalue import KeyValue

T = TypeVar("T")

log = logging.getLogger("ckpt")

BEAT_SECONDS = 1.0
SOON_SECONDS, PAUSE_SECONDS = 0.003, 0.02
"""How long a waiting rank sleeps between two looks, in the first second and later: a save has half a dozen meetings."""
NEIGHBOUR_SECONDS = 0.5
"""How often a waiting rank looks whether absent processes of its own host still exist."""
DEATH_SECONDS = 1.0
"""How long after its connections were closed a dying process may still be seen alive."""
TELL_SECONDS = 10.0
"""How long a rank waits for others to call before it says so."""
LEAVE_SECONDS = 0.5
"""How long rank 0, which may be the host of the store, stays for the others to read why an operation failed."""


class Comm:
    """All ranks of one job. Not thread-safe; one operation at a time.

    ``timeout``: seconds without any sign of life from a rank after which it counts as lost. A rank that makes
    progress (:meth:`beat`) may take as long as it needs.
    """

    def __init__(self, kv: KeyValue | None, rank: int, world: int) -> None:
        self.kv, self.rank, self.world = kv, rank, world
        self.timeout = default_timeout()
        self.operation = 0
        self._step = 0
        self._old_keys: list[str] = []
        self._keys: list[str] = []
        self._last_beat = 0.0
        self._beats = 0
        self._hosts: dict[int, str] = {}
        self.doubt: Callable[[], str] = str  # why ranks that have not come never will; asked by one that waits long

    @property
    def store(self) -> KeyValue:
        """The key-value store of a job with several ranks."""
        if self.kv is None:
            raise ConfigError("this step needs several ranks")
        return self.kv

    # -- what an operation is made of -----------------------------------------------------------------------------

    @contextmanager
    def joint(self, name: str, timeout: float | None = None) -> Iterator[None]:
        """Do something together: enter, run the block, leave. A rank that leaves by an error takes the others along.

        Raises:
            ConfigError: ``timeout`` is not a positive, finite number of seconds.
            RankFailure: as :meth:`enter`.
        """
        self.enter(name, timeout)
        try:
            yield
        except BaseException as error:
            # Whoever waits for this rank in the step to come need not wait for the timeout.
            if self.kv is not None:
                with suppress(CkptError):
                    text, key = f"{type(error).__name__}: {error}", self._key(self._step + 1)
                    self._keys.append(f"{key}/done")
                    self._decide(key, StepOutcome(False, name, {self.rank: text}))
                    self._leave(LEAVE_SECONDS)
            raise
        if self.kv is not None:
            with suppress(CkptError):
                self._leave(self.timeout)

    def enter(self, name: str, timeout: float | None = None) -> None:
        """Begin an operation. All ranks must call it; ranks that wait in vain raise, and may call it again.

        Raises:
            ConfigError: ``timeout`` is not a positive, finite number of seconds.
            RankFailure: names the ranks that did not call within ``timeout`` seconds. Nothing was done.
        """
        self.timeout = default_timeout() if timeout is None else checked_timeout(timeout, f"timeout={timeout!r}")
        self._step = 0
        if self.kv is None:
            return
        if not self.operation:
            self.kv.set(f"who/{self.rank}", identity().encode())
        gave_up: set[int] = set()
        while True:
            key = f"{self.operation + 1}/enter"
            over = self.kv.check([f"{key}/done"])  # has it ended without this rank?
            try:
                entry = self._knock(key, name, gave_up)
            except BaseException as error:  # interrupted: the others must not count on this rank
                self.operation += 1
                with suppress(CkptError):
                    gone = StepOutcome(False, f"enter {name}", {self.rank: f"was interrupted ({type(error).__name__})"})
                    if self._decide(key, gone).complete:
                        self._decide(self._key(1), gone)
                raise
            self.operation += 1
            if entry.complete:
                break
            if not over and self.rank not in entry.failures:
                raise RankFailure(entry.step, entry.failures)
            # The others gave up before this rank came. They have moved on to the next entry, and so does this rank.
            gave_up = set(range(self.world)) - entry.failures.keys() if self.rank in entry.failures else gave_up
        self._forget_previous()
        self._entered(key)

    def missed(self) -> RankFailure | None:
        """Return why others have given up an operation that this rank has not entered, if they have."""
        key = f"{self.operation + 1}/enter"
        if self.kv is None or not self.kv.check([f"{key}/done"]):
            return None
        entry = self._outcome(key)
        return RankFailure(entry.step, entry.failures)

    def catch_up(self) -> None:
        """Take note of all that this rank has missed."""
        while self.missed() is not None:
            self.operation += 1

    def run(self, name: str, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank; return this rank's result once all have succeeded.

        Raises:
            RankFailure: ``work`` failed on some ranks (with one rank, or if all ranks failed with the same class of
                :class:`CkptError`, that error itself).
        """
        key = self._next()
        value, error = self._attempt(key, work)
        self._meet(key, name, error)
        return value  # type: ignore[return-value]  # _meet has raised if there is no value

    def gather(self, name: str, work: Callable[[], bytes]) -> list[bytes]:
        """Run ``work`` on every rank and return all ranks' results, in rank order. Errors as in :meth:`run`."""
        return self.share(name, self.run(name, work))

    def share(self, name: str, payload: bytes) -> list[bytes]:
        """Return all ranks' payloads, in rank order. Only right after a step that all of them have ended well."""
        return [payload] if self.world == 1 else self._carry(name, lambda: self._exchange(payload))

    def scatter(
        self, name: str, work: Callable[[], Mapping[int, bytes]], sizes: Callable[[], Mapping[int, int]]
    ) -> dict[int, bytes]:
        """Run ``work`` on every rank and bring what it returns, rank -> bytes, to those ranks; return what has come.

        Errors as in :meth:`run`. ``sizes``: asked after ``work``: rank -> bytes that it sends to this one.
        """
        payloads = self.run(name, work)
        return dict(payloads) if self.world == 1 else self._carry(name, lambda: self._deliver(payloads, sizes()))

    def _carry(self, name: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except RuntimeError as error:  # the transport's way to say that a peer is gone
            self._broken()
            blind = {self.rank: f"lost a peer ({str(error).splitlines()[0][:200]})"}
            lost = dict.fromkeys(self._dead(range(self.world), DEATH_SECONDS), "its process is gone") or blind
            outcome = self._decide(self._key(self._step + 1), StepOutcome(False, name, lost))
            raise RankFailure(outcome.step, outcome.failures) from error

    def on_root(self, name: str, work: Callable[[], bytes]) -> bytes:
        """Run ``work`` on rank 0 and return its result on all; an error of rank 0 is raised as it is on all."""
        key = self._next()
        value, error = self._attempt(key, work) if self.rank == 0 else (b"", None)
        if self.kv is not None and self.rank == 0 and error is None:
            self._put(f"{key}/value", value or b"")
        self._meet(key, name, error, root=True)
        return value or b"" if self.kv is None or self.rank == 0 else bytes(self.kv.get(f"{key}/value"))

    def beat(self) -> None:
        """Say that this rank is alive and making progress. Cheap; call it once per chunk."""
        now = time.monotonic()
        if self.kv is not None and now - self._last_beat >= BEAT_SECONDS:
            self._last_beat = now
            self._beats += 1
            self.kv.set(f"beat/{self.rank}", str(self._beats).encode())

    def pulse(self) -> int:
        """Return how often this rank has said that it is alive; may be asked by another thread."""
        return self._beats

    # -- how ranks meet -------------------------------------------------------------------------------------------

    def _key(self, step: int) -> str:
        return f"{self.operation}/{step}"

    def _next(self) -> str:
        self._step += 1
        key = self._key(self._step)
        if self.kv is not None and self.kv.check([f"{key}/done"]):
            self._raise_failed(self._outcome(key))  # it cannot be complete: this rank has not arrived
        return key

    def _attempt(self, key: str, work: Callable[[], T]) -> tuple[T | None, Exception | None]:
        try:
            return work(), None
        except Exception as error:
            return None, error
        except BaseException as error:  # KeyboardInterrupt, SystemExit: tell the peers, but do not stay for them
            if self.kv is not None:
                self._report_failure(key, error)
                self._arrive(key)
            raise

    def _meet(self, key: str, name: str, error: Exception | None, *, root: bool = False) -> None:
        if self.kv is None:
            if error is not None:
                raise error
            return
        if error is not None:
            self._report_failure(key, error)
        self._arrive(key)
        self._wait(key, name)
        if not self.kv.add(f"{key}/failed", 0):
            return
        failed = [r for r in range(self.world) if self.kv.check([f"{key}/error/{r}"])]
        wires = {r: msgspec.json.decode(self.kv.get(f"{key}/error/{r}")) for r in failed}
        if root and wires[0]["ours"]:
            raise error or from_wire(wires[0])
        types = {w["type"] for w in wires.values()}
        alike = len(failed) == self.world and len(types) == 1
        if alike and isinstance(error, LayoutError):
            raise with_all_problems(error, wires.values())
        if (alike and isinstance(error, CkptError)) or types == {"SaveCancelled"}:  # one rank's word is enough
            raise error or from_wire(wires[failed[0]])
        raise RankFailure(name, {r: f"{w['type']}: {w['message']}" for r, w in wires.items()}) from error

    def _report_failure(self, key: str, error: BaseException) -> None:
        wire = {**to_wire(error), "ours": isinstance(error, CkptError)}
        self._put(f"{key}/error/{self.rank}", msgspec.json.encode(wire))
        self.store.add(f"{key}/failed", 1)

    def _arrive(self, key: str) -> None:
        self._put(f"{key}/{self.rank}", b"1")
        if self.rank == 0:  # one rank cleans up what all share
            self._keys += [f"{key}/{what}" for what in ("count", "done", "failed", "groupless", "value")]
        if self.store.add(f"{key}/count", 1) == self.world:
            self._decide(key, StepOutcome(True))

    def _decide(self, key: str, outcome: StepOutcome) -> StepOutcome:
        """Say how a step ends, unless that is decided; return the decision."""
        self.store.compare_set(f"{key}/done", "", msgspec.json.encode(outcome).decode())
        return self._outcome(key)

    def _outcome(self, key: str) -> StepOutcome:
        return msgspec.json.decode(self.store.get(f"{key}/done"), type=StepOutcome)

    def _raise_failed(self, outcome: StepOutcome) -> None:
        if not outcome.complete:
            raise RankFailure(outcome.step, outcome.failures)

    def _wait(self, key: str, name: str) -> None:
        """Wait until the step has ended; raise if it has failed. Gives up on ranks that are dead or silent."""
        kv = self.store
        began = now = time.monotonic()
        pause, look = 0.0005, began + self.timeout / 4
        neighbours = began + NEIGHBOUR_SECONDS
        seen: dict[int, tuple[str, float]] = {}
        while not kv.check([f"{key}/done"]):
            self.beat()
            now = time.monotonic()
            if now >= neighbours:
                neighbours = now + NEIGHBOUR_SECONDS
                dead = self._dead_neighbours(key)
                if dead:
                    self._decide(key, StepOutcome(False, name, dict.fromkeys(dead, "its process is gone")))
            if now >= look:
                look = now + self.timeout / 4
                beats = {r: self._text(f"beat/{r}") for r in self._absent(key)}
                lost = silent(beats, seen, now, self.timeout)
                if lost:
                    why = f"did not arrive and gave no sign for {self.timeout:g} s"
                    self._decide(key, StepOutcome(False, name, dict.fromkeys(lost, why)))
            time.sleep(pause)
            pause = min(pause * 1.5, SOON_SECONDS if now - began < 1.0 else PAUSE_SECONDS)
        self._raise_failed(self._outcome(key))

    def _dead(self, ranks: Iterable[int], patience: float = 0.0) -> list[int]:
        """Return which of these ranks are processes of this host that are gone, once there are any."""
        known = {r: self._text(f"who/{r}") for r in ranks}
        deadline = time.monotonic() + patience
        while not (dead := [r for r, who in known.items() if is_dead(who)]) and time.monotonic() < deadline:
            time.sleep(0.01)
        return dead

    def _dead_neighbours(self, key: str) -> list[int]:
        """Return the ranks of this host that have not arrived and are gone. Of other hosts' nobody here can know."""
        if len(self._hosts) < self.world:  # some have never called
            self._hosts = {r: host_of(who) for r in range(self.world) if (who := self._text(f"who/{r}"))}
        here = self._hosts.get(self.rank)
        return self._dead(r for r, host in self._hosts.items() if host == here and not self.store.check([f"{key}/{r}"]))

    def _absent(self, key: str) -> list[int]:
        return [r for r in range(self.world) if not self.store.check([f"{key}/{r}"])]

    def _text(self, key: str) -> str:
        """Return the value of a key that may not be there."""
        return self.store.get(key).decode() if self.store.check([key]) else ""

    # -- coming and going -----------------------------------------------------------------------------------------

    def _knock(self, key: str, name: str, gave_up: set[int]) -> StepOutcome:
        """Wait until an entry is complete or has failed. A rank that finds it failed does not arrive at it."""
        kv, done = self.store, f"{key}/done"
        if not kv.check([done]):
            self._prepare_entry(key)
            self._arrive(key)
        started, pause = time.monotonic(), 0.0005
        look, told = started + NEIGHBOUR_SECONDS, False
        while not kv.check([done]):
            now = time.monotonic()
            dead = self._dead_neighbours(key) if now > look else []
            doubt = self.doubt() if now > max(look, started + TELL_SECONDS) else ""
            over_time = bool(doubt) or now > started + self.timeout
            absent = self._absent(key) if over_time or (not told and now > started + TELL_SECONDS) else []
            look = now + NEIGHBOUR_SECONDS if now > look else look
            if dead:
                self._decide(key, StepOutcome(False, f"enter {name}", dict.fromkeys(dead, "its process is gone")))
            elif absent and over_time:
                late = f"called ckpt.{name} earlier and had given up waiting"
                missing = doubt or f"did not call ckpt.{name} within {self.timeout:g} s (every rank must call it)"
                failures = {r: late if r in gave_up else missing for r in absent}
                self._decide(key, StepOutcome(False, f"enter {name}", failures))
            elif absent:
                told = True
                log.warning("ckpt.%s: rank %d waits for rank(s) %s to call it", name, self.rank, absent[:8])
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)
        return self._outcome(key)

    def _leave(self, patience: float) -> None:
        """Go. Rank 0 goes last, because the store may die with its process while others have still to read it."""
        key = f"{self.operation}/left"
        gone = self.store.add(key, 1)
        if self.rank == 0:
            self._keys.append(key)
            deadline = time.monotonic() + patience
            while gone < self.world and time.monotonic() < deadline:
                time.sleep(0.001)
                gone = self.store.add(key, 0)

    def _put(self, key: str, value: bytes) -> None:
        self._keys.append(key)
        self.store.set(key, value)

    def _forget_previous(self) -> None:
        """Delete this rank's keys of the operation before the last: everybody who is here has left it long ago."""
        for key in self._old_keys:
            self.store.delete_key(key)
        self._old_keys, self._keys = self._keys, []

    # -- bulk transport: overridden where there is a process group ------------------------------------------------

    def _prepare_entry(self, key: str) -> None:
        """Before arrival at the entry."""

    def _entered(self, key: str) -> None:
        """After all ranks have entered."""

    def _broken(self) -> None:
        """An exchange failed: a half-used transport must not be used again."""

    def _exchange(self, payload: bytes) -> list[bytes]:
        key = f"{self._key(self._step)}/bulk"
        self._put(f"{key}/{self.rank}", payload)
        return [bytes(self.store.get(f"{key}/{r}")) for r in range(self.world)]

    def _deliver(self, payloads: Mapping[int, bytes], sizes: Mapping[int, int]) -> dict[int, bytes]:
        key = f"{self._key(self._step)}/to"
        for rank, payload in payloads.items():
            self._put(f"{key}/{rank}/{self.rank}", payload)
        return {peer: bytes(self.store.get(f"{key}/{self.rank}/{peer}")) for peer, nbytes in sizes.items() if nbytes}
