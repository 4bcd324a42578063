"""Jobs whose loops never call the checkpointer come back at their last step, bit for bit, on real engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.gradlog_cases import AFTER
from tests.e2e.test_deepspeed_parallel import pp
from tests.harness.pool import ranks

if TYPE_CHECKING:
    from pathlib import Path

CASES = "tests.e2e.hook_cases"
OVERFLOWS = {"fp16": {"enabled": True, "initial_scale_power": 26, "loss_scale_window": 3, "hysteresis": 1}}

ENGINES: dict[str, tuple[int, dict[str, Any]]] = {
    "zero-3 fp16 with overflows, 4 micro-steps": (
        2, {"kind": "deepspeed", "stage": 3, "dtype": "fp16", "gas": 4, "extra": OVERFLOWS},
    ),
    "pipeline x zero-1": (4, {"kind": "parallel", "layout": pp()}),
    "fsdp2 with a scheduler": (2, {"kind": "fsdp2"}),
    "torch pipeline": (4, {"kind": "tp x pp x dp"}),
    "ddp and a scaler": (2, {"kind": "scaled", "layout": "ddp", "scheduler": False}),
    "ddp, a scaler and a scheduler": (2, {"kind": "scaled", "layout": "ddp", "scheduler": True}),
    "the scaler last": (2, {"kind": "scaled", "layout": "ddp", "scheduler": True, "update_last": True}),
    "megatron": (2, {"kind": "megatron", "dtype": "bfloat16", "distributed": True}),
    "ZeroRedundancyOptimizer": (2, {"kind": "zero1"}),
}  # fmt: skip


@pytest.mark.parametrize("name", ENGINES)
def test_a_loop_without_a_call_comes_back_at_its_last_step(name: str, tmp_path: Path) -> None:
    world, options = ENGINES[name]
    common: dict[str, Any] = {"timeout": 150, "root": str(tmp_path), "steps": 9, **options}
    ranks(world, f"{CASES}:train_and_die", expect_killed=range(world), full_every=5, **common)
    for rank, one in enumerate(ranks(world, f"{CASES}:come_back", **common).values()):
        assert one == {
            "step": 9,
            "exact": True,
            "notes": [],
            "cursor": 9,
            "state": [],
            "objects": True,
            "losses": True,
            "counted": 9 + AFTER,
            "broken": None,
            "end": [[], True],
        }, rank
