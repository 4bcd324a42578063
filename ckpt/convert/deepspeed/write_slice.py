"""What one model slice (pipeline stage, tensor rank) of a DeepSpeed job holds, and in which order its flat buffers do.

The order is that of the optimizer's groups. DeepSpeed checks nothing of it when it loads: in another order a buffer of
the right length fills the wrong parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, TypeVar

from ckpt.convert.torchfile.pickle_write import Piece, Planned
from ckpt.errors import ConfigError
from ckpt.layout.box import Box, boxes_of_range
from ckpt.layout.spec import BUFFER, ITEMSIZE, PARAM, Shard, TensorSpec
from ckpt.layout.tiling import Tiling

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt.convert.deepspeed.write_experts import Experts
    from ckpt.convert.target import Target
    from ckpt.describe.model import Described

SUB_GROUP = 1_000_000_000
"""Elements of a ZeRO-3 sub-group on each rank, DeepSpeed's default (``zero_optimization.sub_group_size``)."""
ALIGNMENT = 2
"""ZeRO-1 and 2 pad a flat buffer to a multiple of it times the ranks (``nccl_start_alignment_factor``)."""

T = TypeVar("T")
Filling = TensorSpec | str
"""Of which tensor of the source a buffer is filled; a dtype: of none, with zeros."""


@dataclass(frozen=True, slots=True)
class Member:
    """One parameter or buffer as a slice has it; ``tiling.local`` is its shape there. ``expert``: of something of an
    expert, its name there, which counts the experts of one expert-parallel rank.
    """

    fqn: str
    tiling: Tiling
    expert: str = ""

    @property
    def name(self) -> str:
        """What the slice calls it."""
        return self.expert or self.fqn

    @property
    def local(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        return self.tiling.local

    @property
    def numel(self) -> int:
        """Elements of the local tensor, padding included."""
        return self.tiling.numel

    def planned(self, spec: TensorSpec) -> Planned:
        """Return the local tensor, to be filled from ``spec``."""
        return Planned(spec.dtype, self.local, tuple(pieces_of(self.tiling, spec, 0, self.numel)))


@dataclass(frozen=True, slots=True)
class Slice:
    """``mp``: number in file names. ``groups``: members of each of the optimizer's groups, flat order; ``number``: of
    each in :attr:`~ckpt.convert.target.Target.groups`. ``frozen``: parameters that are not stepped. ``names``: of all
    parameters in module order.
    """

    stage: int
    tensor_rank: int
    mp: int
    groups: tuple[tuple[Member, ...], ...]
    number: tuple[int, ...]
    frozen: tuple[Member, ...]
    params: tuple[Member, ...]
    buffers: tuple[Member, ...]


def slices_of(target: Target, experts: Experts | None = None, rank: int = 0) -> list[Slice]:
    """Return all slices, by their number in file names; those of one expert-parallel rank, if there are experts."""
    mesh = target.description.mesh.ranks
    first = sorted((int(mesh[p, t, 0]), p, t) for p in range(mesh.shape[0]) for t in range(mesh.shape[1]))
    return [_slice(target, p, t, number, experts, rank) for number, (_, p, t) in enumerate(first)]


def whole_slice(target: Target) -> Slice:
    """Return the whole model as one slice, uncut."""
    tensors = target.description.model.tensors
    return _of_tensors(target, tensors, {t.fqn: Member(t.fqn, Tiling.whole(t.shape)) for t in tensors}, 0, 0, 0)


def _slice(target: Target, stage: int, tensor_rank: int, number: int, experts: Experts | None, rank: int) -> Slice:
    description = target.description
    tensors = [t for t in description.on_stage[stage] if experts is None or experts.has(rank, t.fqn)]
    held = {t.fqn: Member(t.fqn, description.tiling(t, tensor_rank)) for t in tensors}
    found = _of_tensors(target, tensors, held, stage, tensor_rank, number)
    return _of_expert_rank(found, experts, rank) if experts else found


def _of_expert_rank(held: Slice, experts: Experts, rank: int) -> Slice:
    """Return a slice without experts of other ranks, and with the names that they have on this one."""

    def own(members: Sequence[Member]) -> tuple[Member, ...]:
        return tuple(replace(m, expert=experts.local_name(m.fqn)) for m in members if experts.has(rank, m.fqn))

    groups = tuple(map(own, held.groups))
    return replace(held, groups=groups, frozen=own(held.frozen), params=own(held.params), buffers=own(held.buffers))


def _of_tensors(
    target: Target, tensors: Sequence[Described], held: dict[str, Member], stage: int, tensor_rank: int, number: int
) -> Slice:
    empty = {s.fqn: s for s in target.specs if s.role in (PARAM, BUFFER) and 0 in s.shape}
    held = held | {fqn: Member(fqn, Tiling.whole(spec.shape)) for fqn, spec in empty.items()}
    buffers = {t.fqn for t in tensors if t.kind == "buffer"}
    buffers |= {fqn for fqn, spec in empty.items() if spec.role == BUFFER}
    groups = [[held[fqn] for fqn in names if fqn in held and held[fqn].numel] for names in _groups(target, tensors)]
    stepped = {member.fqn for group in groups for member in group}
    params = tuple(member for member in held.values() if member.fqn not in buffers)
    return Slice(
        stage=stage,
        tensor_rank=tensor_rank,
        mp=number,
        groups=tuple(tuple(group) for group in groups if group),
        number=tuple(n for n, group in enumerate(groups) if group),
        frozen=tuple(member for member in params if member.fqn not in stepped),
        params=params,
        buffers=tuple(member for member in held.values() if member.fqn in buffers),
    )


def _groups(target: Target, tensors: Sequence[Described]) -> Sequence[Sequence[str]]:
    if target.groups:
        return [group.params for group in target.groups]
    return [[t.fqn for t in tensors if t.trainable and t.kind != "buffer"]]


def dealt(items: Sequence[T], ranks: int) -> list[T]:
    """Return items in the order of DeepSpeed's ``round_robin_gradients``: dealt to ranks like cards, rank by rank.

    >>> dealt("abcdefg", 3)
    ['a', 'd', 'g', 'b', 'e', 'c', 'f']
    """
    return [items[n] for rank in range(ranks) for n in range(rank, len(items), ranks)]


def gathered(items: Sequence[T], ranks: int) -> list[T]:
    """Return items in the order that they had before they were :func:`dealt`."""
    order = dealt(range(len(items)), ranks)
    return [item for _, item in sorted(zip(order, items, strict=True), key=lambda pair: pair[0])]


# ------------------------------------------------------------------------------------------------------ flat buffers


@dataclass(frozen=True, slots=True)
class Partition:
    """Elements ``[start, stop)`` of a group's members, one behind the other, and ``padding`` behind them."""

    start: int
    stop: int
    padding: int


def partition_of(members: Sequence[Member], ranks: int, rank: int) -> Partition:
    """Return what a data-parallel rank holds of a group under ZeRO-1 and 2: an equal part of it, padded at its end."""
    total = sum(member.numel for member in members)
    size = -(-total // (ALIGNMENT * ranks)) * ALIGNMENT
    start, stop = min(rank * size, total), min((rank + 1) * size, total)
    return Partition(start, stop, size - (stop - start))


def sub_groups_of(members: Sequence[Member], ranks: int, size: int = SUB_GROUP) -> list[tuple[Member, ...]]:
    """Return the sub-groups of a group under ZeRO-3: closed by the member that reaches ``size`` elements on a rank."""
    parts = [-(-member.numel // ranks) for member in members]
    if size >= sum(parts):
        return [tuple(members)]
    found: list[tuple[Member, ...]] = []
    begun: list[Member] = []
    held = 0
    for n, (member, part) in enumerate(zip(members, parts, strict=True)):
        begun.append(member)
        held += part
        if held >= size or n == len(parts) - 1:
            found.append(tuple(begun))
            begun, held = [], 0
    return found


def of_partition(members: Sequence[Member], fillings: Sequence[Filling], part: Partition) -> Iterator[Piece]:
    """Yield the pieces of a ZeRO-1 or 2 partition without its padding.

    Args:
        members: of the group.
        fillings: for each what it is filled from. All of one dtype.
        part: which elements.
    """
    at = 0
    for member, filling in zip(members, fillings, strict=True):
        low, high = max(part.start, at), min(part.stop, at + member.numel)
        if low < high:
            yield from pieces_of(member.tiling, filling, low - at, high - at)
        at += member.numel


def of_shard(member: Member, spec: Filling, ranks: int, rank: int) -> Iterator[Piece]:
    """Yield the pieces of what a rank holds of one parameter under ZeRO-3, its padding included."""
    size = -(-member.numel // ranks)
    start, stop = min(rank * size, member.numel), min((rank + 1) * size, member.numel)
    yield from pieces_of(member.tiling, spec, start, stop)
    yield _zeros(spec, size - (stop - start))


def pieces_of(tiling: Tiling, spec: Filling, start: int, stop: int) -> Iterator[Piece]:
    """Yield the pieces of elements ``[start, stop)`` of a flattened local tensor: boxes in order, zeros as padding."""
    if isinstance(spec, str):
        yield _zeros(spec, stop - start)
        return
    if spec.shape != tiling.shape:
        raise ConfigError(f"{spec} is cut like a tensor of shape {list(tiling.shape)}")
    for local in _boxes(tiling.local, start, stop):
        if tiling.is_whole:
            yield Shard(spec, local)
        else:
            yield from _in_order(tiling, spec, local)


@lru_cache(maxsize=4096)
def _boxes(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """Return ``boxes_of_range``: each rank has the same range of all roles, and of all tensors of one shape."""
    return tuple(boxes_of_range(shape, start, stop))


def _zeros(spec: Filling, count: int) -> int:
    return count * ITEMSIZE[spec if isinstance(spec, str) else spec.dtype]


def _in_order(tiling: Tiling, spec: TensorSpec, local: Box) -> Iterator[Piece]:
    """Yield the pieces of a box of the local tensor: as it is if its tiles lie one behind the other, else by rows."""
    parts: list[tuple[int, Box, Box]] = []
    for tile in tiling.tiles:
        common = local.intersect(tile.local)
        if common is not None:
            offsets = (g + c - a for g, c, a in zip(tile.box.offsets, common.offsets, tile.at, strict=True))
            parts.append((_position(common, local), common, Box(tuple(offsets), common.sizes)))
    parts.sort(key=lambda part: part[0])
    if all(_is_contiguous(common, local) for _, common, _ in parts):
        at = 0
        for position, common, box in parts:
            yield _zeros(spec, position - at)
            yield Shard(spec, box)
            at = position + common.volume
        yield _zeros(spec, local.volume - at)
        return
    dim = next(d for d, size in enumerate(local.sizes) if size > 1)
    for row in range(local.sizes[dim]):
        first, ones = list(local.offsets), list(local.sizes)
        first[dim], ones[dim] = first[dim] + row, 1
        yield from _in_order(tiling, spec, Box(tuple(first), tuple(ones)))


def _position(inner: Box, outer: Box) -> int:
    """Return where the first element of a box is among those of the box around it."""
    strides = [prod(outer.sizes[d + 1 :]) for d in range(outer.ndim)]
    return sum((i - o) * s for i, o, s in zip(inner.offsets, outer.offsets, strides, strict=True))


def _is_contiguous(inner: Box, outer: Box) -> bool:
    first = next((d for d, size in enumerate(inner.sizes) if size > 1), inner.ndim)
    return inner.sizes[first + 1 :] == outer.sizes[first + 1 :]
