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
_HEADER = struct.Struct("<16sQQQQ")
"""In front of each piece: run, rank, step, bytes of the frame, where the piece begins. No bytes: nothing follows."""


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
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.broken: str | None = None
        self.sent = self.received = 0
        """bytes of copies, of all that went well"""
        self._told_full = False
        self._ended: set[int] = set()
        self._changed = threading.Condition()
        # Others may call as soon as this is there.
        self._lines = Lines(comm, self._receive) if len(set(hosts)) > 1 else None
        self._sender = threading.Thread(target=self._send, name="ckpt copies send", daemon=True)
        if self._lines is not None:
            self._sender.start()

    # -- for the log --------------------------------------------------------------------------------------------------

    def copy(self, run: str, step: int, frame: Sequence[Buffer]) -> None:
        """Keep a record of this rank, and send it to its partners behind what is on its way. Never fails."""
        if self._keep(run, self.rank, step, frame) and self.broken is None and self._partners:
            self._queue.put(_Job(run, step, sum(memoryview(part).nbytes for part in frame)))

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
            self._queue.put(None)
            deadline = time.monotonic() + CLOSE_SECONDS
            self._sender.join(CLOSE_SECONDS)
            with self._changed:
                while clean and self.broken is None and not self._ended >= self._sources:
                    if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                        break
                clean = clean and self.broken is None and self._ended >= self._sources and not self._sender.is_alive()
                self.broken = self.broken or "ended"
            self._lines.close()
        if clean:
            self.keeper.remove()

    # -- behind the training ------------------------------------------------------------------------------------------

    def _keep(self, run: str, rank: int, step: int, frame: Sequence[Buffer]) -> bool:
        try:
            kept = self.keeper.keep(run, rank, step, frame)
        except StoreError as error:
            self._break(str(error))
            return False
        if (not kept or self.keeper.dropped) and not self._told_full:
            self._told_full = True
            log.warning(
                "rank %d: %d bytes of memory do not hold the copies of all steps since the last full save; the newest "
                "are kept", self.rank, self.keeper.limit,
            )  # fmt: skip
        return kept

    def _break(self, why: str) -> None:
        if self.broken is None:
            self.broken = why
            log.warning("rank %d: no more copies of log records in memory: %s", self.rank, why)

    def _send(self) -> None:
        buffer = memoryview(bytearray(PIECE))
        lines: list[Connection] = []
        try:
            lines.extend(self._lines.call(partner) for partner in self._partners)  # type: ignore[union-attr]
            while (job := self._queue.get()) is not None:
                for line in lines:
                    self._send_one(job, line, buffer)
            for line in lines:
                line.send_bytes(_HEADER.pack(bytes(16), self.rank, 0, 0, 0))
        except OSError as error:
            self._break(f"a peer is gone ({error})")
        finally:
            for line in lines:
                line.close()

    def _send_one(self, job: _Job, line: Connection, buffer: memoryview) -> None:
        """Send a record as it lies in memory, so that nothing of it has to be kept beside."""
        memory = self.keeper.memory
        key = segment_key(job.run, self.rank, job.step)
        for at in range(0, job.nbytes, PIECE):
            part = buffer[: min(PIECE, job.nbytes - at)]
            try:
                whole = memory.store.read_into(key, at, part) == len(part)
            except StoreError:
                whole = False
            if not whole:
                return  # it has given way to newer ones; what has come of it is forgotten there with the next one
            line.send_bytes(_HEADER.pack(bytes.fromhex(job.run), self.rank, job.step, job.nbytes, at))
            line.send_bytes(part)
        self.sent += job.nbytes

    def _receive(self, line: Connection) -> None:
        """Keep what a peer sends, until it ends."""
        parts: list[bytes] = []
        try:
            while True:
                run, rank, step, nbytes, at = _HEADER.unpack(line.recv_bytes(_HEADER.size))
                if not nbytes:
                    with self._changed:
                        self._ended.add(rank)
                        self._changed.notify_all()
                    return
                piece = line.recv_bytes(PIECE)
                parts = [*parts, piece] if at and at == sum(map(len, parts)) else [piece]
                if sum(map(len, parts)) == nbytes and self.broken is None:
                    kept = self._keep(run.hex(), rank, step, parts)
                    parts = []
                    with self._changed:
                        self.received += nbytes if kept else 0
                        self._changed.notify_all()
        except (OSError, EOFError, struct.error) as error:
            if self.broken is None:
                self._break(f"a peer whose copies are kept here is gone ({type(error).__name__}: {error})")


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
