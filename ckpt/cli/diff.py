"""``ckpt diff``: do two checkpoints hold the same state, whatever their formats and layouts?"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from ckpt.cli.copy import number_of_bytes
from ckpt.cli.program import exits, print_json
from ckpt.cli.progress import bar
from ckpt.cli.render import console, new_table, shown
from ckpt.cli.source import FORMATS, checked_words, read_options, source_options, step_words
from ckpt.words import count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt.convert.checking import Checked
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
@click.option("--optimizer-step-b", type=click.IntRange(min=0), help="As --optimizer-step, of B.")
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
    optimizer_step_b: int | None,
    roles: str,
    memory: float,
    **source: Any,
) -> int:
    """Say whether checkpoints A and B hold the same state: per tensor and role equal, different, or on one side only.

    A and B may be of any format that is read, each saved in any layout. Exit code 0: equal; 11: not.
    """
    from ckpt.convert.checking import check_source
    from ckpt.convert.compare import EQUAL, compare
    from ckpt.convert.find import open_source
    from ckpt.convert.options import WEIGHTS
    from ckpt.layout.spec import BUFFER, PARAM

    options, kind = read_options(source)
    options = replace(options, roles=roles, seen=set() if source["check_source"] else None)
    options_b = replace(options, optimizer_step=optimizer_step_b, seen=set() if source["check_source"] else None)
    left = open_source(a, step=step, options=options, format=kind)
    right = open_source(b, step=step if step_b is None else step_b, options=options_b, format=kind_b)
    wanted = (PARAM, BUFFER) if roles == WEIGHTS else None
    visible = sys.stdout.isatty() and not as_json
    checked: list[Checked | None] = []
    for side, seen in ((left, options.seen), (right, options_b.seen)):
        with bar("checking", visible=visible and seen is not None) as progress:
            checked.append(None if seen is None else check_source(side, seen, progress))
    with bar("comparing", visible=visible) as progress:
        rows = compare(left, right, roles=wanted, memory=int(memory), progress=progress)
    same = all(row.status == EQUAL for row in rows)
    if as_json:
        sides = {"a": _side(left, checked[0]), "b": _side(right, checked[1])}
        apart = {name: words.split(" and ") for name, words in _not_compared(left, right).items()}
        print_json({"equal": same, **sides, "tensors": [*map(_plain, rows)], "not_compared": apart})
    else:
        _print({"A": (left, checked[0]), "B": (right, checked[1])}, rows)
    return 0 if same else DIFFERENT


def _plain(row: Row) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if name != "overflowed"}  # of conversions only


def _side(opened: Opened, checked: Checked | None) -> dict[str, Any]:
    found = {"where": opened.where, "format": opened.format, "step": opened.step}
    found |= {"notes": list(opened.notes), "lost": list(opened.lost)}
    return found if checked is None else {**found, "checked": asdict(checked)}


def _not_compared(a: Opened, b: Opened) -> dict[str, str]:
    """Return name -> ``A``, ``B`` or ``A and B``, of the objects of the user's that are there."""
    from ckpt.runtime.extras import EXTRA, VALUE

    held = [{one.name for one in side.objects if one.kind in (EXTRA, VALUE)} for side in (a, b)]
    words = {(True, True): "A and B", (True, False): "A", (False, True): "B"}
    return {name: words[name in held[0], name in held[1]] for name in sorted(held[0] | held[1])}


def _print(sides: Mapping[str, tuple[Opened, Checked | None]], rows: Sequence[Row]) -> None:
    out = console()
    for name, (side, checked) in sides.items():
        out.print(shown(f"{name}: {side.where}, {step_words(side)}"))
        for note in (*(checked_words(checked) if checked is not None else ()), *side.notes, *side.lost):
            out.print(shown(f"   {note}"))
    print_rows(rows)
    tally = Counter(row.status for row in rows)
    objects = [f"{name} ({words})" for name, words in _not_compared(*(side for side, _ in sides.values())).items()]
    if objects:
        out.print(shown(f"not compared, objects beside the tensors: {', '.join(objects)}"))
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
