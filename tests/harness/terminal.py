"""The command line as a person sees it, on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.harness.environment import REPO

if TYPE_CHECKING:
    from pathlib import Path


def terminal(*arguments: str | Path) -> str:
    """Run the command on a terminal and return all that it wrote there."""
    mine, its = pty.openpty()
    line = [sys.executable, "-m", "ckpt", *map(str, arguments)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(line, stdin=its, stdout=its, stderr=its, cwd=REPO, env=environment) as process:
        os.close(its)
        written = b""
        while True:
            try:
                piece = os.read(mine, 65536)
            except OSError:  # Linux says so when the last writer is gone
                break
            if not piece:
                break
            written += piece
    os.close(mine)
    assert process.returncode == 0, written
    return written.decode()
