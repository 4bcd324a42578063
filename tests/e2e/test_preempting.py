"""A signal on any rank of a real job leads to one save at one step, from which the job goes on bit for bit."""

from __future__ import annotations

import os
import signal
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

CASES = "tests.e2e.preempting_cases"

JOBS: dict[str, tuple[int, dict[str, Any]]] = {
    # DDP changes its buckets behind the first backward pass of a process, and three ranks add up in another order.
    "ddp, one of four": (4, {"kind": "ddp", "told": {2: 3}, "warm": 1}),
    "ddp, all": (2, {"kind": "ddp", "told": {0: 3, 1: 3}}),
    "ddp, at different times": (3, {"kind": "ddp", "told": {2: 3, 0: 4}, "warm": 1}),
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


SCRIPT = """
import sys, itertools, torch, ckpt
import torch.distributed as dist

root, rank, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(40, 30))
optimizer = torch.optim.AdamW(model.parameters())
with ckpt.on_preemption((model, optimizer), root, timeout=60):
    for step in itertools.count(1):
        optimizer.zero_grad()
        model(torch.ones(40)).sum().backward()
        optimizer.step()
        if step == 3:
            print("training", flush=True)
"""


@pytest.mark.parametrize("told", [(0,), (1,), (0, 1)])
def test_a_job_that_a_scheduler_ends(told: tuple[int, ...], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path), str(rank), str(port)],
            cwd=REPO, env={**os.environ, **rank_environment()}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for one in processes:
            assert one.stdout is not None
            assert one.stdout.readline() == "training\n"
        for rank in told:
            processes[rank].send_signal(signal.SIGTERM)
        errors = [one.communicate(timeout=120)[1] for one in processes]
    finally:
        for one in processes:
            one.kill()
    assert [one.returncode for one in processes] == [128 + signal.SIGTERM] * 2, errors
    assert "terminate called" not in "".join(errors)
    assert len(ckpt.steps(tmp_path)) == 1
