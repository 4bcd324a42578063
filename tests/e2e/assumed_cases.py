"""Rank functions of test_assumed.py: a slice that nobody has marked as one."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ckpt
from ckpt.runtime.torch_comm import communicator
from tests.e2e.adapter_fault_cases import error_of


class Halves(nn.Module):
    """``known`` says along which dimension it is cut, ``unknown`` is cut and does not say so, ``whole`` is whole."""

    def __init__(self, rank: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        whole = torch.randn(3, 8, 4)
        self.known = nn.Parameter(whole[0].chunk(2)[rank].clone())
        self.unknown = nn.Parameter(whole[1].chunk(2)[rank].clone())
        self.whole = nn.Parameter(whole[2].clone())
        self.known.tensor_model_parallel, self.known.partition_dim = True, 0  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.known).sum() + (x * self.unknown).square().sum() + self.whole.square().sum()


def job(rank: int, seed: int) -> tuple[Any, Halves, torch.optim.Optimizer]:
    model = Halves(rank, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return ckpt.Parallel((model, optimizer), groups={"tp": [0, 1]}), model, optimizer


def content(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[float]]:
    return [
        t.flatten().tolist()
        for p in model.parameters()
        for t in (p.detach(), optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"])
    ]


def unmarked_slice(rank: int, world: int, root: str) -> dict[str, Any]:
    engine, model, optimizer = job(rank, 0)
    model(torch.arange(16.0).view(4, 4)).backward()
    optimizer.step()
    strict = error_of(lambda: ckpt.save(engine, root, step=1, on_divergence="error"))
    report = ckpt.save(engine, root, step=1)
    fresh, other_model, other = job(rank, 7)
    ckpt.load(fresh, root)
    return {
        "strict": strict,
        "divergences": list(report.divergences),
        "same": content(other_model, other) == content(model, optimizer),
    }


def slice_with_a_rule_too_short(rank: int, world: int, root: str) -> dict[str, Any]:
    """The user's rules call whole what is cut."""
    rules = {"tensors": [{"match": "known", "dim": 0}, {"match": "unknown|whole"}]}
    made = []
    for seed in (0, 7):
        engine, model, optimizer = job(rank, seed)
        made.append((ckpt.Parallel(engine.engine, rules=rules, groups={"tp": [0, 1]}), model, optimizer))
    (engine, model, optimizer), (fresh, other_model, other) = made
    model(torch.arange(16.0).view(4, 4)).backward()
    optimizer.step()
    ckpt.save(engine, root, step=1)
    ckpt.load(fresh, root)
    return {"same": content(other_model, other) == content(model, optimizer)}


def groups_after_the_end(rank: int, world: int, root: str) -> list[bool]:
    """Whether the default group, and any other, is still there when the user has destroyed them."""
    engine, _, _ = job(rank, 0)
    ckpt.save(engine, root, step=1)
    ours = weakref.ref(communicator()._group)  # type: ignore[attr-defined]
    world_group = weakref.ref(dist.group.WORLD)
    store = weakref.ref(communicator())
    alive = [one() is not None for one in (ours, world_group, store)]
    dist.destroy_process_group()
    gc.collect()
    return alive + [one() is None for one in (ours, world_group, store)]
