"""Rank functions of test_torch_adapter.py."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import ckpt
from ckpt.engine.find import adapter_for
from ckpt.layout.spec import MASTER, PARAM
from tests.e2e.adapter_cases import collect, held, pointers, same
from tests.harness.torch_jobs import make_job

if TYPE_CHECKING:
    from ckpt.engine.base import EngineAdapter


def digests(adapter: EngineAdapter) -> dict[str, str]:
    """Return a hash of every tensor in full, master and fp32 param being one thing."""
    whole: Any = collect(adapter)  # type: ignore[arg-type]
    found = {}
    for (fqn, role), tensor in whole.items():
        if role == PARAM and (fqn, MASTER) in whole:
            continue
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[f"{fqn} {PARAM if role == MASTER else role}"] = hashlib.sha256(raw).hexdigest()
    return found


def resume(rank: int, world: int, *, root: str, layout: str, warm: int = 0, **options: Any) -> Any:
    """Train, save, train on; load into an engine of other weights (``warm`` steps old) and train on from there."""
    before, after = 3, 3
    first = make_job(layout, **options)
    first.train(before)
    captured = held(adapter_for(first.engine))  # type: ignore[arg-type]
    report = ckpt.save(first.engine, root, step=before)
    losses = first.train(after, start=before)
    final = held(adapter_for(first.engine))  # type: ignore[arg-type]
    second = make_job(layout, seed=7, **options)
    second.train(warm)
    adapter: Any = adapter_for(second.engine)
    here = pointers(adapter)
    loaded = ckpt.load(second.engine, root)
    there = pointers(adapter)
    state = same(captured, held(adapter))
    lr = [group["lr"] for group in second.optimizer.param_groups]
    objects = adapter_for(first.engine).describe().objects
    return {
        "step": adapter_for(second.engine).step(),
        "lr": lr,
        "moved": [str(k) for k in here if there.get(k, here[k]) != here[k]],
        "state": state,
        "strays": [*loaded.missing, *loaded.unexpected, *loaded.casts, *loaded.notes],
        "losses": [second.train(after, start=before), losses],
        "final": same(final, held(adapter)),
        "objects": objects == adapter.describe().objects,
        "unique": report.bytes_unique,
        "written": report.bytes_written,
        "divergences": list(report.divergences),
        "nbytes": sum(t.numel() * t.element_size() for t in collect(adapter).values()),
    }


def save_from(rank: int, world: int, *, root: str, layout: str, steps: int = 2, **options: Any) -> Any:
    """Train and save; return the whole state's hashes."""
    job = make_job(layout, **options)
    job.train(steps)
    report = ckpt.save(job.engine, root, step=steps)
    return {
        "state": digests(adapter_for(job.engine)),
        "written": report.bytes_written,
        "unique": report.bytes_unique,
    }


def load_all(rank: int, world: int, *, roots: dict[str, str], layout: str, cast: bool = False, **options: Any) -> Any:
    """Load checkpoint after checkpoint into one engine; return the whole state's hashes behind each."""
    job = make_job(layout, seed=7, **options)
    found = {}
    for name, root in roots.items():
        report = ckpt.load(job.engine, root, cast=cast)
        found[name] = {
            "state": digests(adapter_for(job.engine)),
            "strays": [*report.missing, *report.unexpected, *report.casts],
        }
    job.train(1)
    dist.barrier()
    return found
