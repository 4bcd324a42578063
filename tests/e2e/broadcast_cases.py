"""Rank functions of test_broadcast.py."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import ckpt
from ckpt.engine.find import adapter_for
from ckpt.errors import CkptError, StoreError
from ckpt.store.local import LocalStore
from ckpt.store.metered import Metered
from tests.e2e.adapter_cases import held, same
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


def load(rank: int, world: int, *, root: str, layout: str, reads: Sequence[str]) -> list[dict[str, Any]]:
    """Load into a job of other weights, in several ways."""
    found = []
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
    timeout: float = 20.0,
) -> dict[str, Any]:
    """Load a step that cannot be read, or that ``victim`` cannot read; then load it as it should be."""
    job = make_job(layout, seed=7)
    store = Failing(root, how) if rank == victim else LocalStore(root)
    began = time.monotonic()
    result: dict[str, Any] = {"error": None, "text": ""}
    try:
        report = ckpt.load(job.engine, store, read=read, fallback=fallback, timeout=timeout)
        result |= {"step": report.step, "skipped": report.skipped}
    except CkptError as error:
        result |= {"error": type(error).__name__, "text": str(error)}
    result["seconds"] = time.monotonic() - began
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
