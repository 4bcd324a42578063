"""ckpt against other checkpointers on the same live engine state. Started by ``tools/bench``.

One job of four ranks a layout: all systems take turns on it, in every run another one begins, and what is compared
with the device (raw sequential writes and reads by as many processes) is measured in the same turns. docs/benchmarks.md
says how each number is made.
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
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from measure import filesystem, machine
from rich.console import Console

from benchmarks.engines import DTYPES, LAYOUTS
from benchmarks.items import ITEMS
from benchmarks.peers import NOT_RUN, PEERS
from benchmarks.s3_server import s3_server
from benchmarks.stores import BUCKET
from benchmarks.system import children_of, die_with_parent
from benchmarks.table import markdown, tables

REPO = Path(__file__).resolve().parents[2]
STORES = ("tmpfs", "disk", "s3")
WHAT = ("stall", "save", "load", "bytes", "memory", "digest")
SMOKE: dict[str, Any] = {
    "params": 4e5, "layouts": ["zero1", "fsdp2"], "stores": ["tmpfs"], "runs": 1, "loops": 1, "steps": 4,
    "every": 2, "slope_saves": 4,
}  # fmt: skip
PACKAGES = ("torch", "deepspeed", "torchsnapshot", "torch_checkpointing", "dlrover", "bytecheckpoint", "safetensors")


class LayoutFailed(Exception):
    """The job of a layout did not end as it should."""


def launch(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run one job a layout and return everything that was measured."""
    about = machine() | {"filesystem": filesystem(options.dir), "packages": dict(_versions())}
    asked = {name: value for name, value in vars(options).items() if isinstance(value, int | float | str | list)}
    result: dict[str, Any] = {"machine": about, "options": asked, "layouts": [], "failed": [], "not_run": NOT_RUN}
    started = time.monotonic()
    with ExitStack() as stack:
        environment, roots = {**os.environ}, {}
        for name in options.stores:
            if name == "s3":
                environment |= stack.enter_context(s3_server(options.dir))
                roots[name] = f"s3://{BUCKET}"
            else:
                above = options.tmpfs if name == "tmpfs" else options.dir
                roots[name] = stack.enter_context(tempfile.TemporaryDirectory(prefix=f"bench-{name}-", dir=above))
        for layout in options.layouts:
            console.print(f"{layout} …", style="dim")
            try:
                result["layouts"].append(_one_layout(options, layout, roots, environment, console))
            except LayoutFailed as error:  # an hour of other layouts is not to be lost
                console.print(f"{layout}: {error}", style="red", markup=False)
                result["failed"].append(layout)
            result["seconds"] = time.monotonic() - started
            if options.json:
                options.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _one_layout(
    options: argparse.Namespace, layout: str, roots: dict[str, str], environment: dict[str, str], console: Console
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.dir, ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        told = {
            **{
                name: getattr(options, name) for name in ("params", "dtype", "peers", "runs", "loops", "steps", "every")
            },
            **{name: getattr(options, name) for name in ("stall_stores", "slope_saves", "slope_peers")},
            "layout": layout,
            "stores": roots,
            "load": "load" in options.items,
            "items": [
                item
                for item in ITEMS
                if item in options.items or (item == "save" and {"load", "bytes"} & set(options.items))
            ],
        }
        (work / "options.json").write_text(json.dumps(told))
        # Like --standalone, but with an id that is known here: DLRover names what it leaves behind after it.
        command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        command += [f"--rdzv-id={work.name}", f"--nproc-per-node={options.world}", "-m", "benchmarks.rank", str(work)]
        with (work / "log").open("w") as log:
            job = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, preexec_fn=die_with_parent
            )
            try:
                _follow(job, work / "progress", options.limit, console)
            finally:
                _end(job)
                _sweep(work.name)
        if options.log:
            shutil.copy(work / "log", f"{options.log}-{layout}")
        if job.returncode or not (work / "result.json").exists():
            raise LayoutFailed(f"{(work / 'log').read_text()[-6000:]}\nended with exit code {job.returncode}")
        return json.loads((work / "result.json").read_text())


def _follow(job: subprocess.Popen[bytes], progress: Path, limit: float, console: Console) -> None:
    """Wait for a job until it ends or its time is over, and say how far it is."""
    deadline, shown = time.monotonic() + limit, 0
    while True:
        with suppress(subprocess.TimeoutExpired):
            job.wait(0.5)
        lines = progress.read_text().splitlines() if progress.exists() else []
        for line in lines[shown:]:
            console.print(f"  {line}", style="dim")
        shown = len(lines)
        if job.returncode is not None:
            return
        if time.monotonic() > deadline:
            console.print(f"  not finished in {limit:.0f} s")
            return


def _end(job: subprocess.Popen[bytes]) -> None:
    """End a job with all that it has started: some systems' helpers know no parent."""
    if job.returncode is not None:
        return
    below = children_of(job.pid)
    job.kill()
    job.wait()
    for pid in below:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _sweep(run: str) -> None:
    """Remove the shared memory and the sockets that DLRover leaves behind, by the name of the run."""
    for left in Path("/dev/shm").glob(f"{run}_*"):
        left.unlink(missing_ok=True)
    shutil.rmtree(Path("/tmp/ckpt_sock") / run, ignore_errors=True)


def _versions() -> list[tuple[str, str]]:
    found = []
    for name in PACKAGES:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def choice(name: str, allowed: tuple[str, ...], default: str, text: str) -> None:
        def several(value: str) -> list[str]:
            chosen = [part.strip() for part in value.split(",") if part.strip()]
            for one in chosen:
                if one.lower() not in [a.lower() for a in allowed]:
                    raise argparse.ArgumentTypeError(f"{one!r}: expected some of {','.join(allowed)}")
            return [a for one in chosen for a in allowed if a.lower() == one.lower()]

        parser.add_argument(
            f"--{name}", type=several, default=several(default), metavar="A,B", help=f"{text}: {allowed}"
        )

    choice("layouts", LAYOUTS, "ddp,zero1,zero3,fsdp2,hsdp", "what runs")
    choice("stores", STORES, "tmpfs,disk", "where checkpoints go")
    usual = ",".join(name for name, peer in PEERS.items() if not peer.yardstick)
    choice("peers", tuple(PEERS), usual, "which systems; default: all but the yardsticks")
    choice("items", WHAT, ",".join(WHAT), "what is measured")
    choice("stall-stores", STORES, "disk", "stores of the stall (default disk, or the first)")
    choice("slope-peers", tuple(PEERS), "ckpt", "systems whose memory is watched over many saves")
    parser.add_argument("--params", type=float, default=1e8, help="parameters of the model, at least (default 1e8)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--world", type=int, default=4, help="ranks (default 4)")
    parser.add_argument("--runs", type=int, default=3, help="counted runs; one more warms up (default 3)")
    parser.add_argument("--loops", type=int, default=1, help="training loops a system for the stall (default 1)")
    parser.add_argument("--steps", type=int, default=20, help="steps of a loop (default 20)")
    parser.add_argument("--every", type=int, default=5, help="a save every so many steps (default 5)")
    parser.add_argument("--slope-saves", type=int, default=50, help="saves in a row for the slope (default 50)")
    parser.add_argument("--smoke", action="store_true", help="everything, tiny: does it run? numbers mean nothing")
    parser.add_argument("--dir", type=Path, default=REPO / ".cache" / "bench", help="on the disk that is measured")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a folder in memory (default /dev/shm)")
    parser.add_argument("--limit", type=float, default=1800, help="seconds a layout (default 1800)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement")
    parser.add_argument(
        "--from-json", type=Path, metavar="FILE", nargs="+", help="show what earlier runs wrote, one behind the other"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw it (needs matplotlib)")
    parser.add_argument("--md", action="store_true", help="print Markdown")
    parser.add_argument("--log", metavar="PREFIX", help="keep the ranks' output as PREFIX-LAYOUT")
    return parser


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = _parser()
    if "--smoke" in sys.argv:
        parser.set_defaults(**SMOKE)
    options = parser.parse_args()
    if not set(options.stall_stores) & set(options.stores):
        options.stall_stores = options.stores[:1]
    if options.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # not without ending the job
    options.dir = options.dir.resolve()
    options.dir.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else 170, highlight=False)
    if options.from_json:
        result, *others = [json.loads(path.read_text()) for path in options.from_json]
        for other in others:
            result = {**result, **{name: result[name] + other[name] for name in ("layouts", "failed")}}
    else:
        result = launch(options, Console(stderr=True, highlight=False))
    for table in tables(result):
        if options.md:
            print(markdown(table))
        else:
            console.print(table.rich())
    if options.plot:
        from benchmarks.plot import draw

        draw(result, options.plot)
    sys.exit(1 if result["failed"] else 0)


if __name__ == "__main__":
    main()
