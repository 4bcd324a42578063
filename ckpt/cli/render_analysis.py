"""The tables of ``ckpt analyze``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from ckpt.cli.lost_rows import groups_of, verdict
from ckpt.cli.render import console, new_table, shown
from ckpt.cli.rows import merged_classes, paper_lines, shown_losses, worst_shares
from ckpt.cli.words import amount, between, percent
from ckpt.words import count, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from ckpt.analysis.losing import Loss
    from ckpt.analysis.report import AnalysisReport
    from ckpt.cli.subject import PaperCount, Subject


def print_report(subject: Subject, report: AnalysisReport) -> None:
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


def print_summary(out: Console, subject: Subject, report: AnalysisReport) -> None:
    """Print what is looked at, and what is held by role."""
    out.print(shown(subject.name, "bold"))
    out.print(shown(subject.layout))
    domains = "" if report.domain_kind == "rank" else f" on {count(report.domain_count, report.domain_kind)}"
    model = f"{amount(report.parameters)} parameters in {count(report.tensors, 'tensor')}"
    out.print(shown(f"{count(report.world, 'rank')}{domains}; {model}"))
    for note in subject.notes:
        out.print(shown(f"note: {note}"))

    heading(out, "What is held")
    heads = ("role", "held", "unique", "derivable", "redundant")
    table = new_table(heads, heads[1:])
    for one in (*report.roles, report.total):
        sizes = (size(n) if n else "-" for n in (one.bytes_held, one.bytes_unique, one.bytes_derivable))
        table.add_row(*map(shown, (one.role, *sizes, percent(one.redundant_share))))
    out.print(table)


def print_classes(out: Console, report: AnalysisReport) -> None:
    """Print what is held equally often, a row for each."""
    heading(out, f"How often, and what follows for {count(report.k, report.domain_kind)} lost")
    table = new_table(("held by so many ranks", "survives", "bytes", "verdict"), ("bytes",))
    for one in merged_classes(report.classes):
        style = "red" if one.first.tolerance < 0 else "yellow" if one.first.must_write else "green"
        cells = (one.label(report.domain_kind), one.survives(report.domain_kind), size(one.nbytes))
        table.add_row(*map(shown, cells), shown(one.verdict(), style))
    out.print(table)


def print_must_write(out: Console, report: AnalysisReport) -> None:
    """Print what the loss of so many domains could destroy."""
    heading(out, f"What must be written, so that the loss of so many {report.domain_kind}s costs nothing")
    heads = ("lost", "bytes", "parameters", "share")
    table = new_table(heads, heads)
    for row in shown_losses(report):
        table.add_row(*map(shown, (str(row.losses), size(row.bytes), amount(row.parameters), percent(row.share))))
    out.print(table)


def print_survival(out: Console, report: AnalysisReport) -> None:
    """Print what is still held after so many losses."""
    heading(out, f"What is still held after so many {report.domain_kind}s are lost at once")
    heads = ("lost", "in the worst case", "expected", "chance that all is", "worst case is")
    table = new_table(heads, heads[:4])
    for row in report.survival:
        cells = (
            f"{row.lost:,}",
            between(*worst_shares(row.bytes)),
            percent(row.bytes.expected_share),
            between(row.nothing_lost, row.nothing_lost_upper),
            "exact" if row.exact else "a bound",
        )
        table.add_row(*map(shown, cells))
    out.print(table)


def print_loss(out: Console, loss: Loss, domain: str) -> None:
    """Print what the loss of some ranks does. Tensors whose names differ in numbers only share a row."""
    heading(out, f"Loss of {loss.title(domain)}")
    if not loss.tensors:
        out.print("they held nothing")
        return
    out.print(shown(verdict(loss), "red" if loss.bytes else "green"))
    heads = ["tensor", "gone", "roles that nobody holds", "the rest is rebuilt from"]
    if not loss.bytes:
        del heads[1:3]
    table = new_table(heads, ("gone",))
    for group in groups_of(loss.tensors):
        cells = [group.label(), size(group.nbytes) if group.nbytes else "-", group.roles_text(), group.sources_text()]
        if not loss.bytes:
            del cells[1:3]
        table.add_row(*map(shown, cells))
    out.print(table)


def print_paper(out: Console, paper: PaperCount) -> None:
    """Print the redundancy as AdaCheck counts it, beside what that paper says."""
    heading(out, "Redundancy as AdaCheck (FAST'26) counts it")
    table = new_table(("", ""))
    table.show_header = False
    for name, text in paper_lines(paper):
        table.add_row(shown(name), shown(text))
    out.print(table)


def print_presets(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table of ``--list-presets``."""
    table = new_table(("preset", "parameters", "ranks", "layout", "paper"), ("parameters", "ranks", "paper"))
    for row in rows:
        stated = Text("-") if row["published"] is None else shown(f"{row['published']:g} %")
        cells = (row["name"], amount(row["parameters"]), f"{row['ranks']:,}", row["layout"])
        table.add_row(*map(shown, cells), stated)
    console().print(table)
