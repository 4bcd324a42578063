"""One self-contained page of an analysis: summary, heat map of ranks by layers, survival, what is lost.

Everything that varies is escaped twice over: text by ``html.escape``, data as JSON in which ``<`` cannot occur, and a
content security policy lets nothing run but the one script whose digest it names, nor anything be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt.analysis.heat import layer_of
from ckpt.cli import html_parts as parts
from ckpt.cli.render import visible
from ckpt.cli.words import ranks_in
from ckpt.errors import ConfigError

if TYPE_CHECKING:
    from ckpt.analysis.heat import HeatMap
    from ckpt.analysis.losing import Loss
    from ckpt.analysis.report import AnalysisReport
    from ckpt.cli.subject import Subject


LOSS_HINT = " Ranks of a row that is struck through are lost. A bar above a layer: some of it cannot be rebuilt."
"""Behind what a row and a column are, if there is a named loss."""


def write(path: str, subject: Subject, report: AnalysisReport) -> None:
    """Write the page to a file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        Path(path).write_text(page(subject, report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path!r}: cannot be written: {error.strerror or error}") from error


def page(subject: Subject, report: AnalysisReport) -> str:
    """Return the page."""
    folder = files("ckpt.cli") / "page"
    template, style, script = (
        (folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")
    )
    grouped = any(column.count > 1 for column in report.heat.columns)
    domain = report.domain_kind
    filled = {
        "policy": f"default-src 'none'; style-src '{digest(style)}'; script-src '{digest(script)}'; base-uri 'none'",
        "style": style,
        "script": script,
        "name": parts.text(subject.name),
        "layout": parts.text(subject.layout),
        "notes": "".join(f"<p>{parts.text(note)}</p>" for note in subject.notes),
        "facts": parts.facts(report),
        "loss_hint": "" if report.loss is None else LOSS_HINT,
        "rows_hint": ", or several that hold alike or are neighbours" if grouped else "",
        "count_domains": ""
        if domain == "rank"
        else f'<option value="domains">{parts.text(domain)}s that hold it</option>',
        "sections": parts.sections(subject, report),
        "data": data(report),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: filled[found[1]], template)


def data(report: AnalysisReport) -> str:
    """Return what the script reads: JSON that cannot end the element that it stands in."""
    plain = {
        "domain": report.domain_kind,
        "k": report.k,
        "heat": msgspec.to_builtins(report.heat),
        "loss": None if report.loss is None else _lost(report.loss, report.heat),
    }
    document = json.dumps(_visible(plain), separators=(",", ":"))  # ASCII
    return document.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _lost(loss: Loss, heat: HeatMap) -> dict[str, list[int]]:
    """Return how many ranks of each row are lost, and how many bytes of each layer cannot be rebuilt."""
    lost = set(ranks_in(loss.ranks))
    gone = Counter[str]()
    for one in loss.tensors:
        gone[layer_of(one.fqn)] += one.bytes
    return {
        "ranks": [len(lost.intersection(ranks_in(row.ranks))) for row in heat.columns],
        "bytes": [gone[layer] for layer in heat.layers],
    }


def digest(text: str) -> str:
    """Return the source expression that allows an inline script or style (CSP level 2)."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _visible(plain: Any) -> Any:
    if isinstance(plain, str):
        return visible(plain)
    if isinstance(plain, dict):
        return {key: _visible(value) for key, value in plain.items()}
    return [_visible(value) for value in plain] if isinstance(plain, list | tuple) else plain
