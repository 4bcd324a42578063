"""``ckpt log`` and its neighbours on logs of real engines, whose jobs were killed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from ckpt.cli.main import cli
from tests.harness.pool import ranks

if TYPE_CHECKING:
    from pathlib import Path

CASES = "tests.e2e.gradlog_cases"
STEPS, CLIP, START = 7, 0.05, 20
SCALES = {"fp16": {"enabled": True, "initial_scale_power": START, "loss_scale_window": 50, "hysteresis": 1}}


def document(*arguments: str | Path) -> dict[str, Any]:
    result = CliRunner().invoke(cli, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def trained(root: Path, world: int, **options: Any) -> dict[str, Any]:
    ranks(
        world, f"{CASES}:train_and_die", timeout=150, expect_killed=range(world), root=str(root), steps=STEPS,
        full_every=4, **options,
    )  # fmt: skip
    return document("log", root)


def test_overflows_loss_scales_and_clipped_norms_are_told(tmp_path: Path) -> None:
    engine = {"kind": "deepspeed", "stage": 2, "dtype": "fp16", "clip": CLIP, "extra": SCALES}
    found = trained(tmp_path / "root", 2, **engine)
    steps = found["steps"]
    assert [one["step"] for one in steps] == list(range(1, STEPS + 1))
    assert steps[0]["skipped"]
    assert not steps[-1]["skipped"]
    assert found["reaches"] == STEPS
    before = 2.0**START
    for one in steps:
        assert (one["loss_scale"] < before) is one["skipped"]
        before = one["loss_scale"]
        if one["skipped"]:
            assert (one["norm"], one["gradient_bytes"]["stored"]) == (None, 0)
        else:
            assert one["norm"] == pytest.approx(CLIP, rel=1e-3)
            assert one["dtypes"] == ["float16"]
            assert one["multipliers"]
    assert found["summary"]["gradient_bytes_per_parameter"] == 2.0
    assert found["summary"]["changed"] == []  # DeepSpeed steps its scheduler within its own step


@pytest.mark.parametrize("engine", [{"kind": "deepspeed", "stage": 3, "dtype": "bf16"}, {"kind": "fsdp2"}])
def test_each_parameter_is_logged_once_and_a_copy_recovers_as_far(engine: dict[str, Any], tmp_path: Path) -> None:
    found = trained(tmp_path / "root", 3, **engine)
    per = {part["parameters"] for log in found["logs"] for part in log["ranks"]}
    assert len(found["logs"][0]["ranks"]) == 3
    held = json.loads(CliRunner().invoke(cli, ["show", str(tmp_path / "root"), "--json"]).stdout)["tensors"]
    sizes = {one["fqn"]: one for one in held if one["role"] == "exp_avg"}
    elements = 0
    for one in sizes.values():
        count = 1
        for size in one["shape"]:
            count *= size
        elements += count
    assert found["summary"]["parameters"] == elements
    assert None not in per
    wide = 2.0 if engine["kind"] == "deepspeed" else 4.0
    assert found["summary"]["gradient_bytes_per_parameter"] == wide
    assert found["summary"]["other_bytes_per_rank"] < 64 << 10
    document("cp", tmp_path / "root", tmp_path / "copy")
    assert document("log", tmp_path / "copy")["reaches"] == STEPS
    assert not document("verify", tmp_path / "copy")["damaged"]
    assert document("gc", tmp_path / "copy", "--older-than", "0")["removed"] == []
    assert document("log", tmp_path / "copy")["reaches"] == STEPS
