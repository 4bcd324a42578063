"""Live engines to checkpoint: one GPT in every layout of the benchmark, with a training step and a list of its tensors.

The torch layouts train in one dtype with torch's AdamW (bf16: 2 bytes of parameter and 2 x 2 of moments; fp32: 12). The
ZeRO layouts are DeepSpeed's (bf16: parameters, and masters and moments in fp32, cut over the ranks).
"""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LAYERS, VOCAB, CONTEXT = 6, 4096, 16
TORCH_LAYOUTS = ("ddp", "fsdp2", "hsdp")
ZERO_LAYOUTS = ("zero0", "zero1", "zero2", "zero3")
LAYOUTS = (*TORCH_LAYOUTS, *ZERO_LAYOUTS)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unsqueeze(1) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A model of at least ``params`` parameters; its tied head gives every row of the embedding a gradient."""

    def __init__(self, params: float) -> None:
        super().__init__()
        vocab = VOCAB if params >= 1e7 else 256  # a small model is not all embedding
        # 12 L w² + V w = params
        width = (-vocab + math.sqrt(vocab**2 + 48 * LAYERS * params)) / (24 * LAYERS)
        width = 8 * math.ceil(width / 8)
        self.vocab = vocab
        self.embed, self.norm = nn.Embedding(vocab, width), nn.LayerNorm(width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(LAYERS)))
        self.head = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.blocks(self.embed(tokens))))
        return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what of a tensor lies in this rank's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Job:
    """A training job on this rank.

    ``engine`` is what :func:`ckpt.save` is given; ``information`` the bytes of one copy of what cannot be derived.
    """

    kind = "torch"
    engine: Any
    model: nn.Module
    optimizer: Any
    params: int
    information: int

    def __init__(self, layout: str, vocab: int) -> None:
        self.layout, self.rank, self.world = layout, dist.get_rank(), dist.get_world_size()
        self._vocab = vocab
        self._batches = torch.Generator().manual_seed(self.rank)

    def train_step(self, guard: Callable[[], Any] = nullcontext) -> None:
        """Run one optimizer step on random tokens; ``guard()`` is a context that the update happens in."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return the live training state as a nested dict of tensors, as one gives it to a checkpointer of dicts."""
        raise NotImplementedError

    def own_state(self) -> dict[str, Any]:
        """Return the same with this rank's local tensors, for writers that know one process only."""
        return _map(self.state(), lambda t: local(t).detach())

    def tensors(self) -> list[torch.Tensor]:
        """Return this rank's tensors of the state, always in the same order."""
        return [local(t).detach() for t in leaves(self.state())]

    def fingerprint(self) -> str:
        """Return a hash of this rank's state, found without any of ckpt's code."""
        import xxhash

        hasher = xxhash.xxh3_128()
        for tensor in self.tensors():
            hasher.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        return hasher.hexdigest()

    def wipe(self) -> None:
        """Set every tensor of the state to zero, so that a load has something to do."""
        with torch.no_grad():
            for tensor in self.tensors():
                tensor.zero_()

    def tokens(self) -> torch.Tensor:
        """Return one batch."""
        return torch.randint(0, self._vocab, (1, CONTEXT), generator=self._batches)


class TorchJob(Job):
    """DDP, FSDP2 or HSDP around the model, and AdamW."""

    def __init__(self, layout: str, params: float, dtype: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        bare = GPT(params).to(DTYPES[dtype])
        super().__init__(layout, bare.vocab)
        self.params = sum(p.numel() for p in bare.parameters())
        if layout == "ddp":
            self.model = nn.parallel.DistributedDataParallel(bare, gradient_as_bucket_view=True)
        else:
            shape, names = ((self.world,), ("dp",)) if layout == "fsdp2" else ((2, self.world // 2), ("rep", "dp"))
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            for block in bare.blocks:
                fully_shard(block, mesh=mesh, reshard_after_forward=False)  # gathered once a step: more steps a minute
            self.model = fully_shard(bare, mesh=mesh, reshard_after_forward=False)
        self.bare = bare
        self.optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-4, weight_decay=0.1, foreach=True)
        self.engine = (self.model, self.optimizer)
        count = sum(1 for _ in bare.parameters())
        self.information = 3 * self.params * DTYPES[dtype].itemsize + 4 * count  # and a step counter each

    def train_step(self, guard: Callable[[], Any] = nullcontext) -> None:
        self.optimizer.zero_grad(set_to_none=self.layout != "ddp")  # DDP's gradients are views of its buckets
        self.model(self.tokens()).backward()
        with guard():
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        named = dict(self.bare.named_parameters())
        return {
            "model": {name: p.data for name, p in named.items()},
            "optim": {name: dict(self.optimizer.state[p]) for name, p in named.items()},
        }


class ZeroJob(Job):
    """DeepSpeed's engine of one ZeRO stage around the model, and AdamW."""

    kind = "deepspeed"

    def __init__(self, layout: str, params: float, dtype: str) -> None:
        import deepspeed
        import deepspeed.ops
        from deepspeed.utils import logger

        logger.setLevel(logging.ERROR)
        # DeepSpeed would compile this operator with g++ at start; it serves inference only.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        torch.manual_seed(0)
        model = GPT(params)
        super().__init__(layout, model.vocab)
        self.params = sum(p.numel() for p in model.parameters())
        self.stage = int(layout.removeprefix("zero"))
        bucket = 10_000_000  # elements; the defaults, fifty times this, are allocated in full
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": dtype == "bf16"},
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": bucket,
                "stage3_prefetch_bucket_size": bucket,
            },
            "checkpoint": {"tag_validation": "Ignore"},
        }
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-4)
        self.engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        self.model, self.optimizer = self.engine.module, self.engine.optimizer
        self.information = 12 * self.params  # fp32 master (or parameter) and moments; a bf16 parameter is their cast

    def train_step(self, guard: Callable[[], Any] = nullcontext) -> None:
        self.engine.backward(self.engine(self.tokens()))
        with guard():
            self.engine.step()

    def state(self) -> dict[str, Any]:
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        held = [p for group in inner.param_groups for p in group["params"]]
        if self.stage == 3:  # its groups are empty between two steps
            held = list(self.optimizer.fp32_partitioned_groups_flat)
        moments = ("exp_avg", "exp_avg_sq", "step")
        own: dict[str, Any] = {}
        for i, p in enumerate(held):
            own[f"master{i}"] = p.data
            own |= {f"{name}{i}": inner.state[p][name] for name in moments if torch.is_tensor(inner.state[p].get(name))}
        named = list(self.model.named_parameters())
        if self.stage == 3:
            own |= {name: p.ds_tensor.data for name, p in named}
            return {f"rank{self.rank}": own}
        whole = {"model": {name: p.data for name, p in named}}
        return whole | ({"optim": own} if self.stage == 0 else {f"rank{self.rank}": own})


def make_job(layout: str, params: float, dtype: str) -> Job:
    """Return a job that has taken two steps, so that all of its state exists; a collective."""
    job = (TorchJob if layout in TORCH_LAYOUTS else ZeroJob)(layout, params, dtype)
    for _ in range(2):
        job.train_step()
    return job


def _map(tree: Any, f: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return {k: _map(v, f) for k, v in tree.items()} if isinstance(tree, dict) else f(tree)


def leaves(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, dict):
        for key in sorted(tree):
            yield from leaves(tree[key])
    else:
        yield tree
