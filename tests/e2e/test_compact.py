"""A job was killed; its log is compacted offline, by no rank of it; the job that comes back is where it was."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from ckpt.compact.job import Options, compact
from ckpt.store.open import open_store
from tests.harness.pool import ranks

if TYPE_CHECKING:
    from pathlib import Path

CASES = "tests.e2e.gradlog_cases"
STEPS = 9

ENGINES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "zero-3 bf16": (2, 5, {"kind": "deepspeed", "stage": 3, "dtype": "bf16"}),
    "fsdp2": (2, 5, {"kind": "fsdp2"}),
    "ZeroRedundancyOptimizer": (2, 100, {"kind": "zero1"}),
}
"""ranks, steps between full saves, engine"""


@pytest.mark.parametrize("name", ENGINES)
def test_a_compacted_log_is_a_checkpoint_of_the_last_step(name: str, tmp_path: Path) -> None:
    world, every, options = ENGINES[name]
    root = str(tmp_path)
    case = f"{CASES}:train_and_die"
    ranks(world, case, timeout=150, expect_killed=range(world), root=root, steps=STEPS, full_every=every, **options)
    done = compact(open_store(root), Options())
    assert (done.base, done.step, done.exact, done.notes) == (0 if every > STEPS else every, STEPS, True, [])
    assert done.judged.compared
    assert not done.judged.off
    assert not list(tmp_path.rglob("*.log"))
    found = ranks(world, f"{CASES}:come_back", timeout=150, root=root, steps=STEPS, **options).values()
    for rank, one in enumerate(found):
        assert one == {
            "step": STEPS,
            "replayed": 0,
            "exact": None,
            "notes": [],
            "mark": rank,
            "state": [],
            "objects": True,
            "losses": True,
            "end": [],
        }, rank


def test_a_job_that_was_resumed_by_other_ranks(tmp_path: Path) -> None:
    """Two logs in two layouts lead on from one base: the gradients of the first are put together for the second."""
    root, options = tmp_path / "logged", {"kind": "fsdp2"}
    case = f"{CASES}:train_and_die"
    for world, steps in ((2, 3), (3, 4)):
        killed = {"expect_killed": range(world), "timeout": 150}
        ranks(world, case, root=str(root), steps=steps, full_every=100, **killed, **options)
    shutil.copytree(root, tmp_path / "compacted")
    said = subprocess.run(
        [sys.executable, "-m", "ckpt", "compact", str(tmp_path / "compacted"), "--workers", "2", "--json"],
        capture_output=True,
        check=True,
        timeout=120,
    )
    done = json.loads(said.stdout)
    assert (done["base"], done["step"], done["steps"], done["world"], done["exact"]) == (0, 7, 7, 3, True)
    found = ranks(
        3,
        "tests.e2e.compact_cases:load_both",
        timeout=150,
        logged=str(root),
        compacted=str(tmp_path / "compacted"),
        **options,
    ).values()
    for rank, one in enumerate(found):
        assert one["steps"] == [7, 7]
        assert one["replayed"] == [7, 0]
        assert one["marks"] == [rank, rank]
        assert (one["state"], one["objects"], one["losses"], one["end"]) == ([], True, True, [])
