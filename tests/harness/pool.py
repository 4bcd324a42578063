"""Multi-rank tests in milliseconds: ``ranks(4, "tests.e2e.adapter_cases:round_trip", stage=2).values()``.

The first call starts the fork server (about 5 s); it lives as long as the test session. This module imports neither
torch nor deepspeed. A case is a function ``f(rank, world, **kwargs)`` in an importable module; ``kwargs`` and result
are JSON. Every rank has a gloo process group, its own log, and a hard time limit: a rank that exceeds it writes the
stacks of all its threads, is killed, and the test fails with those stacks.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.harness import jit_ops
from tests.harness.environment import REPO, rank_environment

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

START_SECONDS = 180.0
LOG_TAIL = 8000


class RanksFailed(AssertionError):
    """At least one rank did not end the way that the test asked for."""


class RanksTimedOut(RanksFailed):
    """At least one rank was still running at the time limit; the message carries the stacks of its threads."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended. Exactly one of ``ok``, ``error_type`` and ``signal`` is set."""

    rank: int
    ok: bool = False
    value: Any = None
    error_type: str | None = None
    message: str = ""
    traceback: str = ""
    signal: str | None = None
    """``"SIGKILL"`` …, for a rank that a signal ended."""
    log: str = ""
    """The last :data:`LOG_TAIL` characters of what the rank printed."""

    def __str__(self) -> str:
        if self.ok:
            return f"rank {self.rank}: {self.value!r}"
        if self.signal:
            return f"rank {self.rank}: killed by {self.signal}\n{self.log}"
        return f"rank {self.rank}: {self.traceback or self.message}\n{self.log}"


class Outcomes(list[Outcome]):
    """One :class:`Outcome` a rank, in rank order."""

    def values(self) -> list[Any]:
        """Return the ranks' results.

        Raises:
            RanksFailed: some rank failed or was killed; the message holds every such rank's traceback and log.
        """
        self._complain([o for o in self if not o.ok])
        return [o.value for o in self]

    def errors(self) -> list[str | None]:
        """Return each rank's exception type name (None where it returned)."""
        return [o.error_type for o in self]

    def _complain(self, bad: Iterable[Outcome]) -> None:
        texts = [str(o) for o in bad]
        if texts:
            raise RanksFailed("\n".join(texts))


class Pool:
    """The client side of one fork server."""

    def __init__(self) -> None:
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the server
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.server"],
            cwd=REPO,
            env={**os.environ, **rank_environment()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            bufsize=1,
        )
        threads = self._answer(START_SECONDS)["threads"]
        if threads != 1:
            self.close()
            raise RuntimeError(f"the fork server has {threads} threads after its imports; forking it would be unsafe")

    def run(
        self,
        world: int,
        target: str,
        kwargs: Mapping[str, Any],
        *,
        timeout: float,
        expect_killed: Iterable[int] = (),
        env: Mapping[str, str] | None = None,
        ops: tuple[str, ...] = (),
        preload: tuple[str, ...] = (),
    ) -> Outcomes:
        """See :func:`ranks`."""
        jit_ops.build(*ops)
        folder = Path(tempfile.mkdtemp(prefix="ckpt-ranks-"))
        request = {"world": world, "target": target, "kwargs": kwargs, "timeout": timeout, "ops": ops, "env": env or {}}
        request |= {"preload": preload}
        try:
            assert self._server.stdin is not None
            self._server.stdin.write(json.dumps({**request, "folder": str(folder)}) + "\n")
            answer = self._answer(timeout + 120.0)
            outcomes = Outcomes(_outcome(folder, r, code) for r, code in enumerate(answer["codes"]))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if answer["late"]:
            shown = "\n".join(f"rank {r}, still running:\n{outcomes[r].log}" for r in answer["late"])
            ended = "\n".join(str(o) for o in outcomes if o.rank not in answer["late"] and not o.ok)
            raise RanksTimedOut(f"{target}: ranks {answer['late']} not done after {timeout} s\n{shown}\n{ended}")
        wanted = set(expect_killed)
        if wanted != {o.rank for o in outcomes if o.signal}:
            details = "\n".join(map(str, outcomes))
            raise RanksFailed(f"{target}: expected exactly ranks {sorted(wanted)} to be killed\n{details}")
        return outcomes

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._server.stdout is not None
        readable, _, _ = select.select([self._server.stdout], [], [], seconds)
        line = self._server.stdout.readline() if readable else ""
        if not line:
            self.close()
            self._stderr.seek(0)
            raise RuntimeError(f"the fork server gave no answer within {seconds} s\n{self._stderr.read()[-LOG_TAIL:]}")
        answer: dict[str, Any] = json.loads(line)
        if "broken" in answer:
            raise RuntimeError(f"the fork server failed:\n{answer['broken']}")
        return answer

    @property
    def alive(self) -> bool:
        """Can this pool run another case?"""
        return self._server.poll() is None

    def close(self) -> None:
        """End the server. Its ranks, if any are left, die with it."""
        self._server.kill()
        self._server.wait()


def _outcome(folder: Path, rank: int, code: int) -> Outcome:
    log_file, result_file = folder / f"rank{rank}.log", folder / f"rank{rank}.json"
    log = log_file.read_text(errors="replace")[-LOG_TAIL:] if log_file.exists() else ""
    if code < 0:
        return Outcome(rank, signal=signal.Signals(-code).name, log=log)
    if code or not result_file.exists():
        return Outcome(rank, error_type="Exit", message=f"exit code {code} without a result", log=log)
    result = json.loads(result_file.read_text())
    if "traceback" in result:
        kind, message, trace = result["type"], result["message"], result["traceback"]
        return Outcome(rank, error_type=kind, message=message, traceback=trace, log=log)
    return Outcome(rank, ok=True, value=result["value"], log=log)


_pool: Pool | None = None


def ranks(
    world: int,
    target: str,
    *,
    timeout: float = 60.0,
    expect_killed: Iterable[int] = (),
    env: Mapping[str, str] | None = None,
    ops: tuple[str, ...] = (),
    preload: tuple[str, ...] = (),
    **kwargs: Any,
) -> Outcomes:
    """Run ``target`` (``"package.module:function"``) on ``world`` ranks and return how each of them ended.

    Args:
        timeout: seconds for the whole case, on all ranks.
        expect_killed: exactly these ranks must be ended by a signal.
        env: variables to set in the ranks (after torch was imported).
        ops: DeepSpeed operators to compile and load first, see :data:`tests.harness.jit_ops.OPS`. The build does not
            count against ``timeout``.
        preload: modules to import in the server before it forks, for imports that take seconds and few cases need.

    Raises:
        RanksTimedOut: with the stacks of all threads of the ranks that were late.
        RanksFailed: other ranks than ``expect_killed`` were killed.
    """
    global _pool
    if _pool is None or not _pool.alive:
        _pool = Pool()
        atexit.register(_pool.close)
    options = {"expect_killed": expect_killed, "env": env, "ops": ops, "preload": preload}
    return _pool.run(world, target, kwargs, timeout=timeout, **options)
