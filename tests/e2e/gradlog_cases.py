"""Rank functions of test_gradlog.py: jobs that log gradients, are killed, and come back."""

from __future__ import annotations

import os
import signal
from functools import partialmethod
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import ckpt
from ckpt.store.local_appender import LocalAppender
from tests.e2e.adapter_cases import held, same
from tests.e2e.async_cases import Job

if TYPE_CHECKING:
    from collections.abc import Callable

AFTER = 10


def _job(kind: str, seed: int, start: dict[str, Any] | None, options: dict[str, Any]) -> Job:
    if kind == "megatron":
        from megatron.core import parallel_state

        from tests.harness import megatron_models

        if not parallel_state.model_parallel_is_initialized():
            megatron_models.start(**(start or {}))
    return Parallel(seed, **options) if kind == "parallel" else Job(kind, seed=seed, **options)


class Parallel(Job):
    """An engine of DeepSpeed with tensor, pipeline or expert parallelism."""

    def __init__(self, seed: int, layout: dict[str, Any]) -> None:
        from tests.harness.parallel_engines import build

        made = build(layout, seed=seed)
        self.engine, self._train = made.saved, lambda steps, start: made.train(steps, start=start)


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
    if keeper._handle is not None:  # the test says which full save is the last
        keeper._handle.durable.wait(60)
    if keeper._peers is not None:
        _wait_for_copies(keeper, first + steps)
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_copies(keeper: ckpt.Checkpointer, step: int) -> None:
    """Wait until the copies of all ranks' records, up to that of ``step``, are where they should be."""
    peers, log = keeper._peers, keeper._log
    assert peers is not None
    assert log is not None
    with peers._changed:
        for source in peers._sources:
            while peers.keeper.memory.place(log.head.run, source, step) is None:
                assert peers._changed.wait(30), source
    dist.barrier()


def train_and_die_writing(
    rank: int,
    world: int,
    *,
    root: str,
    kind: str,
    steps: int,
    full_every: int,
    victim: int,
    share: float,
    **options: Any,
) -> None:
    """Train with a log; one rank is killed with a part of its last record written, the others at that step."""
    job = _job(kind, 0, None, options)
    keeper = ckpt.Checkpointer(job.engine, root, full_every=full_every, extra={"mark": rank})
    store = dist.distributed_c10d._get_default_store()
    if keeper._handle is not None:  # before the first full save there is nothing to come back to
        keeper._handle.durable.wait(60)
    for step in range(steps):
        if step == steps - 1 and rank == victim:
            keeper.flush()  # the record to be torn is that of the step to come
            LocalAppender.append = partialmethod(_torn, LocalAppender.append, share)  # type: ignore[assignment]
        job.train(1, step)
        if step == steps - 1 and rank == victim:  # whose death must not reach others in their last collective
            store.wait([f"done/{other}" for other in range(world) if other != rank])
        keeper.step()
    store.set(f"done/{rank}", "1")
    if rank == victim:
        keeper.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _torn(self: LocalAppender, append: Callable[[LocalAppender, Any], None], share: float, data: Any) -> None:
    """Append the first part of the data, and die."""
    whole = b"".join(map(bytes, data))
    append(self, [whole[: int(len(whole) * share)]])
    os.kill(os.getpid(), signal.SIGKILL)


def come_back_somewhere(rank: int, world: int, *, root: str, kind: str, **options: Any) -> dict[str, Any]:
    """Load whatever there is, and compare with a job that was never interrupted, there and some steps later."""
    job = _job(kind, 7, None, options)
    report = ckpt.load(job.engine, root, extra={"mark": 0})
    state, objects = held(job.adapter), repr(job.adapter.describe().objects)
    losses = job.train(AFTER, report.step)
    # Not side by side: on a CPU all FusedAdam optimizers of a process share one count of steps.
    other = Job(kind, seed=0, **options)
    other.train(report.step)
    found = {
        "step": report.step,
        "replayed": report.replayed,
        "exact": report.exact,
        "notes": list(report.notes),
        "state": same(held(other.adapter), state),
        "objects": repr(other.adapter.describe().objects) == objects,
    }
    found["losses"] = other.train(AFTER, report.step) == losses
    found["end"] = same(held(other.adapter), held(job.adapter))
    return found


def come_back(
    rank: int,
    world: int,
    *,
    root: str,
    kind: str,
    steps: int,
    start: dict[str, Any] | None = None,
    after: int = AFTER,
    tell_reads: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Load into an engine of other weights; compare with a job that was never interrupted, now and some steps later."""
    other = _job(kind, 0, start, options)
    other.train(steps)
    at_kill, objects = held(other.adapter), repr(other.adapter.describe().objects)
    expected = other.train(after, steps)
    end = held(other.adapter)
    job = _job(kind, 7, start, options)
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
    if tell_reads:
        found["reads"] = [report.log_bytes, report.log_bytes_from_memory]
    return found


def elsewhere(
    rank: int,
    world: int,
    *,
    root: str,
    kind: str,
    steps: int,
    start: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Replay in another layout; compare with a checkpoint that was saved behind the same step."""
    job = _job(kind, 7, start, options)
    report = ckpt.load(job.engine, root, extra={"mark": 0}, cast=True)
    replayed = held(job.adapter)
    ckpt.load(job.engine, f"{root}/whole", extra={"mark": 0}, cast=True)
    return {
        "step": report.step,
        "replayed": report.replayed,
        "exact": report.exact,
        "deviation": report.deviation,
        "off": [report.compared > 0, report.differing],
        "notes": list(report.notes),
        "same": same(held(job.adapter), replayed),
        "tensors": len(replayed),
    }


def train_and_save(
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
) -> dict[str, Any]:
    """Train with a log, and save the end in full elsewhere; return what was logged, in bytes."""
    job = _job(kind, 0, start, options)
    with ckpt.Checkpointer(job.engine, root, full_every=full_every, extra={"mark": 1}, **(log or {})) as keeper:
        for step in range(steps):
            job.train(1, step)
            keeper.step()
        keeper.flush()
        found = {"payload": keeper.log_payload, "written": keeper.log_written}
    ckpt.save(job.engine, f"{root}/whole", step=steps, extra={"mark": 1})
    return found
