"""A checkpoint has the size of the information that the job holds, not of what its ranks hold together."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from safetensors import safe_open

import ckpt
from tests.harness.pool import ranks

if TYPE_CHECKING:
    from pathlib import Path

CASES = "tests.e2e.bytes_cases"
HELD = {0: 56, 1: 20, 2: 20, 3: 14}
"""Stage -> bytes a parameter in the memory of four ranks: bf16 param (2), fp32 master and two moments (12)."""
STAGES = sorted(HELD)


def tensors_in(root: Path, step: int) -> dict[str, int]:
    """Return name -> data bytes of every tensor in the packs of a step, as the stock safetensors library reads them."""
    found: dict[str, int] = {}
    for path in sorted((root / "steps" / str(step)).glob("*/packs/*.safetensors")):
        with safe_open(path, framework="np") as pack:
            length = int.from_bytes(path.read_bytes()[:8], "little")
            header = json.loads(path.read_bytes()[8 : 8 + length])
            names = list(pack.keys())
            assert sorted(names) == sorted(header.keys() - {"__metadata__"})
            sizes = {name: header[name]["data_offsets"] for name in names}
        assert not found.keys() & set(names)
        found |= {name: end - begin for name, (begin, end) in sizes.items()}
        assert path.stat().st_size == 8 + length + sum(end - begin for begin, end in sizes.values())
    return found


def state_bytes(tensors: dict[str, int]) -> int:
    """Return the bytes of tensor state: all but the objects (scheduler, counters, generators)."""
    return sum(nbytes for name, nbytes in tensors.items() if not name.startswith("object:"))


@pytest.mark.parametrize("model", ["tiny", "huge embedding"])
@pytest.mark.parametrize("stage", STAGES)
def test_twelve_bytes_a_parameter_are_written_whatever_is_held(stage: int, model: str, tmp_path: Path) -> None:
    saved: list[dict[str, Any]] = ranks(4, f"{CASES}:save_once", root=str(tmp_path), stage=stage, model=model).values()
    one = saved[0]
    params, buffers = one["params"], one["buffers"]
    assert 12 * params <= one["bytes_written"] <= 1.01 * 12 * params + 4 * buffers
    assert one["bytes_derived"] == 2 * params
    assert one["bytes_held"] == pytest.approx(HELD[stage] * params + 4 * buffers, rel=0.01)
    mean = one["bytes_written"] / 4
    assert one["largest_writer"] <= 1.25 * mean, one["written_by_rank"]
    assert sum(one["written_by_rank"]) == one["bytes_written"]
    assert state_bytes(tensors_in(tmp_path, one["step"])) == one["bytes_written"]
    markers = {"ckpt.json", "attempt.json"}
    assert one["bytes_stored"] == sum(
        f.stat().st_size for f in tmp_path.rglob("*") if f.is_file() and f.name not in markers
    )


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_are_written_once_for_all_steps(stage: int, tmp_path: Path) -> None:
    saved = ranks(4, f"{CASES}:save_twice_half_frozen", root=str(tmp_path), stage=stage).values()
    first, second = saved[0]["first"], saved[0]["second"]
    frozen, trainable = saved[0]["frozen"], saved[0]["trainable"]
    assert 0.4 < trainable / saved[0]["params"] < 0.6
    before, after = tensors_in(tmp_path, first["step"]), tensors_in(tmp_path, second["step"])

    def of_frozen(tensors: dict[str, int]) -> dict[str, int]:
        return {name: nbytes for name, nbytes in tensors.items() if name.partition("|")[0] in frozen}

    assert {name.partition("|")[0] for name in of_frozen(before)} <= set(frozen)
    assert of_frozen(after) == {}
    # Equal content is stored once, so a few biases and norms that were initialised alike may share their bytes.
    assert sum(of_frozen(before).values()) == pytest.approx(2 * (saved[0]["params"] - trainable), rel=0.02)
    assert second["bytes_reused"] == sum(of_frozen(before).values())
    assert second["bytes_written"] <= 1.01 * 12 * trainable + 4 * saved[0]["buffers"]
    assert state_bytes(after) == second["bytes_written"]
    assert ckpt.steps(tmp_path) == [first["step"], second["step"]]
    back = ranks(4, f"{CASES}:load_half_frozen", root=str(tmp_path), stage=stage, step=second["step"]).values()
    assert back == [one["state"] for one in saved]
