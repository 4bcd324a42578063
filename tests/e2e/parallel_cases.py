"""Rank functions of test_deepspeed_parallel.py: model-parallel engines through ``save`` and ``load``."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckpt
from ckpt.engine.find import adapter_for
from tests.harness.parallel_engines import Engine, build, whole_state


def content(job: Engine) -> dict[str, Any]:
    """Return a hash of every tensor that this rank holds, and its plain state."""
    state = adapter_for(job.saved).describe()
    found: dict[str, Any] = {"objects": repr(state.objects)}
    for shard in state.shards:
        raw = shard.tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[f"{shard.spec} {shard.box}"] = hashlib.sha256(raw).hexdigest()
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [k for k in sorted(one.keys() | other.keys()) if one.get(k) != other.get(k)]


def continue_bitwise(rank: int, world: int, root: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Train, save and train on; load into a fresh engine of other weights and train that on."""
    first = build(layout)
    first.train(3)
    report = ckpt.save(first.saved, root, on_divergence="error")
    before = content(first)
    groups = adapter_for(first.saved).describe().groups
    losses = first.train(3, start=3)
    second = build(layout, seed=7)
    loaded = ckpt.load(second.saved, root)
    return {
        "groups": groups,
        "wrapper": type(first.engine.optimizer).__name__,
        "strays": [*loaded.missing, *loaded.unexpected, *loaded.notes],
        "state": differences(before, content(second)),
        "losses": [losses, second.train(3, start=3)],
        "final": differences(content(first), content(second)),
        "written": [report.bytes_written, report.bytes_unique],
    }


def save_with_witness(rank: int, world: int, root: str, layout: dict[str, Any]) -> list[int]:
    """Train and save; leave beside the checkpoint what DeepSpeed itself says that the model is."""
    job = build(layout)
    job.train(2)
    report = ckpt.save(job.saved, f"{root}/ckpt", on_divergence="error")
    whole = whole_state(job, layout)
    if rank == 0:
        torch.save(whole, Path(root) / "whole.pt")
    dist.barrier()
    return [report.bytes_written, report.bytes_unique]


def load_and_compare(rank: int, world: int, root: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Load into another layout and compare with the witness, by the witness' own means."""
    job = build(layout, seed=7)
    report = ckpt.load(job.saved, f"{root}/ckpt")
    expected = torch.load(Path(root) / "whole.pt")
    found = whole_state(job, layout)
    return {
        "strays": [*report.missing, *report.unexpected],
        "notes": list(report.notes),
        "names": sorted(expected.keys() ^ found.keys()),
        "differ": [k for k in sorted(expected.keys() & found.keys()) if not torch.equal(expected[k], found[k])],
        "trains": bool(torch.isfinite(torch.tensor(job.train(2, start=2))).all()),
    }
