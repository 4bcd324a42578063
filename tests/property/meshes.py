"""Layouts of jobs on meshes as people train with: pipeline x data x tensor x expert parallelism, under ZeRO 0, 1 or 3.

Stages share a tied embedding (first and last), norms are replicated over tensor parallelism, experts live on every
``ep``-th data-parallel rank, and partitions are cut where ZeRO cuts them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.layout.box import Box, boxes_of_range
from ckpt.layout.spec import MASTER, PARAM, RankLayout, Shard, TensorSpec

ROLES = (MASTER, "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Weight:
    """A parameter, the dimension that tensor parallelism cuts, and the expert that it belongs to."""

    fqn: str
    shape: tuple[int, ...]
    dim: int | None = None
    expert: int | None = None


@dataclass(frozen=True)
class Mesh:
    """``ep`` divides ``dp``. ``width`` and ``layers`` are the model's size, ``tied``: one embedding on both ends."""

    pp: int
    dp: int
    tp: int
    ep: int
    zero: int
    width: int
    layers: int
    tied: bool

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp

    def stage(self, p: int) -> list[Weight]:
        """What a pipeline stage trains. Widths are multiples of ``tp``, as tensor parallelism wants them."""
        h = self.width * self.tp
        found = [Weight("embedding", (3 * h + 4 * self.tp, h), 0)] if p == 0 or (self.tied and p == self.pp - 1) else []
        for n in range(p, self.layers, self.pp):  # a stage may have none
            found += [Weight(f"{n}.norm", (h,)), Weight(f"{n}.up", (2 * h, h), 0), Weight(f"{n}.down", (h, 2 * h), 1)]
            found += [Weight(f"{n}.expert{e}", (h, h), 0, e) for e in range(self.ep if self.ep > 1 else 0)]
        return found

    def layout(self, rank: int) -> RankLayout:
        """What one rank declares."""
        p, d, t = rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp
        shards: list[Shard] = []
        derived: list[str] = []
        at = {True: 0, False: 0}  # experts and the rest are two ZeRO groups
        local = [w for w in self.stage(p) if w.expert is None or w.expert == d % self.ep]
        sizes = [self.shard(w, t) for w in local]
        for is_expert in (True, False):
            parts, mine = (self.dp // self.ep, d // self.ep) if is_expert else (self.dp, d)
            chosen = [(w, b) for w, b in zip(local, sizes, strict=True) if (w.expert is not None) == is_expert]
            flat = -(-sum(box.volume for _, box in chosen) // parts)
            for weight, box in chosen:
                derived.append(weight.fqn)
                first = at[is_expert]
                at[is_expert] += box.volume
                part, shift = (flat, first) if self.zero == 1 else (-(-box.volume // parts), 0)
                low, high = (min(max(k * part - shift, 0), box.volume) for k in (mine, mine + 1))
                own = [box] if self.zero == 0 else [_moved(b, box) for b in boxes_of_range(box.sizes, low, high)]
                param = TensorSpec(weight.fqn, PARAM, "bfloat16", weight.shape)
                shards += [Shard(param, b) for b in (own if self.zero == 3 else [box])]
                for role in ROLES:
                    shards += [Shard(TensorSpec(weight.fqn, role, "float32", weight.shape), b) for b in own]
                if own:
                    shards.append(Shard(TensorSpec(weight.fqn, "step", "float32", ()), Box((), ())))
        return RankLayout(rank, tuple(shards), (), tuple(derived))

    def shard(self, weight: Weight, t: int) -> Box:
        """What tensor-parallel rank ``t`` has of a weight."""
        if weight.dim is None:
            return Box.whole(weight.shape)
        part = weight.shape[weight.dim] // self.tp
        offsets = tuple(t * part if k == weight.dim else 0 for k in range(len(weight.shape)))
        return Box(offsets, tuple(part if k == weight.dim else n for k, n in enumerate(weight.shape)))


def _moved(box: Box, origin: Box) -> Box:
    return Box(tuple(a + b for a, b in zip(box.offsets, origin.offsets, strict=True)), box.sizes)
