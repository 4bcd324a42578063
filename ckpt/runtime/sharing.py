"""Memory that all ranks of a host see: what one of them has read, the others copy from where it lies.

Each rank has a memory file without a name (``memfd``) and a pipe; its neighbours open both through ``/proc/<pid>/fd``.
So nothing has to be removed, whoever dies and whenever, no limit on ``/dev/shm`` applies, and whoever waits for a
message sleeps in the kernel. Where a neighbour cannot be reached like that (another container or user, no Linux, no
room, too few open files), the ranks of that host send each other bytes as ranks of several hosts do; all know of it
before anything is handed on.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import struct
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from ckpt.errors import CkptError
from ckpt.store.blocks import PAGE, Blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.plan.read_plan import Unit
    from ckpt.runtime.comm import Comm

Block = npt.NDArray[np.uint8]
SLOTS = 8
"""Units that a rank reads, or has read and its neighbours are still copying: more would leave the processor's cache."""
HERE, SPOILT, DONE, STOP = range(4)
"""What a message says of a unit: it is in this slot; it could not be read; it is not needed any more. And: listen no
longer."""
_MESSAGE = struct.Struct(
    "<qqiii4x"
)  # number of the unit, round, sender, slot, what; pipes keep messages this small whole
_PROBLEMS = (OSError, AttributeError, ValueError)


def place_in_page(unit: Unit) -> int:
    """Return where in a page a unit's bytes are to start so that they can be read directly (ADR 0007)."""
    return 0 if unit.encoded else unit.start % PAGE


def block_bytes(span: int) -> int:
    """Return how large a block must be for a unit of ``span`` bytes that starts anywhere in a page."""
    return -(-span // PAGE) * PAGE + PAGE


class _Offer(msgspec.Struct, array_like=True):
    """What a rank's neighbours must know to reach its memory and its pipe."""

    pid: int
    memory: int
    """number of the open file"""
    name: str
    pipe: int
    inode: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Told:
    """A message of a neighbour."""

    number: int
    round: int
    sender: int
    slot: int
    what: int


class Slots:
    """Equal blocks of shared memory, as :class:`~ckpt.store.blocks.Blocks`; not for several threads at once."""

    def __init__(self, memory: Block, size: int, numbers: Sequence[int]) -> None:
        self.size, self._memory, self._free = size, memory, list(numbers)

    def take(self, timeout: float | None = None) -> Block | None:
        """Return a free slot, None if there is none now."""
        if not self._free:
            return None
        number = self._free.pop()
        return self._memory[number * self.size : (number + 1) * self.size]

    def give(self, block: Block) -> None:
        """Give back a slot."""
        self._free.append(self.number(block))

    def number(self, block: Block) -> int:
        """Return which slot a block is."""
        return int(block.ctypes.data - self._memory.ctypes.data) // self.size


@dataclass(eq=False, slots=True)
class _Mine:
    """This rank's memory and pipe, and what is open of its neighbours'."""

    memory: Block
    offer: _Offer
    ear: int
    files: list[int] = field(default_factory=list)
    seen: dict[int, Block] = field(default_factory=dict)
    mouths: dict[int, int] = field(default_factory=dict)


def _make(nbytes: int) -> _Mine:
    files: list[int] = []
    try:
        name = f"ckpt-{secrets.token_hex(8)}"
        files.append(os.memfd_create(name, os.MFD_CLOEXEC))
        os.ftruncate(files[0], nbytes)
        memory = np.frombuffer(mmap.mmap(files[0], nbytes), np.uint8)
        files += os.pipe()
        offer = _Offer(os.getpid(), files[0], name, files[2], os.fstat(files[2]).st_ino, nbytes)
    except BaseException:
        _close(files)
        raise
    return _Mine(memory, offer, files[1], files)


def _open(offer: _Offer, mine: _Mine, rank: int) -> None:
    """Open what a neighbour offers. The names tell whether its process number means that process here too."""
    memory, pipe = f"/proc/{offer.pid}/fd/{offer.memory}", f"/proc/{offer.pid}/fd/{offer.pipe}"
    if not os.readlink(memory).startswith(f"/memfd:{offer.name} ") or os.readlink(pipe) != f"pipe:[{offer.inode}]":
        raise OSError(errno.ENOENT, f"not the memory of rank {rank}", memory)
    mine.files.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    mine.mouths[rank] = mine.files[-1]
    fd = os.open(memory, os.O_RDWR | os.O_CLOEXEC)
    try:
        mine.seen[rank] = np.frombuffer(mmap.mmap(fd, offer.nbytes), np.uint8)
    finally:
        os.close(fd)


def _close(files: list[int]) -> None:
    for fd in files:
        with suppress(OSError):
            os.close(fd)
    files.clear()


class Sharing:
    """What a rank has of the memory that ranks of one host share.

    ``hosts``: those whose ranks share, the same on all ranks. ``names``: of each rank's host. ``size``: bytes of one
    slot.
    """

    def __init__(self, rank: int, names: Sequence[str], hosts: frozenset[str], size: int, mine: _Mine | None) -> None:
        self.rank, self.names, self.hosts, self.size = rank, names, hosts, size
        self.round = 0
        self._mine = mine
        if mine is not None:
            self._finalizer = weakref.finalize(self, _close, mine.files)

    def fits(self, unit: Unit) -> bool:
        """Can a unit be shared?"""
        return place_in_page(unit) + unit.nbytes <= self.size

    def pools(self) -> tuple[Slots, Slots | Blocks] | None:
        """Return new pools for what this rank reads and what comes from other hosts; None if its host has none."""
        if self._mine is None:
            return None
        count = len(self._mine.memory) // self.size
        if len(set(self.names)) == 1:
            return Slots(self._mine.memory, self.size, range(count)), Blocks(2 * self.size, self.size)
        halves = range(count // 2), range(count // 2, count)
        return Slots(self._mine.memory, self.size, halves[0]), Slots(self._mine.memory, self.size, halves[1])

    @property
    def _open(self) -> _Mine:
        if self._mine is None:
            raise CkptError(f"rank {self.rank} shares no memory")
        return self._mine

    @property
    def mates(self) -> set[int]:
        """The other ranks of the host."""
        return set(self._mine.mouths) if self._mine is not None else set()

    def look(self, told: Told, unit: Unit) -> memoryview:
        """Return the bytes of a unit in its owner's memory."""
        at = told.slot * self.size + place_in_page(unit)
        return self._open.seen[told.sender].data[at : at + unit.nbytes].cast("B")

    def tell(self, rank: int, number: int, slot: int, what: int) -> None:
        """Tell a neighbour of a unit.

        Raises:
            RuntimeError: it is gone.
        """
        self._write(self._open.mouths[rank], _MESSAGE.pack(number, self.round, self.rank, slot, what))

    def hear(self) -> list[Told]:
        """Wait for messages."""
        data = os.read(self._open.ear, 64 * _MESSAGE.size)
        return [Told(*one) for one in _MESSAGE.iter_unpack(data)]

    def stop(self) -> None:
        """Let whoever listens on this rank hear that it may stop."""
        self._write(self._open.files[2], _MESSAGE.pack(0, self.round, self.rank, 0, STOP))

    def _write(self, fd: int, message: bytes) -> None:
        while True:
            try:
                os.write(fd, message)
            except BlockingIOError:  # a pipe holds more than there are slots, unless its owner was stopped
                time.sleep(0.001)
            except OSError as error:
                raise RuntimeError(f"cannot reach a rank of this host: {error.strerror}") from error
            else:
                return


def share(comm: Comm, names: Sequence[str], *, span: int, budget: int) -> Sharing | None:
    """Let the ranks of each host share memory, for units of ``span`` bytes; None if they cannot. Collective.

    What a rank sees of its neighbours' memory counts as its own: all ranks of a host together get ``budget`` bytes.
    """
    mates = {host: [r for r, name in enumerate(names) if name == host] for host in set(names)}
    here, ways = mates[names[comm.rank]], min(len(mates), 2)
    size = block_bytes(span)
    count = min(SLOTS, budget // ways // len(here) // span) * ways
    if comm.kv is None or len(mates) == len(names):
        return None
    mine: _Mine | None = None

    def offer() -> bytes:
        nonlocal mine
        if len(here) > 1 and count:
            with suppress(*_PROBLEMS):
                mine = _make(count * size)
        return b"" if mine is None else msgspec.msgpack.encode(mine.offer)

    def look() -> bytes:
        if mine is None:
            return b""
        try:
            for rank in here:
                if rank != comm.rank:
                    _open(msgspec.msgpack.decode(offers[rank], type=_Offer), mine, rank)
        except (*_PROBLEMS, msgspec.DecodeError):
            return b""
        return b"1"

    offers = comm.gather("share", offer)
    seen = comm.gather("share", look)
    hosts = frozenset(host for host, ranks in mates.items() if all(seen[rank] for rank in ranks))
    if mine is not None and names[comm.rank] not in hosts:
        _close(mine.files)
        mine = None
    return Sharing(comm.rank, names, hosts, size, mine) if hosts else None
