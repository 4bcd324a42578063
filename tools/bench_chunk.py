"""What the chunk size costs and buys: the measurement behind docs/adr/0003-chunk-size.md.

``tools/setup && .venv/bin/python tools/bench_chunk.py``: for each chunk size, four ranks save and load (interleaved,
cold page cache), then three ranks load what four have saved. Over-read: bytes read beyond those that the three need,
because a chunk is read and checked whole.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from bench_deepspeed import build_engine, train_step
from measure import MB, Peak, filesystem, machine, make_cold, size_below, timed
from rich.console import Console
from rich.table import Table

SIZES = (1, 4, 16, 64)  # MiB
WORLD, WORLD_AFTER = 4, 3


def use_chunks_of(nbytes: int) -> None:
    """Make the next save of this process cut chunks of at most ``nbytes``."""
    from ckpt.plan.save_plan import build_save_plan
    from ckpt.runtime import agree

    agree.build_save_plan = functools.partial(build_save_plan, chunk_bytes=nbytes)
    agree._cached = None


def of_all_ranks(value: float) -> list[float]:
    """Return what every rank has measured."""
    import torch.distributed as dist

    everyone = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def load_cold(engine, root: Path, found: dict[str, float]) -> float:
    """Load what ``root`` holds; return the bytes read by all ranks."""
    import torch.distributed as dist

    import ckpt

    if dist.get_rank() == 0:
        make_cold(root)
    dist.barrier()
    with Peak() as peak, timed(found, "load"):
        report = ckpt.load(engine, root)
    found["load rss"] = peak.added
    return sum(of_all_ranks(report.bytes_read))


def save_and_load(engine, work: Path, runs: int) -> dict[int, list[dict[str, float]]]:
    """Save and load with every chunk size in turn; the last run's checkpoints stay for the other job."""
    import torch.distributed as dist

    import ckpt

    results: dict[int, list[dict[str, float]]] = {size: [] for size in SIZES}
    for run in range(runs + 1):  # the first is a warm-up
        for size in SIZES:
            found: dict[str, float] = {}
            root = work / f"{size}"
            train_step(engine)
            use_chunks_of(size << 20)
            if dist.get_rank() == 0:
                shutil.rmtree(root, ignore_errors=True)
            dist.barrier()
            with Peak() as peak, timed(found, "save"):
                report = ckpt.save(engine, root)
            found["save rss"] = peak.added
            found["index"] = sum(size_below(folder) for folder in root.glob("steps/*/*/index"))
            found["written"] = report.bytes_written
            load_cold(engine, root, found)
            found = {name: max(of_all_ranks(value)) for name, value in found.items()}
            if run:
                results[size].append(found)
    return results


def reshard(engine, work: Path) -> dict[int, dict[str, float]]:
    """Load each size's checkpoint with another number of ranks."""
    results = {}
    for size in (SIZES[0], *SIZES):  # the first one once more: it warms up
        found: dict[str, float] = {}
        nbytes = load_cold(engine, work / f"{size}", found)
        results[size] = {name: max(of_all_ranks(value)) for name, value in found.items()} | {"read": nbytes}
    return results


def run_rank(options: argparse.Namespace) -> None:
    """Be one rank of one of the two jobs of a stage."""
    import torch.distributed as dist

    # One layer, so that matrices are as large as in a model of several billion parameters: small ones are never cut.
    engine, _ = build_engine(options.stage, options.params, "bf16", layers=1)
    train_step(engine)
    again = options.phase == "reshard"
    result = reshard(engine, options.work) if again else save_and_load(engine, options.work, options.runs)
    if dist.get_rank() == 0:
        (options.work / f"{options.phase}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Run both jobs of every stage and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=100e6)
    parser.add_argument("--runs", type=int, default=5)
    default = Path(__file__).resolve().parents[1] / ".cache" / "bench"
    parser.add_argument("--dir", type=Path, default=default, help="where checkpoints go: the disk that is measured")
    for name in ("--stage", "--work", "--phase"):
        parser.add_argument(name, type={"--stage": int, "--work": Path}.get(name, str), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        run_rank(options)
        return
    options.dir.mkdir(parents=True, exist_ok=True)
    about = machine()
    table = Table(
        title=f"{options.params / 1e6:.0f} M parameters, {WORLD} ranks, bf16, {options.runs} interleaved runs; "
        f"{about['cores']} cores, {filesystem(options.dir)}"
    )
    columns = ("stage", "chunk, MiB", "save, s", "load, s", f"load by {WORLD_AFTER}, s", "over-read", "index, kB/GiB")
    for column in (*columns, "RSS +MB, save", "load"):
        table.add_column(column, justify="right", no_wrap=column in ("save, s", "load, s"))
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}  # the ranks share the cores
    for stage in (1, 3):
        work = Path(tempfile.mkdtemp(prefix="chunk-", dir=options.dir))
        try:
            for phase, ranks in (("save", WORLD), ("reshard", WORLD_AFTER)):
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
                command += [__file__, "--stage", str(stage), "--work", str(work), "--phase", phase]
                command += ["--params", str(options.params), "--runs", str(options.runs)]
                with (work / "log").open("w") as log:
                    code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
                if code:
                    raise SystemExit(f"{(work / 'log').read_text()[-6000:]}\n{phase} ended with exit code {code}")
            saved, loaded = (json.loads((work / f"{phase}.json").read_text()) for phase in ("save", "reshard"))
        finally:
            shutil.rmtree(work, ignore_errors=True)
        table.add_section()
        for size in map(str, SIZES):
            mid = {name: median(run[name] for run in saved[size]) for name in saved[size][0]}
            spread = {n: f"{min(r[n] for r in saved[size]):.2f}–{max(r[n] for r in saved[size]):.2f}" for n in mid}
            table.add_row(
                str(stage),
                size,
                f"{mid['save']:.2f} ({spread['save']})",
                f"{mid['load']:.2f} ({spread['load']})",
                f"{loaded[size]['load']:.2f}",
                f"{loaded[size]['read'] / mid['written'] - 1:+.1%}",
                f"{mid['index'] / 1e3 / (mid['written'] / 2**30):.1f}",
                f"{mid['save rss'] / MB:.0f}",
                f"{mid['load rss'] / MB:.0f}",
            )
    console = Console(width=130, highlight=False)
    console.print(table)
    console.print(f"[dim]load average at the end: {os.getloadavg()[0]:.1f}[/]")


if __name__ == "__main__":
    main()
