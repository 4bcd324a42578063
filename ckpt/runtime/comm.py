"""Ranks that do something together: every step succeeds on all of them or raises the same error on all of them.

Two transports. A key-value store (the one that the job's own rendezvous uses) carries arrival, failure and liveness:
it can say *who* is missing, it needs no peer to answer, and a rank that gives up leaves it usable. A process group of
our own (gloo, made once, never the training's) carries bulk data, and is entered only after every rank has arrived,
so that a collective never waits for a rank that will not come.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist

from ckpt.errors import CkptError, ConfigError, RankFailure, from_wire, to_wire
from ckpt.runtime.liveness import identity, is_dead

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

BEAT_SECONDS = 1.0
NEIGHBOUR_SECONDS = 0.5
"""How often a waiting rank looks whether absent processes of its own host still exist."""
_ABSENT = "did not arrive"


class KeyValue(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def set(self, key: str, value: bytes, /) -> object:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Return the value; blocks until there is one."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, atomically; return the sum."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set the key if it is absent (``expected`` empty); return what it holds then. Of several, one succeeds."""

    def check(self, keys: list[str], /) -> bool:
        """Are all these keys there?"""

    def delete_key(self, key: str, /) -> bool:
        """Remove a key."""


class _Entry(msgspec.Struct):
    """How an entry ended: complete, or with the ranks that were not there."""

    complete: bool
    failures: dict[int, str] = {}

    def text(self) -> str:
        return msgspec.json.encode(self).decode()


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

    @property
    def store(self) -> KeyValue:
        """The key-value store of a job with several ranks."""
        if self.kv is None:
            raise ConfigError("this step needs several ranks")
        return self.kv

    # -- what an operation is made of -----------------------------------------------------------------------------

    def enter(self, name: str, timeout: float | None = None) -> None:
        """Begin an operation. All ranks must call it; ranks that wait in vain raise, and may call it again.

        Raises:
            RankFailure: names the ranks that did not call within ``timeout`` seconds. Nothing was done.
        """
        self.timeout = default_timeout() if timeout is None else timeout
        self._step = 0
        if self.kv is None:
            return
        if not self.operation:
            self.kv.set(f"who/{self.rank}", identity().encode())
        gave_up: set[int] = set()
        while True:
            key = f"{self.operation + 1}/enter"
            entry = self._knock(key, name, gave_up)
            self.operation += 1
            if entry.complete:
                break
            if self.rank not in entry.failures:
                raise RankFailure(f"enter {name}", entry.failures)
            # The others gave up before this rank came. They have moved on to the next entry, and so does this rank.
            gave_up = set(range(self.world)) - entry.failures.keys()
        self._forget_previous()
        self._entered(key)

    def run(self, name: str, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank; return this rank's result once all have succeeded.

        Raises:
            RankFailure: ``work`` failed on some ranks (with one rank, or if all ranks failed with the same class of
                :class:`CkptError`, that error itself).
        """
        key = self._next(name)
        value, error = self._attempt(key, work)
        self._meet(key, name, error)
        return value  # type: ignore[return-value]  # _meet has raised if there is no value

    def gather(self, name: str, work: Callable[[], bytes]) -> list[bytes]:
        """Run ``work`` on every rank and return all ranks' results, in rank order. Errors as in :meth:`run`."""
        payload = self.run(name, work)
        if self.world == 1:
            return [payload]
        try:
            return self._exchange(payload)
        except RuntimeError as error:  # the transport's way to say that a peer is gone
            raise self._abort(name, {self.rank: f"lost a peer ({str(error).splitlines()[0][:200]})"}) from error

    def on_root(self, name: str, work: Callable[[], bytes]) -> bytes:
        """Run ``work`` on rank 0 and return its result on all; an error of rank 0 is raised as it is on all."""
        key = self._next(name)
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

    # -- how ranks meet -------------------------------------------------------------------------------------------

    def _next(self, name: str) -> str:
        self._step += 1
        key = f"{self.operation}/{self._step}"
        if self.kv is not None and self.kv.check([f"{self.operation}/abort"]):
            raise self._aborted()
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
        alike = len(failed) == self.world and len({w["type"] for w in wires.values()}) == 1
        if alike and isinstance(error, CkptError):
            raise error
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
            self.store.set(f"{key}/done", b"1")

    def _wait(self, key: str, name: str) -> None:
        kv = self.store
        pause, look = 0.0005, time.monotonic() + self.timeout / 4
        neighbours = time.monotonic() + NEIGHBOUR_SECONDS
        seen: dict[int, tuple[str, float]] = {}
        while not kv.check([f"{key}/done"]):
            if kv.check([f"{self.operation}/abort"]):
                raise self._aborted()
            self.beat()
            now = time.monotonic()
            if now >= neighbours:
                neighbours = now + NEIGHBOUR_SECONDS
                dead = [r for r in self._absent(key) if is_dead(self._text(f"who/{r}"))]
                # Arrived and then died: it has done its part of this step.
                if dead and not kv.check([f"{key}/done"]):
                    raise self._abort(name, dict.fromkeys(dead, "its process is gone"))
            if now >= look:
                look = now + self.timeout / 4
                lost = self._lost(key, seen, now)
                if lost:
                    raise self._abort(name, dict.fromkeys(lost, f"{_ABSENT} and gave no sign for {self.timeout:g} s"))
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def _absent(self, key: str) -> list[int]:
        return [r for r in range(self.world) if not self.store.check([f"{key}/{r}"])]

    def _text(self, key: str) -> str:
        """Return the value of a key that may not be there."""
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _lost(self, key: str, seen: dict[int, tuple[str, float]], now: float) -> list[int]:
        """Return the absent ranks whose sign of life has not changed for a whole timeout."""
        lost = []
        for rank in self._absent(key):
            beat = self._text(f"beat/{rank}")
            # The first look comes a quarter of the timeout after this rank began to wait.
            if seen.setdefault(rank, (beat, now - self.timeout / 4))[0] != beat:
                seen[rank] = (beat, now)
            elif now - seen[rank][1] >= self.timeout:
                lost.append(rank)
        return lost

    def _abort(self, name: str, failures: dict[int, str]) -> CkptError:
        """End the operation for all: the first rank to give up decides what all ranks raise."""
        kv = self.store
        self._broken()
        if self.store.add(f"{self.operation}/aborts", 1) == 1:
            self._put(f"{self.operation}/abort", msgspec.json.encode(to_wire(RankFailure(name, failures))))
        deadline = time.monotonic() + self.timeout
        while not kv.check([f"{self.operation}/abort"]) and time.monotonic() < deadline:
            time.sleep(0.005)  # the rank that was first has counted and is about to write
        return self._aborted() if kv.check([f"{self.operation}/abort"]) else RankFailure(name, failures)

    def _aborted(self) -> CkptError:
        self._broken()
        return from_wire(msgspec.json.decode(self.store.get(f"{self.operation}/abort")))

    # -- keys of the store ----------------------------------------------------------------------------------------

    def _put(self, key: str, value: bytes) -> None:
        self._keys.append(key)
        self.store.set(key, value)

    def _knock(self, key: str, name: str, gave_up: set[int]) -> _Entry:
        """Wait until an entry is complete or has failed; which of the two is decided once, by compare-and-set.

        A rank that finds an entry which has failed already does not arrive at it.
        """
        kv, done = self.store, f"{key}/done"
        if not kv.check([done]):
            self._prepare_entry(key)
            self._put(f"{key}/{self.rank}", b"1")
            if kv.add(f"{key}/count", 1) == self.world:
                kv.compare_set(done, "", _Entry(True).text())
        deadline, pause = time.monotonic() + self.timeout, 0.0005
        while not kv.check([done]):
            absent = self._absent(key) if time.monotonic() > deadline else []
            if absent:
                late = f"called ckpt.{name} earlier and had given up waiting"
                missing = f"did not call ckpt.{name} within {self.timeout:g} s"
                failed = _Entry(False, {r: late if r in gave_up else missing for r in absent})
                kv.compare_set(done, "", failed.text())
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)
        if self.rank == 0:
            self._keys += [f"{key}/{what}" for what in ("count", "done", "groupless")]
        return msgspec.json.decode(kv.get(done), type=_Entry)

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
        """The operation was aborted: a half-used transport must not be used again."""

    def _exchange(self, payload: bytes) -> list[bytes]:
        kv = self.store
        key = f"{self.operation}/{self._step}/bulk"
        self._put(f"{key}/{self.rank}", payload)
        return [bytes(kv.get(f"{key}/{r}")) for r in range(self.world)]


class TorchComm(Comm):
    """The ranks of ``torch.distributed``'s default group, with a gloo group of our own for bulk data."""

    def __init__(self, generation: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        # torch's stub says that a store holds str; it takes and returns bytes.
        kv = cast("KeyValue", dist.distributed_c10d.PrefixStore(f"ckpt/{generation}", store))
        super().__init__(kv, dist.get_rank(), dist.get_world_size())
        self._group: dist.ProcessGroup | None = None

    def _prepare_entry(self, key: str) -> None:
        if self._group is None:
            self.store.add(f"{key}/groupless", 1)

    def _entered(self, key: str) -> None:
        # A collective decision: if one rank has lost its group, all make a new one together.
        if self.store.add(f"{key}/groupless", 0):
            limit = timedelta(seconds=max(self.timeout, 30.0))
            self._group = dist.new_group(backend="gloo", timeout=limit)  # type: ignore[no-untyped-call,unused-ignore]

    def _broken(self) -> None:
        self._group = None

    def _exchange(self, payload: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(payload)], dtype=torch.int64), group=self._group)
        longest = max(1, *(int(s) for s in sizes))
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else mine[:0]
        rows = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(rows, mine, group=self._group)
        return [row[: int(n)].numpy().tobytes() for row, n in zip(rows, sizes, strict=True)]


def default_timeout() -> float:
    """Return the seconds of ``CKPT_TIMEOUT`` (default 300)."""
    text = os.environ.get("CKPT_TIMEOUT", "300")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value > 0:
        raise ConfigError(f"CKPT_TIMEOUT={text!r} is not a positive number of seconds")
    return value


_current: tuple[object, Comm] | None = None
_generation = 0
"""How many default groups ckpt has met in this process. A job that destroys its group and makes another may get the
same store again, with the keys of the first."""


def communicator() -> Comm:
    """Return the one communicator of this process: torch's default group, or a single rank without one."""
    global _current, _generation
    if not (dist.is_available() and dist.is_initialized()):
        return Comm(None, 0, 1)
    world = dist.group.WORLD
    if _current is None or _current[0] is not world:  # a job may destroy its group and make another
        _generation += 1
        _current = (world, TorchComm(_generation))
    return _current[1]
