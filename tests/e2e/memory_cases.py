"""What the ranks of the memory tests do."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

import ckpt
from ckpt.engine.deepspeed import DeepSpeedAdapter
from tests.harness.models import ds_config

LAYERS = 5
MIB = 1 << 20


class Peak:
    """Resident memory added at the highest point of a block, in MiB (``added``), from the kernel's own high-water mark.

    Free heap is handed back first: a block that reuses what an earlier one has left would look cheaper than it is.
    """

    added = -1.0

    def __enter__(self) -> Peak:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM := VmRSS
        self.before = self._status("VmRSS")
        return self

    def __exit__(self, *exc: object) -> None:
        self.added = (self._status("VmHWM") - self.before) / MIB

    @staticmethod
    def _status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def wide_engine(stage: int, width: int) -> Any:
    """Return a bf16 engine around a stack of square matrices: much state, little work."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    bucket = {"reduce_bucket_size": MIB, "allgather_bucket_size": MIB}
    if stage == 3:
        bucket |= {"stage3_prefetch_bucket_size": MIB}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    config = ds_config(stage, scheduler=False, zero=bucket)
    return deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]


def step(engine: Any, width: int) -> None:
    """One optimizer step, so that there are moments."""
    loss = engine(torch.randn(2, width, dtype=torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    engine.step()


def save_and_load(rank: int, world: int, *, root: str, stage: int, width: int) -> dict[str, float]:
    """Save, spoil the state, load; return what both added to this rank's memory, in MiB."""
    with Peak() as known:
        block = bytearray(100 * MIB)
        del block
    engine = wide_engine(stage, width)
    step(engine, width)
    with Peak() as saving:
        report = ckpt.save(engine, root)
    shards = DeepSpeedAdapter(engine).describe().shards
    sample = [shard.tensor.reshape(-1)[:1000].clone() for shard in shards]
    for shard in shards:
        shard.tensor.zero_()
    with Peak() as loading:
        ckpt.load(engine, root)
    back = (shard.tensor.reshape(-1)[:1000] for shard in DeepSpeedAdapter(engine).describe().shards)
    wrong = sum(not torch.equal(a, b) for a, b in zip(sample, back, strict=True))
    held = sum(s.tensor.numel() * s.tensor.element_size() for s in shards) / MIB
    meter = {"block of 100 MiB": known.added, "held": held, "state": 14 * LAYERS * (width + 1) * width / MIB}
    return {**meter, "save": saving.added, "load": loading.added, "wrong": wrong, "written": report.bytes_written / MIB}
