"""One small GPT with the same names in every layout that torch trains in, and loops around it.

Awkward on purpose: a vocabulary that no number of ranks divides, a tied pair that is not the first parameter and is
cut apart by pipelines, an int and a float buffer, uneven stages whose layer names are local.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCAB, WIDTH, HEADS, KV_HEADS, CONTEXT, LAYERS = 61, 24, 4, 2, 12, 3
HEAD = WIDTH // HEADS
GARBAGE = 7.0
"""What padding rows hold before training: it must never be found in a checkpoint or behind a load."""


@dataclass(frozen=True)
class Tp:
    """A tensor-parallel group of Megatron's kind: plain local tensors, collectives in the forward pass."""

    group: Any = None
    rank: int = 0
    size: int = 1


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Tp) -> torch.Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad, group=ctx.tp.group)
        return grad, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Tp) -> torch.Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=tp.group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Tp) -> torch.Tensor:
        ctx.tp = tp
        parts = [torch.empty_like(x) for _ in range(tp.size)]
        dist.all_gather(parts, x.contiguous(), group=tp.group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].chunk(ctx.tp.size, dim=-1)[ctx.tp.rank].contiguous(), None


class Block(nn.Module):
    """Attention and MLP. ``fused``: ``qkv`` with fewer key than query heads, and ``gate_up``, each one matrix."""

    def __init__(self, tp: Tp, fused: bool) -> None:
        super().__init__()
        self.tp, self.fused = tp, fused
        own, kv = WIDTH // tp.size, max(1, KV_HEADS // tp.size) * HEAD
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        if fused:
            self.qkv, self.gate_up = nn.Linear(WIDTH, own + 2 * kv), nn.Linear(WIDTH, 4 * own)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, own) for _ in range(3))
            self.up = nn.Linear(WIDTH, 2 * own)
        self.proj, self.down = nn.Linear(own, WIDTH), nn.Linear(2 * own, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self._copy(self.norm1(x))
        if self.fused:
            own, kv = self.proj.in_features, (self.qkv.out_features - self.proj.in_features) // 2
            q, k, v = self.qkv(h).split([own, kv, kv], dim=-1)
        else:
            q, k, v = self.q(h), self.k(h), self.v(h)
        heads = [t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in (q, k, v)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=self.fused)
        x = x + self._row(self.proj, mixed.transpose(1, 2).flatten(2))
        h = self._copy(self.norm2(x))
        if self.fused:
            gate, up = self.gate_up(h).chunk(2, dim=-1)
            return x + self._row(self.down, F.silu(gate) * up)
        return x + self._row(self.down, F.gelu(self.up(h)))

    def _copy(self, x: torch.Tensor) -> torch.Tensor:
        return _Copy.apply(x, self.tp) if self.tp.size > 1 else x

    def _row(self, linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return _Reduce.apply(F.linear(x, linear.weight), self.tp) + linear.bias if self.tp.size > 1 else linear(x)


class TorchGPT(nn.Module):
    """Layers ``[first, last)`` of the model; the ends have embedding and head, whose weights are tied."""

    def __init__(self, first: int = 0, last: int = LAYERS, *, tp: Tp | None = None, fused: bool = False) -> None:
        super().__init__()
        self.tp, self.first, self.last = tp or Tp(), first == 0, last == LAYERS
        rows = -(-VOCAB // self.tp.size)
        if self.first:
            self.positions = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.1)
            self.embed = nn.Embedding(rows, WIDTH)
            self.register_buffer("tokens_seen", torch.zeros((), dtype=torch.long))
        self.blocks = nn.ModuleList(Block(self.tp, fused) for _ in range(first, last))
        if self.last:
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, rows, bias=False)
            self.register_buffer("running", torch.zeros(3, WIDTH))
            self.register_buffer("scratch", torch.zeros(5), persistent=False)
        if self.first and self.last:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            self.tokens_seen += x.numel()
            x = self._embedded(x) + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        if not self.last:
            return x
        self.running += 0.5 + torch.arange(WIDTH)
        return 0.2 * self._logits(self.norm(x))

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return self.embed(tokens)
        rows = self.embed.num_embeddings
        local = tokens - self.tp.rank * rows
        mine = (local >= 0) & (local < rows)
        return _Reduce.apply(self.embed(local.clamp(0, rows - 1)) * mine.unsqueeze(-1), self.tp)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return self.head(x)
        return _Gather.apply(self.head(_Copy.apply(x, self.tp)), self.tp)[..., :VOCAB]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def part_of_model(
    seed: int, first: int = 0, last: int = LAYERS, *, tp: Tp | None = None, fused: bool = False
) -> TorchGPT:
    """Return the part of the model of this seed that a rank has: the same model in every layout."""
    torch.manual_seed(seed)
    whole = TorchGPT(fused=fused)
    if (first, last) == (0, LAYERS) and tp is None:
        return whole
    part = TorchGPT(first, last, tp=tp, fused=fused)
    full = dict(whole.named_parameters(remove_duplicate=False))
    for name, p in part.named_parameters(remove_duplicate=False):
        p.copy_(slice_of(global_name(name, first), full[global_name(name, first)], part.tp))
    return part


def global_name(name: str, first: int) -> str:
    """Return the name in the whole model of what a stage beginning at layer ``first`` calls ``name``."""
    head, _, rest = name.partition(".")
    if head != "blocks":
        return name
    index, _, rest = rest.partition(".")
    return f"blocks.{int(index) + first}.{rest}"


def slice_of(name: str, full: torch.Tensor, tp: Tp) -> torch.Tensor:
    """Return what one tensor-parallel rank holds of a tensor, written down without any of ``ckpt``."""

    def cut(t: torch.Tensor, dim: int) -> torch.Tensor:
        return t.chunk(tp.size, dim=dim)[tp.rank]

    kind, what = name.split(".")[-2:] if "." in name else ("", name)
    if kind in ("embed", "head"):
        missing = -(-VOCAB // tp.size) * tp.size - VOCAB
        return cut(torch.cat([full, full.new_full((missing, WIDTH), GARBAGE)]), 0)
    if kind == "qkv":
        q, k, v = full.split([WIDTH, KV_HEADS * HEAD, KV_HEADS * HEAD])
        same = max(1, tp.size // KV_HEADS)  # this many ranks share a head
        keys = [t.chunk(min(KV_HEADS, tp.size))[tp.rank // same] for t in (k, v)]
        return torch.cat([cut(q, 0), *keys])
    if kind == "gate_up":
        return torch.cat([cut(t, 0) for t in full.chunk(2)])
    if kind in ("q", "k", "v", "up"):
        return cut(full, 0)
    if kind in ("proj", "down") and what == "weight":
        return cut(full, 1)
    return full


RULES: dict[str, Any] = {
    "tensors": [
        {"match": r"blocks\.\d+\.(q|k|v|up)\.(weight|bias)", "dim": 0},
        {"match": r"blocks\.\d+\.(proj|down)\.weight", "dim": 1},
        {"match": r"(embed|head)\.weight", "dim": 0, "size": VOCAB},
        {"match": r"positions|tokens_seen|running|.*norm\d?\.(weight|bias)|.*(proj|down)\.bias"},
    ],
    "tied": {"head.weight": "embed.weight"},
}
"""What ``slice_of`` says, in the words of a rules file, for separate q, k and v."""

FUSED_RULES: dict[str, Any] = {
    **RULES,
    "tensors": [
        {
            "match": r"blocks\.\d+\.qkv\.(weight|bias)",
            "dim": 0,
            "fused": [{"size": WIDTH, "heads": HEADS}, *[{"size": KV_HEADS * HEAD, "heads": KV_HEADS}] * 2],
        },
        {"match": r"blocks\.\d+\.gate_up\.(weight|bias)", "dim": 0, "fused": [2 * WIDTH, 2 * WIDTH]},
        *RULES["tensors"][1:],
    ],
}


def batch(step: int, dp_rank: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets ``(size, CONTEXT)`` that depend on nothing but the arguments."""
    generator = torch.Generator().manual_seed(1000 * step + dp_rank)
    tokens = torch.randint(0, VOCAB, (size, CONTEXT + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def groups_of(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Return matrices with and vectors without weight decay."""
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
