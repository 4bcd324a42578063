"""Compile DeepSpeed's CPU optimizers once, before ranks are forked: ``python -m tests.harness.jit_ops [fused_adam …]``.

Two traps are closed here. Ranks that start the same build together would compile it several times over. And a build
that was killed leaves torch's ``lock`` file behind, on which every later start waits for ever: whoever holds *our* lock
(a real ``flock``, which dies with its process) knows that no build is running, so such a file is stale and is removed.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.harness.environment import EXTENSIONS, REPO, rank_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

OPS = {"fused_adam": "FusedAdamBuilder", "cpu_adam": "CPUAdamBuilder"}
"""Operator -> DeepSpeed's builder of it. They are behind FusedAdam and DeepSpeedCPUAdam."""

BUILD_TIMEOUT = 900.0
"""Seconds for one operator; about 50 s each on two idle cores were measured."""


def build(*ops: str) -> None:
    """Make sure that ``ops`` are compiled. Returns at once if they are; safe to call from any number of processes.

    Raises:
        RuntimeError: a build failed; the message carries the compiler's output.
    """
    stamps = {op: EXTENSIONS / f".{op}.built" for op in ops}
    if all(stamp.exists() for stamp in stamps.values()):
        return
    with _no_build_running():
        for op, stamp in stamps.items():
            if not stamp.exists():  # another process may have built it while we waited
                _build_in_child(op)
                stamp.touch()


def load(op: str) -> None:
    """Load a compiled operator into this process, which children forked from it then share."""
    from deepspeed.accelerator import get_accelerator

    with _no_build_running():
        get_accelerator().create_op_builder(OPS[op]).load(verbose=False)


@contextmanager
def _no_build_running() -> Iterator[None]:
    EXTENSIONS.mkdir(parents=True, exist_ok=True)
    with (EXTENSIONS / ".ckpt-build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for stale in EXTENSIONS.glob("*/lock"):
            stale.unlink()
        yield


def _build_in_child(op: str) -> None:
    # A process of its own: the caller must stay free of torch, threads and whatever the loader leaves behind.
    done = subprocess.run(
        [sys.executable, "-m", "tests.harness.jit_ops", "--in-child", op],
        cwd=REPO,
        env={**os.environ, **rank_environment(), "MAX_JOBS": "2"},
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"building {op} failed with exit code {done.returncode}\n{done.stdout}\n{done.stderr}")


def _main(arguments: list[str]) -> None:
    if arguments[:1] == ["--in-child"]:  # the parent holds the lock
        from deepspeed.accelerator import get_accelerator

        get_accelerator().create_op_builder(OPS[arguments[1]]).load(verbose=False)
    else:
        build(*(arguments or OPS))


if __name__ == "__main__":
    _main(sys.argv[1:])
