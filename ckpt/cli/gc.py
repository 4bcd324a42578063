"""``ckpt gc``: what no commit refers to, found and removed."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ckpt.cli.program import exits, print_json
from ckpt.cli.render import console, new_table, shown
from ckpt.repo.gc import collect
from ckpt.store.open import open_store
from ckpt.words import count, size

if TYPE_CHECKING:
    from ckpt.repo.gc import Garbage, GcReport

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SPAN = re.compile(r"(\d{1,9}(?:\.\d+)?)([smhdw])")


def seconds(_ctx: click.Context, _param: click.Parameter, value: str) -> float:
    """Return a time span as people write it, in seconds: ``90s``, ``1h``, ``1h30m``, ``2d``, ``0``.

    >>> [seconds(None, None, text) for text in ("90s", "1h30m", "2d", "0", "0.5h")]
    [90.0, 5400.0, 172800.0, 0.0, 1800.0]
    """
    text = value.strip().lower()
    if re.fullmatch(rf"0+|({_SPAN.pattern})+", text) is None:
        raise click.BadParameter(f"{value!r} is not a time span (90s, 30m, 1h, 1h30m, 2d, 0)")
    return float(sum(float(number) * _SECONDS[unit] for number, unit in _SPAN.findall(text)))


def span(seconds: float | None) -> str:
    """Return a time span for people, in its largest unit.

    >>> [span(s) for s in (None, -3, 0, 59.9, 90, 7200, 200000)]
    ['unknown', '0 s', '0 s', '59 s', '1 min', '2 h', '2 d']
    """
    if seconds is None:
        return "unknown"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(max(0, seconds))} s"


@click.command("gc")
@click.argument("root")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option(
    "--older-than",
    callback=seconds,
    metavar="SPAN",
    default="1h",
    help="Leave alone what showed a sign of life within this time (90s, 1h, 2d; default 1h): it may be a save or copy "
    "at work. 0 takes everything.",
)
@exits
def gc(root: str, as_json: bool, dry_run: bool, older_than: float) -> int:
    """Remove from ROOT what no committed step needs: killed saves and copies, replaced attempts, temporary files.

    Committed steps are never touched. If the commit or index of one cannot be read, nothing is removed.
    """
    store = open_store(root)
    report = collect(store, older_than, dry_run)
    if as_json:
        print_json(
            {
                "root": store.url,
                "dry_run": report.dry_run,
                "steps": report.steps,
                "removed": [_row(one) for one in report.removed],
                "kept": [asdict(one) for one in report.kept],
                "nbytes": report.nbytes,
            }
        )
    else:
        _print(report)
    return 0


def _row(one: Garbage) -> dict[str, Any]:
    row = asdict(one)
    del row["kept"]
    return row


def _print(report: GcReport) -> None:
    out = console()
    did = "would be removed" if report.dry_run else "removed"
    if report.found:
        table = new_table(("garbage", "key", "files", "size", "age", ""), right=("files", "size", "age"))
        for one in sorted(report.found, key=lambda one: (bool(one.kept), one.key)):
            cells = (one.kind, one.key, f"{one.files:,}", size(one.nbytes), span(one.age_s))
            table.add_row(
                *map(shown, cells), shown(f"kept: {one.kept}" if one.kept else did, "yellow" * bool(one.kept))
            )
        out.print(table)
    files = sum(one.files for one in report.removed)
    out.print(shown(f"{count(files, 'file')}, {size(report.nbytes)} {did}" if files else f"nothing {did}"))
    if report.kept:
        held = f"{count(sum(one.files for one in report.kept), 'file')}, {size(sum(one.nbytes for one in report.kept))}"
        out.print(shown(f"{held} kept"))
