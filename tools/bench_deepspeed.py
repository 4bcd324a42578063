"""ckpt.save and ckpt.load against DeepSpeed's own, on the same live engine: ``tools/bench deepspeed`` starts it.

One job a stage. In every run: an optimizer step; ``ckpt.save``; ``engine.save_checkpoint``; then for each of the two a
further step (so that a load has something to undo), its files dropped from the page cache, and its load. After each
load the engine's tensors are hashed and compared with what was saved. Run 0 warms up and is not counted.

``ckpt.save`` is durable when it returns, DeepSpeed's save is not: it never calls fsync. So DeepSpeed has two times,
until its call returns, and until all its files have been fsynced too (by all ranks, each a part of the files).
"""

from __future__ import annotations

import argparse
import cProfile
import json
import logging
import math
import os
import pstats
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from statistics import median

from measure import MB, Peak, cached_share, files_below, filesystem, fsync, machine, make_cold, size_below, timed
from rich.console import Console
from rich.table import Table

console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)

OURS, THEIRS = "ckpt", "DeepSpeed"
LAYERS, VOCAB, CONTEXT = 6, 4096, 16


# ---------------------------------------------------------------------------------------------------- one rank of a job


def build_engine(stage: int, params: float, dtype: str, layers: int = LAYERS):
    """Return a DeepSpeed engine around a GPT of about ``params`` parameters, with AdamW, and their number."""
    import deepspeed
    import deepspeed.ops
    import torch
    from deepspeed.utils import logger
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            q, k, v = (t.unsqueeze(1) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
            x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    class GPT(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.embed, self.norm = nn.Embedding(VOCAB, width), nn.LayerNorm(width)
            self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
            self.head = nn.Linear(width, VOCAB, bias=False)
            nn.init.normal_(self.embed.weight, std=0.02)
            self.head.weight = self.embed.weight  # tied; also gives every row of the embedding a gradient

        def forward(self, tokens):
            logits = self.head(self.norm(self.blocks(self.embed(tokens))))
            return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())

    logger.setLevel(logging.ERROR)
    # DeepSpeed would compile this operator with g++ at start; it serves inference only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    # 12 L w² + V w = params
    width = int((-VOCAB + math.sqrt(VOCAB**2 + 48 * layers * params)) / (24 * layers))
    model = GPT(width)
    bucket = 1_000_000  # elements; the defaults are allocated in full
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16", "initial_scale_power": 8},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
        },
    }
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    count = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(groups, lr=1e-4)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0], count


def train_step(engine) -> None:
    """One optimizer step on random tokens."""
    import torch

    loss = engine(torch.randint(0, VOCAB, (1, CONTEXT), device=engine.device))
    engine.backward(loss)
    engine.step()


def fingerprint(engine) -> str:
    """Return a hash of this rank's parameters, masters and moments, found without any of ckpt's code."""
    import torch
    import xxhash

    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    tensors = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
    held = [p for group in inner.param_groups for p in group["params"]]
    # At stage 3 the groups are empty between two steps.
    for p in held or engine.optimizer.fp32_partitioned_groups_flat:
        tensors += [p, *(inner.state[p][name] for name in ("exp_avg", "exp_avg_sq"))]
    hasher = xxhash.xxh3_128()
    for tensor in tensors:
        hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return hasher.hexdigest()


class Contest:
    """Both systems on one rank. Times are this rank's; the launcher takes the maximum over ranks."""

    def __init__(self, engine, folder: Path, profiles: Path | None) -> None:
        self.engine, self.folder, self.profiles = engine, folder, profiles

    def save(self, system: str, tag: int) -> dict[str, float]:
        """Save and return seconds until the call returned, until all is durable, and the peak of added memory."""
        import torch.distributed as dist

        import ckpt

        found: dict[str, float] = {}
        dist.barrier()
        with self._peak(found, "save"), timed(found, "durable"):
            with timed(found, "blocked"):
                if system == OURS:
                    report = self._call(ckpt.save, step=tag)
                else:
                    self.engine.save_checkpoint(str(self.folder / THEIRS), tag=str(tag))
            if system == THEIRS:
                dist.barrier()  # a file may be another rank's
                beside = [p for p in (self.folder / THEIRS).iterdir() if p.is_file()]  # `latest` and two scripts
                written = sorted([*files_below(self.where(THEIRS, tag)), *beside])
                folders = [self.where(THEIRS, tag), self.folder / THEIRS]
                for path in (*written[dist.get_rank() :: dist.get_world_size()], *folders):
                    fsync(path)
        if system == OURS:
            found |= {f"phase {name}": seconds for name, seconds in report.phases.items()}
        return found

    def load(self, system: str, tag: int) -> dict[str, float]:
        """Drop the files from the page cache, load, and return seconds and the peak of added memory."""
        import torch.distributed as dist

        import ckpt

        found: dict[str, float] = {}
        if dist.get_rank() == 0:
            make_cold(self.where(system, tag))
            found["cached"] = cached_share(self.where(system, tag))
        dist.barrier()
        with self._peak(found, "load"), timed(found, "restore"):
            if system == OURS:
                report = self._call(ckpt.load, step=tag)
            elif self.engine.load_checkpoint(str(self.folder / THEIRS), tag=str(tag))[0] is None:
                raise SystemExit("DeepSpeed has not loaded its checkpoint")
        if system == OURS:
            found |= {f"phase {name}": seconds for name, seconds in report.phases.items()}
        return found

    def _call(self, operation, *, step: int):
        if self.profiles is None:
            return operation(self.engine, self.folder / OURS, step=step)
        profile = cProfile.Profile()
        report = profile.runcall(operation, self.engine, self.folder / OURS, step=step)
        profile.dump_stats(self.profiles / f"{operation.__name__}.prof")  # the last run's stays
        return report

    def where(self, system: str, tag: int) -> Path:
        """Return the folder that holds one checkpoint of one system."""
        return self.folder / OURS / "steps" / str(tag) if system == OURS else self.folder / THEIRS / str(tag)

    @staticmethod
    def _peak(found: dict[str, float], what: str):
        return _Peaks(found, what)


class _Peaks:
    """Peak of host memory, and of device memory where there is a device."""

    def __init__(self, found: dict[str, float], what: str) -> None:
        self.found, self.what, self.host = found, what, Peak()

    def __enter__(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.device = torch.cuda.memory_allocated()
        self.host.__enter__()

    def __exit__(self, *exc: object) -> None:
        import torch

        self.host.__exit__(*exc)
        self.found[f"{self.what} rss"] = self.host.added
        if torch.cuda.is_available():
            self.found[f"{self.what} device"] = torch.cuda.max_memory_allocated() - self.device


def run_rank(options: argparse.Namespace) -> None:
    """All runs of one stage on one rank; rank 0 writes the result."""
    import torch.distributed as dist

    engine, count = build_engine(options.stage, options.params, options.dtype)
    train_step(engine)
    contest = Contest(engine, options.work, options.work if options.profile and dist.get_rank() == 0 else None)
    runs = []
    for run in range(options.runs + 1):
        train_step(engine)
        saved = fingerprint(engine)
        result: dict[str, object] = {"load_average": os.getloadavg()[0]}
        mine: dict[str, dict[str, object]] = {}
        for system in (OURS, THEIRS):
            mine[system] = dict(contest.save(system, run))
        for system in (OURS, THEIRS):
            train_step(engine)
            mine[system] |= contest.load(system, run)
            mine[system]["same"] = fingerprint(engine) == saved
        everyone: list[dict[str, dict[str, object]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
        for system in (OURS, THEIRS):
            ranks = [one[system] for one in everyone]
            result[system] = {
                name: all(r[name] for r in ranks) if name == "same" else max(r[name] for r in ranks if name in r)
                for name in ranks[0]
            } | {"bytes": size_below(contest.where(system, run))}
        if run:
            runs.append(result)
    if dist.get_rank() == 0:
        (options.work / "result.json").write_text(json.dumps({"stage": options.stage, "params": count, "runs": runs}))
    dist.barrier()
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------- launcher

ROWS = [
    ("bytes on disk, MB", "bytes", "bytes", MB, 1),
    ("save: the call returns, s", "blocked", "blocked", 1, 2),
    ("save: durable, s", "blocked", "durable", 1, 2),
    ("save: peak RSS added, MB a rank", "save rss", "save rss", MB, 0),
    ("save: peak device memory added, MB", "save device", "save device", MB, 0),
    ("restore, cold page cache, s", "restore", "restore", 1, 2),
    ("restore: peak RSS added, MB a rank", "load rss", "load rss", MB, 0),
    ("restore: peak device memory added, MB", "load device", "load device", MB, 0),
]
"""Label, ckpt's measurement, DeepSpeed's, unit, digits. ckpt is durable when it returns, so it has one save time."""


def launch(options: argparse.Namespace) -> dict[str, object]:
    """Run one job a stage and return everything that was measured."""
    options.dir.mkdir(parents=True, exist_ok=True)
    stages = []
    for stage in options.stages:
        work = Path(tempfile.mkdtemp(prefix="bench-", dir=options.dir))
        try:
            console.print(f"stage {stage}: {options.runs} runs and a warm-up …", style="dim")
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc_per_node={options.world}", __file__, "--stage", str(stage), "--work", str(work)]
            command += ["--params", str(options.params), "--dtype", options.dtype, "--runs", str(options.runs)]
            command += ["--profile"] if options.profile else []
            with (work / "log").open("w") as log:
                code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
            if code:
                raise SystemExit(f"{(work / 'log').read_text()[-6000:]}\nstage {stage} ended with exit code {code}")
            for name in ("save", "load") if options.profile else ():
                console.rule(f"stage {stage}: ckpt.{name} on rank 0, last run, by own time")
                pstats.Stats(str(work / f"{name}.prof")).strip_dirs().sort_stats("tottime").print_stats(18)
            stages.append(json.loads((work / "result.json").read_text()))
        finally:
            shutil.rmtree(work, ignore_errors=True)
    about = machine() | {"filesystem": filesystem(options.dir)}
    about |= {name: version(name) for name in ("torch", "deepspeed")}
    setup = {"world": options.world, "dtype": options.dtype, "runs": options.runs}
    return {"machine": about, **setup, "stages": stages}


def render(result: dict) -> Table:
    """Return the table of all stages: medians, and the ratio's median with its smallest and largest value."""
    about = result["machine"]
    title = f"{result['world']} ranks, {result['dtype']}, AdamW, {result['runs']} interleaved runs"
    table = Table(title=f"{title}; {about['cores']} cores, {about['filesystem']}")
    for name, how in (("", "left"), (OURS, "right"), (THEIRS, "right"), (f"{OURS} / {THEIRS}", "right")):
        table.add_column(name, justify=how)
    for stage in result["stages"]:
        loads = [run["load_average"] for run in stage["runs"]]
        table.add_section()
        head = f"[bold]ZeRO-{stage['stage']}[/], {stage['params'] / 1e6:.1f} M parameters"
        table.add_row(head, "", "", f"[dim]load average {min(loads):.1f}–{max(loads):.1f}[/]")
        for label, ours, theirs, unit, digits in ROWS:
            a = [run[OURS].get(ours) for run in stage["runs"]]
            b = [run[THEIRS].get(theirs) for run in stage["runs"]]
            if None in a:
                continue  # no device
            if "added" in label:  # often next to nothing, which is no number to divide by
                against = [(x - y) / unit for x, y in zip(a, b, strict=True)]
                spread = f"{median(against):+.0f} MB ({min(against):+.0f} … {max(against):+.0f})"
            else:
                against = [x / y for x, y in zip(a, b, strict=True)]
                spread = f"{median(against):.2f} ({min(against):.2f} … {max(against):.2f})"
            table.add_row(label, f"{median(a) / unit:.{digits}f}", f"{median(b) / unit:.{digits}f}", spread)
        same = [all(run[name]["same"] for run in stage["runs"]) for name in (OURS, THEIRS)]
        table.add_row("restored state bit-identical", *("yes" if s else "NO" for s in same), "")
    return table


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Be the launcher, or one rank if the launcher says so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=50e6, help="parameters of the model, about (default 50e6)")
    parser.add_argument("--world", type=int, default=4, help="ranks (default 4)")
    parser.add_argument("--stages", type=_numbers, default=[1, 2, 3, 0], metavar="1,2,3,0")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--runs", type=int, default=5, help="counted runs a stage (default 5)")
    default = Path(__file__).resolve().parents[1] / ".cache" / "bench"
    parser.add_argument("--dir", type=Path, default=default, help="where checkpoints go: the disk that is measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement of every run")
    parser.add_argument("--profile", action="store_true", help="also print where rank 0 spends its time in ckpt")
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        run_rank(options)
        return
    result = launch(options)
    console.print(render(result))
    console.print(
        f"[dim]{OURS}'s save is durable when it returns; 'durable' of {THEIRS} adds an fsync of all its files, which "
        f"it does not do itself. Both restores read files that were dropped from the page cache (posix_fadvise).[/]"
    )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
