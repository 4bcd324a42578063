"""What is measured. Each item is a function of a :class:`benchmarks.rank.Rank` that leaves records behind."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from measure import Peak, status, timed

from benchmarks.peers.base import PeerFailed
from benchmarks.system import TreePeak, bytes_read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.peers.base import Handle, Peer
    from benchmarks.rank import Rank
    from benchmarks.stores import FileStore, S3Store

BASE = "no saves"
"""The name of loops that save nothing."""


def save_and_load(one: Rank) -> None:
    """Durable saves and cold loads: raw, then every system; in every run another one begins.

    A system that returns before its files are on the disk has two times: ``returned``, and ``durable`` with an fsync
    of all its files by all ranks, each a part of them. Every load starts from wiped tensors and files that were dropped
    from the page cache, and its result is compared bit by bit.
    """
    for store in one.stores:
        for run in range(one.options["runs"] + 1):
            one.job.train_step()
            for peer in one.turns(run, [one.raw, *one.peers_on(store)]):
                with suppress(PeerFailed), one.trying(peer.name, "save or load", store):
                    _save_and_load_once(one, peer, store, run)


def _save_and_load_once(one: Rank, peer: Peer, store: FileStore | S3Store, run: int) -> None:
    if not one.fits(peer, store, 1, f"save on {store.name}"):
        return
    place = store.place(peer.name, f"run{run}")
    saved = one.job.fingerprint()
    found: dict[str, Any] = {}
    one.settle(store)
    with Peak() as peak, timed(found, "durable"):
        with timed(found, "returned"):
            peer.save_sync(place)
        if not peer.fsyncs:
            one.all(None)  # a file may be another rank's
            store.sync(place, one.rank, one.world)
    one.all(None)
    found |= {"rss": peak.added, "bytes": one.on_first(lambda: store.size(place))}
    if not peer.loads_only:
        one.record("save", peer.name, store.name, run, found)
    if one.options["load"]:
        _load_once(one, peer, store, run, place, saved)
    one.on_first(lambda: store.remove(place))


def _load_once(one: Rank, peer: Peer, store: FileStore | S3Store, run: int, place: str, saved: str) -> None:
    found: dict[str, Any] = {}
    if peer is not one.raw:
        one.job.wipe()
    found["cached"] = one.on_first(lambda: store.make_cold(place))
    one.settle(store)
    before = bytes_read()
    with Peak() as peak, timed(found, "load"):
        peer.load(place)
    found |= {"read": bytes_read() - before, "rss": peak.added, "same": one.job.fingerprint() == saved}
    one.record("load", peer.name, store.name, run, found)
    if not all(one.all(found["same"])):
        one.restore()


def stall(one: Rank) -> None:
    """What training loses: whole loops with a save every few steps against the same loops without, taking turns.

    A loop without saves stands at the beginning and at the end of every run and after every two systems; a system's
    loop is compared with those nearest to it. A system without asynchronous saves saves synchronously. Before a save
    the loop waits for the one before it, as the systems ask for.
    """
    steps, every = one.options["steps"], one.options["every"]
    stores = [s for s in one.stores if s.name in one.options["stall_stores"]]
    for store in stores:
        copies = -(-steps // every)
        peers = [p for p in one.peers_on(store) if p.in_loops and not p.loads_only and not p.yardstick]
        peers = [p for p in peers if one.fits(p, store, copies, f"stall on {store.name}")]
        _loop(one, None, store, 0, min(steps, every))
        for peer in peers:  # the first asynchronous save starts processes and makes buffers
            with suppress(PeerFailed), one.trying(peer.name, "stall", store):
                _loop(one, peer, store, 0, 1)
        for run in range(1, one.options["loops"] + 1):
            turns = one.turns(run, [p for p in peers if p in one.peers_on(store)])
            _loop(one, None, store, run, steps)
            for number, peer in enumerate(turns, start=1):
                with suppress(PeerFailed), one.trying(peer.name, "stall", store):
                    _loop(one, peer, store, run, steps)
                if number % 2 == 0 or peer is turns[-1]:
                    _loop(one, None, store, run, steps)


def _loop(one: Rank, peer: Peer | None, store: FileStore | S3Store, run: int, steps: int) -> None:
    name = peer.name if peer else BASE
    calls: list[float] = []
    waits: list[float] = []
    each: list[float] = []
    places: list[str] = []
    handle: Handle | None = None
    one.settle(store)
    start = last = time.perf_counter()
    for step in range(steps):
        if peer and step % one.options["every"] == 0:
            begin = time.perf_counter()
            if handle:
                handle.durable()
            places.append(store.place(name, f"loop{run}-{step}"))
            called = time.perf_counter()
            handle = _begin(peer, places[-1])
            calls.append(time.perf_counter() - called)
            waits.append(called - begin)
        one.job.train_step(peer.guard if peer and peer.has_async else _no_guard)
        now = time.perf_counter()
        each.append(now - last)
        last = now
    found: dict[str, Any] = {"loop": last - start, "steps": each, "calls": calls, "waits": waits}
    if handle:
        handle.durable()
    found["tail"] = time.perf_counter() - last
    one.record("stall", name, store.name, run, found)
    for place in places:
        one.on_first(lambda place=place: store.remove(place))


def _begin(peer: Peer, place: str) -> Handle | None:
    if peer.has_async:
        return peer.save_async(place)
    peer.save_sync(place)
    return None


@contextmanager
def _no_guard() -> Iterator[None]:
    yield


def memory(one: Rank) -> None:
    """Memory added by an asynchronous save, call to durable, and what many of them leave behind (``rss``, one by one).

    Those of synchronous saves and of loads are in the records of these. One run and the one that warms up are enough:
    the largest value counts.
    """
    store = one.stores[0]
    peers = [p for p in one.peers_on(store) if p.has_async and not p.loads_only]
    for run in range(2):
        for peer in one.turns(run, [p for p in peers if p in one.peers_on(store)]):
            with suppress(PeerFailed), one.trying(peer.name, "asynchronous save", store):
                _async_once(one, peer, store, run)
    for peer in [p for p in peers if p in one.peers_on(store) and p.name in one.options["slope_peers"]]:
        with suppress(PeerFailed), one.trying(peer.name, "many asynchronous saves", store):
            resident = []
            for count in range(one.options["slope_saves"]):
                place = store.place(peer.name, f"slope{count}")
                peer.save_async(place).durable()
                resident.append(status("VmRSS"))
                one.on_first(lambda place=place: store.remove(place))
            one.record("slope", peer.name, store.name, 1, {"resident": resident})


def _async_once(one: Rank, peer: Peer, store: FileStore | S3Store, run: int) -> None:
    if not one.fits(peer, store, 1, f"asynchronous save on {store.name}"):
        return
    place = store.place(peer.name, f"async{run}")
    found: dict[str, Any] = {}
    one.settle(store)
    with TreePeak() as peak, timed(found, "finished"):
        with timed(found, "call"):
            handle = peer.save_async(place)
        with timed(found, "staged after"):
            handle.staged()
        handle.durable()
    found["rss"] = peak.added
    one.record("async", peer.name, store.name, run, found)
    one.on_first(lambda: store.remove(place))


def digest(one: Rank) -> None:
    """The share of a durable save that ckpt spends in its digest function (all threads), on the first store."""
    store = one.stores[0]
    for peer in [p for p in one.peers_on(store) if p.name == "ckpt"]:
        for run in range(one.options["runs"] + 1):
            place = store.place(peer.name, f"digest{run}")
            found: dict[str, Any] = {}
            one.settle(store)
            with _Timed() as spent, timed(found, "durable"):
                peer.save_sync(place)
            found |= {
                "share": spent.wall / found["durable"],
                "cpu share": spent.cpu / found["durable"],
                "digested": spent.nbytes,
            }
            one.record("digest", peer.name, store.name, run, found)
            one.on_first(lambda place=place: store.remove(place))


class _Timed:
    """Seconds spent in ckpt's digest functions within a ``with`` block, wherever their names have been imported to."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0
        self.nbytes = 0
        self._lock = threading.Lock()

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed_digest(data: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(data)
            finally:
                cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
                with self._lock:
                    self.wall, self.cpu = self.wall + wall, self.cpu + cpu
                    self.nbytes += memoryview(data).nbytes

        return timed_digest

    def __enter__(self) -> _Timed:
        from ckpt.format import digest as home

        replaced = {function: self._wrapped(function) for function in (home.digest, home.raw_digest)}
        self._undo = []
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "ckpt":
                for attribute, value in list(vars(module).items()):
                    for function, wrapped in replaced.items():
                        if value is function:
                            self._undo.append((module, attribute, value))
                            setattr(module, attribute, wrapped)
        return self

    def __exit__(self, *exc: object) -> None:
        for module, attribute, value in self._undo:
            setattr(module, attribute, value)


ITEMS: dict[str, Callable[[Rank], None]] = {
    "save": save_and_load,
    "memory": memory,  # before anything else has made a system keep buffers for its asynchronous saves
    "stall": stall,
    "digest": digest,
}
"""Name -> function. ``load`` and ``bytes`` are measured by ``save``."""
