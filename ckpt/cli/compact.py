"""``ckpt compact``: a gradient log replayed offline into a full checkpoint."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

import click

from ckpt.cli.copy import number_of_bytes
from ckpt.cli.program import exits, print_json
from ckpt.cli.progress import bar
from ckpt.cli.render import console, shown
from ckpt.store.open import open_store
from ckpt.words import count, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt.compact.job import Compacted


@click.command("compact")
@click.argument("root")
@click.option("--step", type=click.IntRange(min=0), help="Of the new checkpoint; default: the last sound logged one.")
@click.option("--sound", is_flag=True, help="Of a damaged log take what is sound; otherwise damage is an error.")
@click.option("--keep-log", is_flag=True, help="Leave the log as it is.")
@click.option(
    "--keep", type=click.IntRange(min=1), help="Then remove all but so many full checkpoints of this history."
)
@click.option("--workers", type=click.IntRange(1, 1024), default=1, show_default=True, help="Processes.")
@click.option(
    "--memory",
    callback=number_of_bytes,
    metavar="SIZE",
    default="2GiB",
    show_default=True,
    help="All workers together.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=0.01,
    show_default=True,
    help="By how much of its size a value that the log remembers may be off where bits cannot be the same.",
)
@click.option("--dry-run", is_flag=True, help="Look at the log, say what would be done, and write nothing.")
@exits
def compact(root: str, as_json: bool, memory: float, **given: Any) -> int:
    """Replay the gradient log in ROOT on the CPU, commit the result as a full checkpoint, and drop the log.

    No process of the job is needed, and a job that is running may go on. The result is what the job had, bit for bit,
    where the kernels are the same here; each rank's digest in the log says whether it is. A run that was interrupted
    goes on when the same command is given once more.
    """
    from ckpt.compact import job

    store = open_store(root)
    if as_json:
        with _standard_output_kept():
            found = job.compact(store, job.Options(memory=int(memory), **given))
        print_json(document(found))
        return 0
    with bar("replaying", visible=sys.stdout.isatty()) as progress:
        found = job.compact(store, job.Options(memory=int(memory), progress=progress, **given))
    _print(found)
    return 0


@contextmanager
def _standard_output_kept() -> Iterator[None]:
    """Let whatever is written to standard output go to standard error: frameworks and compilers of kernels write."""
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def document(found: Compacted) -> dict[str, Any]:
    """Return everything that the command says, as plain data."""
    judged, worst = found.judged, found.judged.worst
    return {
        "root": found.root,
        "base": found.base,
        "step": found.step,
        "steps": found.steps,
        "world": found.world,
        "dry_run": found.dry_run,
        "exact": found.exact,
        "kernels": found.kernels,
        "values": {
            "compared": judged.compared,
            "differ": judged.off,
            "worst": worst if worst < float("inf") else None,
            "first": judged.first if judged.off else None,
        },
        "bundles": found.bundles,
        "resumed": found.resumed,
        "bytes_written": found.bytes_written,
        "bytes_kept": found.bytes_kept,
        "dropped": {"files": found.dropped.files, "nbytes": found.dropped.nbytes, "in_use": found.dropped.in_use},
        "removed": found.removed,
        "notes": found.notes,
        "seconds": round(found.seconds, 3),
    }


def _print(found: Compacted) -> None:
    out = console()
    for line in found.notes:
        out.print(shown(line, "yellow"))
    for one in found.kernels:
        expected = "the same bits here" if not one["why"] else f"other bits here: {'; '.join(one['why'])}"
        out.print(shown(f"{one['class']}: {expected}"))
    if not found.steps:
        out.print(shown(f"no log leads on from step {found.base}: nothing to compact"))
    elif found.dry_run:
        out.print(shown(f"{count(found.steps, 'step')} would be replayed: from step {found.base} to step {found.step}"))
    else:
        said = {True: "bit for bit what the job had", False: "not bit for bit", None: "not told by the log"}
        wrote = f"{size(found.bytes_written)} written, {size(found.bytes_kept)} of step {found.base} kept"
        out.print(
            shown(
                f"step {found.step} committed: {count(found.steps, 'step')} replayed on step {found.base} in "
                f"{found.seconds:.1f} s, {said[found.exact]}; {wrote}"
            )
        )
    did = "would be removed" if found.dry_run else "removed"
    if found.dropped.files:
        out.print(shown(f"{count(found.dropped.files, 'file')} of the log {did}, {size(found.dropped.nbytes)}"))
    if found.removed:
        out.print(shown(f"removed step {', '.join(map(str, found.removed))}"))
