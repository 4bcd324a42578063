"""Rank functions of test_collective.py: broadcasts of buffers over gloo, which is all of that way but NCCL itself."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from ckpt.errors import CkptError, DigestMismatch, PlanError, StoreError
from ckpt.plan.read_plan import Unit
from ckpt.runtime import collective, groups
from ckpt.runtime.cargo import Outcome, settle
from ckpt.runtime.collective import CollectiveTransfer
from ckpt.runtime.torch_comm import communicator
from tests.e2e import broadcast_cases

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.runtime.comm import Comm


def watched(rank: int, world: int, *, case: str, how: dict[str, Any]) -> dict[str, Any]:
    """A case of test_broadcast.py, and how many units this rank broadcast or received, in how many groups."""
    before = collective.CollectiveTransfer._broadcast
    calls: list[tuple[int, ...]] = []

    def counted(self: CollectiveTransfer, unit: Unit, data: torch.Tensor) -> Any:
        calls.append(tuple(sorted(unit.chain)))
        return before(self, unit, data)

    collective.CollectiveTransfer._broadcast = counted  # type: ignore[method-assign]
    result = getattr(broadcast_cases, case)(rank, world, **how)
    return {"result": result, "broadcasts": len(calls), "groups": len(set(calls)), "threads": threading.active_count()}


class Letters:
    """A cargo of which every byte is known; ``targets``: number -> where a unit is to go."""

    def __init__(self, rank: int, mine: Sequence[Unit], seed: int, live: Sequence[int]) -> None:
        self.rank, self.seed, self.live_numbers = rank, seed, set(live)
        self.targets = {unit.number: torch.zeros(unit.nbytes, dtype=torch.uint8) for unit in mine}
        self.fail: dict[int, str] = {}
        self.lock, self.read_bytes = threading.Lock(), 0

    def truth(self, unit: Unit) -> np.ndarray[Any, Any]:
        return np.random.default_rng(self.seed * 1000 + unit.number).integers(0, 256, unit.nbytes, np.uint8)

    def read(self, unit: Unit, into: memoryview) -> None:
        how = self.fail.get(unit.number)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "refuse":
            raise StoreError(f"unit {unit.number} on rank {self.rank}: no", unit.key)
        into[:] = self.truth(unit).data
        if how == "twist":  # whole when it was read, and not when it was sent
            into[0] ^= 1

    def check(self, unit: Unit, data: memoryview) -> None:
        if bytes(data) != self.truth(unit).tobytes():
            raise DigestMismatch(f"unit {unit.number}")

    def live(self, unit: Unit) -> None:
        return None

    def put(self, unit: Unit, data: memoryview) -> None:
        raise NotImplementedError

    def live_on(self, unit: Unit, device: torch.device) -> torch.Tensor | None:
        return self.targets[unit.number] if unit.number in self.live_numbers else None

    def place(self, unit: Unit, raw: torch.Tensor) -> None:
        whole = bytes(raw.numpy()) == self.truth(unit).tobytes()
        if unit.chain[0] != self.rank and not whole:  # as a count that its target cannot hold
            raise PlanError(f"unit {unit.number} makes no sense")
        self.targets[unit.number].copy_(raw)

    def wrong(self, mine: Sequence[Unit]) -> list[int]:
        return [u.number for u in mine if self.targets[u.number].numpy().tobytes() != self.truth(u).tobytes()]


class Late:
    """A point that a device passes late; until then the host memory that it copies from must stay what it is."""

    def __init__(self, block: torch.Tensor) -> None:
        self.block, self.before, self.looks = block, block.clone(), 0

    def query(self) -> bool:
        self.looks += 1
        return self.looks > 5

    def broken(self) -> bool:
        """Was the memory used again before the point was passed? Asked when all is over."""
        return self.looks <= 5 and not torch.equal(self.block, self.before)


class LateDevice(collective._Device):
    """A CPU that takes its time, as a CUDA device does, and whose receivers do not digest."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.checks, self.points = False, list[Late]()

    def bring(self, data: torch.Tensor, block: torch.Tensor) -> Any:
        super().bring(data, block)
        self.points.append(Late(block))
        return self.points[-1]


def many(rank: int, world: int, *, jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Carry out several plans one after the other with the groups of one communicator."""
    return [one_job(communicator(), job) for job in jobs]


def one_job(comm: Comm, job: dict[str, Any]) -> dict[str, Any]:
    units = [Unit(n, 0, "pack", 0, size, size, (), False, tuple(c)) for n, (size, c) in enumerate(job["units"])]
    mine = [unit for unit in units if comm.rank in unit.chain]
    cargo = Letters(comm.rank, mine, job["seed"], job["live"])
    cargo.fail = {number: how for number, how in job["fail"] if comm.rank == units[number].chain[0]}
    result: dict[str, Any] = {"error": "", "text": "", "wrong": [], "buffers": 0, "broken": 0}
    try:
        with comm.joint("load", job.get("timeout", 60.0)):
            found = groups.agree_on_groups(comm, groups.COLLECTIVE_GLOO, "host", {"read": units}, {}, [])
            if found is None:
                return {**result, "error": "messages"}
            transfer = CollectiveTransfer(comm, found, cargo, span=job["span"], budget=job["budget"])
            most = _count_buffers(transfer)
            late = LateDevice()
            transfer._device = late if job.get("late") else transfer._device
            done = transfer.run("read", units)
            told = comm.gather("read", lambda: msgspec.msgpack.encode(done))
            result["broken"] = sum(point.broken() for point in late.points)
            result |= {"read": done.read, "received": done.received, "buffers": max(most, default=0)}
            settle([msgspec.msgpack.decode(data, type=Outcome) for data in told])
    except CkptError as error:
        result |= {"error": type(error).__name__, "text": str(error)}
    result["wrong"] = cargo.wrong(mine)
    return result


def _count_buffers(transfer: CollectiveTransfer) -> list[int]:
    """Return a list that fills with the bytes of all buffers that are held, at each time that one is taken."""
    held: dict[int, int] = {}
    sums: list[int] = []
    for pool in (transfer._host, transfer._window):

        def take(nbytes: int, before: Any = pool.take) -> torch.Tensor | None:
            buffer = before(nbytes)
            if buffer is not None:
                held[id(buffer)] = len(buffer)
                sums.append(sum(held.values()))
            return buffer

        def give(buffer: torch.Tensor, before: Any = pool.give) -> None:
            del held[id(buffer)]
            before(buffer)

        pool.take, pool.give = take, give  # type: ignore[method-assign]
    return sums


def killed(rank: int, world: int, *, victim: int, number: int) -> dict[str, Any]:
    """One rank is killed in the middle of a plan of many units."""
    units = [[1 << 16, [(victim + n) % world, *((victim + n + k) % world for k in range(1, world))]] for n in range(40)]
    job = {"units": units, "seed": 1, "live": list(range(0, 40, 3)), "span": 1 << 16, "budget": 1 << 18}
    found = one_job(communicator(), {**job, "fail": [[number, "kill"]]})
    own = groups._groups[communicator()]
    return {**found, "usable": own.usable()}


def lost_groups(rank: int, world: int) -> list[str]:
    """Groups that one rank gave up are made anew by all."""
    comm, states = communicator(), []
    job = {"units": [[100, [0, 1, 2, 3]], [50, [2, 1]]], "seed": 3, "live": [], "span": 128, "budget": 1 << 12}
    for turn in range(3):
        found = one_job(comm, {**job, "fail": []})
        states.append(f"{found['error']}{found['wrong']}")
        if turn == 0 and rank == 2:
            groups._groups[comm].abort()
    count = dist.distributed_c10d._world.group_count
    return [*states, str(count)]


def half_made(rank: int, world: int, *, victim: int) -> dict[str, Any]:
    """One rank cannot make the second of its groups; the job's groups made later still find each other."""
    comm, before = communicator(), groups.Groups._new
    job = {"units": [[9, [a, b]] for a, b in ((0, 1), (1, 2), (2, 3), (0, 3))], "seed": 5, "live": [], "fail": []}
    job |= {"span": 16, "budget": 64, "timeout": 10.0}
    made: list[int] = []

    def fails(self: groups.Groups, ranks: Sequence[int]) -> Any:
        found = before(self, ranks)
        made.append(rank)
        if rank == victim and len(made) == 2:
            raise RuntimeError("no more of them")
        return found

    groups.Groups._new = fails  # type: ignore[method-assign]
    first = one_job(comm, job)
    groups.Groups._new = before  # type: ignore[method-assign]
    again = one_job(comm, job)
    total = torch.tensor([rank])
    dist.all_reduce(total, group=dist.new_group(list(range(world)), backend="gloo"))
    return {"first": [first["error"], first["text"]], "again": [again["error"], again["wrong"]], "sum": int(total)}
