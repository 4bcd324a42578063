"""Buckets as Megatron's distributed optimizer fills them, of models that are nothing but names, shapes and numbers.

The rule is Megatron's (``_ParamAndGradBuffer``), written down a second time: parameters in reverse order, each at a
multiple of 64 elements, a bucket ends when it is large enough or around a shared embedding, and is filled up for the
ranks. The parts that a file has are cut where a parameter or a rank's share ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ckpt.convert.megatron.bucket_files import BucketFiles
from ckpt.convert.torchfile.file import Stored
from ckpt.layout.box import Box
from ckpt.store.open import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

WORDS, OUTPUT, NORM = "embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight"
HIDDEN, FFN, ROWS = 32, 24, 40
TE = {
    "self_attention.linear_proj.weight": ((HIDDEN, HIDDEN), 1, 1),
    "self_attention.linear_proj.bias": ((HIDDEN,), None, 1),
    "self_attention.linear_qkv.layer_norm_weight": ((HIDDEN,), None, 1),
    "self_attention.linear_qkv.weight": ((3 * HIDDEN, HIDDEN), 0, 1),
    "mlp.linear_fc1.layer_norm_weight": ((HIDDEN,), None, 1),
    "mlp.linear_fc1.weight": ((2 * FFN, HIDDEN), 0, 2),
    "mlp.linear_fc2.weight": ((HIDDEN, FFN), 1, 1),
    "mlp.linear_fc2.bias": ((HIDDEN,), None, 1),
}
"""A layer as the Transformer Engine has it: leaf -> shape, the axis that tensor parallelism cuts, in how many parts
that each are cut."""
LOCAL = {leaf: TE[leaf] for leaf in ("self_attention.linear_qkv.layer_norm_weight", *TE) if leaf in TE}
"""The same layer as Megatron has it by itself: the norm comes first."""
MOE = {
    "self_attention.linear_proj.weight": ((HIDDEN, HIDDEN), None, 1),
    "mlp.router.weight": ((4, HIDDEN), None, 1),
    **{
        f"mlp.experts.experts.{e}.linear_{what}.weight": (shape, None, 1)
        for e in range(4)
        for what, shape in (("fc1", (FFN, HIDDEN)), ("fc2", (HIDDEN, FFN)))
    },
}


@dataclass
class Model:
    """``masters``: name -> fp32 values. ``cuts``: name -> (axis, parts)."""

    masters: dict[str, torch.Tensor]
    cuts: dict[str, tuple[int | None, int]]
    dtype: torch.dtype

    @classmethod
    def make(
        cls, layer: dict[str, Any], layers: int, *, tied: bool, dtype: torch.dtype = torch.bfloat16, seed: int = 0
    ) -> Model:
        """Return one with random numbers."""
        generator = torch.Generator().manual_seed(seed)
        kinds = {WORDS: ((ROWS, HIDDEN), 0, 1)}
        kinds |= {f"decoder.layers.{n}.{leaf}": kind for n in range(layers) for leaf, kind in layer.items()}
        kinds[NORM] = ((HIDDEN,), None, 1)
        kinds |= {} if tied else {OUTPUT: kinds[WORDS]}
        masters = {name: torch.randn(shape, generator=generator) for name, (shape, _, _) in kinds.items()}
        return cls(masters, {name: (axis, parts) for name, (_, axis, parts) in kinds.items()}, dtype)

    def weights(self, name: str) -> torch.Tensor:
        """Return what the model computes with."""
        return self.masters[name].to(self.dtype)

    def pieces(self, name: str, rank: int, tp: int) -> list[Box]:
        """Return the boxes that a tensor rank has."""
        axis, parts = self.cuts[name]
        whole = Box.whole(self.masters[name].shape)
        if axis is None:
            return [whole]
        rows = whole.sizes[axis] // (parts * tp)
        sizes = (*whole.sizes[:axis], rows, *whole.sizes[axis + 1 :])
        starts = [(part * tp + rank) * rows for part in range(parts)]
        return [Box((*whole.offsets[:axis], at, *whole.offsets[axis + 1 :]), sizes) for at in starts]


@dataclass
class Job:
    """How the ranks were laid out. ``bucket``: elements after which a bucket ends; None: never."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    virtual: int = 1
    bucket: int | None = None
    joined: bool = False
    roles: tuple[str, ...] = ("param", "exp_avg")


@dataclass
class Files:
    """What a checkpoint's files would have. ``pieces``: of the model."""

    folder: Path
    model: Model
    job: Job
    data: bytearray = field(default_factory=bytearray)
    pieces: dict[str, list[tuple[Box, Stored]]] = field(default_factory=dict)
    tensors: dict[str, tuple[int, list[tuple[tuple[int, ...], Stored]]]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def put(self, tensor: torch.Tensor) -> Stored:
        """Write a tensor."""
        flat = tensor.detach().contiguous()
        start = len(self.data)
        self.data += flat.view(-1).view(torch.uint8).numpy().tobytes()
        strides = tuple(flat.stride())
        return Stored(str(flat.dtype).removeprefix("torch."), tuple(flat.shape), strides, "data", start)

    def write(self) -> BucketFiles:
        """Write all; return it as it is read."""
        (self.folder / "data").write_bytes(self.data)
        store = open_store(str(self.folder))
        files = BucketFiles("it", store, self.job.tp * self.job.pp * self.job.dp)
        for key, (numel, parts) in self.tensors.items():
            files.add_tensor(key, "float32", (numel,), parts)
        for key, value in self.values.items():
            files.add_value(key, [value])
        return files


def save(folder: Path, model: Model, job: Job) -> Files:
    """Fill and store the buckets of a job."""
    files = Files(folder, model, job)
    for name in model.masters:
        boxes = dict.fromkeys(box for rank in range(job.tp) for box in model.pieces(name, rank, job.tp))
        files.pieces[name] = [(box, files.put(model.weights(name)[_slices(box)])) for box in boxes]
    for chain, experts in enumerate((False, True) if job.ep > 1 else (False,)):
        prefix = f"chained_{chain}." if job.ep > 1 else ""
        lanes = job.ep if experts else job.tp
        for group in range(job.pp * lanes):
            stage, lane = divmod(group, lanes)
            _group(files, f"{prefix}optimizer.distributed.dp_group_idx_{group}", stage, lane, experts)
    return files


def state_of(model: Model, name: str, role: str) -> torch.Tensor:
    """Return a parameter's state."""
    return model.masters[name] if role == "param" else model.masters[name] * 2 + 1


def _group(files: Files, prefix: str, stage: int, lane: int, experts: bool) -> None:
    job, kind = files.job, (str(files.model.dtype),) * 2
    settings = {"param_groups": [{"is_expert_parallel": experts, "wd_mult": 1.0, "step": 2.0}]}
    files.values[f"{prefix}.optimizer/shard_0_1"] = settings
    sizes: list[list[int]] = []
    padded: list[list[int]] = []
    joined: dict[Any, Any] = {"buckets_coalesced": True}
    dp = max(1, job.dp * job.tp // job.ep) if experts else job.dp
    for number in range(job.virtual):
        names = list(_members(files.model, job, stage, number, lane, experts))
        buckets = list(_fill([(name, _local(files, name, lane), shared) for name, shared in names], job.bucket))
        sizes.append([numel for numel, _ in buckets])
        padded.append([-(-numel // lcm(dp, 128)) * lcm(dp, 128) for numel in sizes[-1]])
        flats = {role: [_flat(files, bucket, lane, role) for bucket in buckets] for role in job.roles}
        joined[number] = {kind: {role: files.put(torch.cat(each)) for role, each in flats.items()}}
        for n, (numel, places) in enumerate(buckets):
            share = padded[-1][n] // dp
            ends = {at for start, count, _ in places for at in (start, start + count)} | {numel}
            cuts = sorted({0, *ends, *(at for at in range(0, numel, share))})
            for role in job.roles:
                parts = [((a,), files.put(flats[role][n][a:b])) for a, b in pairwise(cuts)]
                key = f"{prefix}.gbuf_idx_{number}.dtype_({kind[0]}, {kind[1]}).bucket_idx_{n}.{role}"
                if not job.joined:
                    files.tensors[key] = numel, parts
    if job.joined:
        files.values[f"{prefix}.param_state/shard_0_1"] = joined
    else:
        for what, counts in (("per_bucket_numel_unpadded", sizes), ("per_bucket_numel", padded)):
            files.values[f"{prefix}.{what}/shard_0_1"] = [{kind: one} for one in counts]


def _members(model: Model, job: Job, stage: int, number: int, lane: int, experts: bool) -> Iterator[tuple[str, bool]]:
    """Yield (name, is it a shared embedding) of a chunk's parameters in the model's order."""
    layers = 1 + max(int(name.split(".")[2]) for name in model.masters if name.startswith("decoder.layers."))
    each = layers // (job.pp * job.virtual)
    first = (number * job.pp + stage) * each
    last_chunk = stage == job.pp - 1 and number == job.virtual - 1
    tied = OUTPUT not in model.masters and job.pp > 1
    for name in model.masters:
        parts = name.split(".")
        if ".experts.experts." in name:
            held = int(parts[parts.index("experts") + 2]) // (4 // job.ep) == lane
            if experts and held and first <= int(parts[2]) < first + each:
                yield name, False
        elif experts:
            continue
        elif name.startswith("decoder.layers."):
            if first <= int(parts[2]) < first + each:
                yield name, False
        elif name == WORDS:
            if stage == number == 0:
                yield name, tied
        elif last_chunk:
            yield name, False
    if tied and last_chunk and not experts:
        yield WORDS, True


def _local(files: Files, name: str, lane: int) -> int:
    tp = 1 if ".experts." in name else files.job.tp
    return sum(box.volume for box in files.model.pieces(name, lane % tp, tp))


def _fill(members: list[tuple[str, int, bool]], size: int | None) -> Iterator[tuple[int, list[tuple[int, int, str]]]]:
    """Yield (elements, places of its parameters) of each bucket."""
    at, places = 0, list[tuple[int, int, str]]()
    for name, numel, shared in reversed(members):
        at = -(-at // 64) * 64
        if shared and places:
            yield at, places
            at, places = 0, []
        places.append((at, numel, name))
        at += numel
        if shared or (size is not None and at >= size):
            yield at, places
            at, places = 0, []
    if places:
        yield at, places


def _flat(files: Files, bucket: tuple[int, list[tuple[int, int, str]]], lane: int, role: str) -> torch.Tensor:
    flat = torch.full((bucket[0],), float("nan"))  # what fills up has no meaning
    tp = files.job.tp
    for start, numel, name in bucket[1]:
        boxes = files.model.pieces(name, 0 if ".experts." in name else lane, 1 if ".experts." in name else tp)
        state = state_of(files.model, name, role)
        flat[start : start + numel] = torch.cat([state[_slices(box)].reshape(-1) for box in boxes])
    return flat


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
