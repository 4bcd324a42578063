"""A tiny GPT with every inconvenience that real models have, and DeepSpeed engines around it.

Awkward on purpose: odd sizes, a tied pair that is not the first parameter, an int buffer that forward changes, a float
buffer, a buffer that is not persistent; on request frozen blocks, dropout, and parameters of one element.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, WIDTH, CONTEXT = 61, 24, 12


class Block(nn.Module):
    """Attention and MLP; the MLP is one wider than it should be, for odd sizes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        heads = [
            t.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).split(width, dim=2)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """``positions`` comes before the tied pair ``embed.weight`` / ``head.weight``. About 14,000 parameters."""

    def __init__(
        self,
        layers: int = 2,
        *,
        dropout: float = 0.0,
        frozen_blocks: int = 0,
        tiny: int = 0,
    ) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.1)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(WIDTH, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.tiny = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(tiny))
        self.register_buffer("tokens_seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("running", torch.zeros(3, WIDTH))
        self.register_buffer("scratch", torch.zeros(5), persistent=False)
        for block in list(self.blocks)[:frozen_blocks]:
            block.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(tokens) + self.positions[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        for factor in self.tiny:
            x = x * factor
        if self.training:
            self.tokens_seen += tokens.numel()
            self.running.lerp_(x.detach().mean(dim=(0, 1)).to(self.running.dtype).expand(3, WIDTH), 0.25)
            self.scratch += 1
        return F.cross_entropy(0.2 * self.head(x).float().flatten(0, 1), targets.flatten())


def batch(step: int, micro: int, rank: int, size: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets ``(size, CONTEXT)`` that depend on nothing but the arguments."""
    generator = torch.Generator().manual_seed(100_000 * step + 1000 * micro + rank)
    tokens = torch.randint(0, VOCAB, (size, CONTEXT + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def param_groups(model: nn.Module, groups: int = 2) -> list[dict[str, Any]]:
    """Return the trainable parameters as one group, or as matrices with and the rest without weight decay."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    if groups == 1:
        return [{"params": trainable}]
    shape = [len(getattr(p, "ds_shape", p.shape)) for p in trainable]  # under zero.Init the shape itself is (0,)
    return [
        {"params": [p for p, n in zip(trainable, shape, strict=True) if n > 1], "weight_decay": 0.1},
        {"params": [p for p, n in zip(trainable, shape, strict=True) if n <= 1], "weight_decay": 0.0},
    ]


def make_optimizer(name: str, groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """Return the optimizer called ``name``; FusedAdam and DeepSpeedCPUAdam need their operator compiled."""
    if name == "FusedAdam":
        from deepspeed.ops.adam import FusedAdam

        return FusedAdam(groups, lr=1e-2, betas=(0.9, 0.95), **options)
    if name == "DeepSpeedCPUAdam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, lr=1e-2, betas=(0.9, 0.95), **options)
    if name == "Lion":
        return Lion(groups, lr=1e-3, **options)
    defaults: dict[str, Any] = {
        "AdamW": {"lr": 1e-2, "betas": (0.9, 0.95)},
        "SGD": {"lr": 1e-1, "momentum": 0.9},
        "Adagrad": {"lr": 1e-2},
    }[name]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(groups, **{**defaults, **options})
    return optimizer


class Lion(torch.optim.Optimizer):
    """An optimizer that nobody has special-cased: one moment, and a count kept as a Python float."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["lion_avg"], state["updates"] = torch.zeros_like(p), 0.0
                state["updates"] += 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(state["lion_avg"].lerp(p.grad, 0.1).sign(), alpha=-group["lr"])
                state["lion_avg"].lerp_(p.grad, 1 - group["beta"])


def ds_config(
    stage: int,
    dtype: str = "bf16",
    *,
    gas: int = 1,
    clip: float = 1.0,
    offload: bool = False,
    offload_param: bool = False,
    scheduler: bool = True,
    grad_accum_dtype: str | None = None,
    zero: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a DeepSpeed config with buckets of a sane size (the defaults really allocate 5e8 elements)."""
    world = int(os.environ["WORLD_SIZE"])
    zero_section: dict[str, Any] = {
        "stage": stage, "reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000,
    }  # fmt: skip
    if stage == 3:
        zero_section |= {"stage3_param_persistence_threshold": 200, "stage3_prefetch_bucket_size": 10_000}
    if offload:
        zero_section["offload_optimizer"] = {"device": "cpu"}
    if offload_param:
        zero_section["offload_param"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": gas,
        "train_batch_size": 2 * gas * world,
        "gradient_clipping": clip,
        "steps_per_print": None,
        "zero_optimization": zero_section | (zero or {}),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 3, "hysteresis": 2}
    if grad_accum_dtype:
        config["data_types"] = {"grad_accum_dtype": grad_accum_dtype}
    if scheduler:
        config["scheduler"] = {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": 100, "warmup_num_steps": 5, "warmup_min_lr": 1e-4, "warmup_max_lr": 1e-2,
            },
        }  # fmt: skip
    return config | (extra or {})


def make_engine(
    stage: int,
    dtype: str = "bf16",
    *,
    optimizer: str = "AdamW",
    optimizer_options: dict[str, Any] | None = None,
    groups: int = 2,
    zero_init: bool = False,
    seed: int = 0,
    model: dict[str, Any] | None = None,
    **config: Any,
) -> Any:
    """Return a ``DeepSpeedEngine`` around a :class:`TinyGPT` on this rank. A collective.

    ``dtype`` is ``fp32``, ``bf16`` or ``fp16``; ``model`` holds arguments of TinyGPT; ``config`` those of
    :func:`ds_config`. Different seeds give different weights, equal on all ranks.
    """
    import deepspeed

    settings = ds_config(stage, dtype, **config)
    torch.manual_seed(seed)
    if zero_init:
        deepspeed.init_distributed("gloo")  # else zero.Init checks the batch size against a world of one
        with deepspeed.zero.Init(config_dict_or_path=settings):
            net = TinyGPT(**(model or {}))
    else:
        net = TinyGPT(**(model or {}))
    inner = make_optimizer(optimizer, param_groups(net, groups), **(optimizer_options or {}))
    engine, *_ = deepspeed.initialize(model=net, optimizer=inner, config=settings)
    return engine


def train(engine: Any, steps: int, start: int = 0) -> list[float]:
    """Run optimizer steps ``start … start + steps - 1`` and return the loss of every micro-step.

    Data and dropout masks depend on the step, micro-step and rank alone, so two engines that hold the same state
    return the same losses.
    """
    rank = torch.distributed.get_rank()
    losses = []
    for step in range(start, start + steps):
        for micro in range(engine.gradient_accumulation_steps()):
            torch.manual_seed(7919 * step + 31 * micro + rank)
            loss = engine(*batch(step, micro, rank))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses
