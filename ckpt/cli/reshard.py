"""``ckpt-reshard``, ``ckpt import`` and ``ckpt export``: a checkpoint in another layout, or another format."""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import click
import msgspec

from ckpt.cli.copy import number_of_bytes
from ckpt.cli.diff import print_rows
from ckpt.cli.program import Safe, exits, own_process, print_json
from ckpt.cli.progress import bar
from ckpt.cli.render import console, shown
from ckpt.cli.source import checked_words, read_options, source_options, step_words
from ckpt.errors import ConfigError, DigestMismatch
from ckpt.words import count, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpt.convert.job import Result
    from ckpt.convert.opened import Opened
    from ckpt.convert.target import Target

WRITTEN = ("ckpt", "deepspeed", "universal", "dcp", "safetensors")
"""Names of the formats that are written; a test compares with :mod:`ckpt.convert.find`."""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
DEGREES = ("dp", "tp", "pp", "ep")


def layout_options(body: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a parallel layout."""
    words = {
        "dp": "Data-parallel ranks.",
        "tp": "Tensor-parallel ranks (needs --rules, or a model's config.json in SRC or above it).",
        "pp": "Pipeline stages.",
        "ep": "Expert-parallel ranks, inside of dp.",
    }
    options = [click.option(f"--{name}", type=click.IntRange(1, 2**16), help=words[name]) for name in DEGREES]
    options += [
        click.option("--zero", type=click.IntRange(0, 3), help="ZeRO stage."),
        click.option("--stages", metavar="10,12,…", help="Layers of each stage; default: as in SRC, else equal."),
        click.option(
            "--vocabulary-multiple",
            type=click.IntRange(1, 2**20),
            help="Pad each tensor rank's rows of a vocabulary (a rule with size) to a multiple of this.",
        ),
    ]
    for option in reversed(options):
        body = option(body)
    return body


def writing_options(body: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a conversion that no format and no layout has for itself."""
    options = [
        click.option("--step", type=click.IntRange(min=0), help="Of SRC; default: the newest."),
        click.option(
            "--roles",
            type=click.Choice(["weights", "all"]),
            default="all",
            show_default=True,
            help="Parameters and buffers, or optimizer state and everything else too.",
        ),
        click.option("--dtype", type=click.Choice([*DTYPES, *DTYPES.values()]), help="Of parameters and buffers."),
        click.option(
            "--memory", callback=number_of_bytes, metavar="SIZE", default="2GiB", show_default=True, help="At most."
        ),
        click.option(
            "--workers",
            type=click.IntRange(1, 1024),
            default=1,
            show_default=True,
            help="Files written at once.",
        ),
        click.option("--dry-run", is_flag=True, help="Only say what would be read, written, lost and made up."),
        click.option("--verify", is_flag=True, help="Read DST back and compare it with SRC."),
    ]
    for option in reversed(options):
        body = option(body)
    return source_options(body)


@click.command("reshard", cls=Safe, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option("--to", type=click.Choice(WRITTEN), default="ckpt", show_default=True, help="Format of DST.")
@layout_options
@writing_options
@exits
def reshard(source: str, destination: str, as_json: bool, to: str, **given: Any) -> int:
    """Write the checkpoint in SRC for another parallel layout, or in another format, to DST.

    SRC and DST are paths or URLs. SRC's format is found by looking at it, and SRC is only read. Degrees that are left
    out stay as they are in SRC where SRC says them, else they are 1. A run that was interrupted goes on when the same
    command is given once more.
    """
    return convert(source, destination, to, as_json, given)


@click.command("import")
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@writing_options
@exits
def import_(source: str, destination: str, as_json: bool, **given: Any) -> int:
    """Write the checkpoint in SRC, of any format that is read, into the repository DST (ckpt-reshard SRC DST)."""
    return convert(source, destination, "ckpt", as_json, given, otherwise_whole=True)


@click.command("export")
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option("--to", type=click.Choice(WRITTEN[1:]), required=True, help="Format of DST.")
@layout_options
@writing_options
@exits
def export(source: str, destination: str, as_json: bool, to: str, **given: Any) -> int:
    """Write a checkpoint of a repository in somebody else's format (ckpt-reshard SRC DST --to FORMAT)."""
    return convert(source, destination, to, as_json, given)


def main() -> None:
    """Run ``ckpt-reshard``."""
    reshard(prog_name="ckpt-reshard")


def convert(
    source: str, destination: str, to: str, as_json: bool, given: dict[str, Any], *, otherwise_whole: bool = False
) -> int:
    """Run one conversion and print what it did; return the exit code."""
    if own_process():
        # Nearly all that importing torch, opening and planning make stays until the end, and to look for garbage in it,
        # again and again, takes much of a short conversion's time. Nobody looks until bytes move, and then only at what
        # is new.
        gc.disable()
    from ckpt.convert import job
    from ckpt.convert.options import WriteOptions

    reading, kind = read_options(given)
    writing = WriteOptions(
        memory=int(given["memory"]),
        workers=given["workers"],
        roles=given["roles"],
        dtype=DTYPES.get(given["dtype"], given["dtype"]),
        dry_run=given["dry_run"],
    )
    layout = {name: given.get(name) for name in (*DEGREES, "zero", "vocabulary_multiple")}
    asked = job.Conversion(
        source=source,
        destination=destination,
        to=to,
        kind=kind,
        step=given["step"],
        **layout,
        stages=_stages(given.get("stages")),
        reading=reading,
        writing=writing,
        verify=given["verify"],
        check_source=given["check_source"],
        otherwise_whole=otherwise_whole,
    )
    seen = sys.stdout.isatty() and not as_json
    if seen:
        console().print("planning …")
    begun = partial(_print_begun, to) if not as_json else None
    result = job.convert(asked, lambda title: _bar(title, visible=seen), begun)
    if as_json:
        print_json(document(result, dry_run=writing.dry_run))
    else:
        _print(result, dry_run=writing.dry_run)
    return DigestMismatch.exit_code if result.unequal else 0


@contextmanager
def _bar(title: str, *, visible: bool) -> Iterator[Callable[[int, int], None]]:
    with bar(title, visible=visible) as draw:

        def moved(done: int, total: int) -> None:
            if not gc.isenabled() and own_process():
                gc.freeze()
                gc.enable()
            draw(done, total)

        yield moved


def _stages(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(",")) if text is not None else ()
    except ValueError as error:
        raise ConfigError(f"--stages {text!r}: expected numbers of layers, like 10,12,10") from error


def document(result: Result, *, dry_run: bool) -> dict[str, Any]:
    """Return everything that the command says, as plain data."""
    opened, target, written = result.opened, result.target, result.written
    layout = {name: getattr(target.parallel, name) for name in (*DEGREES, "zero", "stages")}
    found: dict[str, Any] = {
        "source": {
            "where": opened.where,
            "format": opened.format,
            "step": opened.step,
            "world": opened.world,
            "engine": opened.engine,
            **{name: opened.degrees.get(name) for name in (*DEGREES, "zero")},
        },
        "destination": {"where": written.where, "format": written.format, "step": written.step, **layout},
        "dry_run": dry_run,
        "tensors": len(target.specs),
        "bytes_read": written.bytes_read,
        "bytes_written": written.bytes_written,
        "bytes_present": written.bytes_present,
        "memory": written.memory,
        "seconds": round(result.seconds, 3),
        "files": len(written.files),
        "notes": _notes(opened, target),
        "lost": list(written.lost),
        "made": list(written.made),
    }
    if result.checked is not None:
        found["checked"] = msgspec.to_builtins(result.checked)
    if result.compared is not None:
        found["verified"] = {"equal": not result.unequal, "tensors": len(result.compared)}
        found["verified"]["overflowed"] = sum(row.overflowed for row in result.compared)
        found["verified"]["unequal"] = [msgspec.to_builtins(row) for row in result.unequal]
    return found


def _notes(opened: Opened, target: Target) -> list[str]:
    weights = all(spec.role in ("param", "buffer") for spec in target.specs)
    return [*opened.notes, *(() if weights else opened.usual), *target.notes]


def _print_begun(to: str, opened: Opened, target: Target, where: str) -> None:
    """Print what is known before bytes move; whoever reads a log sees it while the conversion runs."""
    from ckpt.convert.find import FORMATS

    out, parallel, format = console(), target.parallel, FORMATS[to]
    out.print(shown(f"from {opened.where}: {step_words(opened)}"))
    shape = [] if format.weights else [f"{name} {getattr(parallel, name)}" for name in DEGREES]
    shape += [] if format.whole else [f"ZeRO-{parallel.zero}"]
    out.print(shown(f"to {where}: {', '.join([to, f'step {opened.step}', *(shape[:1] if format.whole else shape)])}"))
    for note in _notes(opened, target):
        out.print(shown(note))
    sys.stdout.flush()


def _print(result: Result, *, dry_run: bool) -> None:
    out, written = console(), result.written
    for title, lines in (
        ("", checked_words(result.checked) if result.checked is not None else ()),
        ("lost: ", written.lost),
        ("made up: ", written.made),
    ):
        for line in lines:
            out.print(shown(f"{title}{line}", "yellow" if title else ""))
    read, wrote = size(written.bytes_read), size(written.bytes_written)
    held = f"; at most {size(written.memory)} of memory" if written.memory else ""
    if dry_run:
        out.print(shown(f"{read} would be read, {wrote} written{held}"))
        return
    kept = f"; {size(written.bytes_present)} were there" if written.bytes_present else ""
    rate = f" ({size(written.bytes_written / result.seconds)}/s)" if result.seconds > 0 else ""
    tensors = count(len(result.target.specs), "tensor")
    out.print(shown(f"{tensors}: {read} read, {wrote} written{kept} in {result.seconds:.1f} s{rate}"))
    if result.compared is not None:
        print_rows(result.unequal)
        equal = len(result.compared) - len(result.unequal)
        good = f"verified: {count(equal, 'tensor')} of DST equal those of SRC"
        out.print(shown(good if not result.unequal else f"{good}, {len(result.unequal):,} do not", ""))
