"""Where the scripts begin: importing the commands takes its time, and Ctrl-C may come while that goes on."""

from __future__ import annotations

import importlib
import json
import sys
from typing import NoReturn

INTERRUPTED = 130
"""Exit code after Ctrl-C (SIGINT), as shells have it."""


def ckpt() -> NoReturn:
    """Run ``ckpt``."""
    _run("ckpt.cli.main")


def ckpt_reshard() -> NoReturn:
    """Run ``ckpt-reshard``."""
    _run("ckpt.cli.reshard")


def _run(module: str) -> NoReturn:
    try:
        importlib.import_module(module).main()
    except KeyboardInterrupt:  # the commands themselves catch it: nothing has begun yet
        print_interrupted(as_json="--json" in sys.argv)
    sys.exit(INTERRUPTED)


def print_interrupted(*, as_json: bool, goes_on: bool = False) -> None:
    """Say that the user has interrupted a command; ``goes_on``: one that does not begin anew the next time."""
    words = "interrupted" + ("; the same command goes on where this one stopped" if goes_on else "")
    if as_json and sys.stdout is not None:
        error = {"type": "KeyboardInterrupt", "message": words, "exit_code": INTERRUPTED}
        sys.stdout.write(json.dumps({"error": error}, indent=2) + "\n")
    if sys.stderr is not None:
        sys.stderr.write(words + "\n")
