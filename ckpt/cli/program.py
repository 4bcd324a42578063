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
from ckpt.errors import CkptError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Safe(click.Command):
    """A command whose output is safe on any terminal and, if asked for, JSON even for wrong usage."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> NoReturn:
        """Run and exit; see :meth:`click.Command.main`."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a name may hold what the terminal's encoding does not have
                stream.reconfigure(errors="backslashreplace")
        arguments = list(sys.argv[1:] if args is None else args)
        try:
            code = super().main(arguments, *rest, **{**options, "standalone_mode": False, "obj": args is None})
        except click.ClickException as error:
            code = error.exit_code
            if "--json" in itertools.takewhile(lambda argument: argument != "--", arguments):
                print_error(ConfigError.__name__, error.format_message(), code)
            error.show()
        except click.Abort:
            code = 1
        sys.exit(code)


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
        except CkptError as error:
            code = error.exit_code
            if as_json:
                print_error(type(error).__name__, str(error), code)
            click.echo(f"{type(error).__name__}: {lines(str(error))}", err=True)
        sys.exit(code)

    return run


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
