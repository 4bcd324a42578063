"""Which part of which global tensor each tensor of a torch training loop is.

Names come from ``torch_names``. Places come from DTensors (FSDP2, HSDP, DTensor tensor parallelism), from the user's
rules or Megatron's attributes (``shared_tiling``), or are whole. Everything that cannot be expressed is collected, so
that a job learns all of it at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckpt.engine.shared_check import PLAIN, check_tensor, class_names
from ckpt.engine.shared_partition import Named, Partition, Piece
from ckpt.engine.shared_ranks import place_in
from ckpt.engine.shared_tiling import Tiler
from ckpt.engine.torch_dtensor import dtensor_tiling, is_dtensor, mesh_ranks, nested
from ckpt.engine.torch_names import EXTRA_STATE, buffers_of, global_name, joined, marked_name, modules_of, parameters_of
from ckpt.errors import UnsupportedLayout
from ckpt.layout.spec import BUFFER, PARAM
from ckpt.layout.tiling import Tiling

if TYPE_CHECKING:
    from collections.abc import Collection

    from ckpt.engine.base import Context
    from ckpt.engine.torch_parts import ModelPart, Parts

_REFUSED = {
    "FullyShardedDataParallel": "FSDP1 (its flat parameters are not supported): use fully_shard (FSDP2)",
}
"""Modules that keep the parameters where this adapter does not look, by class name."""


@dataclass(slots=True)
class Layout:
    """``named``: id of a parameter -> what it is. ``stateful``: modules with state beside tensors, by global name.
    ``partitions``: for each optimizer what it steps; without pieces where this rank has nothing of it.
    """

    tiler: Tiler
    named: dict[int, Named] = field(default_factory=dict)
    buffers: list[Named] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    stateful: dict[str, torch.nn.Module] = field(default_factory=dict)
    partitions: list[list[Partition]] = field(default_factory=list)
    listed: set[str] = field(default_factory=set)
    names_by_id: dict[int, str] = field(default_factory=dict)


def layout_of(parts: Parts, context: Context, stated: Collection[str] = ()) -> Layout:
    """Return the layout of an engine; what cannot be expressed is in ``tiler.problems``.

    ``stated``: parameters that a checkpoint has optimizer state of, which a frozen one may have kept as well.
    """
    group = context.groups.get("tp", ())
    layout = Layout(Tiler(context, *place_in(group), unnamed=not group and _world() > 1))
    for model in parts.models:
        _add_model(layout, model, several=len(parts.models) > 1)
    layout.partitions = [_partitions(layout, optimizer, stated) for optimizer in parts.optimizers]
    return layout


def _add_model(layout: Layout, model: ModelPart, *, several: bool) -> None:
    tiler = layout.tiler

    def name(local: str) -> str:
        tiler.locals_seen |= {local, marked_name(local, model.stage)}
        return global_name(tiler.context, local, model.stage, several=several)

    for prefix, child in modules_of(model.module):
        for refused in sorted(class_names(child) & _REFUSED.keys()):
            tiler.problems.append(f"module {prefix!r}: {_REFUSED[refused]}")
        if type(child).get_extra_state is not torch.nn.Module.get_extra_state:
            fqn = name(joined(prefix, EXTRA_STATE)).removesuffix(EXTRA_STATE).removesuffix(".")
            layout.stateful[fqn] = child
    for local, p in parameters_of(model.module):
        listed = _listed(layout, name(local), p)
        if listed is not None:
            layout.named[id(p)] = Named(listed, _tiling(tiler, listed, PARAM, p), p)
    for local, buffer in buffers_of(model.module):
        listed = _listed(layout, name(local), buffer)
        if listed is not None:
            layout.buffers.append(Named(listed, _tiling(tiler, listed, BUFFER, buffer), buffer))


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that keeps the state: of a ``ZeroRedundancyOptimizer`` the local one."""
    return optimizer.optim if "ZeroRedundancyOptimizer" in class_names(optimizer) else optimizer


def _listed(layout: Layout, fqn: str, tensor: Any) -> str | None:
    """Return the name to list a tensor under; None if it is listed already."""
    layout.tiler.seen.add(fqn)
    found = layout.names_by_id.get(id(tensor))
    listed = found or layout.tiler.context.rules.tied.get(fqn, fqn)
    if listed != fqn:
        layout.aliases[fqn] = listed
    if found is not None:
        return None
    if listed in layout.listed:
        layout.tiler.problems.append(f"tensor {listed!r}: two different tensors of this rank have this name")
        return None
    layout.listed.add(listed)
    layout.names_by_id[id(tensor)] = listed
    return listed


def _tiling(tiler: Tiler, fqn: str, role: str, tensor: Any) -> Tiling:
    if torch.nn.parameter.is_lazy(tensor):
        tiler.problems.append(f"tensor {fqn!r} ({role}) is not initialized yet: run a forward pass first")
        return Tiling.whole(())
    try:
        check_tensor(fqn, role, tensor)
    except UnsupportedLayout as error:
        tiler.problems.append(str(error))
    local = getattr(tensor, "_local_tensor", tensor)
    if type(local) not in PLAIN and is_traceable_wrapper_subclass(local):
        kind = type(local).__name__
        tiler.problems.append(f"tensor {fqn!r} ({role}) is a {kind}: expected a plain tensor or a DTensor of one")
    if not is_dtensor(tensor):
        return tiler.tiling(fqn, tuple(tensor.shape), tensor)
    tiling, trouble = dtensor_tiling(tensor)
    if trouble:
        tiler.problems.append(f"tensor {fqn!r} ({role}) {trouble}")
    group = set(tiler.context.groups.get("tp", ()))
    if tiler.degree == 1 or group <= mesh_ranks(tensor):
        tiler.explained = True  # the DTensor knows of tensor parallelism itself, if its mesh can have it
        if len(mesh_ranks(tensor)) < _world():
            tiler.check_named(fqn, tensor)
        return tiling
    if tiler.context.rules.rule_for(fqn) is None and not tiler.context.rules.tensors:
        tiler.problems.append(
            f"tensor {fqn!r}: its mesh lacks this rank's tensor-parallel group {sorted(group)}, and no rule says how "
            f"the group cuts it"
        )
        return tiling
    return nested(tiler.tiling(fqn, tuple(tensor.shape), tensor), tiling)


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _partitions(layout: Layout, optimizer: Any, stated: Collection[str]) -> list[Partition]:
    problems = layout.tiler.problems
    if getattr(optimizer, "_overlap_with_ddp", False):
        problems.append("ZeroRedundancyOptimizer(overlap_with_ddp=True): its steps end in the next backward pass")
        return []
    inner = inner_optimizer(optimizer)
    own = {id(p) for group in inner.param_groups for p in group["params"]}
    found = []
    for g, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            entry = layout.named.get(id(p))
            if entry is None:
                problems.append(
                    f"optimizer group {g} steps a parameter of shape {list(p.shape)} that the module lacks: was the "
                    f"optimizer made before the module was wrapped, or for another one?"
                )
            elif p.requires_grad or inner.state.get(p) or entry.fqn in stated:
                holds = id(p) in own and (not is_dtensor(p) or p.device_mesh.get_coordinate() is not None)
                pieces = [Piece(entry.fqn, entry.tiling, 0, entry.numel, 0)] if holds else []
                found.append(Partition(p, g, False, [entry.fqn], pieces, flat=False))
    return found
