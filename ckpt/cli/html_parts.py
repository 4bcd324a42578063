"""The parts of the page that need no script: facts and tables, as HTML. Every text goes through :func:`text`."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, NamedTuple

from ckpt.cli.lost_rows import groups_of, verdict
from ckpt.cli.render import visible
from ckpt.cli.rows import merged_classes, paper_lines, shown_losses, worst_shares
from ckpt.cli.words import amount, between, percent
from ckpt.words import count, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckpt.analysis.losing import Loss
    from ckpt.analysis.report import AnalysisReport
    from ckpt.cli.subject import PaperCount, Subject


class Cell(NamedTuple):
    """A cell of a table: its HTML and its CSS class."""

    html: str
    style: str = ""


def text(said: str) -> str:
    """Return text as HTML, without what a reader cannot see."""
    return escape(visible(said))


def cell(said: str, style: str = "") -> Cell:
    """Return a cell with a text."""
    return Cell(text(said), style)


def number(said: str) -> Cell:
    """Return a cell that is aligned to the right."""
    return cell(said, "number")


def table(heads: Sequence[Cell], rows: Iterable[Sequence[Cell]], last: str = "") -> str:
    """Return a table; ``last``: CSS class of its last row."""
    *listed, end = [_line(row, "td", "") for row in rows] or [""]
    body = "".join(listed) + (end.replace("<tr>", f'<tr class="{last}">', 1) if last else end)
    return f'<div class="scroll"><table><thead>{_line(heads, "th", "")}</thead><tbody>{body}</tbody></table></div>'


def _line(row: Sequence[Cell], tag: str, style: str) -> str:
    cells = "".join(f"<{tag}{_class(one.style)}>{one.html}</{tag}>" for one in row)
    return f"<tr{_class(style)}>{cells}</tr>"


def _class(style: str) -> str:
    return f' class="{style}"' if style else ""


def section(title: str, body: str) -> str:
    """Return a part of the page."""
    return f"<section><h2>{text(title)}</h2>{body}</section>"


def facts(report: AnalysisReport) -> str:
    """Return the summary in a few large numbers."""
    domain, total, must = report.domain_kind, report.total, report.must_write[report.k - 1 : report.k]
    on = "" if domain == "rank" else f" on {count(report.domain_count, domain)}"
    derived = f"; {size(total.bytes_derivable)} more can be derived from it" if total.bytes_derivable else ""
    said = [
        (f"{report.world:,}", f"rank{'s' * (report.world != 1)}{on}"),
        (amount(report.parameters), f"parameters in {count(report.tensors, 'tensor')}"),
        (size(total.bytes_held), "held by all ranks together"),
        (size(total.bytes_unique), f"unique{derived}"),
        (percent(total.redundant_share), "of what is held is redundant"),
        *((size(row.bytes), f"must be written, if {count(row.losses, domain)} may be lost") for row in must),
    ]
    return "".join(f'<div class="fact"><b>{text(big)}</b><span>{text(small)}</span></div>' for big, small in said)


def sections(subject: Subject, report: AnalysisReport) -> str:
    """Return everything below the heat map."""
    domain = report.domain_kind
    found = [
        section(f"What is still held after so many {domain}s are lost at once", survival(report)),
        section(f"How often things are held, and what follows for {count(report.k, domain)} lost", classes(report)),
        '<div class="pair">',
        section("What is held", roles(report)),
        section("What must be written against so many losses", must_write(report)),
        "</div>",
    ]
    if report.loss is not None:
        found.insert(0, section(f"Loss of {report.loss.title(domain)}", loss_table(report.loss)))
    if subject.paper is not None:
        found.append(section("Redundancy as AdaCheck (FAST'26) counts it", paper(subject.paper)))
    return "\n".join(found)


def survival(report: AnalysisReport) -> str:
    """Return the survival table, with bars."""
    named = ("worst case", "expected", "chance that all is held", "worst case is")
    rows = [
        (
            number(f"{row.lost:,}"),
            bar(row.bytes.worst_share, "share", between(*worst_shares(row.bytes))),
            bar(row.bytes.expected_share, "soft", percent(row.bytes.expected_share)),
            cell(between(row.nothing_lost, row.nothing_lost_upper)),
            cell("exact" if row.exact else "a bound"),
        )
        for row in report.survival
    ]
    return table((number("lost"), *map(cell, named)), rows)


def bar(share: float, style: str, said: str) -> Cell:
    """Return a cell with a bar that is filled to a share, and a text."""
    track = '<rect class="track" width="100%" height="100%" rx="2"/>'
    filled = f'<rect class="{style}" width="{100 * share:.3f}%" height="100%" rx="2"/>'
    return Cell(f'<svg aria-hidden="true">{track}{filled}</svg>{text(said)}', "short")


def classes(report: AnalysisReport) -> str:
    """Return what is held equally often, with verdicts."""
    domain = report.domain_kind
    rows = [
        (
            cell(one.label(domain)),
            cell(one.survives(domain), "short"),
            number(size(one.nbytes)),
            cell(one.verdict(), "bad" if one.first.must_write else "good"),
        )
        for one in merged_classes(report.classes)
    ]
    return table((cell("held by so many ranks"), cell("survives"), number("bytes"), cell("verdict")), rows)


def roles(report: AnalysisReport) -> str:
    """Return bytes by role."""
    heads = (cell("role"), *map(number, ("held", "unique", "derivable", "redundant")))
    rows = [
        (
            cell(one.role),
            *(number(size(n) if n else "–") for n in (one.bytes_held, one.bytes_unique, one.bytes_derivable)),
            number(percent(one.redundant_share)),
        )
        for one in (*report.roles, report.total)
    ]
    return table(heads, rows, "total")


def must_write(report: AnalysisReport) -> str:
    """Return what the loss of so many domains could destroy."""
    rows = [
        map(number, (str(row.losses), size(row.bytes), amount(row.parameters), percent(row.share)))
        for row in shown_losses(report)
    ]
    return table([*map(number, ("lost", "bytes", "parameters", "share"))], [tuple(row) for row in rows])


def loss_table(loss: Loss) -> str:
    """Return what a named loss does."""
    heads = (cell("tensor"), number("gone"), cell("roles that nobody holds"), cell("the rest is rebuilt from"))
    rows = [
        (
            Cell(f"<code>{text(group.label())}</code>"),
            number(size(group.nbytes) if group.nbytes else "–"),
            cell(group.roles_text()),
            cell(group.sources_text()),
        )
        for group in groups_of(loss.tensors)
    ]
    return f'<p class="{"bad" if loss.bytes else "good"}">{text(verdict(loss))}</p>{table(heads, rows)}'


def paper(counted: PaperCount) -> str:
    """Return our count beside the paper's."""
    return f"<dl>{''.join(f'<dt>{text(name)}</dt><dd>{text(said)}</dd>' for name, said in paper_lines(counted))}</dl>"
