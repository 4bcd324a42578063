"""The optimizer's groups: which parameters are stepped with which hyperparameters, found again by parameter name.

A checkpoint's groups and an engine's are matched parameter by parameter, wherever a group stands in the list and
however a job cut it: pipeline stages each have groups of their own, which are one group in a job without stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ckpt.engine.shared_check import class_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpt.engine.shared_partition import Partition

_KERNEL_CHOICES = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Group options that say how a step is computed, not what it computes: they belong to the machine at hand."""

_LABELS = frozenset({"name", "moe"})
"""Group options that only tell groups apart: DeepSpeed finds the process group of experts by them, so they say how this
job is laid out."""

_SHOWN = 6
"""names in a message"""


Source = tuple[int, int]
"""(which of the saved ranks' objects, which of the groups in it)"""


@dataclass(frozen=True, slots=True)
class Match:
    """``sources``: for each group here, the saved group whose hyperparameters it takes over. ``exact``: have it and the
    saved groups that its members came from just the same members (of those that belong on this rank)? Never where
    they conflict; a group of nobody has them.

    ``added``: stepped here only; ``removed``: stepped in the saved job only; ``conflicts``: groups whose members were
    saved with different hyperparameters, one line each.
    """

    sources: tuple[Source | None, ...]
    exact: tuple[bool, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    conflicts: tuple[str, ...]


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
    inner: Any,
    partitions: Iterable[Partition],
    saved: Sequence[Mapping[str, Any] | None],
    aliases: Mapping[str, str],
    *,
    part: bool = False,
) -> Match:
    """Find where each of the optimizer's groups comes from.

    Args:
        inner: the optimizer.
        partitions: what it steps.
        saved: what :func:`capture_groups` returned on each of the saved job's ranks (equal ones once), this rank's own
            first; None from a job without an optimizer.
        aliases: tied name -> listed name.
        part: this rank steps a part of the model by design (a pipeline stage, its experts), so that members which a
            group lacks here are no difference.
    """
    before = {
        (k, j): {aliases.get(fqn, fqn) for fqn in group["params"]}
        for k, one in enumerate(saved)
        for j, group in enumerate((one or {}).get("groups", ()))
    }
    home: dict[str, Source] = {}
    for source, members in before.items():
        for fqn in members:
            home.setdefault(fqn, source)
    settings = {(k, j): _settings(saved[k]["groups"][j]) for k, j in before}  # type: ignore[index]
    present = [set(members) for members in members_by_group(inner, partitions)]
    sources: list[Source | None] = []
    exact, conflicts = [], []
    empty = [source for source, members in before.items() if not members]
    for index, members in enumerate(present):
        found = sorted({home[fqn] for fqn in members & home.keys()})
        if not members and (0, index) in empty:
            found = [(0, index)]
        apart = any(settings[source] != settings[found[0]] for source in found[1:])
        sources.append(found[0] if found and not apart else None)
        former = set[str]().union(*(before[source] for source in found))
        exact.append(not apart and bool(found or not members) and (members <= former if part else members == former))
        if apart:
            conflicts.append(_difference(index, members, found, before, settings))
    here = set[str]().union(*present)
    added, removed = tuple(sorted(here - home.keys())), tuple(sorted(home.keys() - here))
    return Match(tuple(sources), tuple(exact), added, removed, tuple(conflicts))


def _settings(group: Mapping[str, Any]) -> dict[str, str]:
    return {k: repr(v) for k, v in sorted(group["options"].items()) if k not in _KERNEL_CHOICES | _LABELS}


def _difference(
    index: int,
    members: set[str],
    found: Sequence[Source],
    before: Mapping[Source, set[str]],
    settings: Mapping[Source, Mapping[str, str]],
) -> str:
    first = settings[found[0]]
    other = next(source for source in found[1:] if settings[source] != first)
    name = next(k for k in sorted(first.keys() | settings[other].keys()) if first.get(k) != settings[other].get(k))
    return (
        f"optimizer group {index}: {name} was {first.get(name)} for {_names(members & before[found[0]])} and "
        f"{settings[other].get(name)} for {_names(members & before[other])}"
    )


def _names(names: set[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{sorted(names)[:_SHOWN]}{more}"


def restore_groups(inner: Any, match: Match, saved: Sequence[Mapping[str, Any] | None]) -> list[str]:
    """Put hyperparameters back and return notes about what could not be; ``saved`` as in :func:`match_groups`."""
    notes: list[str] = []
    for index, (group, source) in enumerate(zip(inner.param_groups, match.sources, strict=True)):
        where = f"optimizer group {index}"
        one = saved[source[0]] if source else None
        if source is None or one is None:
            if not match.exact[index]:  # a stage of a pipeline may have nothing of a group
                notes.append(f"{where}: the checkpoint has no such group: its hyperparameters are as configured here")
            continue
        before = one["groups"][source[1]]
        was = before.get("class", one["class"])  # of its own where a rank has several optimizers
        same = was == class_name(inner)
        if not same:
            was = was or "not named by the checkpoint"  # an imported one
            notes.append(f"optimizer is {class_name(inner)}, was {was}: options that both know were carried")
        if not match.exact[index]:
            notes.append(f"{where} has other members than when it was saved: it has taken over the hyperparameters")
        if before.get("left_out"):  # by the first version of this library
            notes.append(f"{where}: options {before['left_out']} are not plain data and were not saved")
        for name, value in before["options"].items():
            if name in _KERNEL_CHOICES:
                if name in group and (now := group[name]) != value:
                    notes.append(f"{where}: {name} is {now} as configured here, was {value}")
            elif name not in _LABELS and (same or name in group):
                group[name] = _in_kind_of(group.get(name), value)
    return sorted(set(notes), key=notes.index)


def _in_kind_of(present: Any, value: Any) -> Any:
    if isinstance(present, torch.Tensor):  # a learning rate that a captured graph reads: the tensor must stay
        with torch.no_grad():
            return present.copy_(torch.as_tensor(value))
    if isinstance(value, torch.Tensor):
        return value.item() if isinstance(present, int | float) else value.clone()
    return tuple(value) if isinstance(present, tuple) else value
