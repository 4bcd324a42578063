"""Coming back after the loss of a host: log records from another host's memory against all of them from the store.

::

    sudo .venv/bin/python tools/bench_copies.py --steps 30 --runs 3

Emulated hosts as in ``bench_hosts.py``, one rank (FSDP2, bf16 gradients) on each, and a bucket behind a limited link. A
job logs some steps with ``peers=1`` and is killed; what one host had in memory is removed, and a job with a new host in
its place loads: in turns with the copies and without. Both replay the same steps, and have to come to the same weights.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_hosts import REPO, environment, network, server, wait_for, wait_for_bucket

ROOT = "s3://bench/run"
LOST = 1


def job() -> tuple[Any, Any, Any]:
    import torch
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    width = 1024
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(int(os.environ["BENCH_LAYERS"]))))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.Generator().manual_seed(1)

    def step() -> None:
        model(torch.randn(2, width, generator=batches)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return (model, optimizer), step, model


def sums(model: Any) -> list[float]:
    return [float(p.to_local().double().sum()) for p in model.parameters()]


def train() -> None:
    """Log steps, and die once all of them are durable and copied."""
    import boto3
    import torch.distributed as dist

    import ckpt

    if dist.get_rank() == 0:
        wait_for_bucket(boto3.client("s3"))
    dist.barrier()
    engine, step, model = job()
    keeper = ckpt.Checkpointer(engine, ROOT, full_every=10**6, peers=1)
    assert keeper._handle is not None
    keeper._handle.durable.wait()
    steps = int(os.environ["BENCH_STEPS"])
    for _ in range(steps):
        step()
        keeper.step()
    keeper.flush()
    peers, log = keeper._peers, keeper._log
    assert peers is not None
    assert log is not None
    with peers._changed:
        for source in peers._sources:
            while peers.keeper.memory.place(log.head.run, source, steps) is None:
                peers._changed.wait(60)
    Path(f"{os.environ['BENCH_FOLDER']}/sums{dist.get_rank()}").write_text(json.dumps(sums(model)))
    dist.barrier()
    os._exit(0)


def come_back() -> None:
    """Load in turns with what is in memory, and as if there were nothing."""
    import torch
    import torch.distributed as dist

    import ckpt
    from ckpt.gradlog.copies.memory import VARIABLE, HostMemory, folder_for
    from ckpt.store.open import open_store

    engine, _, model = job()
    memory, rank = os.environ[VARIABLE], dist.get_rank()
    expected = json.loads(Path(f"{os.environ['BENCH_FOLDER']}/sums{rank}").read_text())
    for turn in range(int(os.environ["BENCH_RUNS"])):
        for way in ("memory", "store") if turn % 2 == 0 else ("store", "memory"):
            os.environ[VARIABLE] = memory if way == "memory" else f"{memory}-none"
            if rank == LOST:  # each time as if it were new
                shutil.rmtree(folder_for(open_store(ROOT).url), ignore_errors=True)
                assert HostMemory.there(open_store(ROOT).url) is None
            dist.barrier()
            began = time.perf_counter()
            report = ckpt.load(engine, ROOT)
            took = torch.tensor([time.perf_counter() - began, 0.0])
            took[1] = report.log_bytes
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            wrong = torch.tensor([int(sums(model) != expected)])
            dist.all_reduce(wrong)
            if rank == 0:
                told = {"way": way, "seconds": took[0].item(), "log": took[1].item(), "wrong": wrong.item()}
                print("BENCH " + json.dumps({**told, "replayed": report.replayed}), flush=True)
    dist.destroy_process_group()


def rank_main(phase: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    {"train": train, "come_back": come_back}[phase]()


def run_ranks(phase: str, prefix: str, folder: Path, options: argparse.Namespace) -> str:
    """Run one process in each namespace; return what rank 0 printed."""
    ranks = []
    for rank in range(options.hosts):
        lost = phase == "come_back" and rank == LOST
        env = environment(rank, options.hosts, options) | {
            "CKPT_PEER_MEMORY": f"{folder}/memory",
            "CKPT_HOST": "new" if lost else f"host{rank}",
            "BENCH_LAYERS": str(max(1, round(options.params / 1024 / 1025))),
            "BENCH_STEPS": str(options.steps),
            "BENCH_FOLDER": str(folder),
            # A port that the one before has just left may still be taken.
            "MASTER_PORT": "29500" if phase == "train" else "29501",
        }
        command = ["ip", "netns", "exec", f"{prefix}h{rank}", sys.executable, __file__, "--rank", phase]
        with open(folder / f"{phase}{rank}", "wb") as log:
            ranks.append(subprocess.Popen(command, env=env, cwd=REPO, stdout=log, stderr=log))
    wait_for(ranks, [folder / f"{phase}{rank}" for rank in range(options.hosts)])
    return (folder / f"{phase}0").read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--params", type=float, default=12e6)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--fabric", default="400mbit", help="link of each host to the others")
    parser.add_argument("--storage", default="100mbit", help="link of each host to the storage")
    parser.add_argument("--trunk", default="", help="link of the storage itself; default: as fast as the machine")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    options.mib = 0
    with ExitStack() as stack:
        prefix = stack.enter_context(network(options.hosts, options.fabric, options.storage, options.trunk))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckpt-copies-", dir="/dev/shm")))
        stack.enter_context(server(prefix, folder))
        run_ranks("train", prefix, folder, options)
        lines = run_ranks("come_back", prefix, folder, options).splitlines()
    found = [json.loads(line.removeprefix("BENCH ")) for line in lines if line.startswith("BENCH ")]
    print(
        f"{options.hosts} hosts, fabric {options.fabric}, storage {options.storage}, {options.params:.2g} parameters, "
        f"{found[0]['replayed']} steps replayed"
    )
    print("| records from | median s | from | to | MB of the log that the slowest rank reads from the store |")
    print("|---|---|---|---|---|")
    median = {}
    for way in ("memory", "store"):
        times = [one["seconds"] for one in found if one["way"] == way]
        median[way] = statistics.median(times)
        most = max(one["log"] for one in found if one["way"] == way) / 1e6
        print(f"| {way} | {median[way]:.2f} | {min(times):.2f} | {max(times):.2f} | {most:.1f} |")
    print(f"store : memory {median['store'] / median['memory']:.2f}; wrong ranks: {sum(one['wrong'] for one in found)}")


if __name__ == "__main__":
    rank_main(sys.argv[2]) if sys.argv[1:2] == ["--rank"] else main()
