"""``ckpt-reshard`` of a DeepSpeed ZeRO-3 checkpoint, beside a plain copy of its bytes and DeepSpeed's own converter.

``tools/setup && .venv/bin/python tools/bench_reshard.py --dir DIRECTORY --params 1e9 --world 8 --to 6 --runs 3``

The checkpoint (12 bytes a parameter: fp32 masters and two moments) is made by ``zero3_files.py``. In every run each way
has one turn, and another one begins. A turn is a command in a process of its own, timed from its start to its end, with
the files of the checkpoint dropped from the page cache before it, and what it wrote removed after it.

- ``copy``: ``shutil.copyfile`` (sendfile) of every file, then fsync of each.
- ``to FORMAT``: ``ckpt-reshard`` for ``--to`` ranks, with ``--memory``. What it writes is durable when it ends.
- ``ds_to_universal``: DeepSpeed's. It never calls fsync: the benchmark does it afterwards, and counts the time.

Rates are bytes of the checkpoint by seconds, and compared within a run. Memory is that of all processes of a command
together, sampled; a page that two of them share counts twice. ``marks`` adds up the highest that each of them ever had
(the kernel's VmHWM, which misses no peak), as if all had been there at once.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.system import die_with_parent
from measure import MB, cached_share, files_below, filesystem, fsync, machine, make_cold, size_below
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tree_memory import Tree

if TYPE_CHECKING:
    from collections.abc import Sequence

TOOLS = Path(__file__).resolve().parent
RESHARD = "from ckpt.cli.reshard import main; main()"
DIFF = "from ckpt.cli.main import main; main()"
PEER = "ds_to_universal"
COPY = "copy"
GIB = 1 << 30
PEAK = 1.2 * GIB
"""Most memory that the target allows."""
SHARE = 0.5
"""Of a copy's rate that the target asks for."""
TAIL = 2000
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "DEEPSPEED_LOG_LEVEL": "error"}
console = Console(width=140)


@dataclass(frozen=True)
class Way:
    """A command from one folder to another. ``kind``: a format that ``ckpt-reshard`` writes, or who else does it."""

    name: str
    kind: str
    command: tuple[str, ...]

    @property
    def ours(self) -> bool:
        """Is it ``ckpt-reshard``?"""
        return self.kind not in (COPY, PEER)


# -------------------------------------------------------------------------------------------------------------- source


@dataclass(frozen=True)
class Source:
    """A checkpoint of so many parameters, of ``nbytes`` in ``folder``. ``tag``: the folder of its step."""

    folder: Path
    params: int
    nbytes: int

    @property
    def tag(self) -> Path:
        return self.folder / (self.folder / "latest").read_text()


def source_of(options: argparse.Namespace, params: float) -> Source:
    """Return the checkpoint of this size below ``--dir``, made now unless it is there."""
    folder = folder_of(options, params)
    done = folder.with_suffix(".json")  # beside it: not a part of what is converted
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, str(TOOLS / "zero3_files.py"), str(folder)]
        command += ["--params", str(params), "--world", str(options.world)]
        with console.status(f"making a ZeRO-3 checkpoint of {params:g} parameters, {12 * params / 1e9:.2f} GB"):
            made = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
        done.write_text(json.dumps({"params": int(made.stdout)}))
    return Source(folder, json.loads(done.read_text())["params"], size_below(folder))


def folder_of(options: argparse.Namespace, params: float) -> Path:
    return options.dir / f"zero3-{params:g}-x{options.world}"


def remove(source: Source) -> None:
    source.folder.with_suffix(".json").unlink(missing_ok=True)
    shutil.rmtree(source.folder, ignore_errors=True)


def room(options: argparse.Namespace) -> None:
    """End here if the disk would be full half-way: the source, and what one turn holds at its worst."""
    # ds_to_universal has all of it in a temporary folder while it writes it anew.
    turn = 12 * max(options.params, 2 * (options.smaller or options.params) * (PEER not in options.skip))
    sources = 12 * (options.params + (options.smaller or 0))
    there = sum(size_below(folder_of(options, n)) for n in {options.params, options.smaller or options.params})
    need, free = 1.03 * (turn + sources) + 64 * MB, shutil.disk_usage(options.dir).free
    if need > free + there:
        raise SystemExit(f"{options.dir}: {free / 1e9:.1f} GB free, {(need - there) / 1e9:.1f} GB needed")


# --------------------------------------------------------------------------------------------------------------- turns


def environment() -> dict[str, str]:
    paths = [str(TOOLS.parent), str(TOOLS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"}


def ways_of(options: argparse.Namespace, source: Source, target: Path, *, peer: bool) -> list[Way]:
    """Return what takes turns on a source."""
    python = sys.executable
    ways = [Way(COPY, COPY, (python, __file__, "--copy", str(source.folder), str(target)))]
    for form in options.formats:
        for workers in options.workers:
            command = (python, "-c", RESHARD, str(source.folder), str(target), "--dp", str(options.to), "--zero", "3")
            command += ("--memory", options.memory, "--workers", str(workers), "--to", form, "--json")
            ways.append(Way(f"to {form}, {count(workers)}", form, command))
    if peer:
        command = (python, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(source.tag))
        command += ("--output_folder", str(target / f"{source.tag.name}_universal"))
        command += ("--num_extract_workers", str(options.extract), "--num_merge_workers", str(options.merge))
        ways.append(Way(f"{PEER}, {options.extract} + {count(options.merge)}", PEER, command))
    return [way for way in ways if way.kind not in options.skip]


def count(workers: int) -> str:
    return f"{workers} worker{'s' * (workers > 1)}"


def copy(source: Path, target: Path) -> None:
    """Copy a folder's files one after the other and bring them to the disk."""
    made = [(path, target / path.relative_to(source)) for path in files_below(source)]
    for path, other in made:
        other.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, other)
    for _, other in made:
        fsync(other)
    for folder in {other.parent for _, other in made}:
        fsync(folder)


def turn(way: Way, source: Source, target: Path, *, check: bool) -> dict[str, Any]:
    """Run one command and return what it took; ``failed``: the end of what it said, where it did not do it."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()  # nobody pays for what the one before him left
    make_cold(source.folder)
    found: dict[str, Any] = {"way": way.name, "cached": cached_share(source.folder), "load_average": os.getloadavg()[0]}
    log = target.with_suffix(".log")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with open(log, "w+") as said:
        began = time.perf_counter()
        process = subprocess.Popen(
            way.command, env=environment(), stdout=said, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
        )
        with Tree(process.pid) as tree:
            code = process.wait()
        found["seconds"] = time.perf_counter() - began
    for path in files_below(target) if way.kind == PEER else ():
        fsync(path)
    found["durable"] = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found["cpu"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found |= {"peak": tree.peak, "marks": tree.marks, "processes": tree.processes, "written": size_below(target)}
    found |= {"rate": source.nbytes / found["durable"]}
    if code:
        found["failed"] = f"exit code {code}: {log.read_text()[-TAIL:]}"
    elif check and way.ours:
        found["same"] = same(source, target)
    log.unlink()
    shutil.rmtree(target, ignore_errors=True)
    return found


def same(source: Source, target: Path) -> bool:
    """Ask ``ckpt diff`` whether two folders hold the same state."""
    command = (sys.executable, "-c", DIFF, "diff", str(source.folder), str(target))
    return subprocess.run(command, env=environment(), stdout=subprocess.DEVNULL, check=False).returncode == 0


def measure(options: argparse.Namespace, params: float, *, peer: bool) -> dict[str, Any]:
    """Let all ways take turns on one checkpoint."""
    source, target = source_of(options, params), options.dir / "reshard-target"
    ways = ways_of(options, source, target, peer=peer)
    turns: list[dict[str, Any]] = []
    todo = [(run, way) for run in range(options.runs) for way in rotated(ways, run)]
    try:
        for run, way in track(todo, f"{source.params / 1e6:,.0f} M parameters", console=console, transient=True):
            if any(one["way"] == way.name and "failed" in one for one in turns):
                continue  # it will not do better, and may take long to fail
            turns.append({"run": run, **turn(way, source, target, check=options.check and run == 0)})
    finally:
        shutil.rmtree(target, ignore_errors=True)
        if not options.keep:
            remove(source)
    return {
        "params": source.params,
        "nbytes": source.nbytes,
        "ways": {way.name: way.kind for way in ways},
        "turns": turns,
    }


def rotated(ways: Sequence[Way], run: int) -> list[Way]:
    at = run % max(1, len(ways))
    return [*ways[at:], *ways[:at]]


# --------------------------------------------------------------------------------------------------------- what is told


def good(result: dict[str, Any], way: str) -> list[dict[str, Any]]:
    """Return the turns of a way that it finished."""
    return [one for one in result["turns"] if one["way"] == way and "failed" not in one]


def against(result: dict[str, Any], way: str, other: str, key: str) -> list[float]:
    """Return the ratio of two ways in each run that both finished, smallest first."""
    base = {one["run"]: one[key] for one in good(result, other)}
    return sorted(one[key] / base[one["run"]] for one in good(result, way) if one["run"] in base)


def targets(result: dict[str, Any], way: str) -> dict[str, bool | None]:
    """Return which targets a way reaches; None: not measured."""
    turns, shares = good(result, way), against(result, way, COPY, "rate")
    return {
        f"peak RSS ≤ {PEAK / GIB:.1f} GiB": max(one["peak"] for one in turns) <= PEAK if turns else None,
        f"≥ {SHARE} × copy": median(shares) >= SHARE if shares else None,
    }


def spread(values: Sequence[float], digits: int, unit: float = 1.0) -> str:
    if not values:
        return ""
    low, mid, high = (v / unit for v in (min(values), median(values), max(values)))
    return f"{mid:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def render(result: dict[str, Any]) -> Table:
    """Return the table of one checkpoint: medians, with smallest and largest value."""
    title = f"ZeRO-3 × {result['world']} → {result['to']}: {result['params'] / 1e6:,.1f} M parameters"
    table = Table(title=f"{title}, {result['nbytes'] / 1e9:.2f} GB; {result['runs']} interleaved runs")
    table.add_column("", no_wrap=True)
    for name in ("seconds", "MB/s", "rate / copy", "CPU s", "MB written", "peak, MiB", "marks, MiB", "processes"):
        table.add_column(name, justify="right")
    for way in result["ways"]:
        turns = good(result, way)
        if not turns:
            table.add_row(way, "[red]failed[/]" if result["turns"] else "")
            continue
        column = {key: [one[key] for one in turns] for key in turns[0] if key not in ("way", "same")}
        table.add_row(
            way,
            spread(column["durable"], 1),
            f"{median(column['rate']) / MB:,.0f}",
            spread(against(result, way, COPY, "rate") if way != COPY else (), 2),
            f"{median(column['cpu']):.1f}",
            f"{max(column['written']) / MB:,.0f}",
            f"{max(column['peak']) / 2**20:,.0f}",
            f"{max(column['marks']) / 2**20:,.0f}",
            f"{max(column['processes'])}",
        )
    return table


def tell(result: dict[str, Any]) -> None:
    """Print the table, the targets, the ratios to DeepSpeed's converter, and what went wrong."""
    console.print(render(result))
    ours = [way for way, kind in result["ways"].items() if kind not in (COPY, PEER)]
    peer = next((way for way, kind in result["ways"].items() if kind == PEER and good(result, way)), None)
    for way in ours:
        lines = [f"{name}: {_yes(reached)}" for name, reached in targets(result, way).items()]
        if peer and good(result, way):
            lines += [
                f"time / {PEER}: {spread(against(result, way, peer, 'durable'), 2)}",
                f"peak RSS / {PEER}: {spread(against(result, way, peer, 'peak'), 2)}",
            ]
        checked = [one["same"] for one in good(result, way) if "same" in one]
        lines += [f"equal to the source (ckpt diff): {_yes(all(checked))}"] if checked else []
        console.print(f"{way}: {'; '.join(lines)}", highlight=False)
    for one in result["turns"]:
        if "failed" in one:
            console.print(f"[red]{one['way']} failed[/] ({one['peak'] / GIB:.1f} GiB at its highest)")
            console.print(one["failed"], markup=False, highlight=False)
    warm = max((one["cached"] for one in result["turns"]), default=0.0)
    loads = [one["load_average"] for one in result["turns"]]
    if loads:
        told = f"at most {warm:.0%} of the source was in memory before a turn; load average"
        console.print(f"[dim]{told} {min(loads):.1f} … {max(loads):.1f}[/]")


def _yes(reached: bool | None) -> str:
    return {True: "[green]yes[/]", False: "[red]NO[/]", None: "not measured"}[reached]


def versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "deepspeed"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dir", type=Path, default=TOOLS.parent / ".cache" / "bench", help="a folder on the disk that is measured")
    add("--params", type=float, default=1e9, help="parameters of the model, about (default 1e9: 12 GB)")
    add("--world", type=int, default=8, help="ranks that wrote the checkpoint (default 8)")
    add("--to", type=int, default=6, help="ranks that it is converted for (default 6)")
    add("--runs", type=int, default=3)
    add("--memory", default="1GiB", help="that ckpt-reshard may use (default 1GiB)")
    add("--workers", type=lambda text: [int(n) for n in text.split(",")], default=[1], metavar="1,2")
    add("--formats", type=lambda text: text.split(","), default=["ckpt", "deepspeed"], metavar="ckpt,deepspeed,…")
    add("--extract", type=int, default=2, help=f"--num_extract_workers of {PEER} (default 2)")
    add("--merge", type=int, default=2, help=f"--num_merge_workers of {PEER} (default 2)")
    add("--smaller", type=float, metavar="N", help=f"{PEER} only on a model of N parameters, and the others there too")
    add("--skip", nargs="+", default=[], metavar="WAY", help=f"what shall have no turn, as {PEER}")
    add("--check", action="store_true", help="compare what ckpt-reshard wrote in the first run with the source")
    add("--keep", action="store_true", help="leave the checkpoint in --dir; the next call finds it there")
    add("--json", type=Path, metavar="FILE", help="write every measurement of every turn")
    add("--smoke", action="store_true", help="tiny, one run: does it work?")
    add("--copy", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smoke:
        options.params, options.world, options.to, options.runs, options.check = 2e5, 3, 2, 1, True
    return options


def main() -> None:
    options = arguments()
    if options.copy:
        copy(*options.copy)
        return
    options.dir.mkdir(parents=True, exist_ok=True)
    room(options)
    about = machine() | {"filesystem": filesystem(options.dir)} | versions()
    console.print(f"[dim]{', '.join(f'{name} {value}' for name, value in about.items())}[/]", highlight=False)
    peer = PEER not in options.skip
    sizes = [(options.params, peer and not options.smaller)]
    sizes += [(options.smaller, True)] if peer and options.smaller else []
    setup = {"world": options.world, "to": options.to, "runs": options.runs, "memory": options.memory}
    results = [setup | measure(options, params, peer=with_peer) for params, with_peer in sizes]
    for result in results:
        tell(result)
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "checkpoints": results}, indent=1) + "\n")
    if any(
        one.get("same") is False or ("failed" in one and PEER not in one["way"]) for r in results for one in r["turns"]
    ):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
