"""``ckpt.async_save`` on the fake engine: what is in a snapshot, who is told of failures, and one at a time."""

from __future__ import annotations

import copy
import random
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.errors import ConfigError, IntegrityError, RankFailure, SaveCancelled, SaveInFlight, StoreFull
from ckpt.repo.repository import Repository
from ckpt.repo.verify import verify
from ckpt.runtime import behind
from ckpt.runtime.rng import capture_rng, restore_rng
from ckpt.store.local import LocalStore
from ckpt.store.memory import MemoryStore
from tests.harness.gates import Gate, Gated, staging_behind
from tests.property.fake import FakeEngine, comms, each, engines, load_all, run_ranks, small_model, zero1

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WORLD = 2


@pytest.fixture(autouse=True)
def own_generators() -> Iterator[None]:
    before = capture_rng()
    yield
    restore_rng(before)


def job(step: int = 1, world: int = WORLD, *, filled: bool = True) -> list[FakeEngine]:
    model = small_model(step)
    made = engines(model, zero1(model, world), world, filled=filled, at_step=step)
    for one in made:
        one.model = copy.deepcopy(model)  # each process has its own
    return made


def train(engine: FakeEngine, *, through_step: bool = True) -> None:
    """Go on to the next step: everything changes in place, behind the hook or (``through_step`` false) past it."""
    if through_step:
        p = torch.nn.Parameter(torch.zeros(1))
        torch.optim.SGD([p], lr=0.1).step()
    for shard in engine.shards:
        with torch.no_grad():
            if shard.tensor.numel():
                shard.tensor.reshape(-1)[0].zero_() if shard.tensor.dtype == torch.bool else shard.tensor.add_(1)
    engine.at_step += 1
    engine.model.objects["scheduler"]["lr"].append(0.3)


def saved_by(rank: int, made: list[FakeEngine], store: Any, **options: Any) -> Any:
    return ckpt.async_save(made[rank], store, **options)


def check_holds(store: Any, step: int) -> None:
    """The store's step is what ``small_model(step)`` says, on as many and on more ranks."""
    for world in (WORLD, 3):
        fresh = job(step, world, filled=False)
        load_all(fresh, store, step=step)
        assert [line for one in fresh for line in one.differences()] == []
        assert all(one.finished == {"scheduler": {"last": step, "lr": [0.1]}} for one in fresh)
    assert verify(Repository(store)).findings == []


def test_training_that_overtakes_is_held_back_until_it_is_staged():
    made, store, gate, finish = job(), MemoryStore(), Gate(), Gate()
    asked = threading.Barrier(WORLD, action=gate.open)

    def rank(r: int) -> Any:
        handle = saved_by(r, made, Gated(store, finish=finish.pass_through))
        assert not handle.staged.done()
        asked.wait(60)  # from here on it can be staged
        train(made[r])
        assert handle.staged.done()
        assert not handle.durable.done()
        train(made[r])
        asked.wait(60)
        finish.open()
        return handle.durable.wait(60)

    with staging_behind(gate):
        reports = each(run_ranks(comms(WORLD), rank))
    assert [one.step for one in reports] == [1, 1]
    assert reports[0].attempt == reports[1].attempt
    check_holds(store, 1)


def test_it_is_what_a_save_in_the_foreground_is():
    behind_it, there = MemoryStore(), MemoryStore()
    made = job()
    own = each(run_ranks(comms(WORLD), lambda r: saved_by(r, made, behind_it).durable.wait(60)))
    front = each(run_ranks(comms(WORLD), lambda r: ckpt.save(made[r], there)))
    for what in ("step", "bytes_held", "bytes_unique", "bytes_written", "bytes_derived", "written_by_rank"):
        assert getattr(own[0], what) == getattr(front[0], what)
    names = [sorted(key.split("/", 3)[-1] for key in one.objects) for one in (behind_it, there)]
    assert names[0] == names[1]


class Loader:
    """A user's object that gives out its own state, not a copy."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {
            "list": [1, [2]], "array": np.arange(4), "tensor": torch.arange(3.0), "view": torch.arange(6.0)[::2],
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_nothing_that_changes_after_the_call_gets_into_the_snapshot():
    made, store, gate = job(), MemoryStore(), Gate()
    changed = threading.Barrier(WORLD, action=gate.open)
    drawn: list[Any] = [None] * WORLD

    def rank(r: int) -> None:
        loader, value = Loader(), {"epochs": [1, 2]}
        torch.manual_seed(r)
        handle = saved_by(r, made, store, extra={"loader": loader, "value": value})
        drawn[r] = (random.random(), float(np.random.rand()), float(torch.rand(())))
        loader.state["list"][1].append(9)
        loader.state["array"][:] = 9
        loader.state["tensor"].fill_(9)
        loader.state["view"].fill_(9)
        value["epochs"].clear()
        made[r].model.objects["scheduler"]["last"] = 77
        for shard in made[r].shards:  # as forward does
            if shard.spec.role == "buffer":
                shard.tensor.fill_(5)
        changed.wait(60)
        handle.durable.wait(60)

    with staging_behind(gate):
        each(run_ranks(comms(WORLD), rank))
    fresh, loaders = job(filled=False), [Loader() for _ in range(WORLD)]
    reports = each(run_ranks(comms(WORLD), lambda r: ckpt.load(fresh[r], store, extra={"loader": loaders[r]})))
    assert [line for one in fresh for line in one.differences()] == []
    assert fresh[0].finished == {"scheduler": {"last": 1, "lr": [0.1]}}
    for one in loaders:
        assert one.state["list"] == [1, [2]]
        assert one.state["array"].tolist() == [0, 1, 2, 3]
        assert one.state["tensor"].tolist() == [0, 1, 2]
        assert one.state["view"].tolist() == [0, 2, 4]
    assert [one.extra["value"] for one in reports] == [{"epochs": [1, 2]}] * WORLD


def test_generators_are_saved_where_they_stood():
    made, store, gate = job(world=1), MemoryStore(), Gate()

    def draw() -> tuple[float, ...]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def rank(r: int) -> Any:
        handle = saved_by(r, made, store)
        drawn = draw()
        gate.open()
        handle.durable.wait(60)
        return drawn

    with staging_behind(gate):
        (drawn,) = each(run_ranks(comms(1), rank))
    load_all(job(world=1, filled=False), store)
    assert draw() == drawn


@pytest.mark.parametrize("role", ["param", "master", "exp_avg"])
def test_what_is_written_into_by_other_means_is_found(role: str):
    made, store, gate = job(), MemoryStore(), Gate()
    written = threading.Barrier(WORLD, action=gate.open)

    def rank(r: int) -> None:
        handle = saved_by(r, made, store)
        if r == 1:
            shard = next(s for s in made[1].shards if s.spec.fqn == "w" and s.spec.role == role)
            shard.tensor.mul_(2)
        written.wait(60)
        handle.durable.wait(60)

    with staging_behind(gate):
        results = run_ranks(comms(WORLD), rank)
    for result in results:
        assert isinstance(result, RankFailure)
        assert f"IntegrityError: w [{role}]" in str(result) or "was written into" in str(result), result
        assert list(result.failures) == [1]
    assert Repository(store).steps() == []
    assert [key for key in store.objects if key != "ckpt.json"] == []


def test_on_one_rank_it_is_an_integrity_error():
    made, store, gate = job(world=1), MemoryStore(), Gate()

    def rank(r: int) -> None:
        handle = saved_by(r, made, store)
        # Not a buffer, nor a parameter that no optimizer steps: those are copied at the call.
        next(shard for shard in made[0].shards if shard.spec.role == "exp_avg").tensor.fill_(1)
        gate.open()
        handle.durable.wait(60)

    with staging_behind(gate):
        (result,) = run_ranks(comms(1), rank)
    assert isinstance(result, IntegrityError)
    assert "was written into before its snapshot was staged" in str(result)


# ------------------------------------------------------------------------------------------------------ failures


def breaks() -> None:
    raise StoreFull("no space left", "k")


def never() -> None:
    """Do nothing."""


def failing(store: Any, r: int, bad: int = 1) -> Gated:
    return Gated(store, finish=breaks if r == bad else never)


def fail_once(r: int, made: list[FakeEngine], store: Any) -> Any:
    """Save to a store that is full on rank 1, train on, and wait until it has failed without asking the handle."""
    handle = saved_by(r, made, failing(store, r))
    train(made[r])
    behind.wait_for_last()
    return handle


def same_failure(results: list[Any], text: str) -> None:
    for result in results:
        assert isinstance(result, RankFailure), result
        assert text in str(result)
        assert result.failures == results[0].failures


@pytest.mark.parametrize("bad", range(WORLD))
def test_a_failure_of_one_rank_is_the_same_on_all_handles_and_the_next_save_works(bad: int):
    made, store = job(), MemoryStore()

    def rank(r: int) -> Any:
        handle = saved_by(r, made, failing(store, r, bad))
        train(made[r])
        error = handle.durable.exception(60)
        report = saved_by(r, made, store).durable.wait(60)
        assert report.step == 2
        return error

    results = each_but_errors(run_ranks(comms(WORLD), rank))
    same_failure(results, f"rank {bad}: StoreFull: no space left")
    assert Repository(store).steps() == [2]


def each_but_errors(results: list[Any]) -> list[Any]:
    """Errors that a rank has returned, not those that it ended with."""
    assert all(isinstance(result, BaseException) for result in results), results
    return results


@pytest.mark.parametrize("call", [ckpt.save, ckpt.async_save])
@pytest.mark.parametrize("heard", [(), (0,), (1,), (0, 1)])
def test_the_next_call_raises_it_on_all_ranks_unless_all_have_heard(call: Callable[..., Any], heard: tuple[int, ...]):
    made, store = job(), MemoryStore()

    def rank(r: int) -> Any:
        handle = fail_once(r, made, store)
        if r in heard:
            assert handle.staged.exception() is None
            assert handle.durable.exception() is not None
        told: Any = None
        try:
            call(made[r], store)
            behind.wait_for_last()
        except RankFailure as error:
            told = error
            train(made[r])
            call(made[r], store)  # once is enough
            behind.wait_for_last()
        return told

    results = run_ranks(comms(WORLD), rank)
    if len(heard) == WORLD:
        assert results == [None, None]
        assert Repository(store).steps() == [2]
    else:
        same_failure(results, "rank 1: StoreFull: no space left")
        assert Repository(store).steps() == [3]


@pytest.mark.parametrize("calls", [(ckpt.save, ckpt.async_save), (ckpt.async_save, ckpt.save)])
@pytest.mark.parametrize("how", ["still waits", "has given up", "has dealt with it"])
def test_a_rank_that_did_not_call_hears_of_it_as_well(calls: tuple[Callable[..., Any], ...], how: str):
    made, store, given_up, together = job(), MemoryStore(), threading.Event(), threading.Barrier(WORLD)

    def rank(r: int) -> Any:
        told = []
        saved_by(r, made, store, step=0).durable.wait(60)  # the first call of a job is a meeting
        if r == 0:
            handle = saved_by(r, made, store, timeout=0.3)
            if how != "still waits":
                behind.wait_for_last()
            if how == "has dealt with it":
                assert handle.durable.exception() is not None
            given_up.set()
        given_up.wait(60)
        for call in (*calls, *calls):
            together.wait(60)  # as the training's collectives do
            made[r].at_step += 1
            try:
                call(made[r], store, timeout=2)
            except ckpt.CkptError as error:
                told.append(str(error))
        behind.wait_for_last()
        return told

    results = each(run_ranks(comms(WORLD), rank))
    if how != "still waits":
        assert len(results[1]) == 1
        assert "rank 1: did not call ckpt.async_save within 0.3 s" in results[1][0]
        assert results[0] == results[1]
    # Otherwise its next call was taken for the one that it owed, and a rank waits in vain once more.
    assert max(len(told) for told in results) <= 2
    assert Repository(store).steps()[-1] == 5
    check_last = job(5, filled=False)
    load_all(check_last, store, step=5)


def test_what_one_rank_cannot_describe_fails_for_all():
    made, store = job(), MemoryStore()

    def rank(r: int) -> Any:
        if r == 1:
            made[1].describe = refuse  # type: ignore[method-assign]
        handle = saved_by(r, made, store)
        assert (handle.step is None) == (r == 1)
        train(made[r])
        error = handle.durable.exception(60)
        if r == 1:
            del made[1].describe
        saved_by(r, made, store).durable.wait(60)
        return error

    def refuse() -> Any:
        raise ConfigError("gradients are pending")

    results = run_ranks(comms(WORLD), rank)
    same_failure(results, "rank 1: ConfigError: gradients are pending")
    assert Repository(store).steps() == [2]


@pytest.mark.parametrize(
    ("options", "text"),
    [({"on_busy": "queue"}, "on_busy='queue'"), ({"timeout": 0}, "timeout=0"), ({"timeout": "x"}, "timeout")],
)
def test_a_wrong_argument_is_refused_in_the_call(options: dict[str, Any], text: str):
    made = job(world=1)
    with pytest.raises(ConfigError, match=text):
        ckpt.async_save(made[0], MemoryStore(), **options)


@pytest.mark.parametrize("options", [{"codec": "lzma"}, {"budget": 1}, {"on_divergence": "shrug"}, {"step": -1}])
def test_an_argument_that_is_wrong_on_one_rank_fails_for_all(options: dict[str, Any]):
    made, store = job(), MemoryStore()

    def rank(r: int) -> Any:
        error = saved_by(r, made, store, **(options if r else {})).durable.exception(60)
        saved_by(r, made, store).durable.wait(60)
        return error

    for result in run_ranks(comms(WORLD), rank):
        assert isinstance(result, ckpt.CkptError), result
    assert Repository(store).steps() == [1]


# ------------------------------------------------------------------------------------------------- one at a time


def test_the_next_call_waits_for_the_last_one():
    made, store, finish = job(), MemoryStore(), Gate()
    order: list[str] = []

    def rank(r: int) -> None:
        first = saved_by(r, made, Gated(store, finish=finish.pass_through))
        train(made[r])
        if r == 0:
            finish.open_when(finish.reached)
        second = saved_by(r, made, store)
        assert first.durable.done()
        order.append(f"{r}")
        assert (first.durable.wait(60).step, second.durable.wait(60).step) == (1, 2)

    each(run_ranks(comms(WORLD), rank))
    assert Repository(store).steps() == [1, 2]
    check_holds(store, 1)


def test_a_busy_save_can_be_refused_by_all_ranks_alike():
    made, store, finish = job(), MemoryStore(), Gate()

    def rank(r: int) -> Any:
        # Rank 1 has written all it has; the job is busy all the same.
        first = saved_by(r, made, Gated(store, finish=finish.pass_through if r == 0 else never))
        train(made[r])
        refused: Any = None
        try:
            saved_by(r, made, store, on_busy="refuse")
        except SaveInFlight as error:
            refused = error
        both.wait(60)
        first.durable.wait(60)
        assert saved_by(r, made, store, on_busy="refuse").durable.wait(60).step == 2
        return refused

    both = threading.Barrier(WORLD, action=finish.open)
    results = run_ranks(comms(WORLD), rank)
    assert all(isinstance(one, SaveInFlight) for one in results), results
    assert str(results[0]) == str(results[1])
    assert "not durable yet on rank(s) 0, 1" in str(results[0])
    assert Repository(store).steps() == [1, 2]


@pytest.mark.parametrize("heard", [False, True])
def test_a_refusing_call_raises_what_failed_before(heard: bool):
    made, store = job(), MemoryStore()

    def rank(r: int) -> Any:
        handle = fail_once(r, made, store)
        if heard:
            handle.durable.exception()
        try:
            return saved_by(r, made, store, on_busy="refuse").durable.wait(60).step
        except RankFailure as error:
            assert saved_by(r, made, store, on_busy="refuse").durable.wait(60).step == 2
            return error

    results = run_ranks(comms(WORLD), rank)
    if heard:
        assert results == [2, 2]
    else:
        same_failure(results, "StoreFull")


def test_save_and_load_wait_for_what_is_in_flight():
    made, store, finish = job(), MemoryStore(), Gate()

    def rank(r: int) -> Any:
        saved_by(r, made, Gated(store, finish=finish.pass_through))
        train(made[r])
        if r == 0:
            finish.open_when(finish.reached)
        loaded = ckpt.load(made[r], store)  # the one in flight: there is no other
        assert made[r].differences() == []
        saved_by(r, made, store, step=2)
        return loaded.step, ckpt.save(made[r], store, step=3).step

    assert each(run_ranks(comms(WORLD), rank)) == [(1, 3), (1, 3)]
    assert Repository(store).steps() == [1, 2, 3]


# --------------------------------------------------------------------------------------------------------- cancel


@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("phase", ["stage", "write"])
def test_cancelled_before_the_commit_nothing_is_left(phase: str, who: tuple[int, ...]):
    made, store = job(), MemoryStore()
    stage, finish = Gate(opened=phase == "write"), Gate()
    gate = stage if phase == "stage" else finish
    ready = threading.Barrier(WORLD)

    def rank(r: int) -> Any:
        handle = saved_by(r, made, Gated(store, finish=finish.pass_through))
        gate.await_visitor()
        if phase == "write":
            handle.staged.wait(60)
        ready.wait(60)
        if r in who:
            assert handle.cancel()
        ready.wait(60)
        stage.open()
        finish.open()
        train(made[r])
        error = handle.durable.exception(60)
        saved_by(r, made, store).durable.wait(60)
        return error

    with staging_behind(stage):
        results = run_ranks(comms(WORLD), rank)
    assert all(isinstance(one, SaveCancelled) for one in results), results
    assert {str(one) for one in results} == {"the save of step 1 was ended before its commit: cancelled"}
    assert Repository(store).steps() == [2]
    assert not [key for key in store.objects if key.startswith("steps/1/")]


def test_cancelled_on_a_disk_no_folders_are_left(tmp_path):
    made, store, stage = job(), LocalStore(str(tmp_path)), Gate()

    def rank(r: int) -> Any:
        handle = saved_by(r, made, store)
        stage.await_visitor()
        assert handle.cancel()
        stage.open()
        return handle.durable.exception(60)

    with staging_behind(stage):
        assert all(isinstance(one, SaveCancelled) for one in run_ranks(comms(WORLD), rank))
    assert Repository(store).started() == []


def test_cancelled_at_once():
    made, store = job(), MemoryStore()

    def rank(r: int) -> Any:
        handle = saved_by(r, made, store)
        handle.cancel()
        return handle.durable.exception(60)

    results = run_ranks(comms(WORLD), rank)
    # It may have been too late on a rank: then nothing was cancelled there; what counts is that all ranks say the same.
    assert len({type(one) for one in results}) == 1
    assert (Repository(store).steps() == [1]) == (results[0] is None)


def test_what_is_being_committed_is_not_cancelled():
    made, store, commit = job(), MemoryStore(), Gate()

    def rank(r: int) -> Any:
        handle = saved_by(r, made, Gated(store, commit=commit.pass_through))
        commit.await_visitor()
        assert not handle.cancel()
        both.wait(60)
        report = handle.durable.wait(60)
        assert not handle.cancel()
        return report.step

    both = threading.Barrier(WORLD, action=commit.open)
    assert each(run_ranks(comms(WORLD), rank)) == [1, 1]
    assert Repository(store).steps() == [1]


def test_progress_comes_to_all_that_a_rank_holds():
    made, store = job(), MemoryStore()

    def rank(r: int) -> Any:
        handle = saved_by(r, made, store)
        handle.durable.wait(60)
        return handle.progress()

    for progress in each(run_ranks(comms(WORLD), rank)):
        assert progress.staged == progress.total > 0
        assert progress.durable


def test_many_in_a_row_leave_no_threads_behind():
    made, store = job(), MemoryStore()

    def rank(r: int) -> None:
        for _ in range(20):
            saved_by(r, made, store)
            train(made[r])
        behind.wait_for_last()

    before = threading.active_count()
    each(run_ranks(comms(WORLD), rank))
    for thread in threading.enumerate():
        if thread.name.startswith("ckpt save"):
            thread.join(60)
    assert threading.active_count() <= before
    assert Repository(store).steps() == list(range(1, 21))
    assert not behind._patience
