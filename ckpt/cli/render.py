"""From what a repository holds to plain documents, and from those to tables that are never cut."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ckpt.format.manifest import DERIVED, plain
from ckpt.format.tally import tally
from ckpt.repo.findings import DAMAGE, GARBAGE
from ckpt.repo.log_reach import bytes_of
from ckpt.repo.repository import attempt_prefix
from ckpt.words import count, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckpt.format.manifest import CommitBody
    from ckpt.repo.log_reach import Reach
    from ckpt.repo.repository import Index
    from ckpt.repo.verify import Verification
    from ckpt.store.base import Store

PIPE_WIDTH = 100_000
"""Columns when nobody looks on: a pipe has no width, and a cut name is a wrong name."""


class _Pipe(Console):
    """A console that nobody looks at: no line ends in the blanks that fill up a table's last column."""

    def print(self, *objects: Any, **options: Any) -> None:
        with self.capture() as captured:
            super().print(*objects, **options)
        self.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def console() -> Console:
    """Return a console on the standard output of this moment."""
    return Console(highlight=False) if sys.stdout.isatty() else _Pipe(highlight=False, width=PIPE_WIDTH)


def commit_row(body: CommitBody, reach: Reach | None = None) -> dict[str, Any]:
    """Return what ``ls`` says of one checkpoint. ``reach``: how far the logs behind it go."""
    return {
        "step": body.step,
        "attempt": body.attempt,
        "created": body.created,
        "engine": body.engine,
        "world": body.world,
        "log": body.log or None,  # 0: of a checkpointer that keeps none
        "leads_to": None if reach is None else reach.step,
        **body.totals,
    }


def log_of(store: Store, reach: Reach | None, trouble: Exception | None) -> dict[str, Any] | None:
    """Return what ``show`` says of the gradient logs behind a checkpoint; None if there are none."""
    if trouble is not None:
        return {"error": str(trouble)}
    if reach is None:
        return None
    numbers = [span.number for span in reach.spans]
    return {"leads_to": reach.step, "logs": numbers, "nbytes": bytes_of(store, reach)}


def describe(index: Index) -> dict[str, Any]:
    """Return everything that ``show`` says of one checkpoint."""
    own = attempt_prefix(index.commit.step, index.commit.attempt) + "/"
    stored: dict[int, Counter[str]] = defaultdict(Counter)
    sources: dict[int, set[int]] = defaultdict(set)
    objects = []
    for part in index.parts:
        for chunk in part.chunks:
            if chunk.pack == DERIVED:
                stored[chunk.spec]["derived"] += chunk.nbytes
                continue
            key = part.packs[chunk.pack].key
            kind = "written" if key.startswith(own) else "reused"
            stored[chunk.spec][kind] += chunk.nbytes
            if kind == "reused":
                sources[chunk.spec].add(int(key.split("/")[1]))
        for entry in part.objects:
            blobs = [entry.document, *(blob for tensor in entry.tensors for blob in tensor.blobs)]
            nbytes = sum(blob.nbytes for blob in blobs)
            objects.append({"name": entry.name, "kind": entry.kind, "ranks": list(entry.ranks), "nbytes": nbytes})
    tensors = [
        {
            "fqn": spec.fqn,
            "role": spec.role,
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "nbytes": spec.nbytes,
            "stored": {kind: stored[number][kind] for kind in ("written", "reused", "derived")},
            "reused_from": sorted(sources[number]),
        }
        for number, spec in enumerate(index.specs)
    ]
    return {
        "commit": plain(index.commit),
        "aliases": dict(index.root.aliases),
        "tensors": tensors,
        "objects": sorted(objects, key=lambda o: (o["name"], o["ranks"])),
        "divergences": plain(index.root.divergences),
        "codecs": plain(tally(index.parts, index.specs, index.commit.codecs)),
    }


def visible(text: str) -> str:
    r"""Return ``text`` on one line, without what a terminal acts upon or cannot show: names are of anybody's making.

    >>> print(visible("a\nb\x1b[31m\x9bü × \u202e\udcff"))
    a\nb\x1b[31m\x9bü × \u202e\udcff
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(text: str, style: str = "") -> Text:
    """Return text as a piece of a table or a line, never as markup."""
    return Text(visible(text), style)


def print_list(rows: Sequence[dict[str, Any]], unfinished: Sequence[int], log_error: str | None = None) -> None:
    """Print the table of ``ls``."""
    logged = any(row.get("leads_to") is not None for row in rows)
    heads = ["step", "created", "engine", "ranks", "unique", "written", "reused", *["log"] * logged, "note"]
    table = new_table(heads, right=("step", "ranks", "unique", "written", "reused"))
    for row in rows:
        if "error" in row:
            table.add_row(shown(str(row["step"])), *[""] * (len(heads) - 2), shown(row["error"], "red"))
            continue
        leads_to = row["leads_to"]
        log = "" if leads_to is None else f"to step {leads_to}" if leads_to > row["step"] else "empty"
        sizes = (size(row.get(name, 0)) for name in ("bytes_unique", "bytes_written", "bytes_reused"))
        diverging = row.get("divergences", 0)
        note = shown(count(diverging, "diverging replica"), "yellow") if diverging else Text()
        head = (str(row["step"]), row["created"], row["engine"], str(row["world"]))
        table.add_row(*map(shown, (*head, *sizes, *[log] * logged)), note)
    out = console()
    out.print(table if rows else "no committed checkpoint")
    if log_error:
        out.print(shown(f"gradient logs: {log_error}", "red"))
    if unfinished:
        steps = ", ".join(map(str, unfinished))
        out.print(f"files of step {steps}, which are no checkpoints: begun and not committed, or removed but needed")


def print_checkpoint(document: dict[str, Any]) -> None:
    """Print the tables of ``show``."""
    out, commit = console(), document["commit"]
    software = ", ".join(f"{name} {version}" for name, version in sorted(commit["software"].items()))
    out.print(shown(f"step {commit['step']}, attempt {commit['attempt']}, saved {commit['created']}"))
    out.print(shown(f"by {count(commit['world'], 'rank')} of {commit['engine']} ({software})"))
    out.print(shown(", ".join(f"{name.replace('_', ' ')} {amount(name, n)}" for name, n in commit["totals"].items())))

    log = document.get("log")
    if log is not None and "error" in log:
        out.print(shown(f"gradient logs: {log['error']}", "red"))
    elif log is not None:
        leads = f"leads on to step {log['leads_to']}" if log["leads_to"] > commit["step"] else "has no record behind it"
        out.print(shown(f"gradient log {', '.join(map(str, log['logs']))} ({size(log['nbytes'])}) {leads}"))

    table = new_table(("tensor", "role", "dtype", "shape", "size", "stored"), right=("size",))
    for tensor in document["tensors"]:
        shape = "×".join(map(str, tensor["shape"])) or "scalar"
        cells = (tensor["fqn"], tensor["role"], tensor["dtype"], shape, size(tensor["nbytes"]), how_stored(tensor))
        table.add_row(*map(shown, cells))
    out.print(table)

    if document["commit"].get("codecs") or any(one["codec"] != "none" for one in document["codecs"].values()):
        table = new_table(("role", "codec", "size", "in packs", "ratio", "why"), right=("size", "in packs", "ratio"))
        for role, one in document["codecs"].items():
            cells = (role, one["codec"], size(one["raw"]), size(one["stored"]), f"{one['ratio']:.2f}", one["why"])
            table.add_row(*map(shown, cells))
        out.print(table)
    if document["aliases"]:
        table = new_table(("tied name", "is stored as"))
        for alias, name in document["aliases"].items():
            table.add_row(shown(alias), shown(name))
        out.print(table)
    if document["objects"]:
        table = new_table(("object", "kind", "size", "equal on ranks"), right=("size",))
        for entry in document["objects"]:
            table.add_row(*map(shown, (entry["name"], entry["kind"], size(entry["nbytes"]), spans(entry["ranks"]))))
        out.print(table)
    for divergence in document["divergences"]:
        sides = "; ".join(f"{digest} on {plural(ranks)}" for digest, ranks in divergence["copies"].items())
        where = f"{divergence['fqn']} ({divergence['role']}) at {divergence['offsets']}+{divergence['sizes']}"
        where += _exactly(divergence)
        out.print(shown(f"replicas differ: {where}: {sides}; kept {divergence['kept']}", "yellow"))


def _exactly(divergence: dict[str, Any]) -> str:
    """Return which elements differ, where the save looked so closely."""
    found = divergence["differing"]
    if found is None:
        return ""
    by = "" if found["max_abs"] is None else f", by at most {found['max_abs']:.6g}"
    return f", {count(found['elements'], 'element')} in {found['offsets']}+{found['sizes']}{by}"


def verification(result: Verification) -> dict[str, Any]:
    """Return everything that ``verify`` found, as a plain document."""
    return {"damaged": result.damaged, **asdict(result)}


def print_verification(result: Verification) -> None:
    """Print the findings of ``verify``, damage first, and what was checked."""
    out = console()
    for title, severity, style in (("damage", DAMAGE, "red"), ("garbage", GARBAGE, "yellow")):
        found = [finding for finding in result.findings if finding.severity == severity]
        if not found:
            continue
        table = new_table((title, "file", "what"))
        for finding in found:
            where = "" if finding.step is None else f"step {finding.step}"
            table.add_row(shown(where, style), shown(finding.key), shown(finding.message))
        out.print(table)
    checked = (
        f"checked step {', '.join(map(str, result.steps))}" if result.steps else "no committed checkpoint to check"
    )
    out.print(
        f"{checked}: {count(result.tensors, 'tensor')}, {count(result.chunks, 'chunk')}, {size(result.bytes_read)} read"
    )
    if result.logs:
        logs = f"{count(len(result.logs), 'gradient log')}: {count(result.records, 'record')}"
        out.print(f"{logs}, {size(result.log_bytes)} read")
    if result.garbage_bytes:
        out.print(f"{size(result.garbage_bytes)} of garbage")
    out.print(shown("DAMAGED", "bold red") if result.damaged else shown("no damage", "green"))


def new_table(heads: Sequence[str], right: Sequence[str] = ()) -> Table:
    """Return a table whose cells wrap on a narrow terminal, and are never cut."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head, justify="right" if head in right else "left", overflow="fold")
    return table


def how_stored(tensor: dict[str, Any]) -> str:
    """Say where a tensor's bytes are."""
    kinds = [kind for kind, nbytes in tensor["stored"].items() if nbytes]
    words = {
        "written": "here",
        "reused": f"in step {', '.join(map(str, tensor['reused_from']))}",
        "derived": "as cast(master)",
    }
    return " and ".join(words[kind] for kind in kinds) or "empty"


def amount(name: str, number: int) -> str:
    """Return a total with its unit."""
    return size(number) if name.startswith("bytes") else f"{number:,}"


def spans(ranks: Iterable[int]) -> str:
    """Return ranks as runs.

    >>> spans([0, 1, 2, 3, 7, 9, 10])
    '0-3, 7, 9-10'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def plural(ranks: Sequence[int]) -> str:
    """Return ranks as runs, behind the word.

    >>> plural([3]), plural([0, 1])
    ('rank 3', 'ranks 0-1')
    """
    return f"rank{'s' * (len(ranks) != 1)} {spans(ranks)}"
