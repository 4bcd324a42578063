"""A step of a real job, written anew for another layout: the job that goes on from it does not notice."""

from __future__ import annotations

from typing import Any

from ckpt.convert.ours.read import open_ours
from ckpt.convert.ours.write import write_ours
from ckpt.convert.target import target_of
from ckpt.store.local import LocalStore
from tests.harness.pool import ranks

CASES = "tests.e2e.job_cases"


def test_a_killed_job_goes_on_bit_for_bit_from_what_was_written_for_another_stage_and_back(tmp_path: Any) -> None:
    """Weights, masters, moments, counts, groups, scheduler, each rank's generators and the cursor of its loader."""
    engine = {"stage": 1, "dtype": "bf16", "gas": 2, "model": {"dropout": 0.1}}
    saved, there, back = (str(tmp_path / name) for name in ("saved", "there", "back"))
    half = 3
    straight = ranks(2, f"{CASES}:unbroken", steps=2 * half, engine=engine).values()
    ranks(2, f"{CASES}:save_and_die", root=saved, steps=half, engine=engine, expect_killed=[0, 1])
    for source, place, zero in ((saved, there, 3), (there, back, 1)):
        opened = open_ours(LocalStore(source), source)
        done = write_ours(opened, LocalStore(place), target_of(opened, dp=2, zero=zero, engine="deepspeed"))
        assert (done.lost, done.made) == ((), ())
    resumed = ranks(2, f"{CASES}:load_and_train", root=back, steps=half, start=half, engine=engine).values()
    for rank, (one, two) in enumerate(zip(straight, resumed, strict=True)):
        assert two["losses"] == one["losses"][-len(two["losses"]) :]
        assert (two["lr"], two["draws"], two["state"]) == (one["lr"], one["draws"], one["state"])
        assert (two["step"], two["cursor"], two["epoch"]) == (half, 10 * rank + half, 3)
