"""The demo: four processes train and save, all of them are killed, two others go on. Started by ``tools/demo``.

Exit code 0 only if every tensor and counter of the restored job equals, bit for bit, what the killed job had when it
saved; both sides are digested by ``tools/demo_train.py`` without any of ``ckpt``'s code.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
RANKS, STAGE = 4, 2
RANKS_AFTER, STAGE_AFTER = 2, 3
SAVE_EVERY, KILL_AFTER = 20, 43  # steps: three are lost, and done again
PATIENCE = 300.0  # seconds until a job that says nothing counts as failed

console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)


class Job:
    """One torchrun launcher and the ranks it starts."""

    def __init__(self, name: str, ranks: int, work: Path, *arguments: str) -> None:
        self.work, self.log = work, work / f"{name}.log"
        for old in work.glob("pid-*"):
            old.unlink()
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command = [*launcher, str(HERE / "demo_train.py"), "--work", str(work), *arguments]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)

    def pids(self) -> list[int]:
        """Return the ranks' process ids, as they wrote them down themselves."""
        return [int(path.read_text()) for path in self.work.glob("pid-*") if path.read_text()]

    def kill(self) -> int:
        """SIGKILL launcher and ranks, by id; return how many were alive. Nobody gets to clean up."""
        living = [pid for pid in [self.process.pid, *self.pids()] if alive(pid)]
        for pid in living:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        while any(alive(pid) for pid in living):
            time.sleep(0.02)
        return len(living)

    def check(self) -> None:
        """Raise if the launcher has exited with an error; the message carries the end of its log."""
        if self.process.poll():
            lines = self.log.read_text(errors="replace").splitlines()
            lines = [line for line in lines if line.startswith("[rank")] or lines  # the rest is the launcher's
            tail = "\n".join(lines[-40:])
            raise SystemExit(f"{tail}\n\nthe job ended with exit code {self.process.returncode}")


def alive(pid: int) -> bool:
    """Is this process running (a zombie is not)?"""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def read(path: Path):
    """Return the JSON in ``path``, or None if nobody wrote it yet."""
    return json.loads(path.read_text()) if path.exists() else None


def wait(job: Job, done) -> None:
    """Wait until ``done()``, and fail when the job fails or nothing happens for too long."""
    deadline = time.monotonic() + PATIENCE
    while not done():
        job.check()
        if time.monotonic() > deadline:
            raise SystemExit(
                f"no progress for {PATIENCE:.0f} s; its log: {job.log.read_text(errors='replace')[-4000:]}"
            )
        time.sleep(0.05)


def run(root: str, work: Path) -> bool:
    """Play the demo and print its table. Return whether the restored state is bit-identical."""
    console.print(f"[bold]1.[/] {RANKS} processes train a small GPT with DeepSpeed ZeRO-{STAGE}, bf16, and save.")
    job = Job("train", RANKS, work, "--root", root, "--stage", str(STAGE), "--every", str(SAVE_EVERY))
    try:
        wait(job, lambda: max(map(int, read(work / "losses-killed.json") or {0: 0})) >= KILL_AFTER)
    finally:
        killed = job.kill()
    before = read(work / "losses-killed.json")
    console.print(f"[bold]2.[/] SIGKILL to all {killed} processes of the job, after step {max(map(int, before))}.")

    console.print(f"[bold]3.[/] {RANKS_AFTER} processes load into ZeRO-{STAGE_AFTER} and go on.")
    job = Job("restore", RANKS_AFTER, work, "--root", root, "--stage", str(STAGE_AFTER), "--resume", "5")
    try:
        wait(job, lambda: job.process.poll() == 0)
    finally:
        job.kill()

    load, save = read(work / "load.json"), read(work / "save.json")
    expected, found = read(work / f"saved-{load['step']}.json"), read(work / "restored.json")
    differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    print_table(read(work / "model.json")["parameters"], save, load, len(expected), differing)
    print_losses(before, read(work / "losses-restored.json"), not differing)
    return not differing


def print_table(parameters: int, save, load, compared: int, differing: list[str]) -> None:
    """Print what was held, what was written, how long it took, and whether it came back."""

    def size(nbytes: float) -> str:
        return f"{nbytes / 1e6:.2f} MB  ({nbytes / parameters:.2f} B per parameter)"

    redundant = 1 - save["bytes_unique"] / save["bytes_held"]
    table = Table(
        show_header=False, title=f"{parameters:,} parameters, saved at step {load['step']}", title_justify="left"
    )
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("bytes held by all ranks", size(save["bytes_held"]))
    table.add_row("bytes unique", size(save["bytes_unique"]))
    table.add_row("bytes written", size(save["bytes_written"]))
    table.add_row("share redundant", f"{redundant:.1%} of what the ranks hold is a copy, or follows from the rest")
    table.add_row("save", f"{save['seconds']:.2f} s by {RANKS} processes, ZeRO-{STAGE}, durable on return")
    table.add_row("load", f"{load['seconds']:.2f} s by {RANKS_AFTER} processes, ZeRO-{STAGE_AFTER}")
    table.add_row("compared", f"{compared} digests of whole tensors and counters, made without ckpt's code")
    if differing:
        some = ", ".join(differing[:5]) + (f" and {len(differing) - 5} more" if len(differing) > 5 else "")
        table.add_row("bit-identical", f"[red bold]no[/]: {len(differing)} differ: {some}")
    else:
        table.add_row("bit-identical", "[green bold]yes[/]")
    console.print()
    console.print(table)


def print_losses(before, after, identical: bool) -> None:
    """Print the losses of the steps that were lost and done again, side by side."""
    table = Table(title="the same batches, before the kill and after the load", title_justify="left")
    for head in ("step", f"loss, {RANKS} ranks, killed", f"loss, {RANKS_AFTER} ranks, restored"):
        table.add_column(head, justify="right")
    for key, loss in after.items():
        table.add_row(key, f"{before[key]:.4f}" if key in before else "", f"{loss:.4f}")
    console.print()
    console.print(table)
    if identical:
        console.print("Losses agree to rounding only: two ranks add up the same batch in another order than four.")


def main() -> None:
    """Parse the command line, play, clean up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", metavar="DIR", help="write the checkpoints here (absent or empty) and leave them")
    parser.add_argument("--keep", action="store_true", help="keep the temporary folder")
    args = parser.parse_args()
    if args.root and Path(args.root).exists() and any(Path(args.root).iterdir()):
        parser.error(f"--root {args.root} is not empty")

    work = Path(tempfile.mkdtemp(prefix="ckpt-demo-"))
    root = str(Path(args.root).resolve()) if args.root else str(work / "checkpoints")
    try:
        identical = run(root, work)
    finally:
        if args.keep:
            console.print(f"kept: {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)
    if args.root or args.keep:
        console.print(f"look into it: .venv/bin/python -m ckpt show {root}", soft_wrap=True)
    sys.exit(0 if identical else 1)


if __name__ == "__main__":
    main()
