"""The command line: ``ckpt ls|show|verify|analyze|cp|gc|diff|import|export|reshard``. Needs no GPU, no other rank.

Exit codes are those of :mod:`ckpt.errors`; docs/cli.md lists them. With ``--json`` standard output carries exactly one
JSON document, for errors too.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import click

from ckpt.cli import render
from ckpt.cli.analyze import analyze
from ckpt.cli.copy import cp
from ckpt.cli.diff import diff
from ckpt.cli.gc import gc
from ckpt.cli.program import Program, exits, print_json
from ckpt.cli.reshard import export, import_, reshard
from ckpt.errors import CkptError, IntegrityError, NoSuchCheckpoint
from ckpt.repo.repository import MARKER, Repository
from ckpt.repo.verify import verify as check
from ckpt.store.open import open_store

if TYPE_CHECKING:
    from collections.abc import Callable


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ckpt")
def cli() -> None:
    """Look into checkpoint repositories (ROOT is a path or URL), copy, clean and convert them, and analyze layouts."""


cli.add_command(analyze)
cli.add_command(cp)
cli.add_command(gc)
cli.add_command(diff)
cli.add_command(import_)
cli.add_command(export)
cli.add_command(reshard)


def command(body: Callable[..., int]) -> Callable[..., None]:
    """Give ``body`` the repository that is its argument ROOT."""

    @cli.command(name=body.__name__.removesuffix("_"), help=body.__doc__)
    @click.argument("root")
    @exits
    @functools.wraps(body)
    def run(root: str, as_json: bool, **options: Any) -> int:
        return body(Repository(open_store(root)), as_json, **options)

    return run


step_option = click.option("--step", type=click.IntRange(min=0), help="Default: the newest committed step.")


@command
def ls(repository: Repository, as_json: bool) -> int:
    """List the checkpoints in ROOT, oldest first."""
    repository.check_marker()
    started, rows, code = repository.started(), [], 0
    if not started and repository.store.size(MARKER) is None:
        raise NoSuchCheckpoint(f"no repository in {repository.store.url}")
    committed = repository.steps()
    for step in committed:
        try:
            rows.append(render.commit_row(repository.read_commit(step)))
        except CkptError as error:  # one bad commit must not hide the good ones
            rows.append({"step": step, "error": f"{type(error).__name__}: {error}"})
            code = error.exit_code
    unfinished = sorted(set(started) - set(committed))
    if as_json:
        print_json({"root": repository.store.url, "checkpoints": rows, "uncommitted": unfinished})
    else:
        render.print_list(rows, unfinished)
    return code


@command
@step_option
def show(repository: Repository, as_json: bool, step: int | None) -> int:
    """Show what one checkpoint holds: tensors, objects, and how they are stored."""
    document = render.describe(repository.read_index(repository.pick(step)))
    if as_json:
        print_json(document)
    else:
        render.print_checkpoint(document)
    return 0


@command
@step_option
def verify(repository: Repository, as_json: bool, step: int | None) -> int:
    """Check every stored byte of one step, or of all steps and what lies beside them.

    Damage is what a checkpoint promises and the repository does not have; the exit code is then 3. Garbage is what no
    checkpoint needs, such as the leftovers of a killed save: it is listed, and no error.
    """
    result = check(repository, step)
    if as_json:
        print_json(render.verification(result))
    else:
        render.print_verification(result)
    return IntegrityError.exit_code if result.damaged else 0


def main() -> None:
    """Run the command line (the ``ckpt`` script and ``python -m ckpt``)."""
    cli(prog_name="ckpt")
