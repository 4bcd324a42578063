"""The handle alone: its milestones, its progress, and the race between an end and the commit."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from ckpt.errors import RankFailure, SaveCancelled
from ckpt.runtime.handle import Milestone, Progress, SaveHandle


def concluded(handle: SaveHandle, outcome: object) -> SaveHandle:
    """Let a save end with a report or by an error."""

    def run() -> object:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    handle.conclude(run)  # type: ignore[arg-type]
    return handle


def test_a_milestone_is_waited_for_and_gives_its_result():
    one: Milestone[int] = Milestone("durable")
    assert not one.done()
    with pytest.raises(TimeoutError, match=r"not durable after 0.01 s"):
        one.wait(0.01)
    with pytest.raises(TimeoutError):
        one.exception(0.01)
    one.reach(7)
    assert one.done()
    assert (one.wait(), one.exception(), one.peek(), one.retrieved) == (7, None, None, False)


def test_a_timeout_is_not_the_end():
    one: Milestone[None] = Milestone("staged")
    with pytest.raises(TimeoutError):
        one.wait(0.001)
    one.fail(RankFailure("write", {1: "gone"}))
    with pytest.raises(RankFailure, match="gone"):
        one.wait(0.001)


def test_who_waits_in_another_thread_is_woken():
    one: Milestone[int] = Milestone("durable")
    got: list[int] = []
    waiter = threading.Thread(target=lambda: got.append(one.wait(60)))
    waiter.start()
    one.reach(3)
    waiter.join(60)
    assert got == [3]


def test_a_failure_counts_as_heard_only_when_somebody_was_told():
    one: Milestone[None] = Milestone("staged")
    one.fail(RankFailure("digest", {0: "x"}))
    assert isinstance(one.peek(), RankFailure)
    assert one.settled(0)
    assert not one.retrieved
    assert isinstance(one.exception(), RankFailure)
    assert one.retrieved


def test_the_first_outcome_of_a_milestone_counts():
    one: Milestone[int] = Milestone("durable")
    one.reach(1)
    one.fail(ValueError())
    one.reach(2)
    assert one.wait() == 1


@pytest.mark.parametrize(
    ("progress", "shown", "rate"),
    [
        (Progress(0, 0, 0.0, False), "0% staged after 0.0 s (0 MB/s)", 0.0),
        (Progress(50, 200, 2.0, False), "25% staged after 2.0 s (0 MB/s)", 25.0),
        (Progress(3_000_000, 3_000_000, 1.5, True), "durable after 1.5 s (2 MB/s)", 2_000_000.0),
    ],
)
def test_progress(progress: Progress, shown: str, rate: float):
    assert (str(progress), progress.rate) == (shown, rate)


def test_progress_follows_the_save_and_stops_with_it():
    handle = SaveHandle(4)
    handle.expect(10)
    handle.advance(4)
    assert (handle.progress().staged, handle.progress().total, handle.progress().durable) == (4, 10, False)
    assert "step 4: 40% staged" in repr(handle)
    concluded(handle, "report")
    first = handle.progress()
    assert first.durable
    assert handle.progress() == first  # the clock stands still


def test_a_failed_save_is_not_durable_in_its_progress():
    handle = concluded(SaveHandle(4), RankFailure("write", {0: "x"}))
    assert not handle.progress().durable
    for one in (handle.staged, handle.durable):
        with pytest.raises(RankFailure):
            one.wait()


def test_staging_that_was_reached_stays_reached_when_the_save_fails_later():
    handle = SaveHandle(4)
    handle.staged.reach(None)
    concluded(handle, RankFailure("write", {0: "x"}))
    handle.staged.wait()
    with pytest.raises(RankFailure):
        handle.durable.wait()


def test_a_cancelled_save_ends_at_its_next_chunk():
    handle = SaveHandle(4)
    handle.advance(1)
    assert handle.cancel()
    assert handle.ending
    with pytest.raises(SaveCancelled, match="step 4 was ended before its commit: cancelled"):
        handle.advance(1)
    with pytest.raises(SaveCancelled):
        handle.committing()


def test_the_first_reason_is_told():
    handle = SaveHandle(4)
    assert handle.end("no progress")
    assert handle.cancel()
    with pytest.raises(SaveCancelled, match="no progress"):
        handle.committing()


def test_what_is_being_committed_cannot_be_cancelled():
    handle = SaveHandle(4)
    handle.committing()
    assert not handle.cancel()
    handle.advance(1)


@pytest.mark.parametrize("outcome", ["report", RankFailure("write", {0: "x"})])
def test_what_has_ended_cannot_be_cancelled(outcome: object):
    assert not concluded(SaveHandle(4), outcome).cancel()


def test_a_failure_does_not_keep_the_snapshot_alive():
    class Snapshot:
        pass

    gone: list[weakref.ref[Snapshot]] = []

    def run() -> None:
        held = Snapshot()
        gone.append(weakref.ref(held))
        try:
            raise ValueError("inside")
        except ValueError as error:
            raise RankFailure("write", {0: "x"}) from error

    handle = SaveHandle(4)
    handle.conclude(run)  # type: ignore[arg-type]
    gc.collect()
    assert gone[0]() is None
    error = handle.durable.peek()
    assert error is not None
    assert isinstance(error.__cause__, ValueError)
    assert error.__traceback__ is not None


def test_a_save_that_is_ended_ends_at_the_next_part_that_leaves():
    """Else it would fill the store with all that the memory budget holds first."""
    handle = SaveHandle(1)
    handle.store(7)
    assert handle.progress().stored == 7
    handle.cancel()
    with pytest.raises(SaveCancelled, match="ended before its commit"):
        handle.store(1)
