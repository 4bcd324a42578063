"""Rank functions of test_gradlog.py: jobs that log gradients, are killed, and come back."""

from __future__ import annotations

import os
import signal
from typing import Any

import ckpt
from tests.e2e.adapter_cases import held, same
from tests.e2e.async_cases import Job

AFTER = 10


def _job(kind: str, seed: int, start: dict[str, Any] | None, options: dict[str, Any]) -> Job:
    if kind == "megatron":
        from tests.harness import megatron_models

        megatron_models.start(**(start or {}))
    return Job(kind, seed=seed, **options)


def train_and_die(
    rank: int,
    world: int,
    *,
    root: str,
    kind: str,
    steps: int,
    full_every: int,
    start: dict[str, Any] | None = None,
    log: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Train with a log, and be killed right behind the last step."""
    job = _job(kind, 0, start, options)
    keeper = ckpt.Checkpointer(job.engine, root, full_every=full_every, extra={"mark": rank}, **(log or {}))
    first = job.adapter.step()
    for step in range(first, first + steps):
        job.train(1, step)
        keeper.step()
    keeper.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def come_back(
    rank: int,
    world: int,
    *,
    root: str,
    kind: str,
    steps: int,
    start: dict[str, Any] | None = None,
    after: int = AFTER,
    **options: Any,
) -> dict[str, Any]:
    """Load into an engine of other weights; compare with a job that was never interrupted, now and some steps later."""
    other = _job(kind, 0, start, options)
    other.train(steps)
    at_kill, objects = held(other.adapter), repr(other.adapter.describe().objects)
    expected = other.train(after, steps)
    end = held(other.adapter)
    job = Job(kind, seed=7, **options)
    report = ckpt.load(job.engine, root, extra={"mark": 0})
    found = {
        "step": report.step,
        "replayed": report.replayed,
        "exact": report.exact,
        "notes": list(report.notes),
        "mark": report.extra["mark"],
        "state": same(at_kill, held(job.adapter)),
        "objects": repr(job.adapter.describe().objects) == objects,
    }
    found["losses"] = job.train(after, steps) == expected
    found["end"] = same(end, held(job.adapter))
    return found
