"""The tables of a result, for a terminal and for a page."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.figures import Layout
from benchmarks.peers import PEERS
from benchmarks.targets import DCP, lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.figures import Figure

MB = 1e6


@dataclass
class Sheet:
    """A table with nothing but text in it."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    below: list[str] = field(default_factory=list)

    def rich(self) -> Table:
        """Return it for a terminal."""
        table = Table(title=self.title, title_justify="left", caption="\n".join(self.below), caption_justify="left")
        for i, name in enumerate(self.columns):
            table.add_column(name, justify="right" if i else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


def markdown(sheet: Sheet) -> str:
    """Return a sheet as Markdown."""
    out = [f"**{sheet.title}**", "", "| " + " | ".join(sheet.columns) + " |"]
    out.append("|---|" + "---:|" * (len(sheet.columns) - 1))
    out += ["| " + " | ".join(row) + " |" for row in sheet.rows]
    out += ["", *(f"{line}  " for line in sheet.below), ""]
    return "\n".join(out)


def tables(result: dict[str, Any]) -> Iterator[Sheet]:
    """Yield everything that a result has to show."""
    layouts = [Layout(one) for one in result["layouts"]]
    for layout in layouts:
        for store in layout.stores("save"):
            yield _durable(layout, store, result)
        if layout.stores("stall") or layout.stores("async"):
            yield _asynchronous(layout, result)
    targets = Sheet("What is to be reached", ["layout", "target", "found", "reached"])
    for layout in layouts:
        for line in lines(layout):
            reached = {True: "yes", False: "NO", None: "–"}[line.reached]
            targets.rows.append([line.layout, line.target, line.found, reached])
    yield targets
    absent = Sheet("What was not run", ["system", "layout", "reason"])
    for layout in layouts:
        for one in layout.result["not_run"]:
            what = f" ({one['what']})" if one["what"] else ""
            absent.rows.append([one["peer"], layout.name + what, one["reason"]])
    absent.rows += [[name, "all", reason] for name, reason in result["not_run"].items()]
    absent.rows = [list(row) for row in dict.fromkeys(map(tuple, absent.rows))]
    yield absent


def _head(layout: Layout, result: dict[str, Any]) -> str:
    options = result["options"]
    return (
        f"{layout.name} × {options['world']}, {options['dtype']}, {layout.result['params'] / 1e6:.1f} M parameters, "
        f"{layout.information / MB:.1f} MB of information, {layout.result['held'] / MB:.0f} MB held"
    )


def _meanwhile(layout: Layout, *items: str) -> list[str]:
    found = [(item, layout.result["meanwhile"][item]) for item in items if item in layout.result["meanwhile"]]
    return [
        f"{item}: load average {m['load_average']:.1f} at the end, other processes used {m['others_cores']:.2f} cores"
        for item, m in found
    ]


def _text(value: Figure | None, digits: int = 2) -> str:
    return value.text(digits) if value else "–"


def _middle(value: Figure | None, digits: int = 2) -> str:
    return f"{value.median:.{digits}f}" if value else "–"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def _durable(layout: Layout, store: str, result: dict[str, Any]) -> Sheet:
    sheet = Sheet(
        f"{_head(layout, result)}: save and load, {store}",
        ["", "save returns, s", "durable, s", "MB/s", "× raw", "MB stored", "of information", "load, s", "× raw",
         "MB read", "RSS save, MB", "RSS load, MB", "same bits"],
    )  # fmt: skip
    for peer in layout.peers("save", "load", store=store):
        durable = layout.values("save", peer, store, "durable")
        same = [r["same"] for r in layout.of("load", peer, store)]
        sheet.rows.append([
            peer,
            _middle(layout.values("save", peer, store, "returned")),
            _middle(durable),
            f"{layout.information / MB / durable.median:.0f}" if durable else "–",
            _text(layout.against("save", peer, "raw", store, "durable")),
            _middle(layout.values("save", peer, store, "bytes", MB), 1),
            _middle(layout.share_of_information("save", peer, store, "bytes"), 3),
            _middle(layout.values("load", peer, store, "load")),
            _text(layout.against("load", peer, "raw", store, "load")),
            _middle(layout.values("load", peer, store, "read", MB), 0) if store != "s3" else "–",
            _number(layout.peak("save", peer, store, MB)),
            _number(layout.peak("load", peer, store, MB)),
            "" if peer == "raw" or not same else "yes" if all(same) else "NO",
        ])  # fmt: skip
    sheet.rows.sort(key=_order)
    cached = [r["cached"] for r in layout.records if r["item"] == "load" and r["store"] == store]
    cached = [c for c in cached if c is not None and c == c]
    if cached and store == "disk":
        sheet.below.append(f"in the page cache before a load: {max(cached):.1%} at most")
    sheet.below += _meanwhile(layout, "save")
    sheet.below += [f"{n}: {PEERS[n].note}" for n in (row[0] for row in sheet.rows) if n in PEERS and PEERS[n].note]
    return sheet


def _asynchronous(layout: Layout, result: dict[str, Any]) -> Sheet:
    store = next(iter(layout.stores("stall") or layout.stores("async")))
    sheet = Sheet(
        f"{_head(layout, result)}: asynchronous saves, loops on {store}",
        ["", "call, s", "of DCP's", "lost a save, s", "of DCP's", "waits for the last, s", "until finished, s",
         "RSS, MB", "slope, MB a save"],
    )  # fmt: skip
    dcp_call, dcp_lost = layout.calls(DCP, store), layout.lost(DCP, store)
    for peer in layout.peers("stall", "async"):
        call, lost, slope = layout.calls(peer, store), layout.lost(peer, store), layout.slope(peer)
        sheet.rows.append([
            peer + ("" if PEERS[peer].has_async else " (sync)"),
            _text(call, 3),
            f"{call.median / dcp_call.median:.3f}" if call and dcp_call else "–",
            _text(lost, 3),
            f"{lost.median / dcp_lost.median:.2f}" if lost and dcp_lost and dcp_lost.median > 0 else "–",
            _middle(layout.calls(peer, store, "waits"), 3),
            _middle(layout.values("async", peer, None, "finished")),
            _number(layout.peak("async", peer, None, MB)),
            f"{slope / MB:+.3f}" if slope is not None else "–",
        ])  # fmt: skip
    sheet.rows.sort(key=_order)
    step = layout.values("stall", "no saves", store, "loop", result["options"]["steps"])
    noise = layout.noise(store)
    if step:
        sheet.below.append(f"a step without saves: {step.text(3)} s")
    if noise:
        sheet.below.append(
            f"neighbouring loops without saves differ by {noise.text(3)} s a save: what is below that is noise"
        )
    sheet.below += _meanwhile(layout, "stall", "memory")
    return sheet


def _order(row: list[str]) -> int:
    """Return the place of a row: raw first, then as in the registry."""
    names = ["raw", *PEERS]
    return names.index(row[0].removesuffix(" (sync)"))
