"""What the ranks of the bytes tests do."""

from __future__ import annotations

import dataclasses
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn

import ckpt
from tests.e2e.job_cases import fingerprint
from tests.harness.models import ds_config, make_engine, param_groups, train

ROWS, COLUMNS = 30_011, 24


class HugeEmbedding(nn.Module):
    """Nearly all parameters are in one embedding, which is tied to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.embed = nn.Linear(COLUMNS, COLUMNS), nn.Embedding(ROWS, COLUMNS)
        self.head = nn.Linear(COLUMNS, ROWS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.seen += tokens.numel()
        return F.cross_entropy(self.head(self.mix(self.embed(tokens))).float().flatten(0, 1), targets.flatten())


def _engine(stage: int, model: str) -> Any:
    if model == "tiny":
        return make_engine(stage, "bf16")
    torch.manual_seed(0)
    net = HugeEmbedding()
    optimizer = torch.optim.AdamW(param_groups(net), lr=1e-2)
    return deepspeed.initialize(model=net, optimizer=optimizer, config=ds_config(stage, "bf16", scheduler=False))[0]


def _counts(engine: Any) -> dict[str, int]:
    """Return elements of the parameters and bytes of the persistent buffers, each once, from the module alone."""
    module = engine.module
    params = {id(p): getattr(p, "ds_numel", p.numel()) for p in module.parameters()}  # ds_numel: whole, under ZeRO-3
    trainable = sum(params[id(p)] for p in module.parameters() if p.requires_grad)
    persistent = module.state_dict().keys()
    buffers = sum(b.numel() * b.element_size() for n, b in module.named_buffers() if n in persistent)
    return {"params": sum(params.values()), "trainable": trainable, "buffers": buffers}


def save_once(rank: int, world: int, *, root: str, stage: int, model: str) -> dict[str, Any]:
    """Train two steps, so that no moment is zero, and save."""
    engine = _engine(stage, model)
    train(engine, 2)
    report = ckpt.save(engine, root)
    return {**dataclasses.asdict(report), "largest_writer": report.largest_writer, **_counts(engine)}


def save_twice_half_frozen(rank: int, world: int, *, root: str, stage: int) -> dict[str, Any]:
    """Freeze half of the blocks, save, train, save. Buffers change, frozen parameters don't."""
    engine = make_engine(stage, "bf16", model={"layers": 6, "frozen_blocks": 3})
    train(engine, 2)
    first = ckpt.save(engine, root)
    train(engine, 2, start=2)
    second = ckpt.save(engine, root)
    frozen = [name for name, p in engine.module.named_parameters() if not p.requires_grad]
    reports = {"first": dataclasses.asdict(first), "second": dataclasses.asdict(second)}
    return {**reports, "frozen": frozen, "state": fingerprint(engine), **_counts(engine)}


def load_half_frozen(rank: int, world: int, *, root: str, stage: int, step: int) -> dict[str, str]:
    """Load into an engine with other weights, in new processes; return the fingerprint."""
    engine = make_engine(stage, "bf16", model={"layers": 6, "frozen_blocks": 3}, seed=99)
    ckpt.load(engine, root, step=step)
    return fingerprint(engine)
