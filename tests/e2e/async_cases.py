"""Rank functions of test_async.py: real engines that train on while they are being saved."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ckpt
from ckpt.engine.find import adapter_for
from ckpt.errors import CkptError, StoreFull
from ckpt.runtime import behind
from ckpt.store.local import LocalStore
from tests.e2e.adapter_cases import held, same
from tests.e2e.torch_cases import digests
from tests.harness.gates import Gate, Gated, staging_behind

if TYPE_CHECKING:
    from collections.abc import Callable

BEFORE, AFTER = 3, 3


class Job:
    """An engine of any kind: what to save, and how to train it."""

    def __init__(self, kind: str, seed: int = 0, **options: Any) -> None:
        if kind == "deepspeed":
            from tests.harness import models

            engine = models.make_engine(**options, seed=seed)
            self.engine, self._train = engine, lambda steps, start: models.train(engine, steps, start)
        elif kind == "megatron":
            from tests.harness import megatron_models

            made = megatron_models.make_engine(seed, **options)
            self.engine, self._train = made, lambda steps, start: megatron_models.train(made, steps, start)
        else:
            from tests.harness.torch_jobs import make_job

            job = make_job(kind, seed, **options)
            self.engine, self._train = job.engine, job.train

    @property
    def adapter(self) -> Any:
        return adapter_for(self.engine)

    def train(self, steps: int, start: int = 0) -> Any:
        """Run optimizer steps; return losses that depend on the state and the step numbers alone."""
        return self._train(steps, start)


def overtaken(
    rank: int, world: int, *, root: str, kind: str, start: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Save behind the training, which goes on at once; load that step into an engine of other weights, and go on.

    Nothing can be staged before the next optimizer step is asked for, and nothing is durable before all steps are done.
    """
    if kind == "megatron":
        from tests.harness import megatron_models

        megatron_models.start(**(start or {}))
    stage, finish = Gate(), Gate()
    first = Job(kind, **options)
    first.train(BEFORE)
    captured, objects = held(first.adapter), repr(first.adapter.describe().objects)
    front = ckpt.save(first.engine, f"{root}/front", step=BEFORE)
    asked: list[bool] = []

    def opens(*_: Any) -> None:  # in front of ours
        asked.append(handle.staged.done())
        stage.open()

    register_optimizer_step_pre_hook(opens)
    with staging_behind(stage):
        store = Gated(LocalStore(f"{root}/behind"), finish=finish.pass_through)
        handle = ckpt.async_save(first.engine, store, step=BEFORE)
        losses = first.train(1, BEFORE)
        staged = handle.staged.done()
        losses += first.train(AFTER - 1, BEFORE + 1)
        durable = handle.durable.done()
        finish.open()
        report = handle.durable.wait(60)
    final = held(first.adapter)
    second = Job(kind, seed=7, **options)
    loaded = ckpt.load(second.engine, f"{root}/behind", step=BEFORE)
    found = {
        "asked too early": asked[:1],
        "staged": staged,
        "durable": durable,
        "state": same(captured, held(second.adapter)),
        "objects": repr(second.adapter.describe().objects) == objects,
        "strays": [*loaded.missing, *loaded.unexpected, *loaded.casts, *loaded.notes],
        "as the front": report.divergences == front.divergences
        and all(
            getattr(report, name) == getattr(front, name)
            for name in ("bytes_held", "bytes_unique", "bytes_derived", "bytes_written", "written_by_rank")
        ),
    }
    found["losses"] = second.train(AFTER, BEFORE) == losses
    found["final"] = same(final, held(second.adapter))
    return found


def load_both(rank: int, world: int, *, root: str, kind: str, **options: Any) -> dict[str, Any]:
    """Load what was saved behind the training and in the foreground into another layout; are they the same?"""
    if kind == "megatron":
        from tests.harness import megatron_models

        megatron_models.start()
    job, found = Job(kind, seed=7, **options), {}
    for name in ("behind", "front"):
        report = ckpt.load(job.engine, f"{root}/{name}", cast=True)
        found[name] = [digests(job.adapter), repr(job.adapter.describe().objects), list(report.missing)]
    return {"same": found["behind"] == found["front"], "tensors": len(found["front"][0])}


# ------------------------------------------------------------------------------------------------------------ leaks


class Remembering(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler of a user's own that keeps its state in lists and arrays and changes them in place."""

    def __init__(self, optimizer: Any) -> None:
        self.rates, self.table = [[0.5]], np.zeros(4)
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        self.rates[0].append(self.rates[0][-1] * 0.9)
        self.table += 1
        return [self.rates[0][-1] * 0.01 for _ in self.optimizer.param_groups]


def leaks(rank: int, world: int, *, root: str) -> dict[str, Any]:
    """BatchNorm, step counters, a scheduler's lists, two optimizers, generators: all move on before staging begins."""

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        net = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)
        )
        critic = torch.nn.Linear(2, 1)
        optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01), torch.optim.RMSprop(critic.parameters(), lr=0.01)]
        models = [torch.nn.parallel.DistributedDataParallel(one) for one in (net, critic)]
        return models, optimizers, [Remembering(one) for one in optimizers]

    def train(job: Any, steps: int) -> list[float]:
        (net, critic), optimizers, schedulers = job
        losses = []
        for _ in range(steps):
            for one in optimizers:
                one.zero_grad()
            loss = critic(net(torch.randn(4, 6) + rank)).square().mean()
            loss.backward()
            for one in (*reversed(optimizers), *schedulers):
                one.step()
            losses += [loss.item(), random.random(), float(np.random.rand())]
        return losses

    def parts(job: Any) -> Any:
        (net, critic), optimizers, schedulers = job
        return (torch.nn.ModuleDict({"net": net, "critic": critic}), *optimizers, *schedulers)

    job = make(0)
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    train(job, 2)
    stage = Gate()
    register_optimizer_step_pre_hook(lambda *_: stage.open())
    with staging_behind(stage):
        handle = ckpt.async_save(parts(job), root, step=2)
        losses = train(job, 3)
        handle.durable.wait(60)
    fresh = make(5)
    ckpt.load(parts(fresh), root)
    at = [len(fresh[2][0].rates[0]), fresh[2][0].table.tolist(), int(fresh[0][0].module[1].num_batches_tracked)]
    return {"losses": train(fresh, 3) == losses, "at": at}


# ---------------------------------------------------------------------------------------------------------- failures


def fails(rank: int, world: int, *, root: str, how: str) -> dict[str, Any]:
    """Make an asynchronous save fail on the last rank; train on with collectives; save again."""
    job, bad = Job("deepspeed", stage=2), rank == world - 1
    job.train(1)
    ckpt.async_save(job.engine, root, step=1).durable.wait(60)
    job.train(1, 1)

    def strike() -> None:
        if how == "full" and bad:
            raise StoreFull("no space left on the device", "k")
        if how == "killed" and bad:
            os.kill(os.getpid(), signal.SIGKILL)

    handle, stage = None, Gate(opened=how != "written")
    with staging_behind(stage):
        if not (how == "absent" and bad):
            handle = ckpt.async_save(job.engine, Gated(LocalStore(root), finish=strike), step=2, timeout=3)
        if how == "written" and bad:
            with torch.no_grad():
                next(iter(job.engine.module.parameters())).mul_(1)
        stage.open()
        if how == "written":
            handle.durable.settled(60)
    if how == "killed":
        return {"error": _told(handle)}
    losses = job.train(3, 2)
    told = _told(handle) if handle is not None else None
    # Those that have asked the handle know; a rank that has no handle is told now, and with it all are.
    second = None
    try:
        ckpt.async_save(job.engine, root, step=5).durable.wait(60)
    except CkptError as error:
        second = str(error)
        ckpt.async_save(job.engine, root, step=5).durable.wait(60)
    return {"error": told, "second": second, "losses": losses, "steps": ckpt.steps(root)}


def first_call(rank: int, world: int, *, root: str) -> dict[str, Any]:
    """The first asynchronous save of a job, for which one rank calls something else; then all call it."""
    job, error = Job("ddp"), ""
    job.train(1)
    try:
        (ckpt.save if rank == 1 else ckpt.async_save)(job.engine, root, step=1)
    except CkptError as found:
        error = f"{type(found).__name__}: {found}"
    job.train(1, 1)
    ckpt.async_save(job.engine, root, step=2)
    job.train(1, 2)
    ckpt.save(job.engine, root, step=3)
    return {"error": error, "steps": ckpt.steps(root)}


def _told(handle: Any) -> list[str]:
    assert handle is not None
    error = handle.durable.exception(60)
    return [type(error).__name__, str(error)]


# ------------------------------------------------------------------------------------------- what it uses and leaves


def many(rank: int, world: int, *, root: str, kind: str, saves: int, **options: Any) -> dict[str, Any]:
    """Save behind every step; count what is left over, the groups that were made, and who used which."""
    job = Job(kind, **options)
    made: list[str] = []
    wrong: list[str] = []
    used: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "new_group":
                made.append(threading.current_thread().name)
            elif threading.current_thread() is not threading.main_thread():
                used[name] += 1
                if kwargs.get("group") in (None, dist.group.WORLD):
                    wrong.append(f"{name} in {threading.current_thread().name}")
            return real(*args, **kwargs)

        return call

    names = (
        "new_group",
        "all_gather_into_tensor",
        "all_to_all_single",
        "broadcast",
        "all_reduce",
        "barrier",
        "isend",
        "irecv",
    )
    counts = []
    with mock.patch.multiple(dist, **{name: counted(name) for name in names}):
        for step in range(saves):
            job.train(1, step)
            ckpt.async_save(job.engine, root, step=step + 1)
            if step in (4, saves - 1):
                behind.wait_for_last()
                _join()
                gc.collect()
                counts.append(_left_over())
    return {"counts": counts, "groups": made, "wrong": wrong, "used": dict(used), "steps": ckpt.steps(root)}


def _join() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("ckpt save"):
            thread.join(60)


def _left_over() -> dict[str, int]:
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "tensors": sum(isinstance(one, torch.Tensor) for one in gc.get_objects()),
        "maps": sum("ckpt" in line for line in Path("/proc/self/maps").read_text().splitlines()),
    }
