"""A job that was killed comes back at its last logged step, bit for bit, on real engines."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from ckpt.cli.main import cli
from ckpt.repo.repository import Repository
from ckpt.store.open import open_store
from tests.e2e.test_deepspeed_parallel import moe, pp, tp
from tests.harness.pool import ranks

if TYPE_CHECKING:
    from pathlib import Path

CASES = "tests.e2e.gradlog_cases"

ENGINES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"kind": "ddp"}),
    "fsdp2": (3, {"kind": "fsdp2"}),
    "fsdp2 bf16": (2, {"kind": "fsdp2", "bf16": True}),
    "fsdp2, fewer rows than ranks": (3, {"kind": "fsdp2", "narrow": True}),
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
    "tp x zero-2 fp16": (4, {"kind": "parallel", "layout": tp(2, "fp16")}),
    "tp x zero-3": (4, {"kind": "parallel", "layout": tp(3)}),
    "pipeline x zero-1": (4, {"kind": "parallel", "layout": pp()}),
    "pipeline, zero-0": (4, {"kind": "parallel", "layout": pp(0, "fp32")}),
    "experts, zero-2": (4, {"kind": "parallel", "layout": moe(2, 2)}),
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


ELSEWHERE: dict[str, tuple[tuple[int, dict[str, Any]], tuple[int, dict[str, Any]]]] = {
    "zero-3 on 3 to zero-1 on 2": (
        (3, {"kind": "deepspeed", "stage": 3, "dtype": "bf16"}),
        (2, {"kind": "deepspeed", "stage": 1, "dtype": "bf16"}),
    ),
    "zero-2 on 2 to zero-3 on 4": (
        (2, {"kind": "deepspeed", "stage": 2, "dtype": "bf16", "gas": 2}),
        (4, {"kind": "deepspeed", "stage": 3, "dtype": "bf16"}),
    ),
    "zero-1 with fp16 skips to zero-0": (
        (2, {"kind": "deepspeed", "stage": 1, "dtype": "fp16"}),
        (2, {"kind": "deepspeed", "stage": 0, "dtype": "fp16"}),
    ),
    "fsdp2 on 3 to ddp on 2": ((3, {"kind": "fsdp2"}), (2, {"kind": "ddp"})),
    "fsdp2 with fewer rows than ranks, on 3 to 2": (
        (3, {"kind": "fsdp2", "narrow": True}),
        (2, {"kind": "fsdp2", "narrow": True}),
    ),
    "ddp on 2 to fsdp2 x tp on 4": ((2, {"kind": "ddp"}), (4, {"kind": "fsdp2 x tp"})),
    "pipeline on 4 to one process": ((4, {"kind": "tp x pp x dp"}), (1, {"kind": "plain"})),
    "hsdp on 4 to ZeroRedundancyOptimizer on 2": ((4, {"kind": "hsdp"}), (2, {"kind": "zero1"})),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_log_is_replayed_in_another_layout(name: str, tmp_path: Path) -> None:
    (saved_world, saved), (world, options) = ELSEWHERE[name]
    common = {"timeout": 150, "root": str(tmp_path), "steps": 6}
    ranks(saved_world, f"{CASES}:train_and_save", full_every=4, log={"keep": None}, **common, **saved).values()
    for rank, one in enumerate(ranks(world, f"{CASES}:elsewhere", **common, **options).values()):
        assert one.pop("tensors") > 10
        assert (one.pop("deviation"), one.pop("off")) == (0.0, [True, 0])
        notes = [note for note in one.pop("notes") if "log" in note or "repeated" in note]
        assert not notes, rank
        assert one == {"step": 6, "replayed": 2, "exact": None, "same": []}, rank


BYTES = {
    "ddp": (2, {"kind": "ddp"}, 4),
    "fsdp2": (2, {"kind": "fsdp2"}, 4),
    "fsdp2 bf16": (2, {"kind": "fsdp2", "bf16": True}, 2),
    "zero-0": (2, {"kind": "deepspeed", "stage": 0, "dtype": "bf16"}, 2),
    "zero-1": (2, {"kind": "deepspeed", "stage": 1, "dtype": "bf16"}, 2),
    "zero-2": (3, {"kind": "deepspeed", "stage": 2, "dtype": "bf16"}, 2),
    "zero-3": (3, {"kind": "deepspeed", "stage": 3, "dtype": "bf16"}, 2),
    "zero-3 fp16": (2, {"kind": "deepspeed", "stage": 3, "dtype": "fp16"}, 2),
}
"""Bytes that a parameter's gradient takes in a step, over all ranks together."""


@pytest.mark.parametrize("name", BYTES)
def test_each_gradient_is_logged_once_in_as_few_bytes_as_hold_it(name: str, tmp_path: Path) -> None:
    world, options, width = BYTES[name]
    common = {"timeout": 150, "root": str(tmp_path), "steps": 3, "full_every": 100}
    found = ranks(world, f"{CASES}:train_and_save", **common, **options).values()
    parameters = sum(
        math.prod(spec.shape)
        for spec in Repository(open_store(tmp_path / "whole")).read_index(3).specs
        if spec.role == "exp_avg"
    )
    assert sum(one["payload"] for one in found) == 3 * width * parameters
    assert all(one["written"] <= one["payload"] + 3 * (64 << 10) for one in found)
    steps = json.loads(CliRunner().invoke(cli, ["log", str(tmp_path), "--json"]).stdout)["steps"]
    assert len(steps) == 3
    assert all(one["skipped"] or one["norm"] > 1e-3 for one in steps)
