"""Rank functions of test_compact.py."""

from __future__ import annotations

from typing import Any

import ckpt
from tests.e2e.adapter_cases import held, same
from tests.e2e.async_cases import Job


def load_both(
    rank: int, world: int, *, logged: str, compacted: str, kind: str, after: int = 3, **options: Any
) -> dict[str, Any]:
    """Load base and log, and what they were compacted to; compare, now and some steps later."""
    first, second = Job(kind, seed=7, **options), Job(kind, seed=8, **options)
    replayed = ckpt.load(first.engine, logged, extra={"mark": 0})
    whole = ckpt.load(second.engine, compacted, extra={"mark": 0})
    found = {
        "steps": (replayed.step, whole.step),
        "replayed": (replayed.replayed, whole.replayed),
        "marks": (replayed.extra["mark"], whole.extra["mark"]),
        "notes": list(whole.notes),
        "state": same(held(first.adapter), held(second.adapter)),
        "objects": repr(first.adapter.describe().objects) == repr(second.adapter.describe().objects),
    }
    found["losses"] = first.train(after, whole.step) == second.train(after, whole.step)
    found["end"] = same(held(first.adapter), held(second.adapter))
    return found
