"""A save and a load need a bounded amount of host memory, whatever the size of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.harness.pool import ranks

if TYPE_CHECKING:
    from pathlib import Path

CASES = "tests.e2e.memory_cases"
LARGE = 3936
"""Width at which params, masters and moments make 1 GiB: all of it on each rank at stage 0, divided at stage 3."""
SMALL = 2272
"""A third of that."""
LIMIT = 300.0
"""MiB that a save or a load may add to a rank's peak (issue: "less than 300 MiB")."""
SPREAD = 64.0
"""MiB by which this may differ between a model and one of three times its size."""


def measure(root: Path, stage: int, width: int) -> list[dict[str, float]]:
    found = ranks(2, f"{CASES}:save_and_load", timeout=120, root=str(root), stage=stage, width=width).values()
    for one in found:
        assert one["wrong"] == 0
        assert 99 <= one["block of 100 MiB"] <= 110  # else nothing below means anything
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gibibyte_of_state_adds_less_than_300_mib_and_no_more_than_a_third_of_it_does(
    stage: int, tmp_path: Path
) -> None:
    small, large = (measure(tmp_path / str(width), stage, width) for width in (SMALL, LARGE))
    assert 1000 < large[0]["state"] < 1100
    assert large[0]["state"] / small[0]["state"] == pytest.approx(3, rel=0.01)
    for rank, (little, much) in enumerate(zip(small, large, strict=True)):
        for what in ("save", "load"):
            text = (
                f"ZeRO-{stage}, {what} on rank {rank}: peak RSS +{much[what]:.0f} MiB for {much['state']:.0f} MiB of "
                f"state, +{little[what]:.0f} MiB for {little['state']:.0f} MiB"
            )
            assert much[what] < LIMIT, text
            assert abs(much[what] - little[what]) < SPREAD, text
