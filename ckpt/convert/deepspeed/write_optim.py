"""The optimizer in DeepSpeed's files: what its wrappers of each ZeRO stage take back in ``load_checkpoint``.

The keys are those of ``zero/stage_1_and_2.py``, ``zero/stage3.py``, ``fp16/unfused_optimizer.py`` and
``fp16/fused_optimizer.py``. What a loaded engine should keep as it is configured (gradient clipping) is left out where
its loader allows that.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt.convert.deepspeed.read_plain import NAMES
from ckpt.convert.deepspeed.write_slice import (
    SUB_GROUP,
    Filling,
    Member,
    Partition,
    Slice,
    of_partition,
    of_shard,
    partition_of,
    sub_groups_of,
)
from ckpt.convert.deepspeed.write_state import Objects, OptimizerState, loss_scaler
from ckpt.convert.torchfile.pickle_write import Instance, Named, Piece, Planned
from ckpt.errors import UnsupportedLayout
from ckpt.layout.box import Box
from ckpt.layout.spec import ITEMSIZE, Shard

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION = "0.19.8"
"""The release of DeepSpeed whose layout is written."""


@dataclass(slots=True)
class Optimizer:
    """Makes the trees. ``dtype``: of the parameters that are stepped; ``sub_group``: elements, see
    :data:`~ckpt.convert.deepspeed.write_slice.SUB_GROUP`. ``ep``: expert-parallel ranks; groups of experts are cut over
    those that have the same. ``made``: what the source does not say.
    """

    state: OptimizerState
    objects: Objects
    stage: int
    ranks: int
    dtype: str
    sub_group: int = SUB_GROUP
    ep: int = 1
    made: list[str] = field(default_factory=list)

    @property
    def low_precision(self) -> bool:
        """Does an optimizer of stage 0 keep masters beside the parameters?"""
        return self.dtype in ("bfloat16", "float16")

    # ------------------------------------------------------------------------------------------------ ZeRO 1, 2 and 3

    def zero(self, held: Slice, rank: int) -> dict[str, Any]:
        """Return ``optimizer_state_dict`` of a data-parallel rank's ``*_optim_states.pt``."""
        scaler = loss_scaler(self.objects, self.dtype, self.made)
        found = {"loss_scaler": scaler, "dynamic_loss_scale": scaler.attributes["dynamic"], "overflow": False}
        parts = self._stage_3(held, rank) if self.stage == 3 else self._stage_1_or_2(held, rank)
        return {**found, "zero_stage": self.stage, **parts}

    def _stage_1_or_2(self, held: Slice, rank: int) -> dict[str, Any]:
        sharing = [self.ep if group[0].expert else 1 for group in held.groups]  # neighbours have different experts
        parts = [partition_of(g, self.ranks // n, rank // n) for g, n in zip(held.groups, sharing, strict=True)]
        state: dict[int, Any] = {}
        masters: list[Planned] = []
        for number, (group, part) in enumerate(zip(held.groups, parts, strict=True)):
            fillings: list[Filling] = [self.state.master(member) for member in group]
            size = part.stop - part.start
            masters.append(Planned("float32", (size,), tuple(of_partition(group, fillings, part))))
            state[number] = {role: self._partition(group, one, part) for role, one in self._elementwise(group)}
            state[number] |= self.state.scalars(group)
        return {
            "base_optimizer_state": {
                "state": {number: one for number, one in state.items() if one},
                "param_groups": self._param_groups(held, [[number] for number in range(len(held.groups))]),
            },
            "single_partition_of_fp32_groups": masters,
            "group_paddings": [part.padding for part in parts],
            "partition_count": [self.ranks // n for n in sharing],
            "ds_version": VERSION,
            "param_slice_mappings": [_slice_mapping(group, p) for group, p in zip(held.groups, parts, strict=True)],
        }

    @staticmethod
    def _partition(group: Sequence[Member], fillings: list[Filling], part: Partition) -> Planned:
        dtype = _dtype(fillings)
        pieces = (*of_partition(group, fillings, part), part.padding * ITEMSIZE[dtype])
        return Planned(dtype, (part.stop - part.start + part.padding,), pieces)

    def _elementwise(self, group: Sequence[Member]) -> list[tuple[str, list[Filling]]]:
        return list(self.state.elementwise(group).items())

    def sub_groups(self, held: Slice) -> list[list[tuple[Member, ...]]]:
        """Return the sub-groups of each group under ZeRO-3."""
        return [sub_groups_of(group, self.ranks, self.sub_group) for group in held.groups]

    def _stage_3(self, held: Slice, rank: int) -> dict[str, Any]:
        state: dict[int, Any] = {}
        masters: list[Planned] = []
        numbers: list[list[int]] = []
        for sub_groups in self.sub_groups(held):
            numbers.append([])
            for members in sub_groups:
                number = len(masters)
                numbers[-1].append(number)
                masters.append(self._shards(members, [self.state.master(member) for member in members], rank))
                state[number] = {role: self._shards(members, one, rank) for role, one in self._elementwise(members)}
                state[number] |= self.state.scalars(members)
        return {
            "partition_count": self.ranks,
            "optimizer_state_dict": {
                "state": {number: one for number, one in state.items() if one},
                "param_groups": self._param_groups(held, numbers),
            },
            "fp32_flat_groups": masters,
        }

    def _shards(self, members: Sequence[Member], fillings: Sequence[Filling], rank: int) -> Planned:
        pieces: list[Piece] = []
        for member, filling in zip(members, fillings, strict=True):
            pieces += of_shard(member, filling, self.ranks, rank)
        size = sum(-(-member.numel // self.ranks) for member in members)
        return Planned(_dtype(fillings), (size,), tuple(pieces))

    # --------------------------------------------------------------------------------------------------------- ZeRO 0

    def whole(self, held: Slice) -> dict[str, Any]:
        """Return ``optimizer`` of ``mp_rank_*_model_states.pt`` without ZeRO.

        Raises:
            UnsupportedLayout: DeepSpeed's fused wrapper, whose loader wants what the source does not say.
        """
        if not self.low_precision:
            return self._by_parameter(held)
        scaler = loss_scaler(self.objects, self.dtype, self.made).attributes
        found = {"dynamic_loss_scale": scaler["dynamic"], "cur_scale": scaler["cur_scale"]}
        found["cur_iter"] = scaler.get("cur_iter", 0)
        if scaler["dynamic"]:
            found |= {name: scaler[name] for name in ("last_overflow_iter", "scale_factor", "scale_window")}
        if self._is_fused(held):
            return {**found, **self._fused(held)}
        groups = [[member.planned(self.state.master(member)) for member in group] for group in held.groups]
        return {**found, "optimizer_state_dict": self._by_parameter(held), "fp32_groups": groups}

    def _by_parameter(self, held: Slice) -> dict[str, Any]:
        state: dict[int, Any] = {}
        numbers: list[list[int]] = []
        for group in held.groups:
            numbers.append([])
            for member in group:
                number = len(state)
                numbers[-1].append(number)
                state[number] = {r: whole_tensor(member, one[0]) for r, one in self._elementwise([member])}
                state[number] |= self.state.scalars([member])
        state = {number: one for number, one in state.items() if one}
        return {"state": state, "param_groups": self._param_groups(held, numbers), NAMES: _names(held)}

    def _is_fused(self, held: Slice) -> bool:
        """Is the optimizer DeepSpeed's FusedAdam? Of one whose class is not known, its options tell."""
        said = str(self.objects.get("optimizer").get("class", ""))
        options = self.state.options(held.number[0]) if held.number else {}
        return said.endswith("FusedAdam") or (not said and {"bias_correction", "betas"} <= options.keys())

    def _fused(self, held: Slice) -> dict[str, Any]:
        clip = self.objects.get("ds_config").get("gradient_clipping")
        if clip is None:
            raise UnsupportedLayout(
                "FusedAdam without ZeRO: DeepSpeed takes gradient_clipping from the checkpoint, and the source does "
                "not say it; choose ZeRO-1"
            )
        state: dict[int, Any] = {}
        masters = []
        for number, group in enumerate(held.groups):
            everything = Partition(0, sum(member.numel for member in group), 0)
            masters.append(self._partition(group, [self.state.master(member) for member in group], everything))
            state[number] = {role: self._partition(group, one, everything) for role, one in self._elementwise(group)}
            state[number] |= self.state.scalars(group)
        groups = self._param_groups(held, [[number] for number in range(len(held.groups))])
        state = {number: one for number, one in state.items() if one}
        inner = {"state": state, "param_groups": groups, NAMES: _names(held)}
        return {"optimizer_state_dict": inner, "fp32_groups_flat": masters, "clip_grad": clip}

    # ------------------------------------------------------------------------------------------------------ all of them

    def _param_groups(self, held: Slice, numbers: list[list[int]]) -> list[dict[str, Any]]:
        return [{**self.state.options(g), "params": ns} for g, ns in zip(held.number, numbers, strict=True)]


def whole_tensor(member: Member, filling: Filling) -> Planned:
    """Return the local tensor of a member, to be filled."""
    if isinstance(filling, str):
        return Planned(filling, member.local, (member.numel * ITEMSIZE[filling],))
    if filling.shape != member.tiling.shape:  # carried whole, as Adafactor's factors
        return Planned(filling.dtype, filling.shape, (Shard(filling, Box.whole(filling.shape)),))
    return member.planned(filling)


def _names(held: Slice) -> list[list[str]]:
    return [[member.name for member in group] for group in held.groups]


def _dtype(fillings: Sequence[Filling]) -> str:
    return next(f if isinstance(f, str) else f.dtype for f in fillings)


def _slice_mapping(group: Sequence[Member], part: Partition) -> OrderedDict[str, Instance]:
    found: OrderedDict[str, Instance] = OrderedDict()
    at = 0
    for member in group:
        low, high = max(part.start, at), min(part.stop, at + member.numel)
        if low < high:
            address = {"numel": high - low, "start": low - part.start}
            found[member.name] = Instance(Named("deepspeed.utils.tensor_fragment", "fragment_address"), address)
        at += member.numel
    return found
