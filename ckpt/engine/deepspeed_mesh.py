"""The process groups of a DeepSpeed engine: with which ranks this one shares an axis.

An ``mpu`` object is its author's claim: DeepSpeed asks it for groups, sizes and ranks one by one, and nothing makes
them agree. Here they have to. That the groups of *all* ranks tile the world is checked with the layouts
(:mod:`ckpt.layout.mesh`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ckpt.engine.shared_ranks import group_ranks, place_in

if TYPE_CHECKING:
    from ckpt.engine.base import Context

_KINDS = {
    # Where an mpu names the narrower kind, its model_parallel group is of tensor and pipeline parallelism together.
    "tp": ("tensor_model_parallel", "slice_parallel", "model_parallel"),
    "pp": ("pipe_parallel", "pipeline_model_parallel"),
    "cp": ("sequence_parallel", "context_parallel"),
    "dp": ("data_parallel",),
}
"""Axis -> what methods of an mpu call it (``get_<kind>_group``, ``…_world_size``, ``…_rank``), the best one first."""


@dataclass(slots=True)
class Mesh:
    """``groups``: axis -> ranks of this rank's group along it. ``experts``: name of an expert group -> its ranks.

    ``problems``: where an mpu contradicts itself or the engine, one line each.
    """

    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    experts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def mesh_of(engine: Any, context: Context) -> Mesh:
    """Return this rank's groups: what the user says, else what the engine's mpu says, else what the engine has made."""
    mesh = Mesh()
    mpu = getattr(engine, "mpu", None)
    for axis in _KINDS:
        if axis in context.groups:
            mesh.groups[axis] = context.groups[axis]
        elif mpu is not None:
            _ask(mpu, axis, mesh)
    if "cp" not in mesh.groups and getattr(engine, "mesh_device", None) is not None:
        mesh.groups["cp"] = group_ranks(engine.mesh_device.get_group(mesh_dim="sequence_parallel"))
    _data_parallel(engine, mesh)
    _expert_parallel(engine, mesh, context)
    mesh.groups |= context.groups
    own = dist.get_rank()
    mesh.problems += [f"group {a!r} lacks this rank ({own})" for a, ranks in mesh.groups.items() if own not in ranks]
    return mesh


def _ask(mpu: Any, axis: str, mesh: Mesh) -> None:
    groups = {kind: group for kind in _KINDS[axis] if (group := _group(mpu, kind)) is not None}
    claims = {kind: (_number(mpu, f"get_{kind}_world_size"), _number(mpu, f"get_{kind}_rank")) for kind in _KINDS[axis]}
    if next(iter(groups), "model_parallel") != "model_parallel" or hasattr(mpu, "initialize_sequence_parallel"):
        # There it is of several axes together, or (DeepSpeed's parallel_state_sp) another name of the sequence's.
        claims.pop("model_parallel", None)
        groups.pop("model_parallel", None)
    if not groups:
        mesh.problems += [
            f"mpu.get_{kind}_world_size() is {size}, but neither mpu.get_{kind}_group() nor ckpt.Parallel(groups=…) "
            f"says which ranks these are"
            for kind, (size, _) in claims.items()
            if size is not None and size > 1
        ]
        return
    mesh.groups[axis] = ranks = group_ranks(next(iter(groups.values())))
    place = ranks.index(dist.get_rank()) if dist.get_rank() in ranks else None
    for kind, (size, rank) in claims.items():
        if size is not None and size != len(ranks):
            mesh.problems.append(f"mpu.get_{kind}_world_size() is {size}, its group has {len(ranks)} rank(s)")
        if rank is not None and rank != place:
            mesh.problems.append(f"mpu.get_{kind}_rank() is {rank}, in its group this rank is number {place}")


def _group(mpu: Any, kind: str) -> Any:
    try:
        return getattr(mpu, f"get_{kind}_group")()
    except Exception:  # not there, or not initialized: whatever an mpu raises then
        return None


def _number(mpu: Any, name: str) -> int | None:
    try:
        return int(getattr(mpu, name)())
    except Exception:
        return None


def _data_parallel(engine: Any, mesh: Mesh) -> None:
    """Compare with the group that DeepSpeed reduces gradients over: data-parallel ranks, of all sequence parts."""
    group = getattr(engine, "seq_data_parallel_group", None)
    reduced = group_ranks(group) if group is not None else tuple(range(dist.get_world_size()))
    sequence = mesh.groups.get("cp", ())
    if "dp" not in mesh.groups:
        if not set(sequence) - {dist.get_rank()} & set(reduced):
            mesh.groups["dp"] = reduced
        elif set(sequence) <= set(reduced):  # blocks of neighbours, as DeepSpeed's own parallel_state_sp makes them
            mesh.groups["dp"] = reduced[place_in(sequence)[0] :: len(sequence)]
    data = len(mesh.groups.get("dp", reduced))
    if len(reduced) not in (data, data * max(1, len(sequence))):
        mesh.problems.append(
            f"the engine reduces gradients over {len(reduced)} rank(s), its mpu has groups of {data} data-parallel "
            f"and {max(1, len(sequence))} sequence-parallel rank(s)"
        )


def _expert_parallel(engine: Any, mesh: Mesh, context: Context) -> None:
    wanted = {p.group_name for p in engine.module.parameters() if hasattr(p, "group_name") and not _reduced(p)}
    groups = getattr(engine, "expert_parallel_group", None) or {}
    for name in sorted(wanted):
        if name in groups:
            mesh.experts[name] = group_ranks(groups[name])
        elif len(wanted) == 1 and "ep" in context.groups:
            mesh.experts[name] = context.groups["ep"]
        else:
            mesh.problems.append(f"experts of group {name!r}: the engine has no such expert-parallel group")
    # By name: layers, and so stages of a pipeline, may differ in their expert parallelism.
    mesh.groups |= {f"ep {name}": ranks for name, ranks in mesh.experts.items()}


def _reduced(p: Any) -> bool:
    return getattr(p, "allreduce", True) is not False
