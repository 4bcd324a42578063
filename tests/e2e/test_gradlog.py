"""A job that was killed comes back at its last logged step, bit for bit, on real engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.harness.pool import ranks

if TYPE_CHECKING:
    from pathlib import Path

CASES = "tests.e2e.gradlog_cases"

ENGINES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"kind": "ddp"}),
    "fsdp2": (3, {"kind": "fsdp2"}),
    "fsdp2 bf16": (2, {"kind": "fsdp2", "bf16": True}),
    "hsdp": (4, {"kind": "hsdp"}),
    "fsdp2 x tp": (4, {"kind": "fsdp2 x tp"}),
    "ZeroRedundancyOptimizer": (2, {"kind": "zero1"}),
    "pipelining": (4, {"kind": "tp x pp x dp"}),
    "zero-0 bf16": (2, {"kind": "deepspeed", "stage": 0, "dtype": "bf16"}),
    "zero-0 fp32": (2, {"kind": "deepspeed", "stage": 0, "dtype": "fp32"}),
    "zero-0 fp16": (2, {"kind": "deepspeed", "stage": 0, "dtype": "fp16"}),
    "zero-1 bf16": (3, {"kind": "deepspeed", "stage": 1, "dtype": "bf16"}),
    "zero-1 fp16": (2, {"kind": "deepspeed", "stage": 1, "dtype": "fp16"}),
    "zero-1 bf16, fp32 accumulation": (
        2, {"kind": "deepspeed", "stage": 1, "dtype": "bf16", "grad_accum_dtype": "fp32"},
    ),
    "zero-2 bf16, 4 micro-steps": (2, {"kind": "deepspeed", "stage": 2, "dtype": "bf16", "gas": 4}),
    "zero-2 fp32, no clipping": (2, {"kind": "deepspeed", "stage": 2, "dtype": "fp32", "clip": 0.0}),
    "zero-2 offload": (2, {"kind": "deepspeed", "stage": 2, "dtype": "bf16", "offload": True}),
    "zero-3 bf16": (3, {"kind": "deepspeed", "stage": 3, "dtype": "bf16"}),
    "zero-3 fp32": (2, {"kind": "deepspeed", "stage": 3, "dtype": "fp32"}),
    "zero-3 fp16": (2, {"kind": "deepspeed", "stage": 3, "dtype": "fp16"}),
    "zero-3 offload": (2, {"kind": "deepspeed", "stage": 3, "dtype": "bf16", "offload": True, "offload_param": True}),
    "megatron": (2, {"kind": "megatron", "start": {"tp": 2}, "dtype": "bfloat16"}),
    "megatron distributed": (2, {"kind": "megatron", "dtype": "bfloat16", "distributed": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", ENGINES)
def test_a_killed_job_comes_back_at_its_last_step(name: str, tmp_path: Path) -> None:
    world, options = ENGINES[name]
    steps = 9
    ranks(
        world,
        f"{CASES}:train_and_die",
        timeout=150,
        expect_killed=range(world),
        root=str(tmp_path),
        steps=steps,
        full_every=5,
        **options,
    )
    found = ranks(world, f"{CASES}:come_back", timeout=150, root=str(tmp_path), steps=steps, **options).values()
    for rank, one in enumerate(found):
        assert one == {
            "step": steps,
            "replayed": 4,
            "exact": True,
            "notes": [],
            "mark": rank,
            "state": [],
            "objects": True,
            "losses": True,
            "end": [],
        }, rank
