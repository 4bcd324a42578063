"""Rank functions of test_gradlog_mishaps.py: calls that are forgotten, roots that are removed or shared."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from typing import Any

import torch
import torch.distributed as dist

import ckpt
from ckpt.errors import CkptError
from ckpt.runtime import comm
from tests.e2e.async_cases import Job


class _Told(logging.Handler):
    """Keeps what was warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("ckpt").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def miscount(
    rank: int, world: int, *, root: str, calls: dict[str, int], steps: int, full_every: int, patience: float = 60.0
) -> dict[str, Any]:
    """Train; rank 1 calls as often as ``calls`` says behind the steps that it names. Returns how it ended."""
    comm.TELL_SECONDS = 0.5
    told, job = _Told(), Job("ddp")
    keeper = ckpt.Checkpointer(job.engine, root, full_every=full_every, timeout=patience)
    if keeper._handle is not None:
        keeper._handle.durable.wait(60)
    ended = ""
    try:
        for step in range(1, steps + 1):
            job.train(1, step - 1)
            for _ in range(calls.get(str(step), 1) if rank == 1 else 1):
                keeper.step()
    except CkptError as error:
        ended = f"{type(error).__name__}: {error}"
    except RuntimeError as error:  # of a collective of the training: a peer has left
        ended = f"lost: {error}"
    found = {"number": keeper.number, "ended": ended, "told": told.lines}
    if not ended:
        keeper.close()
        found |= _loaded(root, job)
    return found


def miscount_and_die(
    rank: int, world: int, *, root: str, kind: str, calls: dict[str, int], steps: int, **options: Any
) -> None:
    """Train; rank 1 calls as often as ``calls`` says. All are killed before the log that has ended is replaced."""
    job = Job(kind, **options)
    keeper = ckpt.Checkpointer(job.engine, root, full_every=100, extra={"mark": rank})
    for step in range(1, steps + 1):
        job.train(1, step - 1)
        for _ in range(calls.get(str(step), 1) if rank == 1 else 1):
            keeper.step()
    keeper.flush()
    if keeper._handle is not None:
        keeper._handle.durable.wait(60)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def warnings(rank: int, world: int, *, root: str, kind: str, steps: int, **options: Any) -> list[str]:
    """Train with a log, as one should; return what was warned of."""
    told, job = _Told(), Job(kind, **options)
    with ckpt.Checkpointer(job.engine, root, full_every=3, keep=None) as keeper:
        for step in range(steps):
            job.train(1, step)
            keeper.step()
    return told.lines


def disturb(rank: int, world: int, *, root: str, how: str, steps: int, full_every: int) -> dict[str, Any]:
    """Train; before step 4 the root is removed, or another job of rank 0 alone goes on in it."""
    told, job = _Told(), Job("ddp")
    keeper = ckpt.Checkpointer(job.engine, root, full_every=full_every)
    for step in range(1, steps + 1):
        if step == 4:
            keeper.flush()
            if keeper._handle is not None:
                keeper._handle.durable.wait(60)
            dist.barrier()
            if rank == 0 and how == "removed":
                shutil.rmtree(root)
            elif rank == 0:
                shutil.copytree(f"{root}/log/000001", f"{root}/log/000002", ignore=shutil.ignore_patterns("log.json"))
                with open(f"{root}/log/000001/log.json") as file, open(f"{root}/log/000002/log.json", "w") as out:
                    out.write(file.read().replace('"number": 1', '"number": 2'))
            dist.barrier()
        job.train(1, step - 1)
        keeper.step()
    found = {"number": keeper.number, "told": told.lines, "last_full": keeper.last_full}
    keeper.close()
    return found | _loaded(root, job)


def _loaded(root: str, job: Job) -> dict[str, Any]:
    again = Job("ddp", seed=5)
    step = ckpt.load(again.engine, root).step
    return {"loaded": step, "same": all(map(torch.equal, _weights(again), _weights(job)))}


def _weights(job: Job) -> list[torch.Tensor]:
    return [one.tensor for one in job.adapter.describe().shards if one.spec.role == "param"]


def log_and_end(rank: int, world: int, *, root: str, kind: str, steps: int, **options: Any) -> None:
    """Train with a log to its end."""
    job = Job(kind, seed=0, **options)
    with ckpt.Checkpointer(job.engine, root, full_every=1000) as keeper:
        for step in range(steps):
            job.train(1, step)
            keeper.step()


def cannot_repeat(rank: int, world: int, *, root: str, kind: str, at: int, **options: Any) -> str:
    """Load, while rank 1 cannot repeat a step; return what the load says."""
    job = Job(kind, seed=0, **options)
    step = torch.optim.Optimizer.register_step_pre_hook
    counted = iter(range(1, 1000))

    def fail(*_: Any) -> None:
        if next(counted) == at:
            raise RuntimeError("no more device memory")

    if rank == 1:
        for optimizer in {one.optimizer for one in job.adapter.stepped()}:  # type: ignore[attr-defined]
            step(optimizer, fail)
    try:
        ckpt.load(job.engine, root)
    except CkptError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"
