"""The command line: ``ckpt ls|show|log|verify|compact|analyze|cp|gc|diff|import|export|reshard``.

Needs no GPU, and no other rank. Exit codes are those of :mod:`ckpt.errors`; docs/cli.md lists them. With ``--json``
standard output carries exactly one JSON document, for errors too.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import click

from ckpt.cli import render
from ckpt.cli.analyze import analyze
from ckpt.cli.compact import compact
from ckpt.cli.copy import cp
from ckpt.cli.diff import diff
from ckpt.cli.gc import gc
from ckpt.cli.log import log
from ckpt.cli.program import Program, exits, print_json
from ckpt.cli.reshard import export, import_, reshard
from ckpt.errors import CkptError, IntegrityError, NoSuchCheckpoint, is_damage
from ckpt.repo.log_reach import reaches
from ckpt.repo.repository import MARKER, Repository
from ckpt.repo.verify import verify as check
from ckpt.store.open import open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt.repo.log_reach import Reach
    from ckpt.store.base import Store


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ckpt")
def cli() -> None:
    """Look into checkpoint repositories (ROOT is a path or URL), copy, clean and convert them, and analyze layouts."""


cli.add_command(analyze)
cli.add_command(cp)
cli.add_command(compact)
cli.add_command(gc)
cli.add_command(log)
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
    """List the checkpoints in ROOT, oldest first, and how far the gradient logs behind them go."""
    repository.check_marker()
    started, rows, code = repository.started(), [], 0
    if not started and repository.store.size(MARKER) is None:
        raise NoSuchCheckpoint(f"no repository in {repository.store.url}")
    committed = repository.steps()
    found, trouble = reach_of(repository.store)
    for step in committed:
        try:
            rows.append(render.commit_row(repository.read_commit(step), found.get(step)))
        except CkptError as error:  # one bad commit must not hide the good ones
            rows.append({"step": step, "error": f"{type(error).__name__}: {error}"})
            code = error.exit_code
    unfinished = sorted(set(started) - set(committed))
    if as_json:
        said = None if trouble is None else str(trouble)
        document = {"root": repository.store.url, "checkpoints": rows, "uncommitted": unfinished}
        print_json({**document, "log_error": said})
    else:
        render.print_list(rows, unfinished, None if trouble is None else f"{type(trouble).__name__}: {trouble}")
    return code if trouble is None else trouble.exit_code


def reach_of(store: Store) -> tuple[dict[int, Reach], CkptError | None]:
    """Return how far each checkpoint leads, or what keeps anybody from knowing: that must not hide the checkpoints."""
    try:
        return reaches(store), None
    except CkptError as error:
        if not is_damage(error):
            raise
        return {}, error


@command
@step_option
def show(repository: Repository, as_json: bool, step: int | None) -> int:
    """Show what one checkpoint holds: tensors, objects, and how they are stored; and how far its gradient log goes."""
    index = repository.read_index(repository.pick(step))
    found, trouble = reach_of(repository.store)
    log = render.log_of(repository.store, found.get(index.commit.step), trouble)
    document = {**render.describe(index), "log": log}
    if as_json:
        print_json(document)
    else:
        render.print_checkpoint(document)
    return 0


@command
@step_option
def verify(repository: Repository, as_json: bool, step: int | None) -> int:
    """Check every stored byte of one step, or of all steps, the gradient logs behind them, and what lies beside.

    Damage is what a checkpoint or a log promises and the repository does not have; the exit code is then 3. Garbage is
    what nothing needs, such as the leftovers of a killed save: it is listed, and no error.
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
