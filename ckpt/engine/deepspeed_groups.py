"""The optimizer's groups: which parameters are stepped with which hyperparameters, found again by parameter name.

A checkpoint's groups and an engine's are matched by the parameters that both sides step, wherever a group stands in the
list, so that freezing or unfreezing a layer does not cost the others their learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpt.engine.deepspeed_layout import Partition

_KERNEL_CHOICES = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Group options that say how a step is computed, not what it computes: they belong to the machine at hand."""

_SHOWN = 6
"""names in a message"""


@dataclass(frozen=True, slots=True)
class Match:
    """``sources``: for each group here, the number of its saved group. ``exact``: do both have just the same members?

    ``added``: stepped here only; ``removed``: stepped in the saved job only; ``conflicts``: groups that were cut apart
    or put together, one line each.
    """

    sources: tuple[int | None, ...]
    exact: tuple[bool, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    conflicts: tuple[str, ...]


def class_name(value: object) -> str:
    """Return the full name of the class of ``value``."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def members_by_group(inner: Any, partitions: Iterable[Partition]) -> list[list[str]]:
    """Return, for each of the optimizer's groups, the FQNs of the parameters that it steps, on all ranks together."""
    members: list[list[str]] = [[] for _ in inner.param_groups]
    for partition in partitions:
        members[partition.group] += partition.members
    return members


def capture_groups(inner: Any, partitions: Iterable[Partition]) -> dict[str, Any] | None:
    """Return the groups with all their options as they are: one that cannot be stored makes the save refuse."""
    if inner is None:
        return None
    groups = [
        {"params": members, "options": {k: v for k, v in group.items() if k != "params"}}
        for group, members in zip(inner.param_groups, members_by_group(inner, partitions), strict=True)
    ]
    return {"class": class_name(inner), "groups": groups}


def match_groups(
    inner: Any, partitions: Iterable[Partition], saved: Mapping[str, Any] | None, aliases: Mapping[str, str]
) -> Match:
    """Find the saved group of each of the optimizer's; ``saved``: None from a job without an optimizer."""
    present = [set(members) for members in members_by_group(inner, partitions)]
    before = [{aliases.get(fqn, fqn) for fqn in group["params"]} for group in (saved or {}).get("groups", ())]
    here, there = set[str]().union(*present), set[str]().union(*before)
    unmatched: dict[frozenset[str] | None, list[int]] = {}
    for number, members in enumerate(before):
        unmatched.setdefault(_core(members, here), []).append(number)
    sources: list[int | None] = []
    conflicts = []
    for index, members in enumerate(present):
        core = _core(members, there)
        candidates = unmatched.get(core, []) if core is not None else []
        sources.append(candidates.pop(0) if candidates else None)
        if core and sources[-1] is None:
            conflicts.append(_difference(index, members, before))
    exact = tuple(j is not None and before[j] == present[i] for i, j in enumerate(sources))
    return Match(tuple(sources), exact, tuple(sorted(here - there)), tuple(sorted(there - here)), tuple(conflicts))


def _core(members: set[str], other_side: set[str]) -> frozenset[str] | None:
    """Return what identifies a group on both sides; None: nothing does, all that it has is unknown over there."""
    common = frozenset(members & other_side)
    return common if common or not members else None


def _difference(index: int, members: set[str], before: Sequence[set[str]]) -> str:
    nearest = max(range(len(before)), key=lambda j: len(before[j] & members))
    only_here, only_there = _names(members - before[nearest]), _names(before[nearest] - members)
    return f"optimizer group {index}: only here {only_here}, only in the checkpoint's group {nearest} {only_there}"


def _names(names: set[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{sorted(names)[:_SHOWN]}{more}"


def restore_groups(inner: Any, match: Match, saved: Mapping[str, Any]) -> list[str]:
    """Put hyperparameters back and return notes about what could not be."""
    notes: list[str] = []
    same = saved["class"] == class_name(inner)
    if not same:
        notes.append(f"optimizer is {class_name(inner)}, was {saved['class']}: options that both know were carried")
    for index, (group, number) in enumerate(zip(inner.param_groups, match.sources, strict=True)):
        where = f"optimizer group {index}"
        if number is None:
            notes.append(f"{where}: the checkpoint has no such group: its hyperparameters are as configured here")
            continue
        if not match.exact[index]:
            notes.append(f"{where} has other members than when it was saved: it has taken over the hyperparameters")
        source = saved["groups"][number]
        if source.get("left_out"):  # by the first version of this library
            notes.append(f"{where}: options {source['left_out']} are not plain data and were not saved")
        for name, value in source["options"].items():
            if name in _KERNEL_CHOICES:
                if name in group and (now := group[name]) != value:
                    notes.append(f"{where}: {name} is {now} as configured here, was {value}")
            elif same or name in group:
                group[name] = _in_kind_of(group.get(name), value)
    return sorted(set(notes), key=notes.index)


def _in_kind_of(present: Any, value: Any) -> Any:
    if isinstance(present, torch.Tensor):  # a learning rate that a captured graph reads: the tensor must stay
        with torch.no_grad():
            return present.copy_(torch.as_tensor(value))
    if isinstance(value, torch.Tensor):
        return value.item() if isinstance(present, int | float) else value.clone()
    return tuple(value) if isinstance(present, tuple) else value
