"""A machine that stops at the k-th operation on its disk, and what is left then.

The patched calls are those of ``ckpt.store.local``, its writer and its appender (they call ``os.<name>``; ``pwritev``
and ``writev`` are logged as writes). After the crash every further call of the dead rank stops as well, clean-up
included, as after SIGKILL or a power cut of one node.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Iterator

CHANGING = (
    "pwritev", "writev", "fsync", "fdatasync", "link", "rename", "replace", "mkdir", "unlink", "rmdir", "open", "close",
)  # fmt: skip
WRITES = ("pwritev", "writev")


class Crash(BaseException):
    """The machine stopped."""


class Machine:
    """Counts the disk operations of one thread (``only``; None: of all) and stops it at number ``at``.

    ``after``: the operation is still carried out, its answer is lost. ``torn``: of a write, half the bytes arrive.
    """

    def __init__(self, at: int | None = None, *, after: bool = False, torn: bool = False) -> None:
        self.at, self.after, self.torn = at, after, torn
        self.count = 0
        self.log: list[str] = []
        self.dead = False
        self.died_at = 0.0
        self.only: threading.Thread | None = None
        self.victim_is_root = False

    def clock(self) -> float:
        """Seconds, a thousand times faster once the machine has stopped: the living need not wait long for the dead."""
        now = time.monotonic()
        return now + 1000 * (now - self.died_at) if self.dead else now

    def mine(self) -> bool:
        return self.only is None or threading.current_thread() is self.only

    def check(self) -> None:
        if self.dead and self.mine():
            raise Crash

    @contextmanager
    def on(self) -> Iterator[Machine]:
        system = _Os(self)
        files = ("local", "local_writer", "local_appender")
        with ExitStack() as patches:
            for name in files:
                patches.enter_context(mock.patch(f"ckpt.store.{name}.os", system))
            yield self


class _Os:
    """The ``os`` module with a machine behind it."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return _counted(self._machine, name, real) if name in CHANGING else real


def _counted(machine: Machine, name: str, real: Any) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        if not machine.mine():
            return real(*args, **options)
        machine.check()
        machine.count += 1
        machine.log.append("write" if name in WRITES else name)
        if machine.count != machine.at:
            return real(*args, **options)
        machine.dead, machine.died_at = True, time.monotonic()
        if name in WRITES and machine.torn:
            whole = b"".join(map(bytes, args[1]))
            real(args[0], [whole[: len(whole) // 2]], *args[2:])
        elif machine.after:
            real(*args, **options)
        raise Crash

    return call


class DyingKeyValue:
    """A rendezvous store whose connection is gone with the machine: a dead rank tells its peers nothing."""

    def __init__(self, kv: Any, machine: Machine) -> None:
        self._kv, self._machine = kv, machine

    def __getattr__(self, name: str) -> Any:
        self._machine.check()
        return getattr(self._kv, name)
