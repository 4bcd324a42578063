"""A checkpointer that needs no call in the loop: it is called behind each step, by what the engine's step ends with."""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ckpt.engine.base import EndsSteps
from ckpt.engine.shared_ending import INSTEAD
from ckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt.engine.base import EngineAdapter
    from ckpt.runtime.comm import Comm


class Hook:
    """Calls a method behind each step between :meth:`begin` and :meth:`remove`, and another one when the process ends.

    Making one is collective. Only the engine's own objects refer to the first method, and so keep its object alive: a
    loop need not keep what it does not call.

    Args:
        on: else this does nothing.
        comm: all ranks.
        adapter: of the engine.
        step: called behind each step.
        close: called at exit if its object is still there.
        timeout: as in :func:`ckpt.save`.

    Raises:
        ConfigError: where a step ends cannot be told, on some rank.
    """

    def __init__(
        self,
        on: bool,
        comm: Comm,
        adapter: EngineAdapter,
        step: Callable[[], None],
        close: Callable[[], None],
        timeout: float | None,
    ) -> None:
        self._on, self._adapter, self._step = on, adapter, step
        self._remove: Callable[[], None] | None = None
        self._at_exit = _AtExit(close)
        if on:
            with comm.joint("checkpointer", timeout):
                # Tried out: what is refused is refused before anything is loaded or saved.
                comm.run("hook", lambda: self._install()())

    def begin(self) -> None:
        """Count steps from here on."""
        if self._on:
            self._remove = self._install()
            # Not atexit, which comes when threads cannot be started any more; what is to be stored may need some.
            with suppress(AttributeError, RuntimeError):
                threading._register_atexit(self._at_exit)  # type: ignore[attr-defined]

    def remove(self) -> None:
        """Take away all hooks, and leave the engine's methods as they were."""
        if self._remove is not None:
            self._remove()
            self._remove = None
            self._at_exit.over = True

    def refuse_call(self) -> None:
        """Refuse a call by the loop of what is called by the engine.

        Raises:
            ConfigError: this is on.
        """
        if self._on:
            raise ConfigError("step() of a ckpt.Checkpointer whose hook=True calls it: expected one of both")

    def _install(self) -> Callable[[], None]:
        if not isinstance(self._adapter, EndsSteps):
            raise ConfigError(
                f"hook=True: an adapter of kind {self._adapter.kind!r} has no at_step_end, so that nothing tells where "
                f"a training step ends: {INSTEAD}"
            )
        return self._adapter.at_step_end(self._step)


class _AtExit:
    """Calls a method at exit, of an object that may be gone by then: such a loop has no place to close it at."""

    def __init__(self, method: Any) -> None:
        self._method = weakref.WeakMethod(method)
        self.over = False

    def __call__(self) -> None:
        method = None if self.over else self._method()
        if method is not None:
            method()
