"""Saves behind the training: one thread at a time, and the training's optimizer steps held back while it needs them to.

What makes it possible: parameters, masters and moments do not change during forward and backward. What guards it: a
hook in front of every optimizer step of the process, which waits until all live memory has been looked at.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - what it does at exit has to come after what is done here
import logging
import os
import sys
import threading
import time
import weakref
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt.errors import from_wire, to_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckpt.errors import RankFailure
    from ckpt.report import SaveReport
    from ckpt.runtime.comm import Comm
    from ckpt.runtime.handle import SaveHandle

log = logging.getLogger("ckpt")

LOOK_SECONDS = 0.5
"""How often an optimizer step that waits looks whether the snapshot is still growing."""
TELL_SECONDS = 10.0
"""How long a call waits for the save before it until it says so: a store that hangs is not to be hung on in silence."""


class _Flight:
    """``handle``: of the last asynchronous save of this process, done or not. ``comm``: with whom it is done, if that
    job is still there.
    """

    handle: SaveHandle | None = None
    comm: weakref.ref[Comm] | None = None

    def others(self) -> Comm | None:
        """Return the communicator while no save uses it: it is not thread-safe."""
        idle = self.handle is None or self.handle.durable.done()
        return self.comm() if idle and self.comm is not None else None


_last = _Flight()
_hooked = False
_patience: dict[SaveHandle, tuple[float, Callable[[], object]]] = {}


def _reset_after_fork() -> None:
    """Forget the save in a forked child (a data loader's worker): its thread is the parent's, and would be waited for
    in the child's optimizer steps and at its end, for ever.
    """
    _last.handle = _last.comm = None
    _patience.clear()


os.register_at_fork(after_in_child=_reset_after_fork)


def _no_pulse() -> object:
    """Tell of nothing."""
    return None


def in_flight() -> SaveHandle | None:
    """Return the last asynchronous save of this process, done or not; None if there was none or it was dealt with."""
    return _last.handle


def wait_for_last() -> None:
    """Wait until the last asynchronous save has ended, well or badly."""
    handle = _last.handle
    if handle is not None and not handle.durable.settled(TELL_SECONDS):
        log.warning("training waits for the asynchronous save before, which is not durable yet: %r", handle)
        handle.durable.settled()


def meeting(comm: Comm) -> None:
    """Note with whom this process saves behind the training."""
    _last.comm = weakref.ref(comm)


def missed() -> RankFailure | None:
    """Return why the others have given up an asynchronous save that this rank was not called for, if they have."""
    comm = _last.others()
    return comm.missed() if comm is not None else None


def unheard() -> bytes:
    """Return the failure of the last asynchronous save, for other ranks, unless somebody on this rank has heard of it.

    All ranks have failed alike, but some may have asked the handle and dealt with it, and all have to do the same.
    """
    last, error = _last.handle, None
    if last is not None:
        error = None if last.durable.retrieved or last.staged.retrieved else last.durable.peek()
    error = error or missed()
    return b"" if error is None else msgspec.json.encode(to_wire(error))


def raise_unheard(told: Iterable[bytes]) -> None:
    """Raise the first failure that a rank has told of by :func:`unheard`. With that, or without any, all is settled.

    To be called by all ranks together: each forgets a save that has failed.
    """
    wire = next(filter(None, told), b"")
    if wire:
        wait_for_last()  # what has failed there is about to fail here
    last = _last.handle
    own = last.durable.peek() if last is not None else None
    if own is not None:
        _last.handle = None
    comm = _last.others()
    if comm is not None:
        comm.catch_up()
    if wire:
        # The rank's own error has the cause and its traceback; one that did not take part in that save has none.
        theirs = from_wire(msgspec.json.decode(wire))
        error = own if type(own) is type(theirs) and str(own) == str(theirs) else theirs
        which = f" of step {last.step}" if last is not None else ""
        said = (
            f"this is how the asynchronous save{which} has ended; the call that raises it was not begun: call it again"
        )
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(said)
        log.error("%s", said)
        raise error


def launch(
    handle: SaveHandle, run: Callable[[], SaveReport], patience: float, pulse: Callable[[], object] = _no_pulse
) -> None:
    """Run a save in a thread of its own.

    Args:
        handle: of the save; the one before it must have ended.
        run: the save.
        patience: seconds without progress after which an optimizer step gives up on the snapshot.
        pulse: returns something new for as long as the thread does something, if only wait for another rank.
    """
    global _hooked
    if not _hooked:
        # Not to be traced with a step that is compiled: what it looks at changes all the time. The compiler's front end
        # is there if there is an optimizer, and takes seconds to load.
        loaded = "torch._dynamo" in sys.modules
        register_optimizer_step_pre_hook(torch.compiler.disable(_before_step) if loaded else _before_step)
        # Not atexit, which comes when threads cannot be started any more; a save starts some for its I/O.
        with suppress(AttributeError, RuntimeError):  # RuntimeError: the interpreter is ending already
            threading._register_atexit(_at_exit)  # type: ignore[attr-defined]
        _hooked = True
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def save() -> SaveReport:
        if device is not None:
            torch.cuda.set_device(device)  # a new thread begins on device 0
        with torch.no_grad():
            return run()

    def work() -> None:
        handle.conclude(save)
        _patience.pop(handle, None)
        error = handle.durable.peek()
        if error is not None:
            log.error("the asynchronous save of step %s failed, training goes on: %s", handle.step, error)

    _patience[handle] = patience, pulse
    _last.handle = handle
    if not threading.main_thread().is_alive():  # called by an atexit function: nobody would wait for a thread any more
        work()
        return
    thread = threading.Thread(target=work, name=f"ckpt save of step {handle.step}")
    try:
        thread.start()
    except RuntimeError as error:  # no thread to be had: the other ranks will miss this one
        _patience.pop(handle, None)
        handle.conclude(partial(_raise, error))


def _raise(error: BaseException) -> NoReturn:
    raise error


def _before_step(*_: Any) -> None:
    """Wait for what is not staged yet. A failure is not the optimizer's business: it is told at the next save."""
    handle = _last.handle
    if handle is None or handle.staged.done():
        return
    patience, pulse = _patience.get(handle, (0.0, _no_pulse))
    seen, since = (handle.progress().staged, pulse()), time.monotonic()
    while not handle.ending and not handle.staged.settled(LOOK_SECONDS):
        now, looked_at = time.monotonic(), (handle.progress().staged, pulse())
        if looked_at != seen:  # a rank that waits for a slower one is alive: the save itself knows whom to give up
            seen, since = looked_at, now
        elif now - since > patience:
            # What the stuck thread reads from now on may be of the next step: it will find that it was ended.
            handle.end(f"no progress for {now - since:.0f} s while an optimizer step was waiting")


def _at_exit() -> None:
    """Finish what is in flight before the interpreter ends."""
    handle = _last.handle
    if handle is not None and not handle.durable.done():
        log.warning("the interpreter ends while step %s is being saved: finishing it", handle.step)
        handle.durable.settled()
