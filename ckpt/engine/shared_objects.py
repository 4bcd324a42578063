"""Plain state that engines of every framework have: LR schedulers, and modules with state beside their tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ckpt.engine.shared_check import class_name
from ckpt.engine.shared_partition import clean_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt.engine.shared_groups import Source


def capture_scheduler(scheduler: Any) -> dict[str, Any] | None:
    """Return what :func:`restore_scheduler` puts back."""
    return None if scheduler is None else {"class": class_name(scheduler), "state": scheduler.state_dict()}


def restore_scheduler(
    scheduler: Any, saved: Sequence[Mapping[str, Any] | None], sources: Sequence[Source | None]
) -> list[str]:
    """Put an LR scheduler back and return notes about what could not be.

    Args:
        scheduler: this engine's, or None.
        saved: what :func:`capture_scheduler` returned on each of the saved job's ranks, this rank's own first.
        sources: for each of the optimizer's groups, where its hyperparameters come from.
    """
    before = next((one for one in saved if one is not None), None)
    if before is None and scheduler is None:
        return []
    if before is None:
        return [f"no scheduler was saved: {type(scheduler).__name__} starts from its beginning"]
    if scheduler is None:
        return [f"scheduler {before['class']} was saved, this engine has none: its state was left out"]
    here, there = class_name(scheduler), before["class"]
    # An imported state dict does not say its class: then it must have the names that this scheduler's state has.
    if here != there and (there or before["state"].keys() != scheduler.state_dict().keys()):
        there = there or f"with the state {sorted(before['state'])}"
        return [f"scheduler {there} was saved, this engine's is {here}: it starts from its beginning"]
    scheduler.load_state_dict(_regrouped(scheduler, before["state"], saved, sources))
    return []


def _regrouped(
    scheduler: Any,
    state: Mapping[str, Any],
    saved: Sequence[Mapping[str, Any] | None],
    sources: Sequence[Source | None],
) -> Mapping[str, Any]:
    """Return a scheduler's state with its lists of one value a group (``base_lrs``) in the order of the groups here."""
    found = dict(state)
    for name, values in state.items():
        own = getattr(scheduler, name, None)
        by_group = "lr" in name or "momentum" in name
        if by_group and isinstance(values, list) and isinstance(own, list) and len(own) == len(sources):
            found[name] = [_value(saved, source, name, own[i]) for i, source in enumerate(sources)]
    return found


def _value(saved: Sequence[Mapping[str, Any] | None], source: Source | None, name: str, default: Any) -> Any:
    one = saved[source[0]] if source else None
    values = one["state"].get(name) if one else None
    return values[source[1]] if source and isinstance(values, list) and source[1] < len(values) else default


def stateful_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules that keep state of their own beside tensors, in ``nn.Module``'s way, by name."""
    return {
        clean_name(f"{name}.").removesuffix("."): child
        for name, child in module.named_modules()
        if type(child).get_extra_state is not torch.nn.Module.get_extra_state
    }


def gathered(saved: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return the union of the mappings ``name`` in each rank's objects; the first that has a key counts."""
    found: dict[str, Any] = {}
    for objects in saved:
        for key, value in (objects.get(name) or {}).items():
            found.setdefault(key, value)
    return found
