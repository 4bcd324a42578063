"""``ckpt log``: what is in the gradient logs of a repository."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpt.cli.log_document import document_of
from ckpt.cli.log_plot import checked_plot, write_plot
from ckpt.cli.program import exits, print_json
from ckpt.cli.render import console, new_table, plural, shown
from ckpt.errors import IntegrityError
from ckpt.store.open import open_store
from ckpt.words import count, listed, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROWS = 40
"""Rows that are shown of more steps, unless the steps are named: each is then a range of steps."""
SHOWN = 8
_NICE = (1, 2, 5)

Bounds = tuple[int | None, int | None]


def bounds(_ctx: click.Context, _param: click.Parameter, value: str | None) -> Bounds | None:
    """Return the first and last of some steps as people write them, either may be left out.

    >>> [bounds(None, None, text) for text in ("3:7", "3:", ":7", "5", ":", None)]
    [(3, 7), (3, None), (None, 7), (5, 5), (None, None), None]
    """
    if value is None:
        return None
    found = re.fullmatch(r"(\d{0,18})(:?)(\d{0,18})", value.strip(), re.ASCII)
    if found is None or not value.strip() or (found[1] and found[3] and int(found[1]) > int(found[3])):
        raise click.BadParameter(f"{value!r} is no range of steps (100:200, 100:, :200, 150)")
    first = int(found[1]) if found[1] else None
    last = int(found[3]) if found[3] else None
    return (first, last) if found[2] else (first, first)


@click.command("log")
@click.argument("root")
@click.option("--step", "steps", callback=bounds, metavar="A:B", help="List these steps one by one (: is all of them).")
@click.option("--quick", is_flag=True, help="Do not read the gradients: damage inside of them is then not found.")
@click.option("--plot", "plot", metavar="FILE", help="Draw norm, learning rate and loss scale (.svg or .png).")
@exits
def log(root: str, as_json: bool, steps: Bounds | None, quick: bool, plot: str | None) -> int:
    """Show the gradient logs in ROOT: step by step what was logged, and how far checkpoints and logs lead.

    Along the newest history, from its oldest checkpoint on. The exit code is 3 if a record is damaged or missing; the
    torn end that a killed job leaves is no error.
    """
    plotter = None if plot is None else checked_plot(plot)
    from ckpt.gradlog.history import history_of  # imports torch, which takes its time

    store = open_store(root)
    history = history_of(store, whole=not quick)
    first, last = steps or (None, None)
    document = document_of(store.url, history, first, last)
    if plotter is not None and plot is not None:
        write_plot(plotter, Path(plot), document)
    if as_json:
        print_json(document)
    else:
        _print(document, ROWS if steps is None else None)
    if plot is not None:
        click.echo(f"the plot is in {plot}", file=sys.stderr)
    return IntegrityError.exit_code if document["damaged"] else 0


def _print(document: dict[str, Any], most: int | None) -> None:
    out = console()
    heads = ("step", "log", "bytes", "B/param", "norm", "lr", "loss scale", "stored as", "s/step", "note")
    table = new_table(heads, right=("log", "bytes", "B/param", "norm", "lr", "loss scale", "s/step"))
    rows = list(ranges(document["steps"], most))
    for several in rows:
        cells, style = _cells(several)
        table.add_row(*map(shown, cells[:-1]), shown(cells[-1], style))
    if rows:
        out.print(table)
    else:
        out.print("no logged step" if not document["summary"]["steps"] else "none of these steps is in the log")
    for line, style in _lines(document):
        out.print(shown(line, style))


def ranges(steps: Sequence[dict[str, Any]], most: int | None) -> Iterator[Sequence[dict[str, Any]]]:
    """Yield steps in at most about ``most`` ranges (None: one by one): of one log, without a gap.

    >>> [[one["step"] for one in several] for several in ranges([{"step": n, "log": 1} for n in (1, 2, 3, 4, 7)], 3)]
    [[1, 2], [3, 4], [7]]
    """
    length, k = 1, 0
    while most is not None and len(steps) > most * length:
        k += 1
        length = _NICE[k % 3] * 10 ** (k // 3)
    several: list[dict[str, Any]] = []
    for one in steps:
        if several:
            last = several[-1]
            same = one["step"] == last["step"] + 1 and one["log"] == last["log"]
            if not same or (one["step"] - 1) % length == 0:
                yield several
                several = []
        several.append(one)
    if several:
        yield several


def _cells(several: Sequence[dict[str, Any]]) -> tuple[list[str], str]:
    """Return the cells of some steps, the note last, and the note's style."""
    first, last = several[0], several[-1]
    taken = [one for one in several if not one["skipped"]] or several
    step = str(first["step"]) if len(several) == 1 else f"{first['step']}-{last['step']}"
    per = [one["bytes_per_parameter"] for one in taken if one["bytes_per_parameter"] is not None]
    norms = [one["norm"] for one in several if one["norm"] is not None]
    scales = [one["loss_scale"] for one in several if one["loss_scale"] is not None]
    cells = [
        step,
        str(first["log"]),
        size(sum(one["nbytes"] for one in several) / len(several)),
        f"{sum(per) / len(per):.2f}" if per else "",
        f"{sum(norms) / len(norms):.4g}" if norms else "",
        _span([_rates(one["lr"]) for one in several]),
        _span([f"{scale:g}" for scale in scales]),
        _stored(several),
        f"{sum(one['seconds'] for one in several) / len(several):.3g}",
    ]
    note, style = _note(several)
    return [*cells, note], style


def _rates(rates: Sequence[float | None]) -> str:
    """Return the learning rates of a step: one, if all groups have the same."""
    known = [f"{rate:.4g}" for rate in rates if rate is not None]
    return listed(list(dict.fromkeys(known)), 3)


def _span(texts: Sequence[str]) -> str:
    known = [text for text in texts if text]
    if not known or known[0] == known[-1]:
        return known[0] if known else ""
    return f"{known[0]} … {known[-1]}"


def _stored(several: Sequence[dict[str, Any]]) -> str:
    dtypes = sorted({name for one in several for name in one["dtypes"]})
    # Up to a power of two, which is the log's own choice: of bf16 that of the largest number that it holds.
    multipliers = sorted({_mantissa(number) for one in several for number in one["multipliers"]})
    if not multipliers or multipliers == [1.0]:
        return ", ".join(dtypes)
    by = f"{multipliers[0]:.4g}" if len(multipliers) == 1 else f"{multipliers[0]:.4g} … {multipliers[-1]:.4g}"
    return f"{', '.join(dtypes)} × {by}"


def _mantissa(number: float) -> float:
    """Return a multiplier times the power of two that brings it to above 0.5, and at most 1."""
    found = math.frexp(number)[0]
    return 1.0 if found == 0.5 else found


def _note(several: Sequence[dict[str, Any]]) -> tuple[str, str]:
    alone = len(several) == 1
    notes, style = [], ""
    skipped = sum(one["skipped"] for one in several)
    if skipped:
        notes.append("skipped" if alone else f"{skipped} skipped")
    changed = sorted({name for one in several for name in one["changed"]})
    if changed:
        steps = [one["step"] for one in several if one["changed"]]
        notes.append(f"{', '.join(changed)} set by hand" + ("" if alone else f" before step {listed(steps, 3)}"))
        style = "yellow"
    for one in several:
        if one["ranks"] < one["world"]:
            notes.append(
                f"{'' if alone else 'step ' + str(one['step']) + ': '}on {one['ranks']} of {one['world']} ranks"
            )
            style = "yellow"
            break
    lost = [one for one in several if not one["reached"]]
    if lost:
        notes.append("out of reach" if len(lost) == len(several) else f"out of reach from step {lost[0]['step']} on")
        style = "red"
    return "; ".join(notes), style


def _lines(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is said below the table, each line with its style."""
    for one in document["logs"]:
        yield _log_line(one, document["checkpoints"]), ""
        for part in one["ranks"]:
            if part["torn"]:
                yield f"  torn: {part['torn']}", "yellow"
            for trouble in part["troubles"]:
                yield f"  damage: {trouble}", "red"
        if one["parted"] is not None:
            yield f"  {one['parted']['why']}", "yellow"
    for one in document["unread"]:
        yield f"damage: {one['why']}; where log {one['log']} belongs is not known", "red"
    if document["others"]:
        yield f"not on the newest history: log {listed(document['others'], SHOWN)}", ""
    summary = document["summary"]
    changed = summary["changed"]
    if changed:
        yield (
            (
                f"options of a group changed between the end of a step and the next one, before step "
                f"{listed(changed, SHOWN)}: by hand, or by a scheduler that is stepped behind Checkpointer.step"
            ),
            "yellow",
        )
    yield from ((line, "") for line in _sums(summary))
    if document["reaches"] is None:
        yield "no checkpoint leads to these logs", "red"
    else:
        end = "" if document["checked"] else " (gradients were not read)"
        of = document["checkpoints"][-1]
        yield f"checkpoint {of} and the logs lead to step {document['reaches']}{end}", "bold"


def _log_line(one: dict[str, Any], checkpoints: Sequence[int]) -> str:
    """Say what a log continues, and how far its ranks' records go."""
    behind = "" if one["follows"] is None else f", goes on from log {one['follows']} behind step {one['start']}"
    at_checkpoint = one["attempt"] or (not behind and one["start"] in checkpoints)
    begins = (
        ""
        if behind and not at_checkpoint
        else f", begins at {'checkpoint' if at_checkpoint else 'step'} {one['start']}"
    )
    ends: dict[int, list[int]] = {}
    for part in one["ranks"]:
        ends.setdefault(part["end"], []).append(part["rank"])
    if max(ends, default=-1) < one["first"]:
        far = "no record"
    elif len(ends) == 1 and not one["absent"]:
        far = f"{'all ranks' if one['world'] > 1 else 'records'} to step {one['end']}"
    else:
        said = [f"{plural(ranks)} {_to(end, one['first'])}" for end, ranks in sorted(ends.items())]
        said += [f"{count(one['absent'], 'rank')} no part"] if one["absent"] else []
        far = f"{listed(said, SHOWN)}: all of them {_to(one['end'], one['first'])}"
    software = one["software"]
    versions = ", ".join(f"{name} {software[name]}" for name in ("torch", "deepspeed") if name in software)
    by = f", by {', '.join(dict.fromkeys(one['optimizers']))} ({versions})" if one["optimizers"] else ""
    short = one["last"] is not None and one["end"] < one["last"]
    until = f"; the next log goes on behind step {one['last']}" if short else ""
    return f"log {one['number']} of {count(one['world'], 'rank')}{begins}{behind}{by}: {far}{until}"


def _to(end: int, first: int) -> str:
    return f"to step {end}" if end >= first else "no record"


def _sums(summary: dict[str, Any]) -> Iterator[str]:
    skipped = f", {summary['skipped']:,} of them skipped" if summary["skipped"] else ""
    yield f"{count(summary['steps'], 'step')}{skipped}: {size(summary['nbytes'])}"
    if summary["bytes_per_step"] is None:
        return
    line = f"a step that was taken: {size(summary['bytes_per_step'])}"
    if summary["bytes_per_parameter"] is not None:
        line += (
            f", {summary['bytes_per_parameter']:.3f} B per parameter (of {summary['parameters']:,}): gradients "
            f"{summary['gradient_bytes_per_parameter']:.3f} B, and beside them {size(summary['other_bytes_per_rank'])} "
            f"a rank"
        )
    yield line
    if summary["codec_ratio"] is not None and summary["codec_ratio"] != 1:
        yield f"the codec makes gradients {summary['codec_ratio']:.2f} times smaller"
    full = summary["full"]
    if full is not None and summary["ratio"] is not None:
        yield f"the full save of step {full['step']} has {size(full['stored'])}: {summary['ratio']:.2f} times a step's"
