"""Save and load of real DeepSpeed jobs: the thin line from end to end."""

from __future__ import annotations

from typing import Any

import pytest

import ckpt
from tests.harness.pool import ranks

CASES = "tests.e2e.job_cases"
BITWISE = [(s, d, g) for s in (0, 1, 2, 3) for d in ("fp32", "bf16", "fp16") for g in (1, 2)]


@pytest.mark.parametrize(("stage", "dtype", "gas"), BITWISE)
def test_a_killed_job_goes_on_bit_for_bit(stage: int, dtype: str, gas: int, tmp_path: Any) -> None:
    engine = {"stage": stage, "dtype": dtype, "gas": gas, "model": {"dropout": 0.1}}
    root, half = str(tmp_path / "root"), 3
    straight = ranks(2, f"{CASES}:unbroken", steps=2 * half, engine=engine).values()
    ranks(2, f"{CASES}:save_and_die", root=root, steps=half, engine=engine, expect_killed=[0, 1])
    assert ckpt.latest(root) == half
    resumed = ranks(2, f"{CASES}:load_and_train", root=root, steps=half, start=half, engine=engine).values()
    for rank, (one, two) in enumerate(zip(straight, resumed, strict=True)):
        assert two["losses"] == one["losses"][-len(two["losses"]) :]
        assert two["lr"] == one["lr"]
        assert two["draws"] == one["draws"]
        assert two["state"] == one["state"]
        assert (two["step"], two["cursor"], two["epoch"]) == (half, 10 * rank + half, 3)
        assert two["seen"] == [1, 2]
        assert two["same_memory"] or stage == 3  # ZeRO-3 parameters have no memory between steps
        assert two["strays"] == []


LAYOUTS = [(stage, world) for stage in (0, 1, 2, 3) for world in (1, 2, 3, 4)]


def saved_dtype(stage: int, world: int) -> str:
    return ("fp32", "bf16")[(stage + world) % 2]


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with one checkpoint per (stage, world), every element holding its own global index."""
    root = str(tmp_path_factory.mktemp("indexed"))
    ranks(1, f"{CASES}:names_in_order", root=root).values()
    for stage, world in LAYOUTS:
        engine = {"stage": stage, "dtype": saved_dtype(stage, world)}
        for saved in ranks(world, f"{CASES}:save_indexed", root=root, engine=engine).values():
            # `running` is a statistic of each rank's own batches: every copy of a buffer that differs is kept.
            assert saved["written"] <= saved["unique"] + (world - 1) * 3 * 24 * 4
    return root


@pytest.mark.parametrize(("stage", "world"), LAYOUTS)
def test_no_element_is_misplaced_by_any_layout_to_any_layout(stage: int, world: int, indexed: str) -> None:
    engine = {"stage": stage, "dtype": ("bf16", "fp32")[(stage + world) % 2]}
    # A half-precision ZeRO-0 engine of DeepSpeed takes a step with zero gradients when it is made.
    counts = {f"stage{s}-{w}": 2 if s == 0 and saved_dtype(s, w) == "bf16" else 1 for s, w in LAYOUTS}
    loaded = ranks(world, f"{CASES}:load_all_indexed", timeout=120, root=indexed, counts=counts, engine=engine)
    assert loaded.values() == [[]] * world


def test_eight_ranks_load_into_three_and_five(tmp_path: Any) -> None:
    root, engine = str(tmp_path), {"stage": 1, "dtype": "bf16"}
    ranks(1, f"{CASES}:names_in_order", root=root).values()
    saved = ranks(8, f"{CASES}:save_indexed", timeout=120, root=root, engine=engine).values()[0]
    assert max(saved["by_rank"]) <= 1.25 * saved["written"] / 8
    for world, stage, dtype in ((3, 3, "bf16"), (5, 2, "fp32")):
        engine = {"stage": stage, "dtype": dtype}
        loaded = ranks(
            world, f"{CASES}:load_all_indexed", timeout=120, root=root, counts={"stage1-8": 1}, engine=engine
        )
        assert loaded.values() == [[]] * world
