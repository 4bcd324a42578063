"""Who does the bundles: this process, or several that it starts (``python -m ckpt.compact.worker``).

They know the repository by its address, and do what they are told over their standard input, one bundle after the
other, each by whoever is free. One that dies ends the compaction; when this process dies, they end by themselves.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

import msgspec

import ckpt.errors
from ckpt.compact.cuts import Bundle
from ckpt.compact.packs import BundleDone
from ckpt.compact.working import Work, Worker
from ckpt.convert.ours.workers import receive, send
from ckpt.errors import CkptError, from_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpt.compact.source import Source
    from ckpt.store.base import Store

GRACE_SECONDS = 10.0


class Message(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One message between the processes: to a worker ``bundle``, from it one of the others."""

    bundle: Bundle | None = None
    done: BundleDone | None = None
    error: dict[str, Any] | None = None


def run_bundles(
    store: Store, source: Source, work: Work, bundles: Sequence[Bundle], count: int, told: Callable[[BundleDone], None]
) -> list[BundleDone]:
    """Do all bundles, ``count`` at once, and return what became of each.

    Args:
        store: the repository's.
        source: what is compacted.
        work: what every process has to know.
        bundles: what is to be done.
        count: processes.
        told: called after each bundle; what it raises ends the work.

    Raises:
        CkptError: the first that failed; all others are stopped.
    """
    if min(count, len(bundles)) > 1:
        return _Crew(work, bundles, min(count, len(bundles)), told).run()
    worker = Worker(store, source, work.prefix, work.memory, lambda _: None)
    found = []
    for bundle in bundles:
        found.append(worker.run(bundle, resume=work.resume))
        told(found[-1])
    return found


class _Crew:
    """Worker processes, each with a thread here that listens to it; what they say is handled in the caller's thread."""

    def __init__(self, work: Work, bundles: Sequence[Bundle], count: int, told: Callable[[BundleDone], None]) -> None:
        self._work, self._bundles, self._count, self._told = work, bundles, count, told
        self._todo = deque(bundles)
        self._heard: queue.SimpleQueue[tuple[int, Message | None]] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self) -> list[BundleDone]:
        found: list[BundleDone] = []
        threads = []
        try:
            for number in range(self._count):
                process = _start()
                self._processes.append(process)
                threads.append(threading.Thread(target=self._listen, args=(number, process), daemon=True))
                threads[-1].start()
                send(_pipe(process.stdin), self._work)
                self._next(process)
            while len(found) < len(self._bundles):
                number, message = self._heard.get()
                if message is None:
                    raise CkptError(f"worker {number} has ended ({_how(self._processes[number])})")
                if message.error is not None:
                    raise from_wire(message.error)
                if message.done is not None:
                    found.append(message.done)
                    self._told(message.done)
                    self._next(self._processes[number])
        finally:
            self._end(gently=len(found) == len(self._bundles))
            for thread in threads:
                with suppress(RuntimeError):  # Ctrl-C has come before it began
                    thread.join()
            for process in self._processes:
                _pipe(process.stdout).close()
        return found

    def _next(self, process: subprocess.Popen[bytes]) -> None:
        if self._todo:
            with suppress(BrokenPipeError):  # that it is gone is heard from its other pipe
                send(_pipe(process.stdin), Message(bundle=self._todo.popleft()))

    def _listen(self, number: int, process: subprocess.Popen[bytes]) -> None:
        while (data := receive(_pipe(process.stdout))) is not None:
            self._heard.put((number, msgspec.msgpack.decode(data, type=Message)))
        self._heard.put((number, None))

    def _end(self, *, gently: bool) -> None:
        for process in self._processes:
            if gently:
                _close(process)
            else:
                process.terminate()
        for process in self._processes:
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _close(process)


def _start() -> subprocess.Popen[bytes]:
    # The worker must find the package where this process has found it.
    home = os.path.dirname(os.path.dirname(os.path.abspath(ckpt.errors.__file__)))
    path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-m", "ckpt.compact.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C is for this process, which ends the others in order
    )


def _close(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        _pipe(process.stdin).close()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise CkptError("a worker has no pipe")
    return pipe


def _how(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        return "it says nothing more"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
