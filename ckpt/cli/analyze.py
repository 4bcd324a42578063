"""``ckpt analyze``: what is held and how often, what survives losses, what must be written. Of what is not running."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
import msgspec

from ckpt.analysis.report import analyze as report_of
from ckpt.cli import html, render_analysis
from ckpt.cli.failing import domains_of, lost_of, notes_of
from ckpt.cli.program import exits, print_json
from ckpt.cli.subject import Asked, preset_row
from ckpt.describe.parallel import ENGINES, STATE
from ckpt.describe.presets import PRESETS
from ckpt.errors import ConfigError
from ckpt.words import count

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt.analysis.report import AnalysisReport
    from ckpt.cli.subject import Subject

LAYOUT = (
    click.option("--engine", help=f"What cuts the optimizer: {', '.join(ENGINES)}."),
    click.option("--zero", type=int, help="ZeRO stage, 0 to 3; fsdp2 is 3."),
    click.option("--dp", type=int, help="Data-parallel degree."),
    click.option("--tp", type=int, help="Tensor-parallel degree."),
    click.option("--pp", type=int, help="Pipeline stages."),
    click.option("--ep", type=int, help="Expert-parallel degree, inside dp x cp."),
    click.option("--cp", type=int, help="Context- or sequence-parallel degree: more replicas of the weights."),
    click.option("--shard", type=int, help="Ranks that share one copy (HSDP); default: all data-parallel ones."),
    click.option("--order", help="Axes from the slowest to the fastest rank number; default: pp,dp,cp,tp."),
    click.option("--stages", metavar="N,N,…", help="Layers of each pipeline stage; default: equally many."),
    click.option("--hosts", type=int, help="Number of hosts."),
    click.option("--ranks-per-host", type=int, help="Ranks of one host; 8 is assumed."),
    click.option(
        "--dtype", help="Of the parameters; default: float32 where the optimizer steps them themselves, else bfloat16."
    ),
    click.option("--master/--no-master", default=None, help="Separate fp32 masters? Default: as the engine does it."),
    click.option("--optimizer", help=f"Whose state is kept: {', '.join(STATE)}."),
    click.option("--decay-groups", is_flag=True, default=None, help="Two parameter groups: matrices, and the rest."),
    click.option("--vocabulary-multiple", type=int, help="Megatron's make-vocab-size-divisible-by (default: 128)."),
    click.option(
        "--autotp", is_flag=True, default=None, help="Tensor parallelism is DeepSpeed's AutoTP: nothing padded."
    ),
    click.option("--world", type=int, help="Number of ranks, to be checked."),
)


def with_layout(body: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``body`` all options of :data:`LAYOUT`."""
    for decorate in reversed(LAYOUT):
        body = decorate(body)
    return body


@click.command()
@click.argument("root", required=False)
@click.option("--step", type=click.IntRange(min=0), help="Of ROOT; default: the newest committed step.")
@click.option("--model", metavar="FILE", help="A Hugging Face config.json, or a YAML file of shapes (docs/shapes.md).")
@click.option("--preset", metavar="NAME", help="A published layout; the options below replace parts of it.")
@click.option("--list-presets", is_flag=True, help="List the published layouts.")
@with_layout
@click.option("--domains", metavar="rank|host|FILE", help="What fails at once; default: hosts where they are known.")
@click.option("--lose", metavar="NAMES", help="Look at this loss: host:3,host:7, rank:0-3, …")
@click.option("--k", type=int, default=1, show_default=True, help="Losses at once that must be survived.")
@click.option("--html", "page", metavar="FILE", help="Write a page with a heat map; one file, needs no network.")
@exits
def analyze(
    as_json: bool,
    list_presets: bool,
    root: str | None,
    step: int | None,
    model: str | None,
    preset: str | None,
    domains: str | None,
    lose: str | None,
    k: int,
    page: str | None,
    **layout: Any,
) -> int:
    """Say what is held and how often, what survives when ranks or hosts are lost, and what must be written therefore.

    Of the checkpoint in ROOT, or of a layout that need not run anywhere: --model or --preset with degrees.
    """
    given = {name: value for name, value in layout.items() if value is not None}
    if list_presets:
        _only_presets(given, root, step, model, preset, domains, lose, page)
        rows = [preset_row(name) for name in PRESETS]
        print_json({"presets": rows}) if as_json else render_analysis.print_presets(rows)
        return 0
    asked, problems = Asked(root, step, model, preset, given), []
    if "stages" in given:
        try:
            given["stages"] = tuple(int(number) for number in given["stages"].split(","))
        except ValueError:
            problems.append(f"--stages {given['stages']!r}: expected numbers of layers, like 10,12,10")
    if k < 1:
        problems.append(f"--k {k}: expected at least 1")
    problems += asked.problems()
    if problems:
        raise ConfigError("\n  - ".join([f"ckpt analyze: {count(len(problems), 'problem')}", *problems]))

    subject = asked.subject()
    failing = domains_of(subject, domains)
    if k > len(failing.names):
        raise ConfigError(f"--k {k}: expected at most {count(len(failing.names), failing.kind)}, the job has no more")
    subject = replace(subject, notes=notes_of(subject, failing, lose))
    report = report_of(
        subject.holdings,
        failing,
        lost=lost_of(subject, failing, lose),
        k=k,
        pieces=None if lose is None else subject.pieces(),
        redundancy=subject.redundancy,
    )
    if page is not None:
        html.write(page, subject, report)
    if as_json:
        print_json(document(subject, report))
    else:
        render_analysis.print_report(subject, report)
    if page is not None:
        click.echo(f"the page is in {page}", file=sys.stderr)
    return 0


def _only_presets(*others: object) -> None:
    if any(others):
        raise ConfigError("--list-presets: expected no other option but --json")


def document(subject: Subject, report: AnalysisReport) -> dict[str, Any]:
    """Return everything that the command says, as plain data. ``report`` is that of ``ckpt.analyze``."""
    paper = subject.paper
    return {
        "source": {
            "kind": subject.kind,
            "name": subject.name,
            "layout": subject.layout,
            "notes": list(subject.notes),
        },
        "paper": None if paper is None else msgspec.to_builtins(paper),
        "report": msgspec.to_builtins(report),
    }
