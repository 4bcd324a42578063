"""What a DCP checkpoint of a source holds, entry by entry: tensors as ``get_state_dict`` names them, and plain values.

``model.<name>``, ``optim.state.<name>.<state>``, ``optim.param_groups.<n>.<option>`` and, for jobs that flatten it,
``optim.param_groups.<name>.<option>``: a job of plain torch finds all that it asks for. What else the source has stands
at the top, under its own name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ckpt.convert.dcp.metadata import Path
from ckpt.convert.dcp.optimizer import default_options
from ckpt.convert.options import WEIGHTS
from ckpt.layout.spec import BUFFER, MASTER, PARAM, TensorSpec
from ckpt.words import some

if TYPE_CHECKING:
    from ckpt.convert.opened import Loose, Opened
    from ckpt.convert.options import WriteOptions
    from ckpt.convert.target import Target

_RESERVED = ("model", "optim", "scheduler", "scaler", "schedulers")
_OURS = ("optimizer", "setup", *_RESERVED)
"""Engine objects that have a place in it, or are none of the job's state."""


@dataclass(slots=True)
class Entries:
    """``tensors``: path -> tensor of the target; several paths may be one tensor (ties). ``values``: path -> value.
    ``shared``: path -> path whose value it has too. ``lost``, ``made``: a line for each thing that is left out or made
    up.
    """

    tensors: dict[Path, TensorSpec] = field(default_factory=dict)
    values: dict[Path, Any] = field(default_factory=dict)
    shared: dict[Path, Path] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    made: list[str] = field(default_factory=list)


def entries_of(opened: Opened, target: Target, options: WriteOptions) -> Entries:
    """Return what is to be written."""
    found = Entries()
    weights: dict[str, TensorSpec] = {}
    masters = {spec.fqn for spec in target.specs if spec.role == MASTER}
    trailing = sorted({s.fqn for s in target.specs if s.role == PARAM and s.fqn in masters} - set(opened.derived))
    for spec in target.specs:
        if spec.role in (PARAM, BUFFER, MASTER):
            if spec.role != PARAM or spec.fqn not in masters:
                weights[spec.fqn] = spec
        else:
            found.tensors[("optim", "state", spec.fqn, spec.role)] = spec
    if masters:
        found.made.append("parameters are written in the precision of their masters, as FSDP2 keeps them")
    if trailing:
        found.lost.append(
            f"parameters that are not the rounding of their masters, whose masters are written: {some(trailing)}"
        )
    found.tensors = {**{("model", name): spec for name, spec in weights.items()}, **found.tensors}
    for name, listed in sorted(opened.aliases.items()):
        if listed in weights and name not in weights:
            found.tensors["model", name] = weights[listed]
    if options.roles != WEIGHTS:
        _groups(found, opened, target)
        _objects(found, opened.objects)
    return found


def _groups(found: Entries, opened: Opened, target: Target) -> None:
    """Add the optimizer's groups, with what torch's own optimizer has beside: a job asks for each of its options."""
    states = {str(path[3]) for path in found.tensors if path[:2] == ("optim", "state")}
    engine: Mapping[str, Any] = next(
        (o.tree for o in opened.objects if o.name == "optimizer" and o.kind == "engine" and o.tree), {}
    )
    defaults = default_options(str(engine.get("class", "")), states)
    made: set[str] = set()
    for number, group in enumerate(target.groups):
        missing = {k: v for k, v in defaults.items() if k not in group.options}
        if "lr" in group.options and "initial_lr" not in group.options:
            missing["initial_lr"] = group.options["lr"]
        made.update(missing)
        for name, value in {**group.options, **missing, "params": list(group.params)}.items():
            path: Path = ("optim", "param_groups", number, name)
            found.values[path] = value
            if name != "params":  # a job that flattens its optimizer's state asks for them by parameter
                found.shared.update({("optim", f"param_groups.{fqn}.{name}"): path for fqn in group.params})
    if made:
        found.made.append(
            f"options of the optimizer's groups that torch's has and the source does not: {some(sorted(made))}"
        )


def _objects(found: Entries, objects: tuple[Loose, ...]) -> None:
    first: dict[tuple[str, str], Loose] = {}
    for one in sorted(objects, key=lambda one: one.ranks):
        kept = first.setdefault((one.kind, one.name), one)
        if kept is not one and (one.kind != "engine" or one.name not in ("optimizer", "modules")):
            found.lost.append(f"{one.kind} {one.name!r}: ranks differ in it, that of rank {kept.ranks[0]} is written")
    seen: set[Path] = set()
    for (kind, name), one in first.items():
        tree = one.tree
        if kind == "rng":
            found.lost.append("random generators: a state dict of DCP is one for all ranks")
        elif kind == "engine" and name == "modules":
            for loose in (o for o in objects if (o.kind, o.name) == ("engine", "modules")):
                for module, state in (loose.tree or {}).items():
                    path: Path = ("model", f"{module}._extra_state".removeprefix("."))
                    if path not in seen:
                        seen.add(path)
                        _leaves(found, path, state)
        elif kind == "engine" and name in ("scheduler", "scaler"):
            if isinstance(tree, Mapping):
                _leaves(found, (name,), tree.get("state"))
        elif kind == "engine" and name == "schedulers":
            _leaves(found, (name,), [scheduler.get("state") for scheduler in tree])
        elif kind == "engine" and name == "engine":
            others = sorted(key for key in tree if key != "global_steps") if isinstance(tree, Mapping) else []
            if others:
                found.lost.append(f"counters of the source's engine: {some(others)}")
        elif kind == "engine":
            if name not in _OURS and tree:
                found.lost.append(f"{name}: state of the source's engine that no torch loop has")
        elif name in _RESERVED:
            found.lost.append(f"{kind} {name!r}: the name has another meaning in the state dict")
        else:
            _leaves(found, (name,), tree)
    found.lost[:] = dict.fromkeys(found.lost)


def _leaves(found: Entries, path: Path, value: Any) -> None:
    """Add a tree as DCP flattens it: dictionaries always, lists that have dictionaries or tensors in them."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            _leaves(found, (*path, str(key)), one)
    elif isinstance(value, list) and any(isinstance(one, Mapping | torch.Tensor) for one in value):
        for number, one in enumerate(value):
            _leaves(found, (*path, number), one)
    else:
        found.values[path] = value
