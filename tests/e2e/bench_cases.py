"""Rank functions of test_bench.py."""

from __future__ import annotations

import sys
from typing import Any

from tests.harness.environment import REPO


def state(rank: int, world: int, *, layout: str, dtype: str) -> dict[str, Any]:
    """Return how much of a job's state its peers are given, and whether it is live."""
    sys.path.insert(0, str(REPO / "tools"))
    from benchmarks.engines import make_job

    job = make_job(layout, 1e5, dtype)
    before = job.fingerprint()
    job.train_step()
    stepped = job.fingerprint()
    job.wipe()
    return {
        "bytes": sum(t.nbytes for t in job.tensors()),
        "information": job.information,
        "params": job.params,
        "moves": before != stepped,
        "wiped": all(not t.any() for t in job.tensors()),
    }
