"""``ckpt.async_save`` on real engines: training goes on at once, and what is saved is the moment of the call."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import ckpt
from tests.harness.environment import REPO, rank_environment
from tests.harness.pool import ranks

if TYPE_CHECKING:
    from pathlib import Path

CASES = "tests.e2e.async_cases"

Setup = tuple[int, dict[str, Any]]
"""World size, and arguments of ``async_cases.Job``."""

ENGINES: dict[str, tuple[Setup, Setup | None]] = {
    "ddp": ((2, {"kind": "ddp"}), (2, {"kind": "fsdp2"})),
    "ZeroRedundancyOptimizer": ((2, {"kind": "zero1"}), None),
    "fsdp2": ((3, {"kind": "fsdp2"}), (2, {"kind": "ddp"})),
    "fsdp2 bf16": ((2, {"kind": "fsdp2", "bf16": True}), None),
    "fsdp2 x tp": ((4, {"kind": "fsdp2 x tp"}), None),
    "pipelining": ((4, {"kind": "tp x pp x dp"}), (1, {"kind": "plain"})),
    "zero-0 bf16": ((2, {"kind": "deepspeed", "stage": 0, "dtype": "bf16"}), None),
    "zero-0 fp32": ((2, {"kind": "deepspeed", "stage": 0, "dtype": "fp32"}), None),
    "zero-0 fp16": ((2, {"kind": "deepspeed", "stage": 0, "dtype": "fp16"}), None),
    "zero-1 bf16": (
        (3, {"kind": "deepspeed", "stage": 1, "dtype": "bf16"}),
        (2, {"kind": "deepspeed", "stage": 3, "dtype": "bf16"}),
    ),
    "zero-1 fp16": ((2, {"kind": "deepspeed", "stage": 1, "dtype": "fp16"}), None),
    "zero-2 bf16": (
        (2, {"kind": "deepspeed", "stage": 2, "dtype": "bf16", "gas": 2}),
        (2, {"kind": "deepspeed", "stage": 0, "dtype": "fp32"}),
    ),
    "zero-2 fp32": ((2, {"kind": "deepspeed", "stage": 2, "dtype": "fp32"}), None),
    "zero-2 offload": ((2, {"kind": "deepspeed", "stage": 2, "dtype": "bf16", "offload": True}), None),
    "zero-3 bf16": (
        (3, {"kind": "deepspeed", "stage": 3, "dtype": "bf16"}),
        (2, {"kind": "deepspeed", "stage": 1, "dtype": "bf16"}),
    ),
    "zero-3 fp32": ((2, {"kind": "deepspeed", "stage": 3, "dtype": "fp32"}), None),
    "zero-3 fp16": ((2, {"kind": "deepspeed", "stage": 3, "dtype": "fp16"}), None),
    "zero-3 offload": (
        (2, {"kind": "deepspeed", "stage": 3, "dtype": "bf16", "offload": True, "offload_param": True}),
        None,
    ),
    "megatron": ((2, {"kind": "megatron", "start": {"tp": 2}, "dtype": "bfloat16"}), (1, {"kind": "megatron"})),
    "megatron distributed": ((2, {"kind": "megatron", "dtype": "bfloat16", "distributed": True}), None),
}


@pytest.mark.parametrize("name", ENGINES)
def test_training_that_goes_on_at_once_does_not_change_what_is_saved(name: str, tmp_path: Path) -> None:
    (world, options), other = ENGINES[name]
    for rank, found in enumerate(
        ranks(world, f"{CASES}:overtaken", timeout=150, root=str(tmp_path), **options).values()
    ):
        assert found == {
            "asked too early": [False],  # the step was asked for before anything was staged …
            "staged": True,  # … and was not taken before all was …
            "durable": False,  # … but did not wait for the store
            "state": [],
            "objects": True,
            "strays": [],
            "as the front": True,
            "losses": True,
            "final": [],
        }, rank
    if other is not None:
        world, options = other
        for found in ranks(world, f"{CASES}:load_both", timeout=150, root=str(tmp_path), **options).values():
            assert found["same"]
            assert found["tensors"] > 10


def test_what_forward_and_the_loop_change_does_not_leak(tmp_path: Path) -> None:
    for found in ranks(2, f"{CASES}:leaks", timeout=150, root=str(tmp_path)).values():
        assert found["losses"]
        assert found["at"] == [4, [3.0] * 4, 2]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("full", "StoreFull: no space left"),
        ("absent", "did not call"),
        ("written", "was written into before its snapshot was staged"),
    ],
)
def test_a_failure_on_one_rank_is_everybodys_and_training_goes_on(how: str, words: str, tmp_path: Path) -> None:
    found = ranks(3, f"{CASES}:fails", timeout=150, root=str(tmp_path), how=how).values()
    callers = found[:2] if how == "absent" else found
    for one in callers:
        assert one["error"] == found[0]["error"]
        assert one["error"][0] == "RankFailure"
        assert words in one["error"][1]
    for one in found:
        assert one["second"] == (found[0]["error"][1] if how == "absent" else None)
        assert one["steps"] == [1, 5]
        assert len(one["losses"]) == 3


def test_a_rank_that_saves_in_the_foreground_meanwhile_is_told(tmp_path: Path) -> None:
    for one in ranks(2, f"{CASES}:first_call", timeout=150, root=str(tmp_path)).values():
        assert "ranks disagree on the call: 'ckpt.async_save' on rank(s) 0; 'ckpt.save' on rank(s) 1" in one["error"]
        assert one["error"].startswith("ConfigError")
        assert one["steps"] == [2, 3]


def test_a_rank_that_is_killed_meanwhile_is_named(tmp_path: Path) -> None:
    found = ranks(3, f"{CASES}:fails", timeout=150, expect_killed=[2], root=str(tmp_path), how="killed")
    for one in found[:2]:
        assert one.value is not None, one
        assert one.value["error"] == found[0].value["error"]
        assert "rank 2: its process is gone" in one.value["error"][1]
    assert ckpt.steps(tmp_path) == [1]


@pytest.mark.parametrize("options", [{"kind": "ddp"}, {"kind": "deepspeed", "stage": 2}])
def test_many_saves_leave_nothing_behind(options: dict[str, Any], tmp_path: Path) -> None:
    saves = 20
    for found in ranks(2, f"{CASES}:many", timeout=200, root=str(tmp_path), saves=saves, **options).values():
        early, late = found["counts"]
        assert all(late[what] <= early[what] for what in early), (early, late)
        assert found["groups"] == ["MainThread"] * 2  # of the foreground, and of what is behind
        assert found["wrong"] == []
        assert found["used"]["all_gather_into_tensor"] >= saves
        assert found["steps"] == list(range(1, saves + 1))


# --------------------------------------------------------------------------------------- jobs that end, as scripts do

SCRIPT = """
import sys, threading, torch, ckpt
import torch.distributed as dist
from ckpt.store.local import LocalStore
from tests.harness.gates import Gate, Gated

how, root, rank, port = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(40, 30))
optimizer = torch.optim.AdamW(model.parameters())

def train():
    optimizer.zero_grad()
    model(torch.ones(40)).sum().backward()
    optimizer.step()

train()
gate = Gate()
def finish():
    gate.pass_through()
    if how == "full" and rank == 1:
        raise ckpt.StoreError("no space left on the device")
handle = ckpt.async_save((model, optimizer), Gated(LocalStore(f"{root}/repo"), finish=finish), step=1, timeout=20)
train()
if how == "destroyed":
    dist.destroy_process_group()
    gate.open()
elif how == "waited":
    gate.open()
    handle.durable.wait(60)
    dist.destroy_process_group()
else:
    threading._register_atexit(gate.open)
if how == "error" and rank == 0:
    raise ValueError("the training has a bug")
print("end of the script", flush=True)
"""


@pytest.mark.parametrize("how", ["waited", "ends", "full", "error", "destroyed"])
def test_a_script_that_ends(how: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, how, str(tmp_path), str(rank), str(port)],
            cwd=REPO, env={**os.environ, **rank_environment()}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        ended = [one.communicate(timeout=150) for one in processes]
    finally:
        for one in processes:
            one.kill()
    codes, errors = [one.returncode for one in processes], [stderr for _, stderr in ended]
    assert codes == ([1, 0] if how == "error" else [0, 0]), errors
    for text in errors:
        assert "terminate called" not in text
        assert ("the asynchronous save of step 1 failed" in text) == (how in ("full", "destroyed")), text
        assert ("no space left on the device" in text) == (how == "full")
        assert ("destroy_process_group" in text) == (how == "destroyed")
    assert ckpt.steps(tmp_path / "repo") == ([] if how in ("full", "destroyed") else [1])
