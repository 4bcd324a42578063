"""What nobody has said to be whole is kept as every rank has it, if it differs: it may be slices."""

from __future__ import annotations

from typing import Any

from tests.harness.pool import ranks


def test_a_slice_that_nobody_marked_is_named_and_not_lost(tmp_path: Any) -> None:
    for found in ranks(2, "tests.e2e.assumed_cases:unmarked_slice", timeout=60, root=str(tmp_path)).values():
        assert "ReplicaDivergence" in found["strict"]
        named = {line.split("'")[1] for line in found["divergences"]}
        assert named == {"unknown"}
        assert len(found["divergences"]) == 3  # param and both moments
        assert found["same"]


def test_a_slice_that_the_rules_call_whole_is_not_lost(tmp_path: Any) -> None:
    found = ranks(2, "tests.e2e.assumed_cases:slice_with_a_rule_too_short", timeout=60, root=str(tmp_path))
    assert all(one["same"] for one in found.values())


def test_nothing_here_outlives_destroy_process_group(tmp_path: Any) -> None:
    # Threads of a group that is kept alive into the interpreter's end abort the process there, now and then.
    found = ranks(2, "tests.e2e.assumed_cases:groups_after_the_end", timeout=60, root=str(tmp_path))
    assert found.values() == [[True] * 6] * 2
