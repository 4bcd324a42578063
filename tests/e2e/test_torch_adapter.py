"""Torch loops are saved and loaded in every layout, bit for bit, and from every layout into every other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.harness.pool import ranks

if TYPE_CHECKING:
    from pathlib import Path

CASES = "tests.e2e.torch_cases"

RESUMED: list[tuple[str, int, dict[str, Any]]] = [
    ("plain", 1, {}),
    ("plain", 1, {"fused": True}),
    ("ddp", 2, {}),
    ("ddp", 2, {"optimizer": "SGD"}),
    ("zero1", 2, {}),
    ("zero1", 3, {"bucket_view": True}),
    ("fsdp2", 3, {}),
    ("fsdp2", 2, {"bf16": True, "optimizer": "Adagrad"}),
    ("hsdp", 4, {}),
    ("tp", 2, {}),
    ("fsdp2 x tp", 4, {}),
    ("megatron", 2, {}),
    ("megatron", 2, {"fused": True}),
    ("megatron", 2, {"attributes": True}),
    ("tp x pp x dp", 4, {"how": "function"}),
    ("tp x pp x dp", 8, {}),
    ("tp x pp x dp", 8, {"dp": "fsdp2"}),
]


@pytest.mark.parametrize(("layout", "world", "options"), RESUMED)
def test_a_resumed_loop_goes_on_bit_for_bit(layout: str, world: int, options: dict[str, Any], tmp_path: Path) -> None:
    found = ranks(world, f"{CASES}:resume", timeout=120, root=str(tmp_path), layout=layout, **options).values()
    for rank, one in enumerate(found):
        assert one["step"] == 3, rank
        assert one["state"] == [], rank
        assert one["final"] == [], rank
        assert one["losses"][0] == one["losses"][1], rank
        assert one["strays"] == [], rank
        assert one["moved"] == [], rank
        assert one["objects"], rank
        assert one["divergences"] == [], rank
        assert one["unique"] == one["nbytes"], rank
    assert sum(len(one["losses"][0]) for one in found) > 0
