"""Which rank holds what of Llama-3 under tensor, pipeline and data parallelism, in closed form: no rank asks another.

Megatron's order of ranks (tensor parallelism fastest, then data, then pipeline) and DeepSpeed's ZeRO partitions: stage
1 cuts the concatenation of a rank's parameters into one flat range a data-parallel rank, stage 3 cuts each parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from ckpt.layout.box import Box, boxes_of_range
from ckpt.layout.graph import Cell
from ckpt.layout.spec import MASTER, PARAM, RankLayout, Shard, TensorSpec
from ckpt.plan.local_plan import RankView, groups_of

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Llama:
    """Sizes of a model; grouped-query attention, untied embeddings, no biases."""

    hidden: int = 16384
    layers: int = 126
    kv: int = 1024
    """key/value heads times head size"""
    ffn: int = 53248
    vocab: int = 128256

    def layer(self, n: int) -> list[tuple[str, tuple[int, ...], int | None]]:
        """Return ``(fqn, shape, dimension cut by tensor parallelism)`` of each parameter of a layer."""
        h, kv, ffn, at = self.hidden, self.kv, self.ffn, f"layers.{n:03}."
        return [
            (at + "attention_norm", (h,), None),
            (at + "wq", (h, h), 0),
            (at + "wk", (kv, h), 0),
            (at + "wv", (kv, h), 0),
            (at + "wo", (h, h), 1),
            (at + "ffn_norm", (h,), None),
            (at + "w1", (ffn, h), 0),
            (at + "w3", (ffn, h), 0),
            (at + "w2", (h, ffn), 1),
        ]

    def stage(self, p: int, stages: int) -> list[tuple[str, tuple[int, ...], int | None]]:
        """Return the parameters of a pipeline stage; the embedding and the head count as a layer each."""
        slots = self.layers + 2
        first, last = (p * slots // stages, (p + 1) * slots // stages)
        found = [("embedding", (self.vocab, self.hidden), 0)] if p == 0 else []
        for n in range(max(first - 1, 0), min(last - 1, self.layers)):
            found += self.layer(n)
        head = [("norm", (self.hidden,), None), ("head", (self.vocab, self.hidden), 0)]
        return found + (head if p == stages - 1 else [])


LLAMA_405B = Llama()
LLAMA_8B = Llama(hidden=4096, layers=32, ffn=14336)


@dataclass(frozen=True)
class Job:
    """A model in a layout: bf16 parameters, fp32 masters and Adam's moments, one step counter a tensor."""

    model: Llama
    tp: int
    pp: int
    dp: int
    zero: int

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    def place(self, rank: int) -> tuple[int, int, int]:
        """Return the rank's (pipeline, data, tensor) coordinates."""
        return rank // (self.tp * self.dp), rank // self.tp % self.dp, rank % self.tp

    def rank(self, p: int, d: int, t: int) -> int:
        """Return the rank at these coordinates."""
        return (p * self.dp + d) * self.tp + t

    @cached_property
    def _stages(self) -> list[list[tuple[str, tuple[int, ...], int | None]]]:
        return [self.model.stage(p, self.pp) for p in range(self.pp)]

    def shard(self, shape: tuple[int, ...], dim: int | None, t: int) -> Box:
        """Return what tensor-parallel rank ``t`` has of a parameter."""
        if dim is None:
            return Box.whole(shape)
        part = shape[dim] // self.tp
        return Box(
            tuple(t * part if d == dim else 0 for d in range(len(shape))),
            tuple(part if d == dim else n for d, n in enumerate(shape)),
        )

    def cells(self, rank: int) -> dict[TensorSpec, list[Cell]]:
        """Return what a rank holds, and the masters in the place of its parameters."""
        p, mine, t = self.place(rank)
        shards = [(fqn, shape, dim, self.shard(shape, dim, t)) for fqn, shape, dim in self._stages[p]]
        part = -(-sum(box.volume for *_, box in shards) // self.dp)
        found: dict[TensorSpec, list[Cell]] = {}
        at = 0
        for fqn, shape, dim, box in shards:
            per, shift = (part, at) if self.zero == 1 else (-(-box.volume // self.dp), 0)
            owners = range(shift // per, -(-(shift + box.volume) // per))  # data-parallel ranks with a piece of it
            at += box.volume
            twins = range(self.tp) if dim is None else (t,)
            param, master = TensorSpec(fqn, PARAM, "bfloat16", shape), TensorSpec(fqn, MASTER, "float32", shape)
            if self.zero == 1:
                everyone = tuple(self.rank(p, d, u) for d in range(self.dp) for u in twins)
                found[param] = [Cell(param, box, everyone)]
            for d in owners if self.zero == 1 else {mine} & set(owners):
                low, high = max(d * per - shift, 0), min((d + 1) * per - shift, box.volume)
                holders = tuple(self.rank(p, d, u) for u in twins)
                roles = {MASTER: master}
                if d == mine:
                    roles |= {role: TensorSpec(fqn, role, "float32", shape) for role in MOMENTS}
                    roles |= {PARAM: param} if self.zero == 3 else {}
                for piece in boxes_of_range(box.sizes, low, high):
                    there = Box(tuple(a + b for a, b in zip(piece.offsets, box.offsets, strict=True)), piece.sizes)
                    for spec in roles.values():
                        found.setdefault(spec, []).append(Cell(spec, there, holders))
            if mine in owners:
                step = TensorSpec(fqn, "step", "float32", ())
                found[step] = [
                    Cell(step, Box((), ()), tuple(self.rank(p, d, u) for d in owners for u in range(self.tp)))
                ]
        return found

    def layout(self, rank: int) -> RankLayout:
        """Return what a rank declares."""
        cells = self.cells(rank)
        shards = tuple(Shard(c.spec, c.box) for own in cells.values() for c in own if rank in c.ranks)
        return RankLayout(rank, shards, (), tuple(fqn for fqn, *_ in self._stages[self.place(rank)[0]]))

    def view(self, rank: int) -> RankView:
        """Return all that a rank must know to plan for itself."""
        p, _, t = self.place(rank)
        cells, derived = self.cells(rank), frozenset(fqn for fqn, *_ in self._stages[p])
        foreign = {}
        for ranks in {c.ranks for own in cells.values() for c in own if rank not in c.ranks and len(c.ranks) > 1}:
            member = self.rank(p, self.place(ranks[0])[1], t)
            foreign[ranks] = groups_of(self.cells(member), derived)[ranks].nbytes
        return RankView(rank, cells, derived, foreign)

    def nbytes(self, rank: int) -> dict[str, int]:
        """Return the bytes that a rank holds, by role."""
        found: dict[str, int] = {}
        for shard in self.layout(rank).shards:
            size = prod(shard.box.sizes) * shard.spec.itemsize
            found[shard.spec.role] = found.get(shard.spec.role, 0) + size
        return found
