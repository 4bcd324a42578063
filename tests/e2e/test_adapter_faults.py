"""Faults that an adversary found in the DeepSpeed adapter, each held down by a test on real engines."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import ranks

CASES = "tests.e2e.adapter_fault_cases:"
FUSED = {"ops": ("fused_adam",)}

BLOCK = [
    f"blocks.0.{name}.{kind}" for name in ("norm1", "norm2", "qkv", "proj", "up", "down") for kind in ("weight", "bias")
]


def run(case: str, world: int = 2, **options: Any) -> list[Any]:
    return ranks(world, CASES + case, timeout=120, **options).values()


# ---------------------------------------------------------------------------------------------------------- groups


def filled(reports: list[dict[str, Any]], which: str) -> set[str]:
    """The parameters whose moments are not all zero, on any rank."""
    return {name for report in reports for name, some in report[which].items() if some}


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (0, "bf16"), (1, "bf16"), (3, "bf16")])
def test_groups_with_different_hyperparameters_put_together(stage: int, dtype: str, tmp_path: Any) -> None:
    source = {"stage": stage, "dtype": dtype, "groups": 2}
    reports = run("regroup", root=str(tmp_path), source=source, change={"groups": 1})
    for found in reports:
        assert "LayoutError" in found["strict"]
        assert "optimizer group 0: " in found["strict"]
        assert " was 0.03125 for [" in found["strict"]
        assert (found["untouched"], found["usable"]) == (True, "")
        assert (found["missing"], found["unexpected"]) == ([], [])
        assert found["lr"] == found["own"]
        assert sum("no such group" in note for note in found["notes"]) == 1
        assert (found["steps"], found["trains"]) == (2, "")
    assert filled(reports, "moments") == filled(reports, "saved moments") != set()


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (0, "bf16"), (1, "bf16"), (3, "bf16")])
def test_a_group_that_is_cut_in_two_gives_both_its_hyperparameters(stage: int, dtype: str, tmp_path: Any) -> None:
    source = {"stage": stage, "dtype": dtype, "groups": 1}
    reports = run("regroup", root=str(tmp_path), source=source, change={"groups": 2})
    for found in reports:
        assert (found["strict"], found["usable"]) == ("", "")
        assert (found["missing"], found["unexpected"]) == ([], [])
        assert found["lr"] == [0.03125, 0.03125]
        assert sum("has other members" in note for note in found["notes"]) == 2
        assert (found["steps"], found["trains"]) == (2, "")
    assert filled(reports, "moments") == filled(reports, "saved moments") != set()


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "fp32"), (2, "bf16"), (3, "bf16")])
def test_a_block_that_is_trained_now(stage: int, dtype: str, tmp_path: Any) -> None:
    source = {"stage": stage, "dtype": dtype, "model": {"frozen_blocks": 1}}
    reports = run("regroup", root=str(tmp_path), source=source, change={"model": {}})
    for found in reports:
        assert "MissingState" in found["strict"]
        assert "optimizer state of 'blocks.0.norm1.weight'" in found["strict"]
        assert (found["untouched"], found["usable"]) == (True, "")
        assert [m for m in found["missing"] if m.startswith("optimizer")] == sorted(
            f"optimizer state of {n!r}" for n in BLOCK
        )
        assert found["unexpected"] == []
        assert found["lr"][0] == 0.03125
        assert any("has other members" in note for note in found["notes"])
        assert (found["steps"], found["trains"]) == (2, "")
    assert filled(reports, "moments") == filled(reports, "saved moments")
    assert "blocks.1.qkv.weight" in filled(reports, "moments")
    assert not filled(reports, "moments") & set(BLOCK)


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "bf16"), (3, "bf16")])
def test_a_block_that_is_frozen_now(stage: int, dtype: str, tmp_path: Any) -> None:
    source = {"stage": stage, "dtype": dtype}
    for found in run("regroup", root=str(tmp_path), source=source, change={"model": {"frozen_blocks": 1}}):
        assert "MissingState" in found["strict"]
        assert "optimizer state of 'blocks.0.norm1.weight'" in found["strict"]
        assert (found["untouched"], found["usable"]) == (True, "")
        assert found["missing"] == []
        assert {f"optimizer state of {n!r}" for n in BLOCK} <= set(found["unexpected"])
        assert found["lr"][0] == 0.03125
        assert (found["steps"], found["trains"]) == (2, "")


@pytest.mark.parametrize("stage", [0, 1])
def test_a_parameter_without_a_gradient_so_far_is_not_missing(stage: int, tmp_path: Any) -> None:
    assert run("never_had_a_gradient", root=str(tmp_path), stage=stage) == [[[], True, True]] * 2


def test_a_scheduler_follows_groups_into_another_order(tmp_path: Any) -> None:
    for before, now in run("swapped_groups_with_scheduler", root=str(tmp_path)):
        assert before[0] != before[1]
        assert now == before[::-1]


# -------------------------------------------------------------------------------------------------- hyperparameters


def test_hyperparameters_of_any_kind_are_kept_or_refused(tmp_path: Any) -> None:
    for found in run("odd_options", root=str(tmp_path)):
        assert found["same"]
        assert found["notes"] == []
        assert "ConfigError" in found["refused"]
        assert "'optimizer'['groups'][1]['options']['schedule']" in found["refused"]
        assert found["steps"] == [1]


# ------------------------------------------------------------------------------------------------------ extra state


@pytest.mark.parametrize("stage", [1, 3])
def test_extra_state_of_modules(stage: int, tmp_path: Any) -> None:
    for found in run("extra_state", root=str(tmp_path), stage=stage):
        assert found["calls"] == [3, [1, 2, 3]]
        for kind in ("missing", "unexpected"):
            assert "MissingState" in found[kind]
            assert "extra state of module 'part'" in found[kind]
            assert "extra state of module ''" in found[kind]
        assert found["report"] == ["extra state of module ''", "extra state of module 'part'"]


def test_random_ltd_is_kept_and_a_curriculum_refused(tmp_path: Any) -> None:
    for found in run("random_ltd", root=str(tmp_path)):
        assert (found["moved"], found["same"]) == (True, True)
        assert found["notes"] == [[], ["only one side has a random-LTD scheduler: its state was left out"]]
        assert "UnsupportedLayout" in found["curriculum"]
        assert "curriculum learning" in found["curriculum"]


# ------------------------------------------------------------------------------------------------- optimizer's own


@pytest.mark.parametrize("trust", [0.5, float("nan"), float("inf")])
@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "bf16"), (3, "bf16")])
def test_a_trial_step_leaves_no_trace_and_nan_equals_itself(
    stage: int, dtype: str, trust: float, tmp_path: Any
) -> None:
    expected = {"stats": True, "fired": [], "notes": [], "state": True, "losses": True}
    assert run("own_optimizer", root=str(tmp_path), stage=stage, dtype=dtype, trust=trust) == [expected] * 2


def test_what_cannot_be_copied_is_not_tried() -> None:
    assert run("trial_of_what_cannot_be_copied", 1) == [[["flag", "mean", "trust"], None, [0.0, 0.0, 0.0], 0]]


# ---------------------------------------------------------------------------------------------- pending gradients

MOMENTS: dict[str, dict[str, Any]] = {
    **{f"zero {s} {d}": {"stage": s, "dtype": d} for s in (0, 1, 2, 3) for d in ("fp32", "bf16", "fp16")},
    **{f"zero {s} accumulating": {"stage": s, "gas": 2} for s in (0, 1, 2, 3)},
    **{f"zero {s} offloaded": {"stage": s, "offload": True} for s in (1, 2, 3)},
    **{f"zero {s} overflow": {"stage": s, "dtype": "fp16", "overflow": True} for s in (0, 1, 2, 3)},
    "zero 2 offloaded, overflow": {"stage": 2, "dtype": "fp16", "offload": True, "overflow": True},
    "zero 2 offloaded, accumulating": {"stage": 2, "offload": True, "gas": 2},
    "parameters offloaded": {"stage": 3, "offload": True, "offload_param": True},
    "BF16_Optimizer": {"stage": 1, "grad_accum_dtype": "fp32"},
    "BF16_Optimizer accumulating": {"stage": 1, "grad_accum_dtype": "fp32", "gas": 2},
    "FusedAdam": {"stage": 0, "optimizer": "FusedAdam", **FUSED},
    "round robin": {"stage": 2, "zero": {"round_robin_gradients": True}},
    "fp32 accumulation": {"stage": 2, "grad_accum_dtype": "fp32"},
    "fp32 accumulation, zero 3": {"stage": 3, "grad_accum_dtype": "fp32", "gas": 2},
}


@pytest.mark.parametrize("name", MOMENTS)
def test_pending_gradients_are_refused_at_every_moment(name: str, tmp_path: Any) -> None:
    for found in run("pending", root=str(tmp_path), **MOMENTS[name]):
        skipped = int(found.pop("skipped"))
        assert skipped > 0 or "overflow" not in name
        for moment, error in found.items():
            inside = any(word in moment for word in ("backward", "next", "inner", "over gradients"))
            assert ("accumulation window" in error) == inside, (moment, error)
            assert not error or inside, (moment, error)


def test_gradients_that_nobody_steps_are_nobodys_business(tmp_path: Any) -> None:
    assert run("others_keep_gradients", root=str(tmp_path)) == [""] * 2
