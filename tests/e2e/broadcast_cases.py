"""Rank functions of test_broadcast.py."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import ckpt
from ckpt.engine.find import adapter_for
from ckpt.errors import CkptError, StoreError
from ckpt.runtime import reading_mode
from ckpt.store.local import LocalStore
from ckpt.store.metered import Metered
from tests.e2e.adapter_cases import held, same
from tests.e2e.memory_cases import MIB, Peak
from tests.e2e.torch_cases import digests
from tests.harness.torch_jobs import make_job

if TYPE_CHECKING:
    from collections.abc import Sequence


def save(rank: int, world: int, *, root: str, layout: str, steps: Sequence[int] = (3,)) -> dict[str, Any]:
    """Train and save; return what the job's tensors are at each of ``steps``."""
    job = make_job(layout)
    done, found = 0, {}
    for step in steps:
        job.train(step - done, start=done)
        done = step
        ckpt.save(job.engine, root, step=step)
        found[str(step)] = digests(adapter_for(job.engine))
    return found


def load(
    rank: int, world: int, *, root: str, layout: str, reads: Sequence[str], hosts: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Load into a job of other weights, in several ways."""
    found = []
    if hosts:
        os.environ["CKPT_HOST"] = hosts[rank]
        reading_mode.file_system_of = lambda path: "xfs"  # wherever the tests' folder is
    for read in reads:
        job = make_job(layout, seed=7)
        store = Metered(LocalStore(root))
        report = ckpt.load(job.engine, store, read=read)
        found.append(
            {
                "digests": digests(adapter_for(job.engine)),
                "read": report.read,
                "chunks": report.bytes_read,
                "from store": report.bytes_from_store,
                "by rank": report.read_by_rank,
                "received": report.bytes_received,
                "metered": store.bytes_read,
                "strays": [*report.missing, *report.unexpected, *report.casts],
            }
        )
    return found


def resume(rank: int, world: int, *, root: str, layout: str) -> dict[str, Any]:
    """Save, train on; load what was saved into another job by ``once`` and train on from there."""
    first = make_job(layout)
    first.train(3)
    captured = held(adapter_for(first.engine))
    ckpt.save(first.engine, root, step=3)
    losses = first.train(3, start=3)
    second = make_job(layout, seed=7)
    ckpt.load(second.engine, root, read="once")
    state = same(captured, held(adapter_for(second.engine)))
    return {"state": state, "losses": [losses, second.train(3, start=3)]}


class Failing(LocalStore):
    """A local store that does something else than read a pack, on its ``at``-th read."""

    def __init__(self, root: str, how: str, at: int = 1) -> None:
        super().__init__(root)
        self.how, self.left = how, at

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """See :class:`~ckpt.store.base.Store`."""
        self.left -= 1
        if self.left == 0 and self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.left <= 0 and self.how == "refuse":
            raise StoreError(f"read {key!r}: the sector cannot be read", key)
        got = super().read_into(key, start, buffer)
        if self.left == 0 and self.how == "flip":
            buffer[len(buffer) // 2] ^= 1
        return got


def load_in_vain(
    rank: int,
    world: int,
    *,
    root: str,
    layout: str,
    victim: int = -1,
    how: str = "",
    fallback: bool = False,
    read: str = "once",
    timeout: float = 300.0,
) -> dict[str, Any]:
    """Load a step that cannot be read, or that ``victim`` cannot read; then load it as it should be.

    Whoever waited for the timeout would exceed the time limit of the case.
    """
    job = make_job(layout, seed=7)
    store = Failing(root, how) if rank == victim else LocalStore(root)
    result: dict[str, Any] = {"error": None, "text": ""}
    try:
        report = ckpt.load(job.engine, store, read=read, fallback=fallback, timeout=timeout)
        result |= {"step": report.step, "skipped": report.skipped}
    except CkptError as error:
        result |= {"error": type(error).__name__, "text": str(error)}
    if how == "kill":
        return result
    try:
        job.train(1)
    except ckpt.ConfigError as error:
        result["forward"] = str(error)
    if not fallback:
        healthy = ckpt.load(job.engine, root, read=read, fallback=True)
        result |= {"after": healthy.step}
    result["digests"] = digests(adapter_for(job.engine)) if not fallback else None
    return result


def memory(rank: int, world: int, *, root: str, budgets: Sequence[int]) -> dict[str, float]:
    """Return what a load with each budget adds to this rank's memory, in MiB, and how large its state is."""
    width, layers = 1024, 32
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    ckpt.save((model, optimizer), root, step=1)
    state = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    before = [float(t.double().sum()) for t in state]
    found = {"state": sum(t.nbytes for t in state) / MIB}
    for budget in budgets:
        with torch.no_grad():
            for tensor in state:
                tensor.zero_()
        with Peak() as peak:
            ckpt.load((model, optimizer), root, read="once", budget=budget)
        found[str(budget)] = peak.added
        found["wrong"] = found.get("wrong", 0) + sum(
            float(t.double().sum()) != b for t, b in zip(state, before, strict=True)
        )
    return found
