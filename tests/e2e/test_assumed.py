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
