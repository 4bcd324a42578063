"""Saves behind the training: one thread at a time, and the training's optimizer steps held back while it needs them to.

What makes it possible: parameters, masters and moments do not change during forward and backward. What guards it: a
hook in front of every optimizer step of the process, which waits until all live memory has been looked at.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt.report import SaveReport
    from ckpt.runtime.handle import SaveHandle

log = logging.getLogger("ckpt")

LOOK_SECONDS = 0.5
"""How often an optimizer step that waits looks whether the snapshot is still growing."""

_flight: SaveHandle | None = None
_hooked = False


def in_flight() -> SaveHandle | None:
    """Return the last asynchronous save of this process, done or not, unless it was taken note of."""
    return _flight


def forget(handle: SaveHandle) -> None:
    """Take note of how a save has ended."""
    global _flight
    if _flight is handle:
        _flight = None


def launch(handle: SaveHandle, run: Callable[[], SaveReport], patience: float) -> None:
    """Run a save in a thread of its own.

    Args:
        handle: of the save; the one before it must have ended.
        run: the save.
        patience: seconds without progress after which an optimizer step gives up on the snapshot.
    """
    global _flight, _hooked
    if not _hooked:
        register_optimizer_step_pre_hook(_before_step)
        # Not atexit, which comes when threads cannot be started any more; a save starts some for its I/O.
        with suppress(AttributeError):
            threading._register_atexit(_at_exit)  # type: ignore[attr-defined]
        _hooked = True
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    _patience[handle] = patience

    def work() -> None:
        if device is not None:
            torch.cuda.set_device(device)  # a new thread begins on device 0
        with torch.no_grad():
            handle.conclude(run)
        _patience.pop(handle, None)
        error = handle.durable.peek()
        if error is not None:
            log.error("the asynchronous save of step %s failed, training goes on: %s", handle.step, error)

    _flight = handle
    threading.Thread(target=work, name=f"ckpt save of step {handle.step}").start()


_patience: dict[SaveHandle, float] = {}


def _before_step(*_: Any) -> None:
    """Wait for what is not staged yet. A failure is not the optimizer's business: it is told at the next save."""
    handle = _flight
    if handle is None or handle.staged.done():
        return
    seen, since = handle.progress().staged, time.monotonic()
    while not handle.ending and not handle.staged.settled(LOOK_SECONDS):
        now, looked_at = time.monotonic(), handle.progress().staged
        if looked_at != seen:
            seen, since = looked_at, now
        elif now - since > _patience.get(handle, 0.0):
            # What the stuck thread reads from now on may be of the next step: it will find that it was ended.
            handle.end(f"no progress for {now - since:.0f} s while an optimizer step was waiting")


def _at_exit() -> None:
    """Finish what is in flight before the interpreter ends."""
    handle = _flight
    if handle is not None and not handle.durable.done():
        log.warning("the interpreter ends while step %s is being saved: finishing it", handle.step)
        handle.durable.settled()
