"""Killed anywhere, in the middle of a record too: ZeRO 1 to 3, precisions, clipping, accumulation, optimizers.

``CKPT_KILLS=all`` runs every combination, three random ones of each stage run otherwise; ``CKPT_SEED`` chooses others.
"""

from __future__ import annotations

import os
import random
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from tests.harness.pool import ranks

if TYPE_CHECKING:
    from pathlib import Path

CASES = "tests.e2e.gradlog_cases"
OPS = {"FusedAdam": ("fused_adam",), "DeepSpeedCPUAdam": ("cpu_adam",)}
OVERFLOWS = {"fp16": {"enabled": True, "initial_scale_power": 26, "loss_scale_window": 3, "hysteresis": 1}}
"""A loss scale that cannot hold in the first steps, and grows back every third: steps are skipped now and then."""
FEW = 3


def _all() -> dict[str, dict[str, Any]]:
    found = {}
    for stage, dtype, clip, gas, optimizer in product(
        (1, 2, 3), ("bf16", "fp16", "fp32"), (0.0, 0.3), (1, 4), ("AdamW", "FusedAdam", "DeepSpeedCPUAdam")
    ):
        name = f"zero-{stage} {dtype} {'clip' if clip else 'no clip'} gas {gas} {optimizer}"
        found[name] = {"stage": stage, "dtype": dtype, "clip": clip, "gas": gas, "optimizer": optimizer}
        if dtype == "fp16":
            found[name]["extra"] = OVERFLOWS
        if optimizer == "DeepSpeedCPUAdam":
            found[name]["offload"] = True
    return found


ALL = _all()
SEED = int(os.environ.get("CKPT_SEED", "20"))


def _chosen() -> list[str]:
    if os.environ.get("CKPT_KILLS") == "all":
        return list(ALL)
    draw = random.Random(SEED)
    by_stage = [[name for name in ALL if name.startswith(f"zero-{stage}")] for stage in (1, 2, 3)]
    return [name for names in by_stage for name in draw.sample(names, FEW)]


@pytest.mark.parametrize("name", _chosen())
def test_a_job_killed_anywhere_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    options, draw, world = ALL[name], random.Random(f"{SEED} {name}"), 2
    steps, full_every = draw.randrange(4, 14), draw.randrange(3, 8)
    steps += steps % full_every == 0  # a full save would meet the rank that waits for the others' last word
    ops = OPS.get(options["optimizer"], ())
    common = {"root": str(tmp_path), "kind": "deepspeed", "timeout": 150, "ops": ops, **options}
    ranks(
        world,
        f"{CASES}:train_and_die_writing",
        expect_killed=range(world),
        steps=steps,
        full_every=full_every,
        victim=draw.randrange(world),
        share=draw.random(),
        **common,
    )
    for one in ranks(world, f"{CASES}:come_back_somewhere", **common).values():
        step = one.pop("step")
        replayed = one.pop("replayed")
        assert full_every * ((steps - 1) // full_every) <= step < steps, (steps, full_every)
        assert one == {
            "exact": True if replayed else None, "notes": [], "state": [], "objects": True, "losses": True, "end": [],
        }  # fmt: skip
