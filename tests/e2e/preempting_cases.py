"""Rank functions of test_preempting.py: jobs that get a signal while they train."""

from __future__ import annotations

import os
import signal
from typing import Any

import ckpt
from ckpt.store.local import LocalStore
from tests.e2e.adapter_cases import held, same
from tests.e2e.async_cases import Job
from tests.harness.gates import Gate, Gated

STEPS = 10


def preempted(
    rank: int,
    world: int,
    *,
    root: str,
    kind: str,
    told: dict[str, int],
    twice: bool = False,
    behind: int | None = None,
    warm: int = 0,
    start: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train without a break; train until a signal ends it; resume. ``told``: rank -> step in which it gets the signal.

    ``behind``: a step that an asynchronous save is made at, which is not durable before the signal. ``warm``: steps
    that the resuming engine has made before it loads.
    """
    if kind == "megatron":
        from tests.harness import megatron_models

        megatron_models.start(**(start or {}))
    whole = Job(kind, **options)
    losses = [whole.train(1, step) for step in range(STEPS)]
    job, finish, ended, done = Job(kind, **options), Gate(), None, 0
    watch = ckpt.on_preemption(job.engine, root, step=lambda: done)
    try:
        for step in range(STEPS):
            if told.get(str(rank)) == step:
                for _ in range(1 + twice):
                    os.kill(os.getpid(), signal.SIGTERM)
            if behind is not None and step > behind + 1:
                finish.open()
            job.train(1, step)
            done = step + 1
            if step == behind:
                ckpt.async_save(job.engine, Gated(LocalStore(root), finish=finish.pass_through), step=done)
    except SystemExit as error:
        ended = error.code
    watch.close()
    at = watch.saved.step if watch.saved else None
    fresh = Job(kind, seed=7, **options)
    fresh.train(warm)
    report = ckpt.load(fresh.engine, root)
    rest = [fresh.train(1, step) for step in range(report.step, STEPS)]
    return {
        "ended": ended,
        "saved": at,
        "done": done,
        "steps": ckpt.steps(root),
        "losses": rest == losses[report.step :],
        "final": same(held(whole.adapter), held(fresh.adapter)),
        "handler": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
    }
