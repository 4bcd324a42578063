"""``ckpt diff``: do two checkpoints hold the same state, whatever their formats and layouts?"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ckpt.cli.copy import number_of_bytes
from ckpt.cli.program import exits, print_json
from ckpt.cli.progress import bar
from ckpt.cli.render import console, new_table, shown
from ckpt.cli.source import FORMATS, read_options, source_options, step_words
from ckpt.words import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.convert.compare import Row
    from ckpt.convert.opened import Opened

DIFFERENT = 11
"""Exit code: both could be read, and they do not hold the same."""
WORDS = {"equal": "equal", "different": "different", "only_a": "only in A", "only_b": "only in B"}


@click.command("diff")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--step", type=click.IntRange(min=0), help="Of A, and of B unless --step-b says another.")
@click.option("--step-b", type=click.IntRange(min=0), help="Of B.")
@click.option("--from-b", "kind_b", type=click.Choice(FORMATS), help="Format of B; default: by looking.")
@click.option("--roles", type=click.Choice(["all", "weights"]), default="all", show_default=True, help="What counts.")
@click.option("--memory", callback=number_of_bytes, metavar="SIZE", default="1GiB", show_default=True, help="At most.")
@source_options
@exits
def diff(
    a: str,
    b: str,
    as_json: bool,
    step: int | None,
    step_b: int | None,
    kind_b: str | None,
    roles: str,
    memory: float,
    **source: Any,
) -> int:
    """Say whether checkpoints A and B hold the same state: per tensor and role equal, different, or on one side only.

    A and B may be of any format that is read, each saved in any layout. Exit code 0: equal; 11: not.
    """
    from ckpt.convert.compare import EQUAL, compare
    from ckpt.convert.find import open_source
    from ckpt.convert.options import WEIGHTS
    from ckpt.layout.spec import BUFFER, PARAM

    options, kind = read_options(source)
    left = open_source(a, step=step, options=options, format=kind)
    right = open_source(b, step=step if step_b is None else step_b, options=options, format=kind_b)
    wanted = (PARAM, BUFFER) if roles == WEIGHTS else None
    with bar("comparing", visible=sys.stdout.isatty() and not as_json) as progress:
        rows = compare(left, right, roles=wanted, memory=int(memory), progress=progress)
    same = all(row.status == EQUAL for row in rows)
    if as_json:
        print_json({"equal": same, "a": _side(left), "b": _side(right), "tensors": [*map(_plain, rows)]})
    else:
        _print(left, right, rows)
    return 0 if same else DIFFERENT


def _plain(row: Row) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if name != "overflowed"}  # of conversions only


def _side(opened: Opened) -> dict[str, Any]:
    return {"where": opened.where, "format": opened.format, "step": opened.step, "notes": list(opened.notes)}


def _print(a: Opened, b: Opened, rows: Sequence[Row]) -> None:
    out = console()
    for name, side in (("A", a), ("B", b)):
        out.print(shown(f"{name}: {side.where}, {step_words(side)}"))
        for note in side.notes:
            out.print(shown(f"   {note}"))
    print_rows(rows)
    tally = Counter(row.status for row in rows)
    told = ", ".join(f"{tally[status]:,} {words}" for status, words in WORDS.items() if tally[status])
    out.print(shown(f"{count(len(rows), 'tensor')}: {told or 'nothing to compare'}"))


def print_rows(rows: Sequence[Row]) -> None:
    """Print a table of the tensors that are not equal."""
    unequal = [row for row in rows if row.status != "equal"]
    if not unequal:
        return
    table = new_table(("tensor", "role", "", "elements", "max abs", ""), right=("elements", "max abs"))
    for row in unequal:
        odd = f"{row.unordered:,} of them NaN or infinite" if row.unordered else ""
        cells = (
            row.fqn,
            row.role,
            WORDS[row.status],
            f"{row.elements:,}" if row.elements else "",
            "" if row.max_abs is None else f"{row.max_abs:.6g}",
            "; ".join(filter(None, (odd, row.note))),
        )
        table.add_row(*map(shown, cells))
    console().print(table)
