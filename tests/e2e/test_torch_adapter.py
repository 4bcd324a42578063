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
    # DDP changes its buckets behind the first backward pass of a process, and three ranks add up in another order.
    ("zero1", 3, {"bucket_view": True, "warm": 1}),
    ("fsdp2", 4, {"warm": 2}),
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


LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "plain": ("plain", 1, {}),
    "ddp": ("ddp", 2, {}),
    "zero1": ("zero1", 3, {}),
    "fsdp2": ("fsdp2", 4, {}),
    "hsdp": ("hsdp", 4, {}),
    "dtensor tp": ("tp", 2, {}),
    "fsdp2 x tp": ("fsdp2 x tp", 4, {}),
    "megatron tp": ("megatron", 2, {}),
    "tp x pp x dp": ("tp x pp x dp", 8, {}),
    "zero3": ("deepspeed", 2, {}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One checkpoint of every layout, with the hashes of the whole state that it was made of."""
    found = {}
    for steps, (name, (layout, world, options)) in enumerate(LAYOUTS.items(), start=1):
        root = str(tmp_path_factory.mktemp("saved"))
        one = ranks(
            world,
            f"{CASES}:save_from",
            timeout=120,
            root=root,
            layout=layout,
            seed=steps,
            steps=1 + steps % 3,
            **options,
        ).values()
        assert all(other["state"] == one[0]["state"] for other in one)
        found[name] = {"root": root, **one[0]}
    return found


@pytest.mark.parametrize("target", LAYOUTS)
def test_every_layout_loads_what_every_layout_saved(target: str, saved: dict[str, Any]) -> None:
    layout, world, options = LAYOUTS[target]
    roots = {name: one["root"] for name, one in saved.items()}
    found = ranks(world, f"{CASES}:load_all", timeout=180, roots=roots, layout=layout, **options).values()
    for one in found:
        for name in LAYOUTS:
            assert one[name] == {"state": saved[name]["state"], "strays": []}, name


def test_what_is_written_is_what_there_is_to_know(saved: dict[str, Any]) -> None:
    assert {len(one["state"]) for one in saved.values()} == {len(saved["plain"]["state"])}
    assert {one["unique"] for one in saved.values()} == {saved["plain"]["unique"]}
    steps = sum(key.endswith(" step") for key in saved["plain"]["state"])
    for name, one in saved.items():
        # The counts are equal, and content that a rank has to write twice it writes once.
        writers = (one["written"] - one["unique"]) // 4 + steps
        assert 1 <= writers <= LAYOUTS[name][1], name


@pytest.mark.parametrize("stage", [0, 1])
def test_masters_of_a_bf16_engine_and_fp32_parameters_are_the_same_weight(stage: int, tmp_path: Path) -> None:
    low = {"stage": stage, "dtype": "bf16"}
    there = ranks(
        2, f"{CASES}:save_from", timeout=120, root=str(tmp_path / "a"), layout="deepspeed", seed=3, **low
    ).values()[0]["state"]
    here = ranks(2, f"{CASES}:save_from", timeout=120, root=str(tmp_path / "b"), layout="fsdp2", seed=4).values()[0][
        "state"
    ]
    load = f"{CASES}:load_all"
    up = ranks(4, load, timeout=120, roots={"a": str(tmp_path / "a")}, layout="fsdp2 x tp").values()[0]["a"]
    down = ranks(2, load, timeout=120, roots={"b": str(tmp_path / "b")}, layout="deepspeed", **low).values()[0]["b"]
    for found, wanted in ((up, there), (down, here)):
        assert found == {"state": wanted, "strays": []}
