"""How each engine cuts parameters and optimizer state over data-parallel ranks. Pure.

One function an engine: from the local tensors of one model slice, in module order, to their cuts. Each follows the
engine's own code, named in its docstring; the tests compare with live engines where one runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm, prod
from typing import TYPE_CHECKING

from ckpt.describe.cuts import Cut, Group, Groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckpt.describe.parallel import Parallel

DEEPSPEED_ALIGNMENT = 2
"""``nccl_start_alignment_factor`` of DeepSpeed's ``zero/stage_1_and_2.py``."""

DEEPSPEED_EXPERT_GROUP = 178_956_971
"""Elements of an expert parameter group at most: ``max_group_size`` of DeepSpeed's ``moe/utils.py``."""

MEGATRON_PARAM_ALIGNMENT, MEGATRON_BUCKET_ALIGNMENT = 64, 128
"""Elements: ``_pad_start_of_param_if_needed`` and ``_pad_end_of_bucket_if_needed`` of Megatron's
``distributed/param_and_grad_buffer.py``."""


@dataclass(frozen=True, slots=True)
class Local:
    """A local tensor of one model slice. ``decay``: of the first of two parameter groups. ``shared``: tied across
    pipeline stages. ``expert``: its group may be split. ``group``: number of its parameter group, of which
    ``decay`` may make two.
    """

    shape: tuple[int, ...]
    trainable: bool = True
    decay: bool = True
    shared: bool = False
    expert: bool = False
    group: int = 0

    @property
    def numel(self) -> int:
        """Number of elements, padding included."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Cuts:
    """How the parameter and its optimizer state (master, moments, step) are cut; ``state`` is None if not stepped.

    ``scalars_everywhere``: ranks whose slice is empty have the scalars too.
    """

    param: Cut
    state: Cut | None
    scalars_everywhere: bool = False


def cuts_of(tensors: Sequence[Local], groups: Groups, parallel: Parallel) -> list[Cuts]:
    """Return the cuts of the local tensors of one model slice that share data-parallel groups."""
    return _ENGINES[parallel.kind](tensors, groups, parallel)


def _ddp(tensors: Sequence[Local], groups: Groups, parallel: Parallel) -> list[Cuts]:
    """Everything everywhere: torch's DDP, DeepSpeed's ZeRO-0 and Megatron's without its distributed optimizer."""
    whole = [Cut.whole(groups.everyone, t.numel) for t in tensors]
    return [Cuts(cut, cut if t.trainable else None) for t, cut in zip(tensors, whole, strict=True)]


def _deepspeed(tensors: Sequence[Local], groups: Groups, parallel: Parallel) -> list[Cuts]:
    """``zero/stage_1_and_2.py``: each parameter group is one flat buffer, padded at its end to a multiple of
    ``2 * ranks`` and cut evenly, whatever parameters that cuts in two. ``zero/partition_parameters.py`` (stage 3): each
    parameter is cut by itself into ``ceil(numel / ranks)`` elements a rank; sub-groups do not change who holds what.
    """
    if parallel.zero == 0:
        return _ddp(tensors, groups, parallel)
    if parallel.zero == 3:
        parts = len(groups.parts)
        sliced = [Cut.slices(groups.parts, t.numel, -(-t.numel // parts)) for t in tensors]
        return [Cuts(cut, cut if t.trainable else None) for t, cut in zip(tensors, sliced, strict=True)]
    state: dict[int, Cut] = {}
    for group in _parameter_groups(tensors, parallel):
        alignment = DEEPSPEED_ALIGNMENT * len(groups.parts)
        total = -(-sum(tensors[i].numel for i in group) // alignment) * alignment
        offset = 0
        for i in group:
            state[i] = Cut.slices(groups.parts, tensors[i].numel, total // len(groups.parts), offset)
            offset += tensors[i].numel
    return _replicated_params(tensors, groups.everyone, state)


def _parameter_groups(tensors: Sequence[Local], parallel: Parallel) -> Iterator[list[int]]:
    """Yield the parameter groups as indexes, those of experts split as DeepSpeed's
    ``split_params_into_different_moe_groups_for_optimizer`` does.
    """
    wanted = [(t.group, parallel.decay_groups and not t.decay) if t.trainable else None for t in tensors]
    for number in sorted({one for one in wanted if one is not None}):
        group, size = list[int](), 0
        for i, t in enumerate(tensors):
            if wanted[i] != number:
                continue
            if group and t.expert and size + t.numel > DEEPSPEED_EXPERT_GROUP:
                yield group
                group, size = [], 0
            group.append(i)
            size += t.numel
        if group:
            yield group


def _fsdp2(tensors: Sequence[Local], groups: Groups, parallel: Parallel) -> list[Cuts]:
    """``torch.distributed.fsdp.fully_shard``: rows by the rule of ``torch.chunk``, so the last ranks may hold fewer or
    none; the optimizer steps the local shards and counts its steps on every rank.
    """
    found = []
    for t in tensors:
        rows = -(-t.shape[0] // len(groups.parts))
        cut = Cut.slices(groups.parts, t.numel, rows * (t.numel // t.shape[0]))
        found.append(Cuts(cut, cut if t.trainable else None, scalars_everywhere=True))
    return found


def _zero_redundancy(tensors: Sequence[Local], groups: Groups, parallel: Parallel) -> list[Cuts]:
    """``ZeroRedundancyOptimizer._partition_parameters``: whole parameters, largest first within a group, each to the
    rank that has least so far; the sums carry over from group to group.
    """
    sizes = [0] * len(groups.parts)
    state: dict[int, Cut] = {}
    for group in _parameter_groups(tensors, parallel):
        for i in sorted(group, key=lambda i: -tensors[i].numel):
            owner = sizes.index(min(sizes))
            sizes[owner] += tensors[i].numel
            state[i] = Cut.whole(groups.parts, tensors[i].numel, owner)
    return _replicated_params(tensors, groups.everyone, state)


def _megatron(tensors: Sequence[Local], groups: Groups, parallel: Parallel) -> list[Cuts]:
    """The distributed optimizer: one flat buffer of all parameters in reverse order, each starting at a multiple of 64
    elements, its end padded to a multiple of ``lcm(ranks, 128)``, cut evenly. One bucket, as without
    ``--overlap-grad-reduce``; a weight that is tied across stages has a bucket of its own, which is cut by itself.
    """
    if parallel.zero == 0:
        return _ddp(tensors, groups, parallel)
    parts = len(groups.parts)
    end_alignment = lcm(parts, MEGATRON_BUCKET_ALIGNMENT)
    state: dict[int, Cut] = {}
    for bucket in _buckets(tensors):
        offsets, end = [], 0
        for i in bucket:
            offsets.append(-(-end // MEGATRON_PARAM_ALIGNMENT) * MEGATRON_PARAM_ALIGNMENT)
            end = offsets[-1] + tensors[i].numel
        size = -(-end // end_alignment) * end_alignment // parts
        for i, offset in zip(bucket, offsets, strict=True):
            state[i] = Cut.slices(groups.parts, tensors[i].numel, size, offset)
    return _replicated_params(tensors, groups.everyone, state)


def _buckets(tensors: Sequence[Local]) -> Iterator[list[int]]:
    bucket = list[int]()
    for i in reversed(range(len(tensors))):
        if not tensors[i].trainable:
            continue
        if tensors[i].shared:
            yield from [bucket] if bucket else []
            yield [i]
            bucket = []
        else:
            bucket.append(i)
    if bucket:
        yield bucket


def _replicated_params(tensors: Sequence[Local], everyone: Group, state: dict[int, Cut]) -> list[Cuts]:
    return [Cuts(Cut.whole(everyone, t.numel), state.get(i)) for i, t in enumerate(tensors)]


_ENGINES: dict[str, Callable[[Sequence[Local], Groups, Parallel], list[Cuts]]] = {
    "ddp": _ddp,
    "deepspeed": _deepspeed,
    "fsdp2": _fsdp2,
    "zero_redundancy_optimizer": _zero_redundancy,
    "megatron": _megatron,
}
