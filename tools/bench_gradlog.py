"""What a gradient log costs and what it saves: bytes a step, time of the training loop, time to come back.

    python tools/bench_gradlog.py overhead [--layout zero3] [--params 4e6] [--batch 48] [--steps 240] [--root DIR]
    python tools/bench_gradlog.py frequent [--layout zero3] …   # beside a full save and DCP's async_save at each step
    python tools/bench_gradlog.py profile [--layout zero3] …    # what a record costs, part by part, beside a raw writer
    python tools/bench_gradlog.py bytes                         # full save against one step, for every layout
    python tools/bench_gradlog.py recovery [--steps 50] …       # base and replay against base and training again
    python tools/bench_gradlog.py lossless                      # half precision and a multiplier, against a copy
    python tools/bench_gradlog.py worlds [--worlds 8,64,…]      # what a rank of a large job does to find its part

Ranks are processes of this machine (``--ranks``, 2) with gloo. ``overhead`` takes turns in one job: ten steps with the
log, ten without, so that both meet the same noise; it prints medians, and the ratio of the means of all steps.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
from benchmarks.engines import CONTEXT
from benchmarks.system import die_with_parent
from gradlog_jobs import MIXED, job_of
from gradlog_profile import profile
from gradlog_turns import BLOCK, Dcp, Full, Log, Way, in_turn
from log_worlds import WORLDS, simulate
from rich.console import Console

import ckpt
from ckpt.gradlog.writing.lossless import Keeper

if TYPE_CHECKING:
    from collections.abc import Callable

LAYOUTS = ("ddp", "fsdp2", *MIXED, "zero1", "zero2", "zero3")


class Bench:
    """One rank of a job that is measured."""

    def __init__(self, options: argparse.Namespace, layout: str) -> None:
        self.options, self.rank, self.world = options, dist.get_rank(), dist.get_world_size()
        self.root = f"{options.root}/{layout}"
        self.job = job_of(layout, options.params)
        vocab = self.job._vocab
        batches = torch.Generator().manual_seed(self.rank)
        self.job.tokens = lambda: torch.randint(0, vocab, (options.batch, CONTEXT), generator=batches)  # type: ignore[method-assign]

    def step(self) -> float:
        """Run one step and return its seconds."""
        began = time.perf_counter()
        self.job.train_step()
        return time.perf_counter() - began

    def keeper(self, name: str, **options: Any) -> ckpt.Checkpointer:
        """Return a checkpointer whose first full save is durable."""
        made = ckpt.Checkpointer(
            self.job.engine,
            name if name.startswith("/") else f"{self.root}/{name}",
            **{"full_every": 10**9, "resume": False, "log_codec": self.options.codec, **options},
        )
        if made._handle is not None:
            made._handle.durable.wait(600)
        return made

    def all(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def tell(self, **values: Any) -> None:
        """Print a row of results on one rank."""
        if self.rank == 0:
            print(json.dumps({"layout": self.job.layout, "params": self.job.params, **values}), flush=True)


def overhead(bench: Bench) -> None:
    """Print what a step takes with the log and without."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for block in range(bench.options.steps // BLOCK):
        on = block % 2 == 0
        way = Log(bench, f"{bench.root}/block{block}") if on else Way()
        way.begin()
        bench.step()
        way.step()
        dist.barrier()
        for _ in range(BLOCK):
            began = time.perf_counter()
            bench.job.train_step()
            way.step()
            seconds[on].append(time.perf_counter() - began)
        way.end()
        dist.barrier()
    means = [max(one) for one in zip(*bench.all([statistics.fmean(seconds[on]) for on in (True, False)]), strict=True)]
    medians = [
        max(one) for one in zip(*bench.all([statistics.median(seconds[on]) for on in (True, False)]), strict=True)
    ]
    bench.tell(
        item="overhead",
        steps=len(seconds[True]) + len(seconds[False]),
        with_log_s=round(medians[0], 4),
        without_s=round(medians[1], 4),
        ratio_of_medians=round(medians[0] / medians[1], 4),
        ratio_of_means=round(means[0] / means[1], 4),
    )


def frequent(bench: Bench) -> None:
    """Print what a loop takes that can go back to every step: by a log, by full saves, by DCP."""
    ways: dict[str, Way] = {
        "nothing": Way(),
        "log": Log(bench, f"{bench.root}/log"),
        "full": Full(bench, f"{bench.root}/full"),
        "DCP": Dcp(bench, f"{bench.root}/dcp"),
    }
    seconds = in_turn(bench, ways)
    least = seconds["nothing"]
    bench.tell(
        item="frequent",
        **{f"{name}_s": round(value, 4) for name, value in seconds.items()},
        **{f"{name}_more": round((value - least) / least, 4) for name, value in seconds.items() if value is not least},
        full_by_log=round((seconds["full"] - least) / (seconds["log"] - least), 1),
        DCP_by_log=round((seconds["DCP"] - least) / (seconds["log"] - least), 1),
    )


def count_bytes(bench: Bench) -> None:
    """Print the bytes of a full save and of a step's gradients, over all ranks."""
    bench.step()  # with it come the moments
    report = ckpt.save(bench.job.engine, f"{bench.root}/full")
    steps = 5
    keeper = bench.keeper("bytes")
    for _ in range(steps):
        bench.step()
        keeper.step()
    keeper.flush()
    payload, written = (sum(bench.all(one)) / steps for one in (keeper.log_payload, keeper.log_written))
    keeper.close()
    held, full = report.bytes_held, report.bytes_written
    bench.tell(
        item="bytes",
        full=full,
        held=held,
        step=round(payload),
        stored=round(written),
        per_param=round(payload / bench.job.params, 4),
        full_by_step=round(full / payload, 2),
        held_by_step=round(held / payload, 2),
    )


def recovery(bench: Bench) -> None:
    """Print how long it takes to come back by replay, and by training the same steps again."""
    keeper = bench.keeper("recovery")
    steps = bench.options.steps
    trained = []
    for _ in range(steps):
        trained.append(bench.step())
        keeper.step()
    keeper.flush()
    keeper.close()
    dist.barrier()
    began = time.perf_counter()
    base = ckpt.load(bench.job.engine, f"{bench.root}/recovery", replay=False)
    load = time.perf_counter() - began
    again = [bench.step() for _ in range(steps)]
    train_again = time.perf_counter() - began
    dist.barrier()
    began = time.perf_counter()
    report = ckpt.load(bench.job.engine, f"{bench.root}/recovery")
    replay = time.perf_counter() - began
    load, train_again, replay = (max(bench.all(one)) for one in (load, train_again, replay))
    bench.tell(
        item="recovery",
        steps=report.step - base.step,
        exact=report.exact,
        load_s=round(load, 3),
        load_and_train_s=round(train_again, 3),
        load_and_replay_s=round(replay, 3),
        ratio=round(replay / train_again, 4),
        step_s=round(statistics.median(trained), 4),
        step_again_s=round(statistics.median(again), 4),
    )


ITEMS: dict[str, Callable[[Bench], None]] = {
    "overhead": overhead,
    "frequent": frequent,
    "bytes": count_bytes,
    "recovery": recovery,
    "profile": profile,
}


def lossless() -> None:
    """Print what it takes to keep a gradient in the fewest bytes that hold it, beside a copy of it."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        for numel in (2_000_000, 20_000_000):
            keeper, kept, copied = Keeper(), [], []
            width = 0
            for step in range(7):
                half = torch.randn(numel, generator=generator).to(dtype)
                grad = half.float().mul_(1.0 / (1.0 + 0.3 * step))  # another multiplier each time
                began = time.perf_counter()
                width = keeper.keep(grad).data.element_size()
                kept.append(time.perf_counter() - began)
                began = time.perf_counter()
                grad.clone()
                copied.append(time.perf_counter() - began)
            ms = [round(statistics.median(one) * 1e3, 2) for one in (kept, copied)]
            print(json.dumps({"reduced in": name, "numel": numel, "bytes": width, "keep_ms": ms[0], "copy_ms": ms[1]}))


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("item", choices=[*ITEMS, "lossless", "worlds"])
    parser.add_argument("--layout", choices=LAYOUTS, action="append")
    parser.add_argument("--params", type=float, default=4e6)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--codec", default="none")
    parser.add_argument("--root", default="")
    parser.add_argument("--worlds", type=lambda text: [int(n) for n in text.split(",")], default=WORLDS)
    parser.add_argument("--shm", default="")
    options = parser.parse_args()
    if options.item == "lossless":
        lossless()
        return
    if options.item == "worlds":
        Console(width=160).print(simulate(options.worlds))
        return
    if "RANK" in os.environ:
        die_with_parent()
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        for layout in options.layout:
            ITEMS[options.item](Bench(options, layout))
            dist.barrier()
        dist.destroy_process_group()
        return
    where = (tempfile.TemporaryDirectory(dir=one, prefix="ckpt-gradlog-") for one in (options.root or None, "/dev/shm"))
    with next(where) as folder, next(where) as shm:
        options.shm = shm
        layouts = options.layout or (LAYOUTS if options.item == "bytes" else ("zero3",))
        for layout in layouts:
            _launch(options, folder, layout)


def _launch(options: argparse.Namespace, folder: str, layout: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    arguments = [options.item, "--layout", layout, "--root", folder, "--shm", options.shm]
    arguments += ["--codec", options.codec]
    arguments += [f"--{name}={getattr(options, name)}" for name in ("params", "batch", "steps", "ranks")]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(options.ranks)}
    common |= {"DS_ACCELERATOR": "cpu", "DEEPSPEED_LOG_LEVEL": "error", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, *arguments],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(options.ranks)
    ]
    if [code for code in [one.wait() for one in ranks] if code]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
