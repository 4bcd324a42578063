"""What a DeepSpeed engine's parameters and buffers are in the whole model: global name, and which part of the tensor.

Three things make a local name another one globally: experts are numbered from 0 on every expert-parallel rank; modules
that a pipeline shares between stages share only the weights that were declared as tied; and whatever the user's rules
say. Which part a local tensor is, tensor parallelism decides: rules, DeepSpeed's AutoTP record, Megatron's attributes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ckpt.engine.deepspeed_mesh import Mesh, mesh_of
from ckpt.engine.shared_check import class_names
from ckpt.engine.shared_objects import stateful_modules
from ckpt.engine.shared_partition import Named, clean_name
from ckpt.engine.shared_ranks import place_in
from ckpt.engine.shared_tiling import Tiler
from ckpt.errors import LayoutError
from ckpt.layout.tiling import Runs, Tiling, length, take

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckpt.engine.base import Context

_AUTOTP = "ds_autotp_universal_checkpoint_meta"
"""Attribute in which DeepSpeed's AutoTP layers record for each parameter how they have cut it."""

_EXTRA = "_extra_state"
"""torch's name for the state of a module beside its tensors, as if it were a tensor of the module."""


@dataclass(slots=True)
class Naming:
    """One survey of an engine.

    ``named``: ``id(parameter)`` -> what it is, in module order; ``buffers``: the persistent ones; ``aliases``: tied
    name -> listed name; ``stateful``: modules with state beside tensors, by global name. ``problems``: everything that
    cannot be named or placed.
    """

    mesh: Mesh
    tiler: Tiler
    named: dict[int, Named] = field(default_factory=dict)
    buffers: list[Named] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    stateful: dict[str, torch.nn.Module] = field(default_factory=dict)
    _experts: dict[str, int] = field(default_factory=dict)
    _apart: dict[int, int] = field(default_factory=dict)
    _problems: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, engine: Any, context: Context) -> Naming:
        """Survey an engine; nothing of it is changed, and nothing is refused yet (see :attr:`problems`)."""
        mesh = mesh_of(engine, context)
        tp = mesh.groups.get("tp", ())
        alone = not tp and dist.get_world_size() > 1
        found = cls(mesh, Tiler(context, *place_in(tp), unnamed=alone))
        found._find_experts(engine.module)
        found._apart = dict(_not_tied(engine.module))
        found._name_parameters(engine.module)
        found._name_buffers(engine.module)
        found.stateful = {found._module_name(n): child for n, child in stateful_modules(engine.module).items()}
        return found

    @property
    def problems(self) -> list[str]:
        """What keeps this engine from being saved or loaded, one line each."""
        found = [*self.mesh.problems, *self._problems, *self.tiler.problems]
        return found + self._hidden_problems() if found else []

    def _hidden_problems(self) -> list[str]:
        apart = bool(self.mesh.experts) or len(self.mesh.groups.get("pp", ())) > 1
        return self.tiler.hidden_problems(self.mesh.groups, apart=apart)

    def _module_name(self, local: str) -> str:
        return self._name(f"{local}.{_EXTRA}" if local else _EXTRA).removesuffix(_EXTRA).removesuffix(".")

    def _name(self, local: str, tensor: Any = None) -> str:
        local = clean_name(local)
        prefix = next((p for p in self._experts if local.startswith(p)), None)
        if prefix is not None:
            number, _, rest = local.removeprefix(prefix).partition(".")
            local = f"{prefix}{int(number) + self._experts[prefix]}.{rest}"
        if id(tensor) in self._apart:
            local = re.sub(r"^(tied_modules\.[^.]+)", rf"\1@{self._apart[id(tensor)]}", local)
        self.tiler.locals_seen.add(local)
        return self.tiler.context.name(local)

    def _listed(self, local: str, tensor: Any) -> str:
        """Return the name that a tensor is listed under, which for one tied across ranks is another one's."""
        fqn = self._name(local, tensor)
        self.tiler.seen.add(fqn)
        listed = self.tiler.context.rules.tied.get(fqn, fqn)
        if listed != fqn:
            self.aliases[fqn] = listed
        return listed

    def _name_parameters(self, module: torch.nn.Module) -> None:
        taken: dict[str, str] = {}
        for name, p in module.named_parameters(remove_duplicate=False):
            if id(p) in self.named:
                fqn, listed = self._name(name, p), self.named[id(p)].fqn
                self.tiler.seen.add(fqn)
                if fqn != listed:
                    self.aliases[fqn] = listed
                continue
            numbered = any(clean_name(name).startswith(prefix) for prefix in self._experts)
            if getattr(p, "allreduce", True) is False and not numbered:
                self._problems.append(
                    f"parameter {name!r}: an expert of a mixture of experts, whose name repeats on every "
                    f"expert-parallel rank (only deepspeed.moe.layer.MoE numbers them in a known way)"
                )
            fqn = self._listed(name, p)
            if fqn in taken:
                self._problems.append(f"parameters {taken[fqn]!r} and {name!r} of this rank are both named {fqn!r}")
            taken[fqn] = name
            self.named[id(p)] = Named(fqn, self._tiling(fqn, tuple(getattr(p, "ds_shape", p.shape)), p), p)

    def _name_buffers(self, module: torch.nn.Module) -> None:
        """List the persistent buffers; those that are not persistent are rebuilt by the model's own code."""
        listed: dict[int, str] = {}
        for prefix, child in module.named_modules(remove_duplicate=False):
            for name, buffer in child._buffers.items():
                if buffer is None or name in child._non_persistent_buffers_set:
                    continue
                local = f"{prefix}.{name}" if prefix else name
                if id(buffer) in listed:
                    fqn = self._name(local)
                    if fqn != listed[id(buffer)]:
                        self.aliases[fqn] = listed[id(buffer)]
                    continue
                listed[id(buffer)] = fqn = self._listed(local, None)
                self.buffers.append(Named(fqn, self.tiler.tiling(fqn, tuple(buffer.shape), buffer), buffer))

    def _tiling(self, fqn: str, local: tuple[int, ...], p: Any) -> Tiling:
        record = getattr(p, _AUTOTP, None)
        if record is None or self.tiler.context.rules.rule_for(fqn) is not None:
            return self.tiler.tiling(fqn, local, p)
        try:
            tiling = autotp_tiling(record, local, self.tiler.rank)
            self.tiler.explained |= tiling.shape != tiling.local
            return tiling
        except LayoutError as error:
            self.tiler.problems.append(f"tensor {fqn!r}: {error}")
            return Tiling.whole(local)

    def _find_experts(self, module: torch.nn.Module) -> None:
        for name, child in module.named_modules(remove_duplicate=False):
            if "Experts" in class_names(child) and hasattr(child, "deepspeed_experts"):
                local: Any = child.deepspeed_experts
                group = next((p.group_name for p in local.parameters() if hasattr(p, "group_name")), "")
                first = place_in(self.mesh.experts.get(group, ()))[0] * len(local)
                self._experts[clean_name(f"{name}.deepspeed_experts.".lstrip("."))] = first


def autotp_tiling(record: Mapping[str, Any], local: tuple[int, ...], rank: int) -> Tiling:
    """Return which part of a parameter AutoTP left on a rank, from the record that it keeps for its own checkpoints.

    Args:
        record: DeepSpeed's ``ds_autotp_universal_checkpoint_meta``.
        local: shape of what is there.
        rank: number of this rank in the tensor-parallel group.

    Raises:
        LayoutError: a way of cutting that DeepSpeed itself calls unsupported, or a record that is not what is there.
    """
    conversion = record.get("conversion") or {}
    if conversion.get("unsupported_reason"):
        raise LayoutError(f"AutoTP has cut it in a way that it cannot describe: {conversion['unsupported_reason']}")
    shape, dim = tuple(record.get("logical_shape") or local), record.get("partition_dim")
    widths, sizes = record.get("sub_param_shard_widths"), record.get("partition_sizes")
    if dim is None or record.get("replicated"):
        if shape != local:
            raise LayoutError(f"AutoTP says that every rank holds all of {list(shape)}, found {list(local)}")
        return Tiling.whole(local)
    cuts = widths or [sizes or ()]
    if any(len(one) <= rank for one in cuts) or not 0 <= dim < len(shape):
        raise LayoutError(f"AutoTP has cut it, but has not recorded where for rank {rank} of the tensor-parallel group")
    tiling = Tiling.of_runs(shape, {dim: _runs(cuts, rank)})
    if tiling.local != local:
        raise LayoutError(f"AutoTP has recorded a part of shape {list(tiling.local)}, found {list(local)}")
    return tiling


def _runs(widths: Any, rank: int) -> Runs:
    """Return the runs of a rank along a dimension of matrices whose cuts are given by ``widths[matrix][rank]``."""
    runs, start = [], 0
    for one in widths:
        runs.append((start + sum(one[:rank]), one[rank]))
        start += sum(one)
    return take(tuple(runs), 0, length(tuple(runs)))


def _not_tied(module: Any) -> Iterator[tuple[int, int]]:
    """Yield ``id(parameter)`` and layer number for what a pipeline stage has of a shared module without sharing it.

    A ``TiedLayerSpec`` builds its whole module on every stage, but only ``tied_weight_attr`` is broadcast and has its
    gradients summed: everything else in it (positions beside an embedding) goes its own way on each stage. The first
    stage keeps the plain name; on the others it belongs to the first layer there that uses the module.
    """
    for key, comm in (getattr(module, "tied_comms", None) or {}).items():
        if module.global_rank == min(comm["ranks"]):
            continue
        tied = {id(attrgetter(name)(comm["module"])) for name in comm["weight_attr"]}
        layers = enumerate(module._layer_specs[module._local_start : module._local_stop], module._local_start)
        first = next(i for i, spec in layers if getattr(spec, "key", None) == key)
        yield from ((id(p), first) for p in comm["module"].parameters() if id(p) not in tied)
