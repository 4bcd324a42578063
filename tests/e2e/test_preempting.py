"""A signal on any rank of a real job leads to one save at one step, from which the job goes on bit for bit."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.harness.pool import ranks

if TYPE_CHECKING:
    from pathlib import Path

CASES = "tests.e2e.preempting_cases"

JOBS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp, one of four": (4, {"kind": "ddp", "told": {2: 3}}),
    "ddp, all": (2, {"kind": "ddp", "told": {0: 3, 1: 3}}),
    "ddp, at different times": (3, {"kind": "ddp", "told": {2: 3, 0: 4}}),
    "ddp, twice": (2, {"kind": "ddp", "told": {1: 2}, "twice": True}),
    "ddp, while a save is in flight": (2, {"kind": "ddp", "told": {0: 3}, "behind": 2}),
    "fsdp2": (4, {"kind": "fsdp2", "told": {1: 3}}),
    "zero-2": (4, {"kind": "deepspeed", "stage": 2, "told": {3: 3}}),
    "zero-2, accumulation": (2, {"kind": "deepspeed", "stage": 2, "gas": 2, "told": {1: 3}}),
    "zero-2, while a save is in flight": (2, {"kind": "deepspeed", "stage": 2, "told": {1: 3}, "behind": 2}),
    "zero-3": (2, {"kind": "deepspeed", "stage": 3, "told": {0: 3}}),
    "zero-3 fp32": (2, {"kind": "deepspeed", "stage": 3, "dtype": "fp32", "told": {1: 3}}),
    "pipelining": (4, {"kind": "tp x pp x dp", "told": {3: 3}}),
    "megatron": (2, {"kind": "megatron", "start": {"tp": 2}, "dtype": "bfloat16", "told": {0: 3}}),
    "megatron, pipeline": (2, {"kind": "megatron", "start": {"pp": 2}, "told": {1: 3}}),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_signal_is_one_save_on_all_ranks(name: str, tmp_path: Path) -> None:
    world, options = JOBS[name]
    found = ranks(world, f"{CASES}:preempted", timeout=150, root=str(tmp_path), **options).values()
    step = found[0]["saved"]
    first = min(options["told"].values())
    assert step is not None, found
    assert first < step <= first + 4
    for rank, one in enumerate(found):
        assert one == {
            "ended": 128 + signal.SIGTERM,
            "saved": step,
            "done": step,
            "steps": [3, step] if "behind" in options else [step],
            "losses": True,
            "final": [],
            "handler": True,
        }, rank


def test_looking_costs_a_fraction_of_a_millisecond_and_is_one_look() -> None:
    for seconds in ranks(2, f"{CASES}:cost", timeout=60, checks=200).values():
        assert seconds > 0
