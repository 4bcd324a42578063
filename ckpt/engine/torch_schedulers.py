"""LR schedulers of a torch loop, each with the optimizer that it drives.

A job may have one optimizer for each of its model's parts (the stages of an interleaved pipeline) and a scheduler for
each of them, where another job has one of both for the whole model. So a scheduler is not found again by its place in
a list: it continues the one that drove the group that its optimizer's first group comes from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.engine.shared_objects import capture_scheduler, restore_scheduler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt.engine.shared_groups import Source
    from ckpt.engine.torch_parts import Parts

Captured = dict[str, Any]


def capture_schedulers(parts: Parts) -> dict[str, Any]:
    """Return ``scheduler``, the first or None as every engine has it, and ``schedulers`` if there are several.

    The latter have ``groups``: the range of the groups that each drives, all optimizers' one behind the other.
    """
    captured = [capture_scheduler(one) for one in parts.schedulers]
    found: dict[str, Any] = {"scheduler": captured[0] if captured else None}
    if len(captured) > 1:
        ranges = [_range(parts, one) for one in parts.schedulers]
        found["schedulers"] = [{**(one or {}), "groups": r} for one, r in zip(captured, ranges, strict=True)]
    return found


def restore_schedulers(
    parts: Parts, saved: Sequence[Mapping[str, Any]], sources: Sequence[Sequence[Source | None]]
) -> list[str]:
    """Put schedulers back and return notes about what could not be.

    Args:
        parts: this engine.
        saved: what each of the saved job's ranks had, this rank's own first.
        sources: for each optimizer and each of its groups, where its hyperparameters come from.
    """
    there = [_listed(objects) for objects in saved]
    notes: list[str] = []
    counted: dict[int | None, int] = {}  # how many schedulers of an optimizer have been seen to
    for scheduler in parts.schedulers:
        driven = _driven(parts, scheduler)
        nth = counted.get(driven, 0)
        counted[driven] = nth + 1
        wanted = sources[driven] if driven is not None else ()
        if any(wanted):
            picked, places = _picked(there, wanted, nth)
        else:
            picked, places = [one[nth] for one in there if nth < len(one)], []
        notes += restore_scheduler(scheduler, picked, places)
    most = max(counted.values(), default=0)
    for one in there[0] if there else ():
        chain = [other for other in there[0] if other["groups"] == one["groups"]]
        if any(one is other for other in chain[most:]):
            notes += restore_scheduler(None, [one], ())
    return list(dict.fromkeys(notes))


def _picked(
    there: Sequence[Sequence[Captured]], wanted: Sequence[Source | None], nth: int
) -> tuple[list[Captured], list[Source | None]]:
    """Return the saved schedulers that drove the wanted groups, and for each group which of them at which place."""
    picked: list[Captured] = []
    places: list[Source | None] = []
    for source in wanted:
        driving = [one for one in there[source[0]] if source[1] in range(*one["groups"])] if source else []
        if source is None or nth >= len(driving):
            places.append(None)
            continue
        one = driving[nth]
        at = next((i for i, other in enumerate(picked) if other is one), len(picked))
        picked[at:] = picked[at:] or [one]
        places.append((at, source[1] - one["groups"][0]))
    return picked, places


def _driven(parts: Parts, scheduler: Any) -> int | None:
    """Return which optimizer a scheduler drives, None if that cannot be told."""
    found = [i for i, one in enumerate(parts.optimizers) if one is getattr(scheduler, "optimizer", None)]
    return found[0] if found else (0 if len(parts.optimizers) == 1 else None)


def _range(parts: Parts, scheduler: Any) -> list[int]:
    sizes = [len(one.param_groups) for one in parts.optimizers]
    driven = _driven(parts, scheduler)
    return [0, sum(sizes)] if driven is None else [sum(sizes[:driven]), sum(sizes[: driven + 1])]


def _listed(objects: Mapping[str, Any]) -> list[Captured]:
    every = {"groups": [0, len((objects.get("optimizer") or {}).get("groups", ()))]}
    return [{**every, **one} for one in objects.get("schedulers") or [objects.get("scheduler")] if one is not None]
