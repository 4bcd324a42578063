"""What the ranks of the fault tests do: saves that are killed, refused, or starved of disk."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

import ckpt
from ckpt.errors import CkptError
from ckpt.runtime.comm import Comm
from ckpt.runtime.packing import Packer
from ckpt.store import local, local_writer
from tests.e2e.job_cases import fingerprint
from tests.harness.models import make_engine, train
from tests.property.fake import FakeEngine, small_model, zero1

ENGINE = {"stage": 2, "dtype": "bf16"}
OPERATIONS = ("open", "mkdir", "pwritev", "fsync", "link", "rename", "unlink", "close")


class Counter:
    """Counts file operations of the store and steps of the communicator; calls ``strike`` before the ``k``-th."""

    def __init__(self, strike_at: int | None = None) -> None:
        self.count, self.strike_at, self.trace = 0, strike_at, list[str]()
        self.paused = False

    def tick(self, what: str) -> None:
        """Count one operation; SIGKILL this process if it is the one."""
        if self.paused:
            return
        self.count += 1
        self.trace.append(what)
        if self.count == self.strike_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        """Wrap the functions of ``os`` that the local store uses, and the entry of every collective step."""

        class Wrapped:
            def __getattr__(wrapped, name: str) -> Any:
                real = getattr(os, name)
                if name not in OPERATIONS:
                    return real

                def counted(*args: Any, **kwargs: Any) -> Any:
                    self.tick(name)
                    return real(*args, **kwargs)

                return counted

        local.os = local_writer.os = Wrapped()  # type: ignore[attr-defined,assignment]
        # Which rank makes a directory is a race between them: counted, it would move all points behind it.
        make = local.LocalStore._make_parent

        def make_parent(store: local.LocalStore, path: str) -> str:
            self.paused = True
            try:
                return make(store, path)
            finally:
                self.paused = False

        local.LocalStore._make_parent = make_parent  # type: ignore[method-assign]
        original = Comm._next

        def step(comm: Comm) -> str:
            self.tick("step")
            return original(comm)

        Comm._next = step  # type: ignore[method-assign]


def good_then_killed(rank: int, world: int, *, root: str, victim: int, at: int | None) -> dict[str, Any]:
    """Save step 1; train; save step 2, in which ``victim`` is killed at its operation ``at`` (None: count only)."""
    job = make_engine(**ENGINE)
    train(job, 1)
    ckpt.save(job, root, timeout=20)
    Path(root, f"print{rank}").write_text(repr(sorted(fingerprint(job).items())))
    train(job, 1, start=1)
    counter = Counter(at if rank == victim else None)
    counter.install()
    started = time.monotonic()
    try:
        ckpt.save(job, root, timeout=20)
    except CkptError as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - started}
    return {"error": None, "count": counter.count, "trace": counter.trace}


def recover(rank: int, world: int, *, roots: list[str]) -> list[dict[str, Any]]:
    """For each root: load the newest step, compare it with what was saved, and save step 2 again if it is not there."""
    job = make_engine(**{**ENGINE, "seed": 5})
    found = []
    for root in roots:
        report = ckpt.load(job, root)
        same = Path(root, f"print{rank}").read_text() == repr(sorted(fingerprint(job).items()))
        if report.step == 1:
            train(job, 1, start=1)
            ckpt.save(job, root)
        found.append({"step": report.step, "same": same, "steps": ckpt.steps(root)})
    return found


def _attempt(call: Any) -> dict[str, Any]:
    started = time.monotonic()
    try:
        call()
    except CkptError as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - started}
    return {"error": None, "text": "", "seconds": time.monotonic() - started}


def refused(rank: int, world: int, *, root: str, how: str) -> dict[str, Any]:
    """Make a save fail in the way that ``how`` names; then train on and save for real."""
    job = make_engine(**ENGINE)
    train(job, 1)
    before = fingerprint(job)
    if how == "rank 0 alone":
        result = _attempt(lambda: ckpt.save(job, root, timeout=2)) if rank == 0 else {"error": None, "text": ""}
    elif how == "another step":
        result = _attempt(lambda: ckpt.save(job, root, step=rank))
    elif how == "another root":
        result = _attempt(lambda: ckpt.save(job, f"{root}/{rank}"))
    elif how == "save against load":
        result = _attempt(lambda: ckpt.save(job, root) if rank else ckpt.load(job, root))
    elif how == "lambda in extra":
        result = _attempt(lambda: ckpt.save(job, root, extra={"hook": {"f": (lambda: None)} if rank else {}}))
    elif how == "split root":
        result = _attempt(lambda: ckpt.save(job, _private_root(root, rank), timeout=4))
    elif how == "full disk":
        result = _attempt(lambda: ckpt.save(job, Path(root, "small")))
    elif how == "read-only disk":
        result = _attempt(lambda: ckpt.save(job, Path(root, "readonly")))
    elif how == "mid-accumulation":
        result = _attempt(lambda: _save_between_micro_steps(root))
    else:
        raise AssertionError(how)
    untouched = fingerprint(job) == before
    train(job, 1, start=1)
    ckpt.save(job, Path(root, "after"))
    return {**result, "untouched": untouched, "after": ckpt.steps(Path(root, "after"))}


def _save_between_micro_steps(root: str) -> None:
    job = make_engine(**ENGINE, gas=2)
    from tests.harness.models import batch

    job.backward(job(*batch(0, 0, 0)))
    job.step()
    ckpt.save(job, root)


class _Private(local.LocalStore):
    """One URL, two directories: a node-local disk mounted under the same path on every node."""

    def __init__(self, root: str, rank: int) -> None:
        super().__init__(f"{root}/node{rank}")
        self.url = root


def _private_root(root: str, rank: int) -> _Private:
    return _Private(root, rank)


def diverge(rank: int, world: int, *, root: str, policy: str) -> dict[str, Any]:
    """Flip one bit of a replicated parameter on the last rank and save."""
    job = make_engine(stage=0, dtype="fp32")
    train(job, 1)
    if rank == world - 1:
        with torch.no_grad():
            job.module.embed.weight.view(torch.int32)[3, 5] ^= 1
    result = _attempt(lambda: ckpt.save(job, root, on_divergence=policy))
    if not result["error"]:
        fresh = make_engine(stage=0, dtype="fp32", seed=3)
        ckpt.load(fresh, root)
        result["same"] = bool(torch.equal(fresh.module.embed.weight, job.module.embed.weight))
    return result


def slow_peer(rank: int, world: int, *, root: str) -> dict[str, Any]:
    """Rank 1 writes so slowly that it needs longer than the timeout, but it makes progress."""
    job = make_engine(**ENGINE)
    train(job, 1)
    if rank == 1:
        real = Packer._write

        def slowly(self: Packer, *output: Any) -> Any:
            time.sleep(0.06)
            return real(self, *output)

        Packer._write = slowly  # type: ignore[method-assign]
    return _attempt(lambda: ckpt.save(job, root, timeout=2))


def save_two(rank: int, world: int, *, root: str) -> None:
    """Save steps 1 and 2 and note what each holds."""
    job = make_engine(**ENGINE)
    for step in (1, 2):
        train(job, 1, start=step)
        ckpt.save(job, root, extra={"note": step})
        Path(root, f"print{step}-{rank}").write_text(repr(sorted(fingerprint(job).items())))


def load_damaged(rank: int, world: int, *, root: str) -> dict[str, Any]:
    """Load a root whose newest step has a flipped bit, in all the ways that a user would."""
    job = make_engine(**{**ENGINE, "seed": 5})
    refused = _attempt(lambda: ckpt.load(job, root))
    forward = _attempt(lambda: train(job, 1))
    saved = _attempt(lambda: ckpt.save(job, Path(root, "other")))
    report = ckpt.load(job, root, fallback=True)
    same = Path(root, f"print1-{rank}").read_text() == repr(sorted(fingerprint(job).items()))
    train(job, 1)
    return {
        "refused": refused,
        "forward": forward,
        "saved": saved,
        "step": report.step,
        "skipped": report.skipped,
        "same": same,
    }


def load_refused(rank: int, world: int, *, root: str, how: str) -> dict[str, Any]:
    """Be refused a load before anything is touched, and train on as if nothing had been asked."""
    job = make_engine(**{**ENGINE, "seed": 5, **({"model": {"layers": 3}} if how == "another model" else {})})
    if how != "fresh engine":
        train(job, 1)
    before = fingerprint(job)
    calls: dict[str, Any] = {
        "another model": lambda: ckpt.load(job, root),
        "missing extra": lambda: ckpt.load(job, root, extra={"loader": job.lr_scheduler}),
        "fresh engine": lambda: ckpt.load(job, root, extra={"nobody": 1}),
        "no such step": lambda: ckpt.load(job, root, step=77),
        "empty root": lambda: ckpt.load(job, f"{root}/nothing"),
    }
    result = _attempt(calls[how])
    untouched = fingerprint(job) == before
    return {**result, "untouched": untouched, "trains": len(train(job, 2)) == 2}


def tcp_store(rank: int, world: int, *, root: str, port: int, kill: bool) -> dict[str, Any]:
    """Save with rank 0 as the host of the rendezvous store, as ``env://`` has it; ``kill`` rank 0 in the middle.

    Otherwise rank 0 ends the moment its save returns, and the store with it.
    """
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    model = small_model()
    job = FakeEngine(model, zero1(model, world), rank, filled=True)
    if rank == 0 and kill:
        Counter(40).install()
    result = _attempt(lambda: ckpt.save(job, root, timeout=20))
    if rank == 0:
        os._exit(7)
    return result


def other_layout(rank: int, world: int, *, root: str) -> dict[str, Any]:
    """Save with two buffers of another shape and another dtype on rank 1."""
    job = make_engine(**ENGINE)
    if rank == 1:
        job.module.running = torch.zeros(4, 24)
        job.module.tokens_seen = job.module.tokens_seen.float()
    return _attempt(lambda: ckpt.save(job, root))
