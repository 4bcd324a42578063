"""Where a DeepSpeed engine keeps its state: every wrapper reduced to a list of :class:`Partition`.

Seven wrappers, one shape. Each of them hands the inner optimizer some tensors of its own (flat or not, whole or this
rank's slice), which are the keys of ``inner.state``; what differs is which elements of which parameter lie where in
them. That arithmetic, and how the low-precision parameters are rebuilt, is here and nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ckpt.engine.shared_check import class_names
from ckpt.engine.shared_partition import Partition, Piece, clear_padding, flat_padding, flat_views, tile_views
from ckpt.errors import UnsupportedLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckpt.engine.shared_partition import Named
    from ckpt.layout.box import Box


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that really steps; None for an engine without one."""
    inner = getattr(optimizer, "optimizer", optimizer)
    nothing = {"DeepSpeedZeRoOffload", "DummyOptim"} & (class_names(optimizer) | class_names(inner))
    return None if nothing else inner


def parameter_views(named: Named) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield what this rank holds of a model parameter: all of it, or under ZeRO-3 its slice without the padding."""
    p = named.param
    if not hasattr(p, "ds_tensor") or named.numel == 0:
        yield from tile_views(p.view(named.tiling.local) if hasattr(p, "ds_tensor") else p, named.tiling)
        return
    start, numel = _zero3_slice(p)
    yield from flat_views(p.ds_tensor.view(-1), 0, named.tiling, start, numel)


def clear_parameter_padding(named: Iterable[Named]) -> None:
    """Set to zero what is nobody's state in the model's own tensors: rows by which a vocabulary was padded."""
    for entry in named:
        p = entry.param
        if not hasattr(p, "ds_tensor"):
            clear_padding([entry])
        elif entry.tiling.padding:
            start, numel = _zero3_slice(p)
            for hole in flat_padding(p.ds_tensor.view(-1), 0, entry.tiling, start, numel):
                hole.zero_()


def partitions_of(optimizer: Any, named: dict[int, Named]) -> list[Partition]:
    """Return this rank's partitions in a deterministic order.

    Raises:
        UnsupportedLayout: an unknown wrapper, a parameter that is not in the module, or a partition of another size
            than DeepSpeed's own books say.
    """
    inner = inner_optimizer(optimizer)
    if inner is None:
        return []
    build = _BUILDERS.get(type(optimizer).__name__)
    if build is None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedLayout(f"unknown optimizer wrapper {type(optimizer).__name__}: expected {sorted(_BUILDERS)}")
    return list((build or _plain)(optimizer, lambda p: _name(named, p)))


def _name(named: dict[int, Named], p: Any) -> Named:
    if id(p) not in named:
        raise UnsupportedLayout(f"the optimizer steps a parameter of shape {list(p.shape)} that the module lacks")
    return named[id(p)]


def _plain(optimizer: Any, name: Callable[[Any], Named]) -> Iterator[Partition]:
    for g, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p.requires_grad or optimizer.state.get(p):
                yield _whole(p, g, name(p), separate=False)


def _unfused(optimizer: Any, name: Callable[[Any], Named]) -> Iterator[Partition]:
    for g, (params, masters) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)):
        for p, master in zip(params, masters, strict=True):
            yield _whole(master, g, name(p), separate=True)


def _whole(key: torch.Tensor, group: int, named: Named, *, separate: bool) -> Partition:
    piece = Piece(named.fqn, named.tiling, 0, named.numel, 0)
    return Partition(key, group, separate, [named.fqn], [piece], flat=False)


def _fused(optimizer: Any, name: Callable[[Any], Named]) -> Iterator[Partition]:
    for g, (params, flat) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)):
        yield _slice(flat, g, [name(p) for p in params], _packed(params), 0, optimizer.fp16_groups_flat[g])


def _zero12(optimizer: Any, name: Callable[[Any], Named]) -> Iterator[Partition]:
    for g, flat in enumerate(optimizer.single_partition_of_fp32_groups):
        # DeepSpeed's own offsets: round robin reorders parameters, parameter_alignment puts holes between them.
        offsets = optimizer.round_robin_bit16_offsets[g]
        members = [name(p) for p in optimizer.round_robin_bit16_groups[g]]
        low = _rank(optimizer.real_dp_process_group[g]) * optimizer.partition_size[g]
        _expect_size(flat, optimizer.partition_size[g], members)
        yield _slice(flat, _group_of(optimizer, flat, g), members, offsets, low, optimizer.bit16_groups_flat[g])


def _bf16(optimizer: Any, name: Callable[[Any], Named]) -> Iterator[Partition]:
    for g, flat in enumerate(optimizer.fp32_groups_flat_partition):
        params, process_group = optimizer.bf16_groups[g], optimizer.real_dp_process_group[g]
        size = optimizer.bf16_groups_flat[g].numel() // dist.get_world_size(process_group)
        _expect_size(flat, size, members := [name(p) for p in params])
        low = _rank(process_group) * size
        yield _slice(flat, _group_of(optimizer, flat, g), members, _packed(params), low, optimizer.bf16_groups_flat[g])


def _zero3(optimizer: Any, name: Callable[[Any], Named]) -> Iterator[Partition]:
    last = len(optimizer.optimizer.param_groups) - 1
    for i, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
        members = [name(p) for p in optimizer.fp16_groups[i]]
        low_precision = optimizer.fp16_partitioned_groups_flat[i]
        _expect_size(flat, optimizer.fp16_partitioned_groups_flat_numel[i], members)
        group = min(optimizer.sub_group_to_group_id[i], last)  # Adagrad is rebuilt by DeepSpeed with one group
        found = Partition(flat, group, not _shares_memory(flat, low_precision), [m.fqn for m in members])
        for member in members:
            start, numel = _zero3_slice(member.param)
            if numel:
                offset = optimizer.grad_position[member.param.ds_id][1]
                found.pieces.append(Piece(member.fqn, member.tiling, start, numel, offset))
        yield found


def _zero3_slice(p: Any) -> tuple[int, int]:
    """Return (first element, number of elements) of this rank's slice; the padding at the end is not counted."""
    size = p.partition_numel()
    start = _rank(p.ds_process_group) * size
    return min(start, p.ds_numel), max(0, min(size, p.ds_numel - start))


def _slice(
    flat: torch.Tensor, group: int, members: list[Named], offsets: list[int], low: int, low_precision: torch.Tensor
) -> Partition:
    """Return the partition that holds elements ``[low, low + flat.numel())`` of a group laid out at ``offsets``."""
    found = Partition(flat, group, not _shares_memory(flat, low_precision), [m.fqn for m in members])
    for member, offset in zip(members, offsets, strict=True):
        start = max(0, low - offset)
        stop = min(member.numel, low + flat.numel() - offset)
        if start < stop:
            found.pieces.append(Piece(member.fqn, member.tiling, start, stop - start, offset + start - low))
    return found


def _packed(params: Iterable[torch.Tensor]) -> list[int]:
    """Return the offset of each parameter when they lie one behind the other."""
    offsets, end = [], 0
    for p in params:
        offsets.append(end)
        end += p.numel()
    return offsets


def _group_of(optimizer: Any, key: torch.Tensor, default: int) -> int:
    groups = optimizer.optimizer.param_groups
    return next((i for i, group in enumerate(groups) if any(p is key for p in group["params"])), default)


def _rank(group: Any) -> int:
    return dist.get_rank(group)


def _shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.numel() > 0


def _expect_size(flat: torch.Tensor, size: int, members: list[Named]) -> None:
    if flat.numel() != size:
        names = f"{members[0].fqn!r} … {members[-1].fqn!r}"
        raise UnsupportedLayout(f"master partition of {names}: expected {size} elements, found {flat.numel()}")


_BUILDERS: dict[str, Callable[[Any, Callable[[Any], Named]], Iterator[Partition]]] = {
    "FP16_UnfusedOptimizer": _unfused,
    "FP16_Optimizer": _fused,
    "DeepSpeedZeroOptimizer": _zero12,
    "BF16_Optimizer": _bf16,
    "DeepSpeedZeroOptimizer_Stage3": _zero3,
}
"""By exact class name: a subclass (ZenFlow, SuperOffload) keeps its state elsewhere."""


# ------------------------------------------------------------------------------- writing back, in DeepSpeed's own order


def before_writing(optimizer: Any) -> None:
    """Make the engine ready to be written into: ZeRO-3 drops gathered parameters, which would hide the new values."""
    if "DeepSpeedZeroOptimizer_Stage3" in class_names(optimizer):
        optimizer.checkpoint_event_prologue()
    elif "DeepSpeedZeRoOffload" in class_names(optimizer):
        optimizer.partition_all_parameters()


@torch.no_grad()
def rebuild_low_precision(optimizer: Any) -> None:
    """Copy masters to the model's own parameters. A collective under ZeRO-1 and 2 (each rank has its slice only)."""
    kind = type(optimizer).__name__
    if kind in ("DeepSpeedZeroOptimizer", "BF16_Optimizer"):
        optimizer.update_lp_params()
    elif kind == "DeepSpeedZeroOptimizer_Stage3":
        for i in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(i)
    elif kind == "FP16_UnfusedOptimizer":
        for params, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for p, master in zip(params, masters, strict=True):
                p.data.copy_(master)
    elif kind == "FP16_Optimizer":
        # Through the parameters, as its step() does: fp16_groups_flat need not be their memory any more.
        for params, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            for p, offset in zip(params, _packed(params), strict=True):
                p.data.copy_(flat.detach().narrow(0, offset, p.numel()).view(p.shape))


def after_writing(optimizer: Any) -> None:
    """Gather ZeRO-3's persistent parameters again, as every step leaves them. A collective there."""
    if "DeepSpeedZeroOptimizer_Stage3" in class_names(optimizer):
        optimizer.checkpoint_event_epilogue()
    elif "DeepSpeedZeRoOffload" in class_names(optimizer) and optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def relink_state(optimizer: Any, complete: bool) -> None:
    """Point ``param._hp_mapping`` at the optimizer state as it is now; ``complete``: every partition has some.

    DeepSpeed links once, after the first step of group 0, so tensors that a load created would never be seen by
    ``deepspeed.utils.safe_get_*`` (nor, without a load, those of the other groups).
    """
    if inner_optimizer(optimizer) is not None and hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
        optimizer._hp_optimizer_states_linked = complete  # else the first step has to link again
