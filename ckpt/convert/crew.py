"""Worker processes: told over their standard input what to do, one task after the other, each by whoever is free.

One that dies, or fails, ends the work of all. When the process that started them dies, they end by themselves.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

import ckpt.errors
from ckpt.errors import CkptError, from_wire, to_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

LENGTH = 8
"""Bytes of the length in front of each message."""
MAX_MESSAGE = 1 << 32
GRACE_SECONDS = 10.0
"""How long a worker may take to end when it is told to."""


class Said(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What every message from a worker may have: why it has ended."""

    error: dict[str, Any] | None = None


M = TypeVar("M", bound=Said)
R = TypeVar("R")
Todo = queue.SimpleQueue[bytes]


def send(pipe: IO[bytes], message: msgspec.Struct) -> None:
    """Write a message."""
    data = msgspec.msgpack.encode(message)
    pipe.write(len(data).to_bytes(LENGTH, "little") + data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes | None:
    """Read a message; None at the end of the pipe, or in the middle of one that does not come."""
    head = pipe.read(LENGTH)
    nbytes = int.from_bytes(head, "little")
    if len(head) < LENGTH or nbytes > MAX_MESSAGE:
        return None
    data = pipe.read(nbytes)
    return data if len(data) == nbytes else None


class Crew(Generic[M, R]):
    """Worker processes, each with a thread here that listens to it; what they say is handled in the caller's thread.

    Args:
        module: what each process runs (:func:`serve`).
        work: what each is told first.
        tasks: messages that each ask for one result, in the order in which they are given out.
        count: processes.
        kind: of messages.
        result_of: what a message brings of a task; None if it only tells how far that is.
        told: called with each message; what it raises ends the work.
    """

    def __init__(
        self,
        module: str,
        work: msgspec.Struct,
        tasks: Iterable[M],
        count: int,
        kind: type[M],
        result_of: Callable[[M], R | None],
        told: Callable[[M], None],
    ) -> None:
        self._module, self._work, self._count, self._kind = module, work, count, kind
        self._result_of, self._told = result_of, told
        self._todo = deque(tasks)
        self._heard: queue.SimpleQueue[tuple[int, M | None]] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self) -> list[R]:
        """Do all tasks and return their results, in the order in which they came.

        Raises:
            CkptError: the first that failed; all workers are stopped.
        """
        found: list[R] = []
        wanted, threads = len(self._todo), []
        try:
            for number in range(self._count):
                process = _start(self._module)
                self._processes.append(process)
                threads.append(threading.Thread(target=self._listen, args=(number, process), daemon=True))
                threads[-1].start()
                send(_pipe(process.stdin), self._work)
                self._next(process)
            while len(found) < wanted:
                number, message = self._heard.get()
                if message is None:
                    raise CkptError(f"worker {number} has ended ({_how(self._processes[number])})")
                if message.error is not None:
                    raise from_wire(message.error)
                result = self._result_of(message)
                if result is not None:
                    found.append(result)
                self._told(message)
                if result is not None:
                    self._next(self._processes[number])
        finally:
            self._end(gently=len(found) == wanted)
            for thread in threads:
                with suppress(RuntimeError):  # Ctrl-C has come before it began
                    thread.join()
            for process in self._processes:
                _pipe(process.stdout).close()
        return found

    def _next(self, process: subprocess.Popen[bytes]) -> None:
        if self._todo:
            with suppress(BrokenPipeError):  # that it is gone is heard from its other pipe
                send(_pipe(process.stdin), self._todo.popleft())

    def _listen(self, number: int, process: subprocess.Popen[bytes]) -> None:
        while (data := receive(_pipe(process.stdout))) is not None:
            self._heard.put((number, msgspec.msgpack.decode(data, type=self._kind)))
        self._heard.put((number, None))

    def _end(self, *, gently: bool) -> None:
        for process in self._processes:
            if gently:
                _close(process)
            else:
                process.terminate()  # it takes away what it has begun
        for process in self._processes:
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _close(process)


def _start(module: str) -> subprocess.Popen[bytes]:
    # The worker must find the package where this process has found it.
    home = os.path.dirname(os.path.dirname(os.path.abspath(ckpt.errors.__file__)))
    path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(  # noqa: S603 - a module of this package
        [sys.executable, "-m", module],
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


# ------------------------------------------------------------------------------------------------------ in a worker


def serve(work: Callable[[Todo, IO[bytes]], None]) -> None:
    """Be a worker, until nobody sends any more (:func:`_listen`), or something fails.

    Args:
        work: gets what comes in, and where to say what has become of it; does not return.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # on the way out it removes files that are not whole
    told = os.fdopen(os.dup(0), "rb")
    says = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not end up among the messages
    todo: Todo = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(told, todo), daemon=True).start()
    try:
        work(todo, says)
    except Exception as error:
        send(says, Said(error=to_wire(error)))


def _listen(told: IO[bytes], todo: Todo) -> None:
    """Hand on what comes. When the pipe ends, whoever started this is gone, and there is nobody to work for."""
    while (data := receive(told)) is not None:
        todo.put(data)
    os._exit(1)
