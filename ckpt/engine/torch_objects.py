"""The part of a torch loop's state that is not tensors: hyperparameters, schedulers, gradient scaler, extra state.

Stored in the shapes of every other engine, so that a job may go on with another one: ``optimizer`` has the groups of
all optimizers one behind the other, ``engine`` the one counter that a loop's objects know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.engine.base import Mismatch
from ckpt.engine.shared_check import class_name, class_names
from ckpt.engine.shared_groups import capture_groups, match_groups, restore_groups
from ckpt.engine.shared_objects import gathered
from ckpt.engine.torch_layout import inner_optimizer
from ckpt.engine.torch_schedulers import capture_schedulers, restore_schedulers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt.engine.shared_groups import Match, Source
    from ckpt.engine.torch_layout import Layout
    from ckpt.engine.torch_parts import Parts


def capture_objects(parts: Parts, layout: Layout, step: int) -> dict[str, Any]:
    """Return what :func:`restore_objects` puts back."""
    return {**capture_counters(parts, layout, step), "optimizer": _capture_optimizers(parts, layout)}


def capture_counters(parts: Parts, layout: Layout, step: int) -> dict[str, Any]:
    """Return the part of it that changes from step to step, without the optimizers' groups."""
    found: dict[str, Any] = {"engine": {"global_steps": step}, **capture_schedulers(parts)}
    if parts.scaler is not None:
        found["scaler"] = {"class": class_name(parts.scaler), "state": parts.scaler.state_dict()}
    if layout.stateful:
        found["modules"] = {name: module.get_extra_state() for name, module in layout.stateful.items()}
    return found


def _capture_optimizers(parts: Parts, layout: Layout) -> dict[str, Any] | None:
    found: list[dict[str, Any]] = []
    for optimizer, partitions in zip(parts.optimizers, layout.partitions, strict=True):
        # The groups of the optimizer that the user sees: a scheduler has moved their lr, ZeRO copies it with each step.
        one = capture_groups(optimizer, partitions) or {}
        found.append({**one, "class": class_name(inner_optimizer(optimizer))})
    if len(found) > 1:
        groups = [{**group, "class": one["class"]} for one in found for group in one["groups"]]
        return {"class": ", ".join(one["class"] for one in found), "groups": groups}
    return found[0] if found else None


def compare_objects(parts: Parts, layout: Layout, saved: Sequence[Mapping[str, Any]]) -> Mismatch:
    """Return what :func:`restore_objects` could not put back of ``saved``."""
    here, there = layout.stateful.keys(), gathered(saved, "modules").keys()
    missing = [f"extra state of module {name!r}" for name in sorted(here - there)]
    unexpected = [f"extra state of module {name!r}" for name in sorted(there - here)]
    conflicts: list[str] = []
    if parts.optimizers and any("optimizer" in one for one in saved):
        matches = _matches(parts, layout, [one.get("optimizer") for one in saved])
        trained = {entry.fqn for entry in layout.named.values() if entry.param.requires_grad}
        missing += [f"optimizer state of {fqn!r}" for match in matches for fqn in match.added if fqn in trained]
        left = set.intersection(*(set(match.removed) for match in matches))
        unexpected += [f"optimizer state of {fqn!r}" for fqn in sorted(left)]
        conflicts = [line for match in matches for line in match.conflicts]
    return Mismatch(tuple(missing), tuple(unexpected), tuple(conflicts))


def restore_objects(parts: Parts, layout: Layout, saved: Sequence[Mapping[str, Any]]) -> list[str]:
    """Put back what the saved job's ranks had (this rank's own first) and return notes about what could not be."""
    notes: list[str] = []
    groups = [one.get("optimizer") for one in saved]
    sources: list[list[Source | None]] = [[] for _ in parts.optimizers]
    if any(groups):
        for i, (optimizer, match) in enumerate(zip(parts.optimizers, _matches(parts, layout, groups), strict=True)):
            inner = inner_optimizer(optimizer)
            notes += restore_groups(inner, match, groups)
            if inner is not optimizer:
                _follow(optimizer, inner)
            sources[i] = list(match.sources)
    notes += restore_schedulers(parts, saved, sources)
    notes += _restore_scaler(parts.scaler, saved[0] if saved else {})
    states = gathered(saved, "modules")
    for name, module in layout.stateful.items():
        if name in states:
            module.set_extra_state(states[name])
    return notes


def _matches(parts: Parts, layout: Layout, groups: Sequence[Mapping[str, Any] | None]) -> list[Match]:
    stage = bool(parts.pipeline) or len(layout.tiler.context.groups.get("pp", ())) > 1
    return [
        match_groups(optimizer, partitions, groups, layout.aliases, part=stage)
        for optimizer, partitions in zip(parts.optimizers, layout.partitions, strict=True)
    ]


def _follow(optimizer: Any, inner: Any) -> None:
    """Give a ``ZeroRedundancyOptimizer`` the hyperparameters of its local optimizer; a step copies them back."""
    for shown, local in zip(optimizer.param_groups, inner.param_groups, strict=True):
        shown.update({name: value for name, value in local.items() if name != "params"})


def _restore_scaler(scaler: Any, objects: Mapping[str, Any]) -> list[str]:
    saved = objects.get("scaler")
    if scaler is None or saved is None:
        if scaler is None and saved is None:
            return []
        side = "the checkpoint" if scaler is None else "this engine"
        return [f"only {side} has a gradient scaler: its state was left out"]
    if bool(saved["state"]) != bool(scaler.is_enabled()) or not class_names(scaler) & {saved["class"].split(".")[-1]}:
        return [f"the gradient scaler was a {saved['class']}, here it is another kind or disabled: left as it is"]
    scaler.load_state_dict(saved["state"])
    return []
