"""One small network in every kind of model parallelism, with the names and values of its unpartitioned twin.

Every part is made whole and then cut, so that a seed gives the same model in any layout. Awkward on purpose: gate and
up are fused in one column-parallel matrix, the vocabulary is padded to be cut, input and output embedding are tied, and
blocks count their calls, in a buffer and beside their tensors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCAB, WIDTH, HIDDEN, LENGTH = 61, 16, 20, 8


class Copy(torch.autograd.Function):
    """Identity forward, sum over the group backward: into a tensor-parallel region."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Sum(torch.autograd.Function):
    """Sum over the group forward, identity backward: out of a tensor-parallel region."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class Gather(torch.autograd.Function):
    """Put the last dimension together forward, take the own part backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.place, ctx.size = dist.get_rank(group), x.shape[-1]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.narrow(-1, ctx.place * ctx.size, ctx.size).contiguous(), None


def cut(whole: torch.Tensor, group: Any, dim: int, stride: int = 1) -> nn.Parameter:
    """Return this rank's part of a whole tensor, with Megatron's attributes on it."""
    if group is None:
        return nn.Parameter(whole)
    rank, degree = dist.get_rank(group), dist.get_world_size(group)
    parts = [part.chunk(degree, dim)[rank] for part in whole.chunk(stride, dim)]
    p = nn.Parameter(torch.cat(parts, dim).contiguous())
    p.tensor_model_parallel, p.partition_dim, p.partition_stride = True, dim, stride
    return p


class Embedding(nn.Module):
    """Vocabulary-parallel: rows are padded to a multiple of the group, the padding takes no part in anything."""

    def __init__(self, group: Any = None, positions: bool = False) -> None:
        super().__init__()
        self.group = group
        whole = torch.randn(VOCAB, WIDTH) * 0.1
        if group is not None:
            rows = -VOCAB % dist.get_world_size(group)
            whole = torch.cat([whole, torch.full((rows, WIDTH), 7.0)])
        self.weight = cut(whole, group, 0)
        if positions:
            self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            x = F.embedding(tokens, self.weight)
        else:
            rows = self.weight.shape[0]
            local = tokens - dist.get_rank(self.group) * rows
            mine = (local >= 0) & (local < rows)
            x = F.embedding(local.clamp(0, rows - 1), self.weight) * mine.unsqueeze(-1)
            x = Sum.apply(x, self.group)
        return x + self.positions if hasattr(self, "positions") else x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the real vocabulary, by the same weight."""
        if self.group is None:
            return F.linear(x, self.weight)
        return Gather.apply(F.linear(Copy.apply(x, self.group), self.weight), self.group)[..., :VOCAB]


class Head(Embedding):
    """An output layer of its own, which a job may tie to the input by means that no framework knows of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(x)


class Column(nn.Module):
    """A linear layer cut along its output, each of ``stride`` fused matrices by itself."""

    def __init__(self, into: int, out: int, group: Any, stride: int = 1) -> None:
        super().__init__()
        self.group = group
        self.weight = cut(torch.randn(out, into) * 0.2, group, 0, stride)
        self.bias = cut(torch.randn(out) * 0.1, group, 0, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x if self.group is None else Copy.apply(x, self.group), self.weight, self.bias)


class Row(nn.Module):
    """A linear layer cut along its input; every rank has the whole bias."""

    def __init__(self, into: int, out: int, group: Any) -> None:
        super().__init__()
        self.group = group
        self.weight = cut(torch.randn(out, into) * 0.2, group, 1)
        self.bias = nn.Parameter(torch.randn(out) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, self.weight)
        return (x if self.group is None else Sum.apply(x, self.group)) + self.bias


class Block(nn.Module):
    """Norm and a gated MLP."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate_up = Column(WIDTH, 2 * HIDDEN, group, stride=2)
        self.down = Row(HIDDEN, WIDTH, group)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.counted = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"counted": self.counted}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.counted = state["counted"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.counted += 1
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Net(nn.Module):
    """The whole model, or cut over a tensor-parallel group. ``sequence``: which part of the tokens is this rank's."""

    def __init__(
        self, layers: int, group: Any = None, sequence: tuple[int, int] = (0, 1), positions: bool = False
    ) -> None:
        super().__init__()
        self.sequence = sequence
        self.embed = Embedding(group, positions)
        self.blocks = nn.ModuleList(Block(group) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        rank, parts = self.sequence
        tokens, targets = tokens.chunk(parts, 1)[rank], targets.chunk(parts, 1)[rank]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return loss_of(self.embed.logits(self.norm(x)), targets)


class Mixture(nn.Module):
    """A model with one layer of experts between the embeddings."""

    def __init__(self, experts: int, ep: int, noisy: str | None = None, residual: bool = False) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.embed = Embedding()
        self.norm = nn.LayerNorm(WIDTH)
        expert = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        self.moe = MoE(WIDTH, expert, experts, ep, k=1, min_capacity=2, noisy_gate_policy=noisy, use_residual=residual)
        first = dist.get_rank() % ep * (experts // ep)
        for i, one in enumerate(self.moe.deepspeed_moe.experts.deepspeed_experts):
            generator = torch.Generator().manual_seed(first + i)
            for p in one.parameters():  # else all experts start alike, and a wrong number would not show
                p.data += 0.1 * torch.randn(p.shape, generator=generator)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        y, balance, _ = self.moe(self.norm(x))
        return loss_of(self.embed.logits(x + y), targets) + 0.01 * balance.float()


class Plain(nn.Module):
    """What AutoTP cuts by itself: nothing but ``nn.Linear`` and ``nn.Embedding``; sizes that two does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.gate_up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, 2 * HIDDEN)
        self.down, self.down2 = nn.Linear(HIDDEN, WIDTH), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return loss_of(self.head(x + self.down2(F.silu(gate) * up)), targets)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy; a pipeline's loss function too."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets ``(2, LENGTH)`` that depend on nothing but the arguments."""
    generator = torch.Generator().manual_seed(100_000 * step + 1000 * micro + rank)
    tokens = torch.randint(0, VOCAB, (2, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def head_of(embedding: Embedding, x: torch.Tensor) -> torch.Tensor:
    """Apply the tied output layer, as a pipeline calls it."""
    return embedding.logits(x)


class Mpu:
    """A hand-written mpu: tensor-parallel ranks are neighbours. Not a module of globals, so a job may have several."""

    def __init__(self, tp: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        rows = [list(range(i, i + tp)) for i in range(0, world, tp)]
        columns = [list(range(i, world, tp)) for i in range(tp)]
        groups = {tuple(ranks): dist.new_group(ranks) for ranks in [*rows, *columns]}  # every rank makes them all
        self.tp = next(groups[tuple(ranks)] for ranks in rows if rank in ranks)
        self.dp = next(groups[tuple(ranks)] for ranks in columns if rank in ranks)

    def get_model_parallel_group(self) -> Any:
        return self.tp

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self.tp)

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self.tp)

    def get_data_parallel_group(self) -> Any:
        return self.dp

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.dp)

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.dp)

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank
