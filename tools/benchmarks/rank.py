"""One rank of the job of one layout: all systems take turns on the same live engine. Started by the launcher.

Every measurement becomes a record, merged over the ranks (times and memory: the largest; bytes read: the sum). A
system that fails is reported with its error, the state is put back, and the others go on.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import traceback
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.engines import make_job
from benchmarks.items import ITEMS
from benchmarks.peers import PEERS
from benchmarks.peers.base import PeerFailed
from benchmarks.raw import Raw
from benchmarks.stores import FileStore, S3Store, open_store
from benchmarks.system import Others, children_of, die_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.peers.base import Peer

COLLECTIVE_SECONDS = 300
SUMS = ("read",)


class Rank:
    """What the items of the benchmark work with: the job, the systems, the stores, and a list of records (rank 0's)."""

    def __init__(self, options: dict[str, Any], work: Path) -> None:
        self.options, self.work = options, work
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.job = make_job(options["layout"], options["params"], options["dtype"])
        self.held = sum(self.all(sum(t.nbytes for t in self.job.tensors())))
        self.stores: list[FileStore | S3Store] = [open_store(name, root) for name, root in options["stores"].items()]
        self.records: list[dict[str, Any]] = []
        self.first: list[dict[str, Any]] = []
        self.not_run: list[dict[str, str]] = []
        self._failed: set[tuple[str, str]] = set()
        self._backup = work / f"state-{self.rank}"
        torch.save(self.job.tensors(), self._backup)
        self.raw = Raw(self.job, work)
        self.peers = self._make_peers()

    def _make_peers(self) -> list[Peer]:
        made = []
        for name in self.options["peers"]:
            reason = PEERS[name].why_not_here(self.options["layout"])
            if reason:
                self.drop(name, reason)
                continue
            with suppress(PeerFailed), self.trying(name, "start", None):
                made.append(PEERS[name](self.job, self.work))
        return made

    def all(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def settle(self, store: FileStore | S3Store) -> None:
        """Start together, with nothing left to write from what came before."""
        dist.barrier()
        if self.rank == 0:
            store.settle()
        dist.barrier()

    def on_first(self, work: Callable[[], Any]) -> Any:
        """Do something on rank 0. Returns its result there, None elsewhere; all ranks wait."""
        result = work() if self.rank == 0 else None
        dist.barrier()
        return result

    def say(self, text: str) -> None:
        """Tell the launcher how far it is."""
        if self.rank == 0:
            with (self.work / "progress").open("a") as file:
                file.write(text + "\n")

    def record(self, item: str, peer: str, store: str, run: int, values: dict[str, Any]) -> None:
        """Keep what was measured. Run 0 warms up: it is kept apart, for the memory that is taken once."""
        everyone = self.all(values)
        if self.rank:
            return
        merged: dict[str, Any] = {}
        for name in values:
            found = [one[name] for one in everyone if one[name] is not None] or [None]
            if name == "same":
                merged[name] = all(found)
            elif isinstance(found[0], list):
                merged[name] = [max(column) for column in zip(*found, strict=True)]
            else:
                merged[name] = sum(found) if name in SUMS else max(found)
        (self.records if run else self.first).append({"item": item, "peer": peer, "store": store, "run": run, **merged})

    def drop(self, peer: str, reason: str, what: str = "") -> None:
        """Note once that a system does not take part, or not in one item, and why."""
        if any(one["peer"] == peer and one["what"] == what for one in self.not_run):
            return
        self.not_run.append({"peer": peer, "what": what, "reason": reason})

    def peers_on(self, store: FileStore | S3Store) -> list[Peer]:
        """Return the systems that can use a store and have not failed there."""
        return [p for p in self.peers if store.name in p.stores and (p.name, store.name) not in self._failed]

    @contextmanager
    def trying(self, peer: str, what: str, store: FileStore | S3Store | None) -> Iterator[None]:
        """Run a system's code; if it fails anywhere, no rank uses it on this store again, and the state is put back."""
        problem = ""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # DCP's failures are no Exceptions
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            problem = f"{type(error).__name__}: {lines[0][:200]}"
        problems = [p for p in self.all(problem) if p]
        if problems:
            self.drop(peer, problems[0], f"{what} on {store.name}" if store else what)
            if store:
                self._failed.add((peer, store.name))
            self.restore()
            raise PeerFailed(peer)

    def restore(self) -> None:
        """Put the state of the start back, which a load may have destroyed."""
        with torch.no_grad():
            for live, saved in zip(self.job.tensors(), torch.load(self._backup, mmap=True), strict=True):
                live.copy_(saved)

    @staticmethod
    def turns(run: int, peers: list[Peer]) -> list[Peer]:
        """Return the systems in this run's order: another one begins each time."""
        first = run % len(peers) if peers else 0
        return peers[first:] + peers[:first]

    def fits(self, peer: Peer, store: FileStore | S3Store, copies: int, what: str) -> bool:
        """Is there room for so many checkpoints at their largest? Notes it if not."""
        needed = int(copies * self.held * 1.05) + (64 << 20)
        free = min(self.all(store.free()))
        if needed <= free:
            return True
        self.drop(peer.name, f"needs {needed / 1e9:.1f} GB of {store.name}, {free / 1e9:.1f} GB are free", what)
        return False


def run(work: Path) -> None:
    """Measure everything that the options ask for; rank 0 writes the result."""
    options = json.loads((work / "options.json").read_text())
    logging.disable(logging.WARNING)  # peers tell of each call
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    one = Rank(options, work)
    meanwhile: dict[str, Any] = {}
    for item in options["items"]:
        one.say(f"{options['layout']}: {item}")
        with Others(os.getppid()) as others:
            ITEMS[item](one)
        meanwhile[item] = {"load_average": os.getloadavg()[0], "others_cores": others.cores}
    if one.rank == 0:
        result = {
            "layout": options["layout"],
            "kind": one.job.kind,
            "params": one.job.params,
            "information": one.job.information,
            "held": one.held,
            "records": one.records,
            "first": one.first,
            "not_run": one.not_run,
            "meanwhile": meanwhile,
        }
        (work / "result.json").write_text(json.dumps(result))
    dist.barrier()
    for peer in one.peers:
        with suppress(Exception):
            peer.close()


def main() -> None:
    """Run, and leave no process behind: some systems' helpers outlive an ordinary exit."""
    die_with_parent()
    code = 1
    try:
        run(Path(sys.argv[1]))
        code = 0
    except BaseException:
        traceback.print_exc()
    for pid in children_of(os.getpid()):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
