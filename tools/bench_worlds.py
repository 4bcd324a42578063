"""``ckpt-reshard`` for large jobs: what planning for many target ranks takes, and what writing tiny files for them.

``tools/setup && .venv/bin/python tools/bench_worlds.py --dir DIRECTORY``

The source is a ZeRO-3 checkpoint of 8 ranks (``zero3_files.py``). With ``--dry-run`` its files are sparse: nothing but
headers is read, all is planned as for the model's real size. ``--write N``: then a checkpoint of N parameters is
converted for real, so that what ranks and chunks cost stands out of what bytes cost.

Each line is a command in a process of its own. CPU time, not wall time; peak RSS as the kernel has it (importing torch
included). ``read``: bytes of the source that are read, those that several parts of the target need counted as often.
``--code FOLDER``: another copy of this repository, measured on the same files.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import machine
from rich.console import Console
from rich.table import Table
from zero3_files import model, write

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parent.parent
RESHARD = "from ckpt.cli.reshard import main; main()"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
FAILED = 500
console = Console(width=120)


@dataclass(frozen=True)
class Layout:
    """A target: degrees and ZeRO stage."""

    dp: int
    zero: int
    tp: int = 1
    pp: int = 1

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        cut = f"tp {self.tp} x pp {self.pp} x " if self.tp * self.pp > 1 else ""
        return f"ZeRO-{self.zero}, {cut}dp {self.dp}"


def layouts(ranks: Sequence[int], *, cut: bool) -> list[Layout]:
    """Return the targets of so many ranks; ``cut``: those with tensor parallelism and a pipeline too."""
    found = [Layout(n, zero) for n in ranks for zero in (1, 3)]
    return found + [Layout(n // 16, zero, 4, 4) for n in ranks for zero in (1, 3) if cut and n >= 64]


def rules(path: Path, params: float) -> Path:
    """Write how tensor parallelism cuts the model of ``zero3_files.py``."""
    rows = model(params)["model.embed_tokens.weight"][0]
    tensors: list[dict[str, Any]] = [
        {"match": r".*(q|k|v|gate|up)_proj\.weight", "dim": 0},
        {"match": r".*(o|down)_proj\.weight", "dim": 1},
        {"match": r".*(embed_tokens|lm_head)\.weight", "dim": 0, "size": rows},
        {"match": ".*norm.*"},
    ]
    path.write_text(json.dumps({"tensors": tensors}))
    return path


def source(folder: Path, params: float, *, holes: bool) -> Path:
    """Return the checkpoint, made now unless it is there."""
    path = folder / f"{'sparse' if holes else 'zero3'}-{params:g}"
    if not (path / "latest").exists():
        shutil.rmtree(path, ignore_errors=True)
        write(path, params, 8, holes=holes)
    return path


def run(code: Path, command: Sequence[str]) -> dict[str, Any]:
    """Run ``ckpt-reshard`` and return what it says, with its ``cpu`` seconds and its ``peak`` in bytes."""
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(code)}
    process = subprocess.Popen(
        [sys.executable, "-c", RESHARD, *command, "--json"], env=environment, stdout=subprocess.PIPE
    )
    if process.stdout is None:
        raise SystemExit("a process without a pipe")
    said = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}: {said[-FAILED:].decode()}")
    return {**json.loads(said), "cpu": used.ru_utime + used.ru_stime, "peak": used.ru_maxrss << 10}


def measure(options: argparse.Namespace, form: str, params: float, *, dry: bool) -> Table:
    """Convert one checkpoint for all layouts."""
    origin = source(options.dir, params, holes=dry)
    cut = rules(options.dir / "rules.json", params)
    title = f"{params:g} parameters to {form}{', --dry-run' if dry else ''}"
    table = Table("layout", title=title, title_justify="left")
    for name in ("ranks", "CPU s", "CPU ms a rank", "peak, MiB", "read, GB", "written, GB"):
        table.add_column(name, justify="right")
    for layout in layouts(options.ranks, cut=dry and form == "ckpt"):
        target = options.dir / "target"
        shutil.rmtree(target, ignore_errors=True)
        command = [str(origin), str(target), "--to", form, "--dp", str(layout.dp), "--zero", str(layout.zero)]
        command += ["--tp", str(layout.tp), "--pp", str(layout.pp)]
        command += ["--rules", str(cut)] if layout.tp > 1 else []
        found = run(options.code, [*command, *(["--dry-run"] if dry else [])])
        table.add_row(
            str(layout),
            f"{layout.ranks:,}",
            f"{found['cpu']:.1f}",
            f"{1e3 * found['cpu'] / layout.ranks:.1f}",
            f"{found['peak'] / 2**20:,.0f}",
            f"{found['bytes_read'] / 1e9:,.2f}",
            f"{found['bytes_written'] / 1e9:,.2f}",
        )
        shutil.rmtree(target, ignore_errors=True)
    return table


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dir", type=Path, default=ROOT / ".cache" / "bench", help="a folder for the checkpoints")
    add("--params", type=float, default=1e9, help="parameters of the model that is planned for (default 1e9)")
    add("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[64, 256, 1024], metavar="64,256,…")
    add("--formats", type=lambda text: text.split(","), default=["ckpt", "deepspeed"], metavar="ckpt,deepspeed")
    add("--write", type=float, metavar="N", help="convert a checkpoint of N parameters for real too")
    add("--code", type=Path, default=ROOT, help="the copy of this repository to be measured")
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    console.print(f"[dim]{', '.join(f'{name} {value}' for name, value in machine().items())}[/]", highlight=False)
    for form in options.formats:
        console.print(measure(options, form, options.params, dry=True))
        if options.write:
            console.print(measure(options, form, options.write, dry=False))
    console.print(f"[dim]load average at the end: {os.getloadavg()[0]:.1f}[/]")


if __name__ == "__main__":
    main()
