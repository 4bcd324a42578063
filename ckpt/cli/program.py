"""What all commands share: safe output, exactly one JSON document, errors mapped to exit codes."""

from __future__ import annotations

import functools
import io
import itertools
import json
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ckpt.cli.render import visible
from ckpt.cli.start import INTERRUPTED, print_interrupted
from ckpt.cli.streams import Output
from ckpt.errors import CkptError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


RESUMABLE = ("reshard", "import", "export", "cp", "compact")
"""Commands that go on where they were interrupted."""


class Safe(click.Command):
    """A command whose output is safe on any terminal and, if asked for, JSON even for wrong usage."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> NoReturn:
        """Run and exit; see :meth:`click.Command.main`."""
        arguments = list(sys.argv[1:] if args is None else args)
        output = Output() if args is None else None
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a name may hold what the terminal's encoding does not have
                stream.reconfigure(errors="backslashreplace")
        try:
            code = super().main(arguments, *rest, **{**options, "standalone_mode": False, "obj": args is None})
        except SystemExit as leaving:
            code = leaving.code
        except click.ClickException as error:
            code = error.exit_code
            if _wants_json(arguments):
                print_error(ConfigError.__name__, error.format_message(), code)
            error.show()
        except click.Abort:  # click's words for Ctrl-C
            print_interrupted(as_json=_wants_json(arguments))
            code = INTERRUPTED
        trouble = output.trouble() if output is not None else None
        if trouble is not None:
            click.echo(f"standard output: {trouble}", err=True)
            code = code or CkptError.exit_code
        sys.exit(code)


def _wants_json(arguments: Sequence[str]) -> bool:
    return "--json" in itertools.takewhile(lambda argument: argument != "--", arguments)


class Program(Safe, click.Group):
    """The group of all commands."""


def own_process() -> bool:
    """Is all of this process the command that runs, as it is not where somebody calls one with arguments of his own?"""
    context = click.get_current_context(silent=True)
    return context is not None and context.obj is True


def exits(body: Callable[..., int]) -> Callable[..., NoReturn]:
    """Give ``body``, whose result is an exit code, the option ``--json`` and map its errors to exit codes."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
    @functools.wraps(body)
    def run(as_json: bool, **options: Any) -> NoReturn:
        try:
            code = body(as_json=as_json, **options)
        except BaseException as error:
            if _is_interrupt(error):
                code = INTERRUPTED
                print_interrupted(as_json=as_json, goes_on=click.get_current_context().command.name in RESUMABLE)
            elif isinstance(error, CkptError):
                code = error.exit_code
                if as_json:
                    print_error(type(error).__name__, str(error), code)
                click.echo(f"{type(error).__name__}: {lines(str(error))}", err=True)
            else:
                raise
        sys.exit(code)

    return run


def _is_interrupt(error: BaseException | None) -> bool:
    """Did Ctrl-C end the command, whatever it met then while it put things in order?"""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def lines(text: str) -> str:
    r"""Return an error's text with its list of problems on lines of their own, and nothing else that moves a cursor.

    >>> print(lines("two problems\n  - a\n  - b\x1b"))
    two problems
      - a
      - b\x1b
    """
    return "\n  - ".join(map(visible, text.split("\n  - ")))


def print_json(document: Any) -> None:
    """Print one JSON document to standard output, in ASCII: no name can fail to print, or reach the terminal raw."""
    click.echo(json.dumps(document, indent=2))


def print_error(kind: str, message: str, code: int) -> None:
    """Print the JSON document of a command that failed."""
    print_json({"error": {"type": kind, "message": message, "exit_code": code}})
