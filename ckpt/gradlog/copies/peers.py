"""Copies of each rank's newest log records in the memory of another host, sent behind the training.

What is lost with a host, its ranks' own copies, is in the memory of the next one; what the hosts that live had is where
it was. So a job that comes back after the loss of a host needs the store for the headers of records alone.
"""

from __future__ import annotations

import logging
import queue
import struct
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ckpt.errors import CkptError, ConfigError, StoreError
from ckpt.gradlog.copies.lines import Lines
from ckpt.gradlog.copies.memory import HostMemory, Keeper, free_bytes
from ckpt.repo.log_files import segment_key
from ckpt.runtime.describing import host_name
from ckpt.words import listed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from ckpt.format.digest import Buffer
    from ckpt.runtime.comm import Comm

log = logging.getLogger("ckpt")

PIECE = 4 << 20
"""Bytes of a message: what sending and receiving hold beside the copies."""
CLOSE_SECONDS = 10.0
"""How long a rank that ends waits for those whose copies it keeps to end too."""
MANY = 64
"""Records that wait for a partner when it is told that it is slow."""
_HEADER = struct.Struct("<16sQQQ")
"""In front of a record: run, rank, step, bytes of the frame (none: nothing follows). Its pieces follow; an empty one
says that the rest does not come."""


def partners_of(hosts: Sequence[str], peers: int) -> list[list[int]]:
    """Return for each rank those that keep copies of its records, one on each of the ``peers`` hosts behind its own.

    Args:
        hosts: of each rank.
        peers: copies; if there are fewer other hosts, so many.
    """
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    ring = list(members.values())
    found: list[list[int]] = [[] for _ in hosts]
    for i, ranks in enumerate(ring):
        for distance in range(1, min(peers, len(ring) - 1) + 1):
            behind = ring[(i + distance) % len(ring)]
            for place, rank in enumerate(ranks):
                found[rank].append(behind[place % len(behind)])
    return found


class _Job(NamedTuple):
    run: str
    step: int
    nbytes: int


class Peers:
    """One rank's part: its own records go into its host's memory and to its partners, and theirs come here.

    Making one is collective, in an entered operation, by the thread that trains.

    Args:
        comm: all ranks.
        url: of the repository.
        peers: copies on other hosts.
        limit: bytes of copies that this rank keeps, its own and others'; None: a fair share of half of what is free.

    Raises:
        ConfigError: there is no memory to be had.
    """

    def __init__(self, comm: Comm, url: str, peers: int, limit: int | None) -> None:
        self.rank = comm.rank
        memory = comm.run("memory", lambda: HostMemory.make(url))
        said = comm.gather("hosts", lambda: msgspec.msgpack.encode((host_name(), memory.identity())))
        hosts, seen = zip(*(msgspec.msgpack.decode(one, type=tuple[str, str]) for one in said), strict=True)
        neighbours = [rank for rank, one in enumerate(seen) if one == seen[comm.rank]]
        share = free_bytes(memory.folder) // 2 // len(neighbours) if limit is None else limit
        self.keeper = Keeper(memory, share)
        self._leads = neighbours[0] == comm.rank
        partners = partners_of(hosts, peers)
        self._partners = partners[comm.rank]
        self._sources = {rank for rank, theirs in enumerate(partners) if comm.rank in theirs}
        if comm.rank == 0 and len(set(hosts)) <= peers:
            log.warning(
                "peers=%d: the ranks are on %d host(s), so each record has %d copies on others",
                peers, len(set(hosts)), len(set(hosts)) - 1,
            )  # fmt: skip
        self.broken: str | None = None
        self.received = 0
        """bytes of others' copies that went well"""
        self._told_full = False
        self._ended: set[int] = set()
        self._changed = threading.Condition()
        # Others may call as soon as this is there.
        self._lines = Lines(comm, self._receive) if len(set(hosts)) > 1 else None
        self._senders = [] if self._lines is None else [_Sender(self, self._lines, one) for one in self._partners]

    @property
    def sent(self) -> int:
        """Bytes of copies that partners have taken."""
        return sum(one.sent for one in self._senders)

    # -- for the log --------------------------------------------------------------------------------------------------

    def copy(self, run: str, step: int, frame: Sequence[Buffer]) -> None:
        """Keep a record of this rank, and send it to its partners behind what is on its way. Never fails."""
        if self.broken is None and self._told(self.keeper.keep(run, self.rank, step, frame)):
            for one in self._senders:
                one.put(_Job(run, step, sum(memoryview(part).nbytes for part in frame)))

    def trim(self, base: int) -> None:
        """Remove what the full save of step ``base`` makes needless."""
        self.keeper.trim(base)
        if self._leads:
            with suppress(CkptError):
                self.keeper.memory.remove_left(base)

    def close(self, *, failed: bool) -> None:
        """Send what is to be sent, and wait a while for the others to do so. Copies of a job that ended well are gone.

        Args:
            failed: this rank ends by an error. Then, and if others cannot be reached, the copies stay where they are:
                the job will come back.
        """
        clean = not failed
        if self._lines is not None:
            deadline = time.monotonic() + CLOSE_SECONDS
            for one in self._senders:
                one.end()
            late = {one.partner for one in self._senders if not one.join(deadline)}
            with self._changed:
                while clean and self.broken is None and not late and not self._ended >= self._sources:
                    if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                        late |= self._sources - self._ended
                clean = clean and self.broken is None and not late
                broken, self.broken = self.broken, self.broken or "ended"
            if late and broken is None:
                log.warning(
                    "rank %d: rank(s) %s did not end within %g s of this one; copies of log records stay in memory",
                    self.rank, listed(sorted(late), 8), CLOSE_SECONDS,
                )  # fmt: skip
            self._lines.close()
        if clean:
            self.keeper.remove()

    # -- behind the training ------------------------------------------------------------------------------------------

    def _told(self, kept: bool) -> bool:
        """Tell once that there is not enough memory; return whether a copy was kept."""
        if (not kept or self.keeper.dropped) and not self._told_full:
            self._told_full = True
            log.warning(
                "rank %d: %s does not hold the copies of all steps since the last full save (this rank may use %d "
                "bytes of it, %d are free); the newest are kept",
                self.rank, self.keeper.memory.folder, self.keeper.limit, free_bytes(self.keeper.memory.folder),
            )  # fmt: skip
        return kept

    def give_up(self, why: str) -> None:
        """Make and take no more copies."""
        if self.broken is None:
            self.broken = why
            log.warning("rank %d: no more copies of log records in memory: %s", self.rank, why)

    def _receive(self, line: Connection) -> None:
        """Keep what a peer sends, until it ends."""
        try:
            while self._receive_one(line):
                pass
        except (OSError, EOFError, struct.error) as error:
            self.give_up(f"a peer whose copies are kept here is gone ({type(error).__name__}: {error})")

    def _receive_one(self, line: Connection) -> bool:
        """Take a record, piece by piece; one that does not come to its end is forgotten."""
        run, rank, step, nbytes = _HEADER.unpack(line.recv_bytes(_HEADER.size))
        if not nbytes:
            with self._changed:
                self._ended.add(rank)
                self._changed.notify_all()
            return False
        left = nbytes
        with self.keeper.begin(run.hex(), rank, step, nbytes) as copy:
            while left and (piece := line.recv_bytes(PIECE)):
                copy.write(piece)
                left -= len(piece)
        if not left:
            self._told(copy.kept)
            if copy.failed:  # the next one may find room
                self.keeper.make_room()
        with self._changed:
            self.received += nbytes if copy.kept else 0
            self._changed.notify_all()
        return True


class _Sender:
    """The line to one partner, and what waits to be sent there. One that stalls holds up nobody else."""

    def __init__(self, peers: Peers, lines: Lines, partner: int) -> None:
        self._peers, self._lines, self.partner = peers, lines, partner
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._slow = False
        self.sent = 0
        self._thread = threading.Thread(target=self._work, name=f"ckpt copies to {partner}", daemon=True)
        self._thread.start()

    def put(self, job: _Job) -> None:
        """Send a record behind those that wait."""
        self._queue.put(job)
        if self._queue.qsize() > MANY and not self._slow:
            self._slow = True
            log.warning(
                "rank %d: rank %d takes copies of log records more slowly than they are made: %d wait",
                self._peers.rank, self.partner, MANY,
            )  # fmt: skip

    def end(self) -> None:
        """Send nothing that comes later."""
        self._queue.put(None)

    def join(self, deadline: float) -> bool:
        """Wait until all is sent; return whether it is."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _work(self) -> None:
        buffer = memoryview(bytearray(PIECE))
        try:
            with self._lines.call(self.partner) as line:
                while (job := self._queue.get()) is not None:
                    self._send(job, line, buffer)
                line.send_bytes(_HEADER.pack(bytes(16), self._peers.rank, 0, 0))
        except OSError as error:
            self._peers.give_up(f"rank {self.partner} is gone ({error})")

    def _send(self, job: _Job, line: Connection, buffer: memoryview) -> None:
        """Send a record as it lies in memory, so that nothing of it has to be kept beside."""
        memory, rank = self._peers.keeper.memory, self._peers.rank
        key = segment_key(job.run, rank, job.step)
        line.send_bytes(_HEADER.pack(bytes.fromhex(job.run), rank, job.step, job.nbytes))
        for at in range(0, job.nbytes, PIECE):
            part = buffer[: min(PIECE, job.nbytes - at)]
            whole = False
            with suppress(StoreError):
                whole = memory.store.read_into(key, at, part) == len(part)
            if not whole:  # it has given way to newer ones
                line.send_bytes(b"")
                return
            line.send_bytes(part)
        self.sent += job.nbytes


def checked_peers(peers: object, memory: object) -> tuple[int, int | None]:
    """Return how many copies are wanted and the bytes for them.

    Raises:
        ConfigError: neither is a number of that kind.
    """
    if type(peers) is not int or peers < 0:
        raise ConfigError(f"peers={peers!r}: expected a whole number from 0 on")
    if memory is not None and (type(memory) is not int or memory < 1):
        raise ConfigError(f"peer_memory={memory!r}: expected a number of bytes")
    return peers, memory
