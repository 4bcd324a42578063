"""From what was found in the gradient logs to one plain document: the steps, the logs rank by rank, and the sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.gradlog.history import History, Log, RankPart, Step


def document_of(root: str, history: History, first: int | None, last: int | None) -> dict[str, Any]:
    """Return all that ``ckpt log`` says; ``first`` … ``last``: the steps that are listed (None: no bound)."""
    chosen = [
        one for one in history.steps if (first is None or one.step >= first) and (last is None or one.step <= last)
    ]
    groups = sorted({group for one in history.steps for group in one.lr})
    parameters = _parameters(history)
    return {
        "root": root,
        "damaged": history.damaged,
        "checked": history.whole,
        "reaches": history.reaches,
        "checkpoints": history.checkpoints,
        "logs": [_log(one) for one in history.logs],
        "others": history.others,
        "unread": [{"log": number, "why": why} for number, why in history.unread.items()],
        "groups": [list(group) for group in groups],
        "steps": [_step(one, parameters.get(one.log), groups) for one in chosen],
        "summary": _summary(history, parameters),
    }


def _step(one: Step, parameters: int | None, groups: Sequence[tuple[int, int]]) -> dict[str, Any]:
    return {
        "step": one.step,
        "log": one.log,
        "ranks": one.ranks,
        "world": one.world,
        "skipped": one.skipped,
        "reached": one.reached,
        "nbytes": one.nbytes,
        "bytes_per_parameter": one.nbytes / parameters if parameters else None,
        "gradient_bytes": {"stored": one.stored, "raw": one.raw},
        "dtypes": sorted(one.dtypes),
        "multipliers": sorted(one.multipliers),
        "norm": one.norm,
        "lr": [one.lr.get(group) for group in groups],
        "loss_scale": one.loss_scale,
        "seconds": one.seconds,
        "changed": sorted(one.changed),
    }


def _log(one: Log) -> dict[str, Any]:
    head = one.head
    named = [part for part in one.ranks if part.software]
    parted = one.parted(one.first)
    return {
        "number": head.number,
        "start": head.start,
        "world": head.world,
        "created": head.created,
        "attempt": head.attempt or None,
        "follows": head.follows,
        "first": one.first,
        "last": one.last,
        "end": one.end,
        "parted": None if parted is None else {"step": parted.step, "why": parted.text(head.number)},
        "software": named[0].software if named else {},
        "optimizers": named[0].kernels if named else [],
        "ranks": [_part(part, one.first) for part in one.ranks],
        "absent": one.absent,
    }


def _part(one: RankPart, first: int) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "end": one.sound.sound_to(first),
        "runs": [list(run) for run in one.sound.runs],
        "records": one.records,
        "nbytes": one.nbytes,
        "parameters": one.parameters,
        "torn": one.torn or None,
        "troubles": one.troubles,
    }


def _parameters(history: History) -> dict[int, int | None]:
    """Return log -> elements that all its ranks log together; None if a rank does not say."""
    found: dict[int, int | None] = {}
    for log in history.logs:
        counts = [part.parameters for part in log.ranks]
        known = [count for count in counts if count is not None]
        found[log.head.number] = sum(known) if known and len(known) == log.head.world else None
    return found


def _summary(history: History, parameters: dict[int, int | None]) -> dict[str, Any]:
    """Return the sums over all steps. Bytes of a step are the mean over those that were not skipped."""
    taken = [one for one in history.steps if not one.skipped]
    nbytes, stored, raw = (sum(getattr(one, name) for one in taken) for name in ("nbytes", "stored", "raw"))
    known = [one for one in taken if parameters.get(one.log)]
    elements = sum(parameters[one.log] or 0 for one in known)
    ranks = sum(one.ranks for one in taken)
    a_step = nbytes / len(taken) if taken else None
    full = None
    if history.base is not None:
        totals = history.base.totals
        full = {
            "step": history.base.step,
            "stored": totals.get("bytes_written", 0) + totals.get("bytes_reused", 0),
            "unique": totals.get("bytes_unique", 0),
            "held": totals.get("bytes_held", 0),
        }
    return {
        "steps": len(history.steps),
        "skipped": len(history.steps) - len(taken),
        "nbytes": sum(one.nbytes for one in history.steps),
        "bytes_per_step": a_step,
        "parameters": next((count for count in reversed(parameters.values()) if count), None),
        "bytes_per_parameter": sum(one.nbytes for one in known) / elements if elements else None,
        "gradient_bytes_per_parameter": sum(one.stored for one in known) / elements if elements else None,
        "other_bytes_per_rank": (nbytes - stored) / ranks if ranks else None,
        "codec_ratio": raw / stored if stored else None,
        "full": full,
        "ratio": full["stored"] / a_step if full is not None and a_step else None,
        "changed": [one.step for one in history.steps if one.changed],
        "seconds": sum(one.seconds for one in history.steps),
    }
