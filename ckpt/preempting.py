"""A job that is about to be taken off its machines saves once more: at one step, on all ranks, whoever was told.

A signal reaches one rank, or several at different times. At every step boundary each rank looks at one key of the
job's key-value store: has anybody been told? Then the ranks agree on a boundary that none of them has passed. They
cannot wait for each other where they are: one that is a step ahead needs the others in its next collective. So each
says at which boundary it has learnt of it, and goes on; one boundary after the last of these all know all of them, as
collectives keep ranks within a step of each other. Where nothing does, those that stop there see that another is ahead,
and catch up with it.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt.engine.parallel import Parallel
from ckpt.engine.shared_boundary import at_step_begin
from ckpt.errors import CheckpointExists, CkptError, ConfigError, RankFailure
from ckpt.runtime.behind import wait_for_last
from ckpt.runtime.timeout import checked_timeout, default_timeout
from ckpt.runtime.torch_comm import communicator
from ckpt.saving import save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType

    from ckpt.report import SaveReport
    from ckpt.runtime.comm import Comm
    from ckpt.store.open import Root

log = logging.getLogger("ckpt")

EXIT, CONTINUE = "exit", "continue"
TELL_SECONDS = 10.0
"""How long a rank waits for others to come to the boundary before it says so."""

_made: weakref.WeakKeyDictionary[Comm, int] = weakref.WeakKeyDictionary()
"""How many have been made in a job: each has keys of its own."""


def on_preemption(
    engine: object,
    root: Root | None = None,
    *,
    signals: Iterable[int] = (signal.SIGTERM,),
    then: str | Callable[[SaveReport | None], object] = EXIT,
    **options: Any,
) -> Preemption:
    """Save once, on all ranks at the same step, when any of them gets a signal. Every rank must call it.

    The save comes at a step boundary, one to three steps after the signal: when a training step begins and the one
    before is complete (docs/preemption.md says where that is for which engine). A loop that keeps state of its own, as
    a data loader that has handed out the next batch by then, calls :meth:`Preemption.check` at its end instead.

    Args:
        engine: as in :func:`ckpt.save`.
        root: as in :func:`ckpt.save`.
        signals: which ones; the handlers that were there are called after the save. Empty: only
            :meth:`Preemption.request`.
        then: what all ranks do behind the save, be it well or badly ended: ``"exit"``: raise ``SystemExit`` with
            128 + the signal's number, as a process that the signal has ended, so that a scheduler starts the job again;
            ``"continue"``; or a function that is given the :class:`ckpt.SaveReport` (None if there is none).
        options: of :func:`ckpt.save`; ``step`` and ``extra`` may be functions, asked when it is time to save.

    Raises:
        ConfigError: not the main thread, to which Python gives signals; no such signal; ``then`` is none of these.
    """
    return Preemption(engine, root, tuple(signals), then, options)


class Preemption:
    """Watches for a preemption until :meth:`close`, or the end of a ``with`` block. See :func:`on_preemption`.

    ``saved``: the report, once it is saved. ``error``: why it could not be.
    """

    def __init__(
        self,
        engine: object,
        root: Root | None,
        signals: tuple[int, ...],
        then: str | Callable[[SaveReport | None], object],
        options: dict[str, Any],
    ) -> None:
        if not (callable(then) or then in (EXIT, CONTINUE)):
            raise ConfigError(f"then={then!r}: expected {EXIT!r}, {CONTINUE!r} or a function")
        timeout = options.get("timeout")
        self._timeout = default_timeout() if timeout is None else checked_timeout(timeout, f"timeout={timeout!r}")
        self.saved: SaveReport | None = None
        self.error: CkptError | None = None
        self._then, self._save = then, partial(_save, engine, root, options)
        self._comm = communicator()
        number = _made[self._comm] = _made.get(self._comm, 0) + 1
        self._prefix = f"preemption/{number}"
        self._signal: int | None = None
        self._count = self._seen = 0
        self._over = self._closed = self._by_hand = False
        self._previous: dict[int, Any] = {}
        self._undo: list[Callable[[], None]] = []
        try:
            self._install(signals)
        except BaseException:
            self.close()
            raise
        inner = engine.engine if isinstance(engine, Parallel) else engine
        remove = at_step_begin(inner, self._begin)
        if remove is None:
            log.warning("on_preemption: a %s has no step boundary that is known: call check()", type(inner).__name__)
            return
        self._undo.append(remove)

    @property
    def requested(self) -> bool:
        """Has this rank been told, by a signal or by another rank?"""
        return self._signal is not None

    def request(self, signum: int = signal.SIGTERM) -> None:
        """Do as if the signal had come: for notices that come by other ways. One rank is enough."""
        self._signal = signum if self._signal is None else self._signal

    def check(self) -> bool:
        """Say that this is a step boundary; save here if all ranks have agreed to. Returns whether it has.

        From the first call on, only these calls count. Every rank must make them, at the same places.
        """
        self._by_hand = True
        return self._boundary()

    def close(self) -> None:
        """Stop watching and put back the handlers that were there."""
        if self.requested and not self._over and self._undo:
            log.warning("preemption was asked for, but training has ended before the ranks could save")
        self._over = self._closed = True
        for undo in self._undo:
            undo()
        self._undo.clear()
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def __enter__(self) -> Preemption:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- signals and boundaries -----------------------------------------------------------------------------------

    def _install(self, signals: tuple[int, ...]) -> None:
        if signals and threading.current_thread() is not threading.main_thread():
            raise ConfigError("on_preemption outside the main thread: Python runs signal handlers in the main thread")
        for number in dict.fromkeys(signals):
            try:
                previous = signal.getsignal(number)
                signal.signal(number, self._handle)
            except (OSError, TypeError, ValueError) as error:
                raise ConfigError(f"signals: {number!r} cannot be handled: {error}") from error
            self._previous[number] = previous

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._closed:  # another one, made later and closed later, has put this handler back
            previous = self._previous.get(signum)
            signal.signal(signum, signal.SIG_DFL if previous is None else previous)
            signal.raise_signal(signum)
            return
        # Nothing else: it may have come in the middle of anything. What comes later is the same preemption.
        self.request(signum)

    def _begin(self) -> None:
        if not self._by_hand:
            self._boundary()

    def _boundary(self) -> bool:
        if self._over:
            return False
        self._count += 1
        try:
            here = self._agreed()
        except CkptError as error:  # a rank is lost, or the store: nothing can be agreed on any more
            self.error = error
        else:
            if not here:
                return False
            self.saved, self.error = self._save()
        self._over = True
        if self.error is not None:
            log.error("the save before the preemption failed: %s", self.error)
        self._finish()
        return self.error is None

    def _finish(self) -> None:
        number = self._signal or signal.SIGTERM
        previous = self._previous.get(number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, None)
        if callable(self._then):
            self._then(self.saved)
        elif self._then == EXIT:
            raise SystemExit(128 + number)

    # -- agreement ------------------------------------------------------------------------------------------------

    def _agreed(self) -> bool:
        """Is this the boundary to save at? Waits for the other ranks only where none of them waits for this one."""
        comm = self._comm
        if comm.kv is None:
            return self._signal is not None
        if not self._seen:
            if self._signal is not None:
                comm.kv.compare_set(self._key("asked"), "", str(int(self._signal)))
            elif not comm.kv.check([self._key("asked")]):
                return False
            self._signal, self._seen = int(comm.kv.get(self._key("asked"))), self._count
            self._raise("last seen", self._count)
            comm.kv.add(self._key("all seen"), 1)
            return False
        if comm.kv.add(self._key("all seen"), 0) < comm.world or self._count <= int(
            comm.kv.get(self._key("last seen"))
        ):
            return False
        self._raise("ahead", self._count)
        comm.kv.set(self._key(f"at {self._count}/{comm.rank}"), b"1")
        comm.kv.add(self._key(f"at {self._count}"), 1)
        return self._all_here()

    def _all_here(self) -> bool:
        """Wait until all ranks are at this boundary; False if one is ahead, and this rank has to catch up with it."""
        kv, world = self._comm.store, self._comm.world
        started, said, pause = time.monotonic(), False, 0.0005
        while kv.add(self._key(f"at {self._count}"), 0) < world:
            if int(kv.get(self._key("ahead"))) > self._count:
                return False
            waited = time.monotonic() - started
            if waited > self._timeout or (waited > TELL_SECONDS and not said):
                said, lost = True, [r for r in range(world) if not kv.check([self._key(f"at {self._count}/{r}")])]
                log.warning("preemption: rank %d waits for rank(s) %s at a step boundary", self._comm.rank, lost[:8])
                if waited > self._timeout:
                    text = f"did not come to step boundary {self._count} within {self._timeout:g} s"
                    raise RankFailure("preemption", dict.fromkeys(lost, text))
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)
        return True

    def _key(self, what: str) -> str:
        return f"{self._prefix}/{what}"

    def _raise(self, what: str, value: int) -> None:
        """Raise a number that all ranks share to at least ``value``."""
        kv, held = self._comm.store, ""
        while (found := bytes(kv.compare_set(self._key(what), held, str(value))).decode()) != str(value):
            if int(found) >= value:
                return
            held = found


def _asked(function: Callable[[], Any]) -> Any:
    """Return what a function of the user says. What it raises is raised by the save, on all ranks alike."""
    try:
        return function()
    except Exception as error:
        return {"asked": _Failed(error)}


class _Failed:
    """An extra that cannot be had."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def state_dict(self) -> Any:
        raise self._error

    def load_state_dict(self, state: Any) -> None:
        """Do nothing: it is never saved."""


def _save(engine: object, root: Root | None, options: dict[str, Any]) -> tuple[SaveReport | None, CkptError | None]:
    """Save; return the report or the error, the same on all ranks. An asynchronous save in flight is finished first."""
    wait_for_last()
    found: CkptError | None = None
    for _ in range(2):  # the first one may only have told what the asynchronous save before had failed with
        try:
            asked = {k: _asked(v) if k in ("step", "extra") and callable(v) else v for k, v in options.items()}
            report = save(engine, root, **asked)
            log.warning("preemption: step %d is saved in %s", report.step, report.root)
            return report, None
        except CheckpointExists as error:  # by a save that the loop itself has just made
            log.info("nothing to save before the preemption: %s", error)
            return None, None
        except CkptError as error:
            log.warning("the save before the preemption failed: %s", error)
            found = error
    return None, found
