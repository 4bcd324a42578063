"""Which way the bytes of units take between ranks, and the process groups of the collective one. ADR 0009.

NCCL broadcasts from device to device where each rank's tensors are on a CUDA device of its own; gloo, message by
message through host memory, in all other cases. All ranks decide alike, from what all have told.
"""

from __future__ import annotations

import os
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import torch
import torch.distributed as dist

from ckpt.errors import ConfigError, RankFailure
from ckpt.plan.read_plan import decode_runs, encode_runs, runs_of_numbers
from ckpt.runtime.fabric import FOREVER, NEVER_SENT
from ckpt.runtime.torch_comm import TorchComm
from ckpt.runtime.watching import Watch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpt.plan.load_plan import ChunkRead
    from ckpt.plan.read_plan import Unit
    from ckpt.runtime.comm import Comm
    from ckpt.runtime.pieces import Piece

FABRIC_VARIABLE = "CKPT_FABRIC"
AUTO, GLOO, NCCL, COLLECTIVE_GLOO = "auto", "gloo", "nccl", "collective-gloo"
"""The last is the way of ``nccl`` over gloo and host memory: what can be tested without a device."""
MOST_SETS = 16
"""Sets of ranks that one rank may be in. Resharding has many small ones: a communicator each would cost device memory
and seconds, and messages do as well."""
CPU_PART = 8
"""At most one byte of so many may have to go on from the device to the host: step counters of an optimizer, say."""
POLL_SECONDS = 0.001
LOOK_SECONDS = 0.25
"""How often a rank looks whether the others can go on."""
PATIENCE_SECONDS = 2.0
"""How long a rank whose connection to a peer is lost waits to learn which rank is to blame."""


class Facts(msgspec.Struct, array_like=True):
    """What all ranks are told of one, to decide on the way together."""

    wish: str
    usable: str = ""
    """backend of the groups that it has, if they are whole"""
    needs: bool = True
    """Does it need any bytes?"""
    device: str = ""
    """names the CUDA device that its tensors are on, unlike all others of the job"""
    lack: str = ""
    """why there is none"""
    many: bool = False
    """Is it in more sets of ranks than it makes groups for?"""
    sets: list[bytes] = []
    """those of which it is the first member, as runs"""


def wished_fabric() -> str:
    """Return what ``CKPT_FABRIC`` asks for (default ``auto``).

    Raises:
        ConfigError: no such way.
    """
    wish = os.environ.get(FABRIC_VARIABLE, AUTO)
    if wish not in (AUTO, GLOO, NCCL, COLLECTIVE_GLOO):
        raise ConfigError(f"{FABRIC_VARIABLE}={wish[:80]!r}: expected 'auto', 'gloo' or 'nccl'")
    return wish


def device_of(reads: Iterable[ChunkRead], targets: Sequence[Piece]) -> torch.device | None:
    """Return the device that (nearly) all bytes go to which a rank needs; None if it needs none.

    Several CUDA devices, or a good part on the CPU (an offloaded optimizer), count as CPU.
    """
    found: dict[torch.device, int] = {}
    for read in reads:
        for use in read.uses:
            target = targets[use.target]
            nbytes = use.box.volume * target.spec.itemsize
            found[target.tensor.device] = found.get(target.tensor.device, 0) + nbytes
    total = sum(found.values())
    if not total:
        return None
    cuda = [device for device in found if device.type == "cuda"]
    enough = len(cuda) == 1 and (total - found[cuda[0]]) * CPU_PART <= total
    return cuda[0] if enough and {device.type for device in found} <= {"cpu", "cuda"} else torch.device("cpu")


def sets_of(units: Iterable[Unit]) -> list[tuple[int, ...]]:
    """Return the sets of several ranks that share units, each once, in ascending order."""
    return sorted({tuple(sorted(unit.chain)) for unit in units if len(unit.chain) > 1})


def decide(told: Sequence[Facts]) -> str | None:
    """Return the backend of collective broadcasts, or None for messages. Pure; the same on all ranks.

    Raises:
        ConfigError: ranks wish for different ways, or for NCCL where it cannot be.
    """
    wishes = {one.wish for one in told}
    if len(wishes) > 1:
        raise ConfigError(f"{FABRIC_VARIABLE}: ranks ask for different ways: {', '.join(sorted(wishes))}")
    wish = told[0].wish
    if wish == GLOO:
        return None
    few = not any(one.many for one in told)
    if wish == COLLECTIVE_GLOO:
        return GLOO if few else None
    lacks = {rank: one.lack for rank, one in enumerate(told) if one.needs and not one.device}
    named: dict[str, int] = {}
    for rank, one in enumerate(told):
        if one.device and named.setdefault(one.device, rank) != rank:
            lacks[rank] = f"it shares its device with rank {named[one.device]}"
    if lacks and wish == NCCL:
        rank = min(lacks)
        raise ConfigError(f"{FABRIC_VARIABLE}='nccl', and rank {rank} cannot: {lacks[rank]}")
    return NCCL if named and few and not lacks else None


def facts_of(wish: str, usable: str, rank: int, host: str, device: torch.device | None, units: Iterable[Unit]) -> Facts:
    """Return what one rank tells the others."""
    own = [ranks for ranks in sets_of(units) if rank in ranks]
    many = len(own) > MOST_SETS
    sets = [] if many else [encode_runs(runs_of_numbers(ranks)) for ranks in own if ranks[0] == rank]
    facts = Facts(wish, usable, device is not None, many=many, sets=sets)
    if device is None:
        return facts
    if device.type != "cuda":
        facts.lack = "its tensors are not on one CUDA device"
    elif not dist.is_nccl_available():
        facts.lack = "its torch has no NCCL"
    else:  # by what it is, not by its number: each process may be shown one device only, as number 0
        facts.device = f"{host} {torch.cuda.get_device_properties(device).uuid}"
    return facts


class Groups:
    """Process groups of our own for sets of ranks, made together and kept. torch keeps them, as that of ``TorchComm``.

    Args:
        comm: all ranks.
        backend: ``nccl`` or ``gloo``.
        device: what this rank's buffers are on.
    """

    def __init__(self, comm: Comm, backend: str, device: torch.device) -> None:
        self.backend, self.device, self.broken = backend, device, False
        self._timeout = timedelta(seconds=max(comm.timeout, 10.0))
        self._refs: dict[tuple[int, ...], weakref.ref[Any]] = {}

    def usable(self) -> str:
        """Return the backend, or "" if a group is gone."""
        return "" if self.broken or any(ref() is None for ref in self._refs.values()) else self.backend

    def make(self, comm: Comm, sets: Iterable[tuple[int, ...]]) -> None:
        """Make those that are not there yet. Collective: all ranks, members or not, with the same sets in one order.

        Raises:
            RankFailure: a rank is gone, or a group cannot be made.
        """
        watch = Watch(comm, "groups")
        todo = [ranks for ranks in sets if ranks not in self._refs]
        for at, ranks in enumerate(todo):
            try:
                self._make_one(comm, ranks, watch)
            except BaseException as error:
                self.abort()
                # torch numbers groups as a process makes them, the training's too: no rank may fall behind the others.
                for _ in todo[at + 1 :]:
                    with suppress(RuntimeError):
                        self._new([(comm.rank + 1) % comm.world])
                if isinstance(error, RuntimeError):
                    blame(watch, ranks, error)
                raise

    def _new(self, ranks: Sequence[int]) -> Any:
        # All ranks call, not the members alone: with use_local_synchronization a group's name would depend on how many
        # groups the process is in, which pipeline stages, say, do not have in common.
        return dist.new_group(list(ranks), backend=self.backend, timeout=self._timeout)

    def _make_one(self, comm: Comm, ranks: tuple[int, ...], watch: Watch) -> None:
        group = self._new(ranks)
        if comm.rank not in ranks:
            self._refs[ranks] = _stays
            return
        self._refs[ranks] = weakref.ref(group)
        # NCCL connects in the first collective, and the host waits for it: now, while all are known to live.
        self._try_out(group, ranks, watch)
        # From here on a unit may take as long as its reader makes progress, which `Watch` looks after.
        dist.distributed_c10d._set_pg_timeout(FOREVER, group)

    def _try_out(self, group: dist.ProcessGroup, ranks: Sequence[int], watch: Watch) -> None:
        work = dist.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device), ranks[0], group, async_op=True)
        looked = time.monotonic()
        while not work.is_completed():
            time.sleep(POLL_SECONDS)
            if time.monotonic() - looked > LOOK_SECONDS:
                watch.comm.beat()
                watch.look(ranks)
                looked = time.monotonic()
        work.wait()

    def of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Return the group of exactly these ranks; never None, which torch would take for the training's own.

        Raises:
            RuntimeError: there is none (any more).
        """
        group = self._refs[ranks]() if ranks in self._refs and not self.broken else None
        if not isinstance(group, dist.ProcessGroup):
            raise RuntimeError("the group is gone")
        return group

    def abort(self) -> None:
        """End all that is on its way; the groups are never used again."""
        self.broken = True
        groups = [group for ref in self._refs.values() if isinstance(group := ref(), dist.ProcessGroup)]
        with suppress(RuntimeError):
            (_abort_nccl if self.backend == NCCL else _abort_gloo)(groups)


def blame(watch: Watch, peers: Sequence[int], error: Exception) -> NoReturn:
    """Raise which rank is gone, after ``error`` has told that some rank is; this one, if that cannot be known.

    Raises:
        RankFailure: always.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        watch.look(peers)
        time.sleep(0.01)
    text = f"lost a peer ({str(error).splitlines()[0][:200]})"
    raise RankFailure(watch.name, {watch.comm.rank: text}) from error


class _Stays:
    """A non-member's group, which torch does not keep: there is nothing that could be gone."""


_nobody = _Stays()
_stays: weakref.ref[Any] = weakref.ref(_nobody)


def _abort_nccl(groups: Sequence[Any]) -> None:
    backends = [group._get_backend(torch.device("cuda")) for group in groups]
    if backends:
        # As torch itself does with several: one after the other, their aborts could wait for each other.
        backends[0]._group_start()
        for backend in backends:
            backend.abort()
        backends[0]._group_end()


def _abort_gloo(groups: Sequence[Any]) -> None:
    """Let a message that nobody sends run out of time, which closes the connections (see ``fabric``)."""
    for group in groups:
        for peer in dist.get_process_group_ranks(group):
            if peer != dist.get_rank():
                with suppress(RuntimeError):
                    nothing = torch.zeros(1, dtype=torch.uint8)
                    dist.irecv(nothing, peer, group, NEVER_SENT).wait(timedelta(milliseconds=1))  # type: ignore[union-attr]


_groups: weakref.WeakKeyDictionary[Comm, Groups] = weakref.WeakKeyDictionary()


def agree_on_groups(
    comm: Comm,
    wish: str,
    host: str,
    units: Mapping[str, Sequence[Unit]],
    reads: Mapping[str, Sequence[ChunkRead]],
    targets: Sequence[Piece],
) -> Groups | None:
    """Return groups for all sets of ranks that share units, None where bytes go as messages. Collective.

    Args:
        comm: all ranks, in an operation.
        wish: of this rank (:func:`wished_fabric`).
        host: name of this rank's.
        units: stage -> the plan.
        reads: stage -> what this rank needs.
        targets: this rank's pieces.

    Raises:
        ConfigError: see :func:`decide`.
        RankFailure: a rank is gone, or a group cannot be made.
    """
    if not isinstance(comm, TorchComm):  # the same on all ranks: without a default group there is nothing to decide
        return None
    found = _groups.get(comm)
    device = device_of((read for stage in reads.values() for read in stage), targets)
    every = [unit for stage in units.values() for unit in stage]

    def work() -> bytes:
        usable = found.usable() if found is not None else ""
        return msgspec.msgpack.encode(facts_of(wish, usable, comm.rank, host, device, every))

    told = [msgspec.msgpack.decode(data, type=Facts) for data in comm.gather("way", work)]
    backend = decide(told)
    if backend is None:
        return None
    own = device if backend == NCCL and device is not None else torch.device("cpu")
    # Together: a rank that had done its part before the others gave up has groups that look whole.
    if found is None or any(one.usable != backend for one in told):
        found = _groups[comm] = Groups(comm, backend, own)
    found.device = own
    sets = {tuple(int(n) for a, b in decode_runs(data) for n in range(a, b)) for one in told for data in one.sets}
    found.make(comm, sorted(sets))
    return found
