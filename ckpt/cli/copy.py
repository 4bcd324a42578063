"""``ckpt cp``: checkpoints from one store to another."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict

import click

from ckpt.cli.program import exits, print_json
from ckpt.cli.progress import bar
from ckpt.cli.render import console, shown
from ckpt.errors import ConfigError
from ckpt.repo.copying import THREADS, CopyReport, copy_steps
from ckpt.repo.repository import Repository
from ckpt.store.open import check_apart, open_store
from ckpt.words import count, size, some

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def number_of_bytes(_ctx: click.Context, _param: click.Parameter, value: str | None) -> float | None:
    """Return a number of bytes as people write it: ``1500``, ``100MB``, ``1.5GiB``, ``100MB/s``.

    >>> [number_of_bytes(None, None, text) for text in ("1500", "100MB", "1.5 GiB", "2k/s", None)]
    [1500.0, 100000000.0, 1610612736.0, 2000.0, None]
    """
    if value is None:
        return None
    found = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([kmgt]i?|)b?(?:/s)?", value.strip().lower())
    number = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if number <= 0:
        raise click.BadParameter(f"{value!r} is not a number of bytes above 0 (1500, 100MB, 1.5GiB)")
    return number


@click.command("cp")
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option(
    "--step", "steps", type=click.IntRange(min=0), multiple=True, help="May be repeated. Default: the newest."
)
@click.option("--all", "every", is_flag=True, help="All committed steps.")
@click.option("--overwrite", is_flag=True, help="Replace a step of DST that is another one.")
@click.option("--trust-sizes", is_flag=True, help="Do not read what DST has already; its size is enough.")
@click.option("--io-limit", callback=number_of_bytes, metavar="SIZE", help="Bytes per second at most, such as 100MB.")
@click.option("--threads", type=click.IntRange(1, 256), default=THREADS, show_default=True, help="Packs at once.")
@click.option("--no-log", is_flag=True, help="Leave out the gradient logs behind the checkpoints.")
@exits
def cp(
    source: str,
    destination: str,
    as_json: bool,
    steps: tuple[int, ...],
    every: bool,
    overwrite: bool,
    trust_sizes: bool,
    io_limit: float | None,
    threads: int,
    no_log: bool,
) -> int:
    """Copy checkpoints from SRC to DST (paths or URLs), each chunk checked on the way.

    Packs of earlier steps that a step refers to go with it, and so do the gradient logs that lead on from it. What DST
    has already is checked and not copied again: after an interruption, run the same command once more.
    """
    if every and steps:
        raise ConfigError("--all and --step: expected one of them")
    src, dst = open_store(source), open_store(destination)
    check_apart(src.url, dst.url)
    chosen: list[int] | None = list(steps) or None
    if every:
        repository = Repository(src)
        chosen = repository.steps() or [repository.pick(None)]  # of none: the error that says so
    with bar("copying", visible=sys.stdout.isatty() and not as_json) as progress:
        report = copy_steps(
            src,
            dst,
            chosen,
            overwrite=overwrite,
            verify=not trust_sizes,
            threads=threads,
            io_limit=io_limit,
            progress=progress,
            logs=not no_log,
        )
    if as_json:
        print_json({"source": src.url, "destination": dst.url, **asdict(report)})
    else:
        _print(report)
    return 0


def _print(report: CopyReport) -> None:
    out = console()
    if report.steps:
        out.print(shown(f"copied step {some(report.steps)}"))
    if report.present:
        out.print(shown(f"there already: step {some(report.present)}"))
    moved = f"{count(report.packs_copied, 'pack')}, {size(report.bytes_copied)} copied and checked"
    kept = f"; {count(report.packs_present, 'pack')}, {size(report.bytes_present)} were there"
    out.print(shown(moved + (kept if report.bytes_present else "")))
    if report.logs:
        moved = f"{count(report.log_files_copied, 'file')}, {size(report.log_bytes_copied)} copied and checked"
        kept = f"; {count(report.log_files_present, 'file')}, {size(report.log_bytes_present)} were there"
        out.print(shown(f"gradient log {some(report.logs)}: {moved}" + (kept if report.log_files_present else "")))
