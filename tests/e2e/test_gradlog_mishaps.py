"""What goes wrong around a log on several ranks: nobody waits without a word, and what can be saved is saved.

Every rank counts steps by its calls, and meets the others at full saves by that count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ckpt.gradlog.history import history_of
from ckpt.store.open import open_store
from tests.e2e.test_gradlog_matrix import OVERFLOWS
from tests.harness.pool import ranks

if TYPE_CHECKING:
    from pathlib import Path

CASES = "tests.e2e.mishap_cases"
ONCE = "must be called once behind each optimizer step, skipped ones too, on every rank"


def run(root: Path, calls: dict[str, int], full_every: int, **options: Any) -> list[dict[str, Any]]:
    return ranks(
        2, f"{CASES}:miscount", timeout=90, root=str(root), calls=calls, steps=20, full_every=full_every, **options
    ).values()


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (0, "rank 1 has taken 2 optimizer steps between two calls of ckpt.Checkpointer.step() (as step 3)"),
        (2, "rank 1 has called ckpt.Checkpointer.step() with no optimizer step taken or skipped since the last call"),
    ],
)
def test_a_rank_that_alone_has_miscounted_is_told_and_put_right(times: int, words: str, tmp_path: Path) -> None:
    first, second = run(tmp_path, {"3": times}, 100)
    assert (first["ended"], second["ended"]) == ("", "")
    assert (first["number"], second["number"]) == (20, 20)
    assert any(line.startswith(words) and ONCE in line for line in second["told"])
    assert not any("count of steps" in line for line in first["told"])
    # Its log has ended, and a full save and a new log have followed.
    assert (first["loaded"], second["loaded"], first["same"], second["same"]) == (20, 20, True, True)


@pytest.mark.parametrize(
    ("calls", "waits", "words"),
    [
        ({"5": 0}, 0, "rank 1: did not call ckpt.Checkpointer.step (full save of step 5) within 2 s"),
        ({"4": 0}, 0, "does not come to step 5: rank 1 has taken 2 optimizer steps between two calls"),
        ({"4": 2}, 1, "does not come to step 5: rank 1 has called ckpt.Checkpointer.step() with no optimizer step"),
    ],
)
def test_ranks_that_cannot_meet_at_a_full_save_say_why(
    calls: dict[str, int], waits: int, words: str, tmp_path: Path
) -> None:
    found = run(tmp_path, calls, 5, patience=2.0)
    assert words in found[waits]["ended"], found
    assert found[waits]["ended"].startswith("RankFailure: ")
    assert found[1 - waits]["ended"].startswith("lost: ")


ZERO3 = {"kind": "deepspeed", "stage": 3, "dtype": "bf16"}
FP16 = {"kind": "deepspeed", "stage": 3, "dtype": "fp16", "extra": OVERFLOWS}


@pytest.mark.parametrize(
    ("options", "times", "at", "ends"),
    [
        ({"kind": "fsdp2"}, 2, 4, 4),
        (ZERO3, 2, 4, 4),
        (FP16, 0, 14, 12),  # the scale has grown again: step 14 overflows
    ],
    ids=["fsdp2 twice", "zero-3 twice", "zero-3 forgotten behind a skipped step"],
)
def test_a_rank_that_has_miscounted_before_the_job_dies(
    options: dict[str, Any], times: int, at: int, ends: int, tmp_path: Path
) -> None:
    common = {"root": str(tmp_path), **options}
    calls = {"calls": {str(at): times}, "steps": at + 4, "expect_killed": [0, 1]}
    ranks(2, f"{CASES}:miscount_and_die", timeout=120, **calls, **common)
    history = history_of(open_store(tmp_path))
    found = ranks(2, "tests.e2e.gradlog_cases:come_back_somewhere", timeout=120, **common).values()
    for one in found:
        (note,) = one["notes"]
        assert "some rank has called ckpt.Checkpointer.step() once too often or not often enough" in note
        assert f"ends behind step {one['step']}" in note
        assert one["step"] == history.reaches == ends
        assert (one["exact"], one["state"], one["objects"], one["losses"], one["end"]) == (True, [], True, True, [])


@pytest.mark.parametrize(
    ("how", "full_every", "words"),
    [
        ("removed", 100, "was removed or moved while it was being written to"),
        ("shared", 6, "another job has begun log 2 in"),
    ],
)
def test_a_root_that_is_not_the_jobs_own_any_more(how: str, full_every: int, words: str, tmp_path: Path) -> None:
    common = {"root": str(tmp_path / "root"), "how": how, "steps": 22, "full_every": full_every}
    found = ranks(2, f"{CASES}:disturb", timeout=90, **common).values()
    assert any(words in line for line in found[0]["told"])
    for one in found:
        assert (one["number"], one["loaded"], one["same"]) == (22, 22, True)
        assert one["last_full"] <= (18 if how == "shared" else 16)  # and not one after the other


@pytest.mark.parametrize("stage", [1, 3])
def test_steps_that_overflow_are_no_calls_too_many(stage: int, tmp_path: Path) -> None:
    options = {"kind": "deepspeed", "stage": stage, "dtype": "fp16", "extra": OVERFLOWS}
    told = ranks(2, f"{CASES}:warnings", timeout=120, root=str(tmp_path), steps=9, **options).values()
    assert not [line for lines in told for line in lines if "step" in line and "replicas" not in line]
    skipped = [one.skipped for one in history_of(open_store(tmp_path)).steps]
    assert any(skipped), skipped


@pytest.mark.parametrize(
    "options", [{"kind": "deepspeed", "stage": 3, "dtype": "bf16"}, {"kind": "fsdp2"}], ids=lambda one: one["kind"]
)
def test_all_ranks_hear_of_a_step_that_one_cannot_repeat(options: dict[str, Any], tmp_path: Path) -> None:
    """Else they wait for it in what the engine does together behind a replay."""
    common = {"timeout": 60, "root": str(tmp_path), **options}
    ranks(2, f"{CASES}:log_and_end", steps=4, **common).values()
    for said in ranks(2, f"{CASES}:cannot_repeat", at=3, **common).values():
        assert said.startswith("RankFailure: "), said
        assert "rank 1: ReplayError: log 1, step 3" in said
        assert "no more device memory" in said
