"""Ranks as threads over one ``HashStore``: what any of them does, all come to the same end within the timeout."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from ckpt.errors import CheckpointExists, CkptError, ConfigError, NoSuchCheckpoint, RankFailure, StoreFull
from ckpt.runtime import comm as module
from ckpt.runtime.comm import Comm, default_timeout
from ckpt.runtime.torch_comm import communicator

if TYPE_CHECKING:
    from collections.abc import Callable

LONG = 60.0
"""Seconds that no test may need: what waits for this timeout has failed."""


class Job:
    """N ranks with a shared store; ``run`` gives each rank's result or exception."""

    def __init__(self, world: int) -> None:
        self.kv = dist.HashStore()
        self.kv.set_timeout(timedelta(seconds=5))
        self.comms = [Comm(self.kv, rank, world) for rank in range(world)]

    def run(self, work: Callable[[Comm], Any], only: tuple[int, ...] | None = None) -> dict[int, Any]:
        results: dict[int, Any] = {}

        def one(comm: Comm) -> None:
            try:
                results[comm.rank] = work(comm)
            except BaseException as error:  # the test looks at it
                results[comm.rank] = error

        chosen = [c for c in self.comms if only is None or c.rank in only]
        threads = [threading.Thread(target=one, args=(c,), daemon=True) for c in chosen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
            assert not thread.is_alive(), "a rank hangs"
        return results


def fail(error: BaseException) -> Any:
    raise error


def same_failure(results: dict[int, Any], step: str, failures: dict[int, str]) -> None:
    for rank, result in results.items():
        assert isinstance(result, RankFailure), (rank, result)
        assert result.step == step
        assert result.failures == failures


@pytest.fixture
def job() -> Job:
    return Job(3)


def test_all_succeed_and_each_gets_its_own_result(job):
    def work(comm: Comm) -> Any:
        comm.enter("save", LONG)
        own = comm.run("a", lambda: comm.rank * 10)
        return own, comm.gather("b", lambda: bytes([comm.rank]) * comm.rank), comm.on_root("c", lambda: b"root")

    assert job.run(work) == {r: (r * 10, [b"", b"\1", b"\2\2"], b"root") for r in range(3)}


def test_gather_of_nothing_and_of_megabytes(job):
    def work(comm: Comm) -> Any:
        comm.enter("save", LONG)
        return comm.gather("a", lambda: b""), [len(x) for x in comm.gather("b", lambda: bytes(comm.rank << 20))]

    assert job.run(work) == {r: ([b""] * 3, [0, 1 << 20, 2 << 20]) for r in range(3)}


def test_on_root_runs_on_rank_0_only(job):
    ran: list[int] = []

    def work(comm: Comm) -> None:
        comm.enter("save", LONG)
        comm.on_root("a", lambda: ran.append(comm.rank) or b"")

    job.run(work)
    assert ran == [0]


@pytest.mark.parametrize("error", [StoreFull("no space", "k"), ValueError("bad"), OSError(5, "I/O")], ids=repr)
def test_one_raises_and_all_raise_the_same(job, error):
    def work(comm: Comm) -> None:
        comm.enter("save", LONG)
        comm.run("before", lambda: None)
        comm.run("write", lambda: fail(error) if comm.rank == 1 else None)

    same_failure(job.run(work), "write", {1: f"{type(error).__name__}: {error}"})


def test_an_error_with_a_name_that_is_not_utf8_reaches_the_peers(job):
    def work(comm: Comm) -> None:
        comm.enter("save", LONG)
        comm.run("write", lambda: fail(StoreFull("in /data/\udcff", "k")) if comm.rank == 1 else None)

    same_failure(job.run(work), "write", {1: "StoreFull: in /data/\\udcff"})


def test_all_raise_the_same_class_and_each_raises_its_own(job):
    """A wrong argument on all ranks must read like one, not like a failure of the job."""

    def work(comm: Comm) -> None:
        comm.enter("save", LONG)
        comm.run("describe", lambda: fail(ConfigError(f"rank {comm.rank} is wrong")))

    results = job.run(work)
    assert {r: (type(e), str(e)) for r, e in results.items()} == {
        r: (ConfigError, f"rank {r} is wrong") for r in range(3)
    }


def test_different_errors_and_foreign_errors_on_all_are_a_rank_failure(job):
    def work(comm: Comm) -> None:
        comm.enter("save", LONG)
        comm.run("a", lambda: fail([StoreFull("x"), ConfigError("y"), StoreFull("z")][comm.rank]))

    same_failure(job.run(work), "a", {0: "StoreFull: x", 1: "ConfigError: y", 2: "StoreFull: z"})

    def foreign(comm: Comm) -> None:
        comm.enter("save", LONG)
        comm.run("a", lambda: fail(ValueError("x")))

    same_failure(job.run(foreign), "a", dict.fromkeys(range(3), "ValueError: x"))


@pytest.mark.parametrize("error", [NoSuchCheckpoint("none in /x"), CheckpointExists("step 1")], ids=repr)
def test_an_error_of_the_root_arrives_with_its_own_type(job, error):
    def work(comm: Comm) -> None:
        comm.enter("load", LONG)
        comm.on_root("pick", lambda: fail(error))

    for result in job.run(work).values():
        assert type(result) is type(error)
        assert str(result) == str(error)


def test_a_foreign_error_of_the_root_is_the_same_failure_on_all(job):
    """Rank 0 raised RankFailure and the others a bare CkptError: handlers would take different ways."""

    def work(comm: Comm) -> None:
        comm.enter("load", LONG)
        comm.on_root("pick", lambda: fail(KeyError("x")))

    same_failure(job.run(work), "pick", {0: "KeyError: 'x'"})


def test_after_a_failure_the_next_operation_works(job):
    def work(comm: Comm) -> Any:
        seen = []
        for n in range(4):
            comm.enter("save", LONG)
            try:
                seen.append(
                    comm.run("a", lambda n=n: fail(StoreFull("x")) if n % 2 == 0 and comm.rank == n // 2 else n)
                )
            except RankFailure as error:
                seen.append(sorted(error.failures))
        return seen

    assert job.run(work) == {r: [[0], 1, [1], 3] for r in range(3)}


def test_rank_0_alone_is_told_who_is_missing_and_the_next_common_entry_works(job):
    alone = job.run(lambda comm: comm.enter("save", 0.2), only=(0,))
    same_failure(
        alone, "enter save", dict.fromkeys((1, 2), "did not call ckpt.save within 0.2 s (every rank must call it)")
    )
    again = job.run(lambda comm: comm.enter("save", 0.2), only=(0,))
    same_failure(
        again, "enter save", dict.fromkeys((1, 2), "did not call ckpt.save within 0.2 s (every rank must call it)")
    )
    assert job.run(lambda comm: (comm.enter("save", LONG), comm.run("a", lambda: comm.rank))[1]) == {0: 0, 1: 1, 2: 2}


def test_those_who_wait_together_blame_only_the_one_who_never_came(job):
    """The first to give up took its arrival back, and the next to give up named it as missing."""
    results = job.run(lambda comm: comm.enter("save", 0.1 + 0.4 * comm.rank), only=(0, 1))
    same_failure(results, "enter save", {2: "did not call ckpt.save within 0.1 s (every rank must call it)"})
    assert job.run(lambda comm: (comm.enter("save", LONG), comm.run("a", lambda: comm.rank))[1]) == {0: 0, 1: 1, 2: 2}


def test_ranks_that_give_up_in_the_moment_in_which_the_last_one_comes_stay_together(job):
    """Two ranks took back their arrivals just as the third completed the entry: it went on alone."""
    rng = random.Random(7)
    for _ in range(60):
        delays = [rng.uniform(0, 0.004) for _ in range(3)]

        def work(comm: Comm, delays: list[float] = delays) -> bool:
            time.sleep(delays[comm.rank])  # the race itself: the timeouts below end about when the others come
            try:
                comm.enter("save", 0.002)
            except RankFailure:
                return False
            return True

        entered = list(job.run(work).values())
        assert len(set(entered)) == 1, "an entry is complete for all or for nobody"
    final = job.run(lambda comm: (comm.enter("save", LONG), comm.operation)[1])
    assert len(set(final.values())) == 1


def test_one_after_the_other_is_told_that_the_peer_has_been_there():
    job = Job(2)
    same_failure(
        job.run(lambda comm: comm.enter("save", 0.1), only=(0,)),
        "enter save",
        {1: "did not call ckpt.save within 0.1 s (every rank must call it)"},
    )
    late = job.run(lambda comm: comm.enter("save", 0.1), only=(1,))
    same_failure(late, "enter save", {0: "called ckpt.save earlier and had given up waiting"})


def test_a_rank_that_dies_in_a_step_fails_the_others_within_the_timeout(job):
    def work(comm: Comm) -> Any:
        comm.enter("save", 0.5)
        comm.run("a", lambda: None)
        if comm.rank == 2:
            return "dead"
        return comm.run("write", lambda: None)

    results = job.run(work)
    assert results.pop(2) == "dead"
    same_failure(results, "write", {2: "did not arrive and gave no sign for 0.5 s"})


def test_the_survivors_of_a_dead_rank_agree_even_if_they_wait_in_different_steps(job):
    def work(comm: Comm) -> Any:
        comm.enter("save", 0.5)
        if comm.rank == 2:
            return None
        return comm.run("a", lambda: None) or comm.run("b", lambda: None)

    results = job.run(work)
    results.pop(2)
    same_failure(results, "a", {2: "did not arrive and gave no sign for 0.5 s"})


def test_a_slow_rank_that_shows_signs_of_life_is_waited_for(job, monkeypatch):
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.02)
    looked: list[float] = []
    real = module.silent
    monkeypatch.setattr(module, "silent", lambda *rest: looked.append(1) or real(*rest))

    def slow(comm: Comm) -> str:
        # Until the others have looked for longer than the timeout: a look comes every quarter of it.
        while len(looked) < 16:
            comm.beat()
            time.sleep(0.005)
        return "done"

    def work(comm: Comm) -> Any:
        comm.enter("save", 1.0)
        return comm.run("write", lambda: slow(comm) if comm.rank == 1 else "quick")

    assert job.run(work) == {0: "quick", 1: "done", 2: "quick"}


def test_a_rank_that_was_given_up_gets_the_same_error_when_it_comes(job):
    given_up = threading.Event()

    def work(comm: Comm) -> Any:
        comm.enter("save", 0.4)
        if comm.rank == 1:
            given_up.wait(LONG)
        try:
            comm.run("a", lambda: None)
            return comm.run("b", lambda: None)
        finally:
            given_up.set()

    same_failure(job.run(work), "a", {1: "did not arrive and gave no sign for 0.4 s"})
    assert job.run(lambda comm: (comm.enter("save", LONG), comm.run("a", lambda: comm.rank))[1]) == {0: 0, 1: 1, 2: 2}


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_rank_tells_the_others_before_it_goes(job, stop):
    def work(comm: Comm) -> Any:
        comm.enter("save", LONG)
        return comm.run("write", lambda: fail(stop()) if comm.rank == 0 else None)

    results = job.run(work)
    assert isinstance(results.pop(0), stop)
    same_failure(results, "write", {0: f"{stop.__name__}: {stop.__name__}"})


def test_a_transport_that_loses_a_peer_is_the_same_failure_on_all(job, monkeypatch):
    def exchange(self: Comm, payload: bytes) -> list[bytes]:
        if self.rank == 1:
            raise RuntimeError("Connection reset by peer\nmore")
        return [payload] * self.world

    monkeypatch.setattr(Comm, "_exchange", exchange)

    def work(comm: Comm) -> Any:
        comm.enter("save", LONG)
        comm.gather("digests", lambda: b"x")
        return comm.run("write", lambda: None)

    same_failure(job.run(work), "digests", {1: "lost a peer (Connection reset by peer)"})


def test_a_rank_that_comes_late_finds_that_the_step_has_failed(job):
    """It used to complete the step alone, and then hung in a collective that the others had given up."""
    others_are_gone = threading.Barrier(3)

    def work(comm: Comm) -> Any:
        comm.enter("save", 0.3)
        try:
            return comm.gather("describe", lambda: others_are_gone.wait(LONG) and b"" if comm.rank == 1 else b"")
        finally:
            if comm.rank != 1:
                others_are_gone.wait(LONG)

    same_failure(job.run(work), "describe", {1: "did not arrive and gave no sign for 0.3 s"})


def test_rank_0_cannot_succeed_in_what_the_others_have_given_up(job):
    """A commit that took longer than the timeout was a success on rank 0 and a failure elsewhere."""
    others_are_gone = threading.Barrier(3)

    def work(comm: Comm) -> Any:
        comm.enter("save", 0.3)
        try:
            return comm.on_root("commit", lambda: b"%d" % others_are_gone.wait(LONG))
        finally:
            if comm.rank:
                others_are_gone.wait(LONG)

    same_failure(job.run(work), "commit", {0: "did not arrive and gave no sign for 0.3 s"})


def test_an_interrupted_entry_does_not_count(job, monkeypatch):
    """Its arrival stayed counted, and the next call of the same rank entered alone."""
    real = time.sleep

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ckpt.runtime.comm.time.sleep", interrupt)
    assert isinstance(job.run(lambda comm: comm.enter("save", LONG), only=(0,))[0], KeyboardInterrupt)
    monkeypatch.setattr("ckpt.runtime.comm.time.sleep", real)
    again = job.run(lambda comm: comm.enter("save", 0.2), only=(0,))
    same_failure(
        again, "enter save", dict.fromkeys((1, 2), "did not call ckpt.save within 0.2 s (every rank must call it)")
    )
    assert job.run(lambda comm: (comm.enter("save", LONG), comm.run("a", lambda: comm.rank))[1]) == {0: 0, 1: 1, 2: 2}


def test_a_rank_that_leaves_by_an_error_between_two_steps_takes_the_others_along(job):
    def work(comm: Comm) -> Any:
        with comm.joint("save", LONG):
            comm.run("a", lambda: None)
            if comm.rank == 2:
                raise ValueError("between")
            comm.run("b", lambda: None)

    results = job.run(work)
    assert isinstance(results.pop(2), ValueError)
    same_failure(results, "save", {2: "ValueError: between"})
    assert job.run(lambda comm: (comm.enter("save", LONG), comm.run("a", lambda: comm.rank))[1]) == {0: 0, 1: 1, 2: 2}


@pytest.mark.parametrize("seconds", ["10", float("nan"), float("inf"), 0, -1, True, b"1"])
def test_a_timeout_that_is_no_number_of_seconds_is_refused_before_arrival(job, seconds):
    for result in job.run(lambda comm: comm.enter("save", seconds), only=(0,)).values():
        assert isinstance(result, ConfigError)
    alone = job.run(lambda comm: comm.enter("save", 0.1), only=(0,))
    same_failure(
        alone, "enter save", dict.fromkeys((1, 2), "did not call ckpt.save within 0.1 s (every rank must call it)")
    )


def test_keys_do_not_accumulate(job):
    """A job saves tens of thousands of times through one rendezvous store."""

    def work(times: int) -> Callable[[Comm], None]:
        def one(comm: Comm) -> None:
            for n in range(times):
                comm.enter("save", LONG)
                comm.run("a", lambda: None)
                comm.gather("b", lambda: b"x" * 100)
                comm.on_root("c", lambda: b"y")
                with suppress(CkptError):
                    comm.run("d", lambda n=n: fail(StoreFull("x")) if n % 3 == comm.rank else None)

        return one

    job.run(work(5))
    before = job.kv.num_keys()
    job.run(work(100))
    assert job.kv.num_keys() <= before


def test_one_rank_needs_no_store():
    comm = Comm(None, 0, 1)
    comm.enter("save", 1)
    comm.beat()
    assert comm.run("a", lambda: 5) == 5
    assert comm.gather("b", lambda: b"x") == [b"x"]
    assert comm.on_root("c", lambda: b"y") == b"y"
    for step in (comm.run, comm.gather, comm.on_root):
        with pytest.raises(ValueError, match="as it is"):
            step("d", lambda: fail(ValueError("as it is")))
    with pytest.raises(ConfigError, match="several ranks"):
        _ = comm.store


def test_without_a_process_group_there_is_one_rank():
    assert communicator().world == 1


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "nan", "inf "])
def test_a_timeout_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv("CKPT_TIMEOUT", text)
    with pytest.raises(ConfigError, match="CKPT_TIMEOUT"):
        default_timeout()


def test_the_timeout_of_the_environment(monkeypatch):
    monkeypatch.setenv("CKPT_TIMEOUT", "1.5")
    assert default_timeout() == 1.5
    monkeypatch.delenv("CKPT_TIMEOUT")
    assert default_timeout() == 300
