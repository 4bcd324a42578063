"""The tables of ``ckpt analyze``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from ckpt.cli.render import console, new_table, shown, size
from ckpt.cli.render_loss import print_loss
from ckpt.cli.words import amount, between, copies, count, percent, tolerated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from ckpt.analysis.classes import CellClass
    from ckpt.analysis.report import Report
    from ckpt.cli.subject import PaperCount, Subject

SHOWN_LOSSES = 3
"""Losses that "must be written" is shown for, unless more are asked for."""


def print_report(subject: Subject, report: Report) -> None:
    """Print everything: what is held, how often, what must be written, what survives."""
    out = console()
    print_summary(out, subject, report)
    print_classes(out, report)
    print_must_write(out, report)
    print_survival(out, report)
    if report.loss is not None:
        print_loss(out, report.loss, report.domain_kind)
    if subject.paper is not None:
        print_paper(out, subject.paper)


def heading(out: Console, text: str) -> None:
    """Print a line that begins a part."""
    out.print()
    out.print(shown(text, "bold"))


def print_summary(out: Console, subject: Subject, report: Report) -> None:
    """Print what is looked at, and what is held by role."""
    out.print(shown(subject.name, "bold"))
    out.print(shown(subject.layout))
    # A domain for each rank is no news.
    groups = "" if report.domain_kind == "rank" else f" in {count(report.domain_count, report.domain_kind)}"
    model = f"{amount(report.parameters)} parameters in {count(report.tensors, 'tensor')}"
    out.print(shown(f"{count(report.world, 'rank')}{groups}; {model}"))
    for note in subject.notes:
        out.print(shown(f"note: {note}"))

    heading(out, "What is held")
    table = new_table(
        ("role", "held", "unique", "derivable", "redundant"), ("held", "unique", "derivable", "redundant")
    )
    for one in (*report.roles, report.total):
        sizes = (size(n) if n else "-" for n in (one.bytes_held, one.bytes_unique, one.bytes_derivable))
        table.add_row(*map(shown, (one.role, *sizes, percent(one.redundant_share))))
    out.print(table)


def print_classes(out: Console, report: Report) -> None:
    """Print what is held equally often, one row for each."""
    heading(out, f"How often, and what follows for {count(report.k, report.domain_kind)} lost")
    table = new_table(("held by so many ranks", "survives", "bytes", "verdict"), ("bytes",))
    for kind, rows in _merged(report.classes):
        first = rows[0]
        held = copies([one for one in first.roles if kind == "scalar" or not one.scalar], report.domain_kind)
        what = f"{kind}: " if kind not in ("trained", "scalar") else ""
        style = "red" if first.tolerance < 0 else "yellow" if first.must_write else "green"
        nbytes = size(sum(one.bytes for one in rows))
        cells = (f"{what}{held}", tolerated(first, report.domain_kind), nbytes)
        table.add_row(*map(shown, cells), shown(first.verdict, style))
    out.print(table)


def _merged(classes: Sequence[CellClass]) -> list[tuple[str, list[CellClass]]]:
    """Put classes together that differ in how often scalars are held, and in nothing that matters."""
    found: dict[tuple[object, ...], list[CellClass]] = {}
    for one in classes:
        roles = tuple(role for role in one.roles if one.kind == "scalar" or not role.scalar)
        found.setdefault((one.kind, one.derived, roles, one.tolerance, one.verdict), []).append(one)
    return [(rows[0].kind, rows) for rows in found.values()]


def print_must_write(out: Console, report: Report) -> None:
    """Print what the loss of so many domains could destroy."""
    heading(out, f"What must be written, so that nothing is lost with so many {report.domain_kind}s")
    table = new_table(("lost", "bytes", "parameters", "share"), ("lost", "bytes", "parameters", "share"))
    for row in report.must_write[: max(SHOWN_LOSSES, report.k)]:
        cells = (str(row.losses), size(row.bytes), amount(row.parameters), percent(row.share))
        table.add_row(*map(shown, cells))
    out.print(table)


def print_survival(out: Console, report: Report) -> None:
    """Print what is still held after so many losses."""
    heading(out, f"What is still held after so many {report.domain_kind}s are lost at once")
    heads = ("lost", "in the worst case", "expected", "chance that all is", "worst case is")
    table = new_table(heads, heads[:4])
    for row in report.survival:
        total = row.bytes.worst / row.bytes.worst_share if row.bytes.worst_share else 0
        worst = row.bytes.worst_share
        upper = worst if row.bytes.worst_upper == row.bytes.worst or not total else row.bytes.worst_upper / total
        cells = (
            f"{row.lost:,}",
            between(worst, upper),
            percent(row.bytes.expected_share),
            between(row.nothing_lost, row.nothing_lost_upper),
            "exact" if row.exact else "a bound",
        )
        table.add_row(*map(shown, cells))
    out.print(table)


def print_paper(out: Console, paper: PaperCount) -> None:
    """Print the redundancy as AdaCheck counts it, beside what that paper says."""
    heading(out, "Redundancy as AdaCheck (FAST'26) counts it")
    table = new_table(("", ""))
    table.show_header = False
    table.add_row("this layout", shown(f"{percent(paper.share)} of parameters, gradients and optimizer states"))
    for name, text in paper_lines(paper):
        table.add_row(shown(name), shown(text))
    out.print(table)


def paper_lines(paper: PaperCount) -> list[tuple[str, str]]:
    """Return what is to be said beside our number, as (name, text)."""
    if not paper.open:
        return [("layout", paper.layout)]
    stated = (
        "none for this layout (25 % to 100 % for its four)" if paper.published is None else f"{paper.published:g} %"
    )
    if paper.changed:
        stated += f", for another layout: {', '.join(paper.changed)} replaced"
    return [("the paper's number", stated), ("layout", paper.layout), ("sources", paper.open)]


def print_presets(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table of ``--list-presets``."""
    out = console()
    table = new_table(("preset", "parameters", "ranks", "layout", "paper"), ("parameters", "ranks", "paper"))
    for row in rows:
        stated = Text("-") if row["published"] is None else shown(f"{row['published']:g} %")
        cells = (row["name"], amount(row["parameters"]), f"{row['ranks']:,}", row["layout"])
        table.add_row(*map(shown, cells), stated)
    out.print(table)
