"""What a Megatron-core model says of itself: global names, tilings, extra state.

All of it is read from ``sharded_state_dict()``, by which Megatron's own checkpoints are made: it knows what attributes
on parameters do not (gate and up of a GLU, layers of a pipeline stage, experts, weights tied across stages), and its
names are the same for the local and for the Transformer Engine modules.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ckpt.engine.shared_check import class_names
from ckpt.engine.shared_partition import Named
from ckpt.engine.shared_ranks import group_ranks, place_in
from ckpt.engine.shared_tiling import Tiler
from ckpt.layout.box import Box
from ckpt.layout.tiling import Tile, Tiling

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt.engine.base import Context

_WRAPPERS = {"DistributedDataParallel", "Float16Module"}

_FP8 = {"Float8Tensor", "MXFP8Tensor", "Float8BlockwiseQTensor", "NVFP4Tensor", "QuantizedTensor"}

_METADATA = {"non_homogeneous_layers": True, "singleton_local_shards": False}
"""Layers are named by their global number, not stacked to one tensor; gate and up stay one tensor."""

_GROUPS = {
    "tp": "get_tensor_model_parallel_group",
    "dp": "get_data_parallel_group",
    "pp": "get_pipeline_model_parallel_group",
    "cp": "get_context_parallel_group",
    "ep": "get_expert_model_parallel_group",
}

_OPTIONAL = {"cp", "ep"}
"""Axes that are named only if they have more than one rank."""


@dataclass(slots=True)
class Survey:
    """What the chunks of one rank hold.

    ``named``: ``id(parameter) -> Named``; ``buffers``: persistent ones. ``aliases``: tied name -> listed name.
    ``extras``: global name -> module with extra state, and that state. ``unused``: rules that fitted nothing here.
    ``assumed``: names that count as whole on all tensor-parallel ranks because only a rule says so.
    """

    named: dict[int, Named] = field(default_factory=dict)
    buffers: list[Named] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    extras: dict[str, tuple[torch.nn.Module, Any]] = field(default_factory=dict)
    unused: set[str] = field(default_factory=set)
    assumed: set[str] = field(default_factory=set)


def process_group(name: str) -> Any:
    """Return a process group of ``megatron.core.parallel_state`` by its getter's name; None where there is none."""
    state = sys.modules.get("megatron.core.parallel_state")  # the model's own module has imported it
    if state is None or not state.model_parallel_is_initialized():
        return None
    getter = getattr(state, name, None)
    return getter() if getter is not None else None


def axis_groups(context: Context) -> dict[str, tuple[int, ...]]:
    """Return axis -> ranks of this rank's group along it; what the user said of an axis counts first."""
    found: dict[str, tuple[int, ...]] = {}
    for axis, getter in _GROUPS.items():
        group = process_group(getter)
        if group is not None and (axis not in _OPTIONAL or group.size() > 1):
            found[axis] = group_ranks(group)
    return {**found, **context.groups}


def unwrap(chunk: Any) -> Any:
    """Return the model inside of Megatron's wrapper modules."""
    while class_names(chunk) & _WRAPPERS:
        chunk = chunk.module
    return chunk


def survey(chunks: Sequence[Any], context: Context) -> Survey:
    """Describe the model chunks of this rank. No collective, no copy.

    Raises:
        UnsupportedLayout: tensors whose place in a global tensor the model does not say; all of them.
    """
    found = Survey()
    tilers = _Tilers(context)
    for chunk in chunks:
        model = unwrap(chunk)
        metadata = dict(_METADATA)
        if getattr(chunk, "dp_cp_group", None) is not None:
            metadata["dp_cp_group"] = chunk.dp_cp_group
        for local, entry in model.sharded_state_dict(metadata=metadata).items():
            kinds = class_names(entry)
            if "ShardedObject" in kinds:
                _add_extra(found, tilers, model, local, entry)
            elif kinds & {"ShardedTensor", "ShardedTensorFactory"}:
                _add_tensor(found, tilers, entry)
            elif "LocalNonpersistentObject" not in kinds:
                tilers.problems.append(f"state {local!r} is a {type(entry).__name__}: expected a sharded tensor")
        for name, p in model.named_parameters():
            if id(p) not in found.named:
                tilers.problems.append(f"parameter {name!r} is not in the model's sharded_state_dict()")
            elif class_names(p) & _FP8:
                tilers.problems.append(f"parameter {name!r} is quantized ({type(p).__name__}): expected plain memory")
        if getattr(model, "share_embeddings_and_output_weights", False):
            # Said by every stage, because the one with the output layer need not be the one with the embedding.
            tied, listed = context.name("output_layer.weight"), context.name("embedding.word_embeddings.weight")
            found.aliases[tied] = listed
    groups = axis_groups(context)
    apart = any(len(groups.get(axis, ())) > 1 for axis in ("pp", "ep"))
    tilers.dense.check("the Megatron model", groups, apart=apart)
    found.unused = tilers.dense.unused()
    found.assumed = tilers.dense.assumed | tilers.experts.assumed
    return found


class _Tilers:
    """One :class:`Tiler` for dense tensors and one for experts, which may have tensor-parallel groups of their own."""

    def __init__(self, context: Context) -> None:
        self.context = context
        groups, several = axis_groups(context), dist.is_initialized() and dist.get_world_size() > 1
        rank, degree = place_in(groups.get("tp", ()))
        # Explained: sharded_state_dict() says of every tensor how it is cut.
        self.dense = Tiler(context, rank, degree, unnamed=several and "tp" not in groups, explained=True)
        self.problems = self.dense.problems
        own = dist.get_rank() if dist.is_initialized() else 0
        self.problems += [
            f"axis {a!r}: the group {list(ranks)} lacks this rank ({own})"
            for a, ranks in groups.items()
            if own not in ranks
        ]
        of_experts = process_group("get_expert_tensor_parallel_group")
        if of_experts is not None:  # else that of the dense ones is theirs too
            rank, degree = of_experts.rank(), of_experts.size()
        self.experts = replace(self.dense, rank=rank, degree=degree, assumed=set())

    def of(self, tensor: torch.Tensor) -> Tiler:
        return self.dense if getattr(tensor, "allreduce", True) else self.experts


def _add_tensor(found: Survey, tilers: _Tilers, entry: Any) -> None:
    whole = entry.data
    parts = [entry] if "ShardedTensor" in class_names(entry) else [*_leaves(entry.build())]
    local = _expert_name(parts[0])
    if local is None or any(_expert_name(part) != local for part in parts):
        names = sorted({part.key for part in parts})
        tilers.problems.append(f"tensor {entry.key!r} is stacked or stored under several names {names}")
        return
    tiler = tilers.of(whole)
    tiler.locals_seen.add(local)
    fqn = tilers.context.name(local)
    tiler.seen.add(fqn)
    listed = tilers.context.rules.tied.get(fqn)
    if listed is not None:
        found.aliases[fqn], fqn = listed, listed
    if tilers.context.rules.rule_for(fqn) is not None:
        tiling: Tiling | None = tiler.tiling(fqn, tuple(whole.shape), whole)
    else:
        tiling = _tiling(whole, parts)
    if tiling is None:
        tilers.problems.append(f"tensor {fqn!r}: the parts that it is stored as are no views that make up the whole")
        return
    if id(whole) in found.named:
        if found.named[id(whole)].fqn != fqn:
            found.aliases[fqn] = found.named[id(whole)].fqn
        return
    if any(named.fqn == fqn for named in found.named.values()):
        tilers.problems.append(f"tensor {fqn!r} is held twice by this rank, as two tensors")
        return
    if isinstance(whole, torch.nn.Parameter):
        found.named[id(whole)] = Named(fqn, tiling, whole)
    else:
        found.buffers.append(Named(fqn, tiling, whole))


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict | list | tuple):
        for one in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(one)
    else:
        yield tree


def _expert_name(part: Any) -> str | None:
    """Return the name of one tensor. Experts are stacked to one tensor under a key without their number: put it back.

    None: stacked in a way that this does not know.
    """
    key: str = part.key
    if not part.prepend_axis_num:
        return key
    if part.prepend_axis_num != 1 or ".experts." not in key:
        return None
    layer, _, rest = key.rpartition(".experts.")
    return f"{layer}.experts.{part.global_offset[0]}.{rest}"


def _tiling(whole: torch.Tensor, parts: Sequence[Any]) -> Tiling | None:
    tiles = []
    for part in parts:
        at = _offsets_in(whole, part.data)
        if at is None:
            return None
        box = Box(tuple(part.global_offset[part.prepend_axis_num :]), tuple(part.local_shape))
        tiles.append(Tile(box, at))
    if sum(tile.box.volume for tile in tiles) != whole.numel():
        return None
    return Tiling(tuple(parts[0].global_shape[parts[0].prepend_axis_num :]), tuple(whole.shape), tuple(tiles))


def _offsets_in(whole: torch.Tensor, part: torch.Tensor) -> tuple[int, ...] | None:
    """Return where the view ``part`` begins in a contiguous tensor; None if it is no view of it of the same strides."""
    shared = part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    if not shared or not whole.is_contiguous() or part.stride() != whole.stride():
        return None
    distance, at = part.storage_offset() - whole.storage_offset(), []
    for stride in whole.stride():
        at.append(distance // stride)
        distance %= stride
    return tuple(at)


def _add_extra(found: Survey, tilers: _Tilers, model: Any, local: str, entry: Any) -> None:
    tilers.dense.locals_seen.add(entry.key)
    value = entry.data
    if value is None or (isinstance(value, torch.Tensor) and value.numel() == 0):
        return  # modules that have nothing to say, or of the Transformer Engine without fp8
    name = tilers.context.name(entry.key).removesuffix("._extra_state")
    if any(size > 1 for size in entry.global_shape):
        name = f"{name}{list(entry.global_offset)}"  # experts share a key
    try:
        found.extras[name] = (model.get_submodule(local.removesuffix("._extra_state")), value)
    except AttributeError:
        tilers.problems.append(f"extra state {local!r} is of no module of that name")
