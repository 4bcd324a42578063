"""Saves that stand still where a test wants them to: in staging, or in front of a file's finish or of the commit."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest import mock

from ckpt.runtime.digesting import Digests
from ckpt.store.forward import Forward, ForwardWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpt.store.base import Buffer, ObjectWriter, Store
    from ckpt.store.blocks import Blocks

SECONDS = 60.0
"""A gate that stays closed for so long fails the save: no test hangs."""


class Gate:
    """Closed until opened. ``reached``: set once somebody stands in front of it."""

    def __init__(self, *, opened: bool = False) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        if opened:
            self.open()

    def open(self) -> None:
        """Let everybody pass from now on."""
        self._open.set()

    def close(self) -> None:
        """Stop everybody from now on."""
        self.reached.clear()
        self._open.clear()

    def open_when(self, event: threading.Event) -> None:
        """Open as soon as ``event`` is set, from a thread of its own."""

        def wait() -> None:
            event.wait(SECONDS)
            self.open()

        threading.Thread(target=wait, daemon=True, name="gatekeeper").start()

    def await_visitor(self) -> None:
        """Wait until somebody stands in front of it."""
        if not self.reached.wait(SECONDS):
            raise TimeoutError("nobody came to the gate")

    def pass_through(self) -> None:
        """Wait until it is open."""
        self.reached.set()
        if not self._open.wait(SECONDS):
            raise TimeoutError("the gate was never opened")


@contextmanager
def staging_behind(gate: Gate) -> Iterator[None]:
    """Let every digest of a chunk wait at ``gate``, so that nothing is staged before it opens."""
    original = Digests.of

    def of(self: Digests, data: memoryview) -> bytes:
        gate.pass_through()
        return original(self, data)

    with mock.patch.object(Digests, "of", of):
        yield


class Gated(Forward):
    """A store whose writers' ``finish`` and whose commits call something first: a gate, or a failure."""

    def __init__(
        self,
        store: Store,
        *,
        finish: Callable[[], None] = lambda: None,
        commit: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(store)
        self.before_finish, self.before_commit = finish, commit

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> None:
        """See :class:`~ckpt.store.base.Store`."""
        if key.endswith("/commit.json"):
            self.before_commit()
        super().put(key, data, overwrite=overwrite)

    def writer(self, key: str, *, head: int = 0, size: int = 0, blocks: Blocks | None = None) -> ObjectWriter:
        """See :class:`~ckpt.store.base.Store`."""
        return _Writer(super().writer(key, head=head, size=size, blocks=blocks), self.before_finish)


class _Writer(ForwardWriter):
    def __init__(self, writer: ObjectWriter, before_finish: Callable[[], None]) -> None:
        super().__init__(writer)
        self._before_finish = before_finish

    def finish(self, head: Buffer = b"") -> None:
        self._before_finish()
        super().finish(head)
