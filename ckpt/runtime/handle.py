"""What the caller of an asynchronous save holds: two milestones, progress, and a way to end it."""

from __future__ import annotations

import threading
import time
import traceback
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from ckpt.errors import SaveCancelled
from ckpt.words import size

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt.report import SaveReport

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far this rank is. ``staged``: bytes of its state that were digested and, where it owns them, copied or
    stored; ``total``: all that it holds (0: not known yet). ``seconds``: since the call. ``stored``: bytes that went
    from the memory budget to the store (0 where the store writes from live memory).
    """

    staged: int
    total: int
    seconds: float
    durable: bool
    stored: int = 0

    @property
    def rate(self) -> float:
        """Bytes staged a second."""
        return self.staged / self.seconds if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        share = f"{self.staged / self.total:.0%}" if self.total else "0%"
        state = "durable" if self.durable else f"{share} staged"
        state += f", {size(self.stored)} stored" if self.stored and not self.durable else ""
        return f"{state} after {self.seconds:.1f} s ({self.rate / 1e6:.0f} MB/s)"


class Milestone(Generic[T]):
    """Something that an asynchronous save will have reached, or failed to. Any thread may wait for it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._future: Future[T] = Future()
        self.retrieved = False
        """has anybody been told of the failure?"""

    def wait(self, timeout: float | None = None) -> T:
        """Wait until it is reached; ``durable`` returns the :class:`ckpt.SaveReport`, ``staged`` nothing.

        Args:
            timeout: seconds (None: for ever).

        Raises:
            TimeoutError: not reached within ``timeout`` seconds; the save goes on.
            CkptError: the save has failed, with its cause: the same on every rank.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._future.result()

    def done(self) -> bool:
        """Was it reached, or will it never be?"""
        return self._future.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return why it will not be reached, or None once it is. Waits like :meth:`wait`."""
        if not self.settled(timeout):
            raise TimeoutError(f"not {self._name} after {timeout:g} s")
        error = self._future.exception()
        self.retrieved = self.retrieved or error is not None
        return error

    def settled(self, timeout: float | None = None) -> bool:
        """Wait like :meth:`wait`, but only say whether :meth:`done` is true then."""
        return bool(wait([self._future], timeout).done)

    def reach(self, result: T) -> None:
        """For the thread that saves: it is reached."""
        if not self._future.done():
            self._future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """For the thread that saves: it will never be reached."""
        if not self._future.done():
            self._future.set_exception(error)

    def peek(self) -> BaseException | None:
        """Return the failure, if there is one by now, without counting as somebody who was told."""
        return self._future.exception() if self._future.done() else None


class SaveHandle:
    """One asynchronous save of this rank.

    ``staged``: training may change the state again (the hook before the next optimizer step waits for it by itself).
    ``durable``: the checkpoint is committed.
    """

    def __init__(self, step: int | None) -> None:
        self.step = step
        """number of the checkpoint; None if the engine could not be asked for it"""
        self.staged: Milestone[None] = Milestone("staged")
        self.durable: Milestone[SaveReport] = Milestone("durable")
        self._started = time.monotonic()
        self._ended: float | None = None
        self._total = self._looked_at = self._stored = 0
        self._end: str | None = None
        self._lock = threading.Lock()
        self._committing = False

    def __repr__(self) -> str:
        return f"<SaveHandle of step {self.step}: {self.progress()}>"

    def progress(self) -> Progress:
        """Return how far this rank is."""
        seconds = (self._ended or time.monotonic()) - self._started
        durable = self.durable.done() and self.durable.peek() is None
        return Progress(self._looked_at, self._total, seconds, durable, self._stored)

    def cancel(self) -> bool:
        """End the save on all ranks, unless it is about to be committed. Returns whether it will end.

        What was written is removed. ``durable`` fails with :class:`ckpt.SaveCancelled` on all ranks, whichever of them
        have cancelled.
        """
        self.durable.retrieved = True  # whoever cancels need not be told of it by the next save
        return self.end("cancelled")

    # -- for the thread that saves, and the hook ------------------------------------------------------------------

    @property
    def ending(self) -> bool:
        """Will it fail at its next chunk?"""
        return self._end is not None

    def end(self, why: str) -> bool:
        """Make the save fail at its next chunk, unless it is done or being committed."""
        with self._lock:
            if self._committing or self.durable.done():
                return False
            self._end = self._end or why
            return True

    def expect(self, nbytes: int) -> None:
        """Learn how many bytes there are to look at."""
        self._total = nbytes

    def advance(self, nbytes: int) -> None:
        """Count bytes; raise if the save is to end."""
        self._looked_at += nbytes
        if self._end is not None:
            raise SaveCancelled(f"the save of step {self.step} was ended before its commit: {self._end}")

    def store(self, nbytes: int) -> None:
        """Count bytes that leave; raise if the save is to end."""
        self.advance(0)
        self._stored += nbytes

    def committing(self) -> None:
        """Close the door for :meth:`end`; raise if it came first."""
        with self._lock:
            self.advance(0)
            self._committing = True

    def conclude(self, run: Callable[[], SaveReport]) -> None:
        """Run the save; whatever comes of it ends in the milestones."""
        try:
            report = run()
        except BaseException as error:
            self._ended = time.monotonic()
            _let_go(error)
            self.staged.fail(error)
            self.durable.fail(error)
        else:
            self._ended = time.monotonic()
            self.staged.reach(None)
            self.durable.reach(report)


def _let_go(error: BaseException | None) -> None:
    """Keep where an error came from, but not the frames' variables: among them is the snapshot with all its copies."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
