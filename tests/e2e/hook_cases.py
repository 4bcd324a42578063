"""Rank functions of test_gradlog_hook.py: loops that never call the checkpointer, are killed, and come back."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

import ckpt
from tests.e2e import gradlog_cases
from tests.e2e.adapter_cases import held, same
from tests.e2e.async_cases import Job
from tests.harness.torch_models import batch, loss_of

OVERFLOWS = 4
"""Every so many steps one has a gradient that is infinite."""


class Cursor:
    """A data loader's place: the loop takes a batch in front of each step."""

    def __init__(self) -> None:
        self.taken = 0

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


class Scaled(Job):
    """A torch loop with a gradient scaler that leaves steps out, with a scheduler or without."""

    def __init__(self, layout: str, seed: int, *, scheduler: bool, update_last: bool = False) -> None:
        super().__init__(layout, seed)
        self.model, self.optimizer, self.scheduler = self.engine
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        self.stepping = [self.scaler.update, *([self.scheduler.step] if scheduler else [])]
        if update_last:
            self.stepping.reverse()
        self.engine = (self.model, self.optimizer, self.scaler, *([self.scheduler] if scheduler else []))
        self._train = self._run

    def _run(self, steps: int, start: int) -> list[float]:
        losses = []
        for step in range(start, start + steps):
            tokens, targets = batch(step, torch.distributed.get_rank())
            self.optimizer.zero_grad()
            loss = loss_of(self.model(tokens), targets)
            self.scaler.scale(loss).backward()
            if step % OVERFLOWS == 1:
                next(self.model.parameters()).grad.fill_(float("inf"))
            self.scaler.step(self.optimizer)
            for name in self.stepping:
                getattr(name.__self__, name.__name__)()  # looked up anew, as a loop does
            losses.append(loss.item())
        return losses


def _job(kind: str, seed: int, options: dict[str, Any]) -> Job:
    return Scaled(seed=seed, **options) if kind == "scaled" else gradlog_cases._job(kind, seed, None, options)


def train_and_die(rank: int, world: int, *, root: str, kind: str, steps: int, full_every: int, **options: Any) -> None:
    """Train; nothing in the loop speaks of checkpoints. Be killed right behind the last step."""
    job, cursor = _job(kind, 0, options), Cursor()
    extra = {"mark": rank, "loader": cursor}
    keeper = ckpt.Checkpointer(job.engine, root, full_every=full_every, extra=extra, hook=True)
    for step in range(steps):
        cursor.taken += 1
        job.train(1, step)
    keeper.flush()
    if keeper._handle is not None:  # the test says which full save is the last
        keeper._handle.durable.wait(60)
    os.kill(os.getpid(), signal.SIGKILL)


def come_back(rank: int, world: int, *, root: str, kind: str, steps: int, **options: Any) -> dict[str, Any]:
    """Resume with a hook; compare with a job that was never interrupted, at once and some steps later."""
    after = gradlog_cases.AFTER
    other = _job(kind, 0, options)
    other.train(steps)
    at_kill, objects = held(other.adapter), repr(other.adapter.describe().objects)
    expected = other.train(after, steps)
    end, rates = held(other.adapter), repr(other.adapter.describe().objects)
    job, cursor = _job(kind, 7, options), Cursor()
    keeper = ckpt.Checkpointer(job.engine, root, full_every=100, extra={"mark": 0, "loader": cursor}, hook=True)
    report = keeper.resumed
    assert report is not None
    found = {
        "step": report.step,
        "exact": report.exact,
        "notes": list(report.notes),
        "cursor": cursor.taken,
        "state": same(at_kill, held(job.adapter)),
        "objects": repr(job.adapter.describe().objects) == objects,
    }
    found["losses"] = job.train(after, steps) == expected
    found["counted"] = keeper.number
    found["broken"] = keeper._log.broken if keeper._log is not None else "no log"
    keeper.close()
    if isinstance(job, Scaled):
        taken = {int(one["step"]) for one in job.optimizer.state.values()}
        assert 0 < min(taken) <= max(taken) < steps + after, taken  # some steps were skipped
    found["end"] = same(end, held(job.adapter)), repr(job.adapter.describe().objects) == rates
    return found
