"""``ckpt.on_preemption``: whoever is told and whenever, all ranks save once, at one step."""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckpt
from ckpt.errors import ConfigError, RankFailure, StoreFull
from ckpt.repo.repository import Repository
from ckpt.store.memory import MemoryStore
from tests.harness.gates import Gate, Gated
from tests.property.fake import FakeEngine, comms, each, engines, run_ranks, small_model, zero1

if TYPE_CHECKING:
    from collections.abc import Callable

BY_HAND: dict[str, Any] = {"signals": (), "then": "continue"}


def job(world: int) -> list[FakeEngine]:
    model = small_model()
    return engines(model, zero1(model, world), world, filled=True, at_step=0)


def loop(
    world: int,
    store: Any,
    told: dict[int, int],
    *,
    collective: bool = True,
    pace: Callable[[int, int], None] = lambda r, step: None,
    **options: Any,
) -> list[Any]:
    """Train until the preemption is over; ``told``: rank -> the step in which it gets the notice.

    ``collective``: does a step need all ranks? Returns each rank's object.
    """
    made, together = job(world), threading.Barrier(world)

    def rank(r: int) -> Any:
        watch = ckpt.on_preemption(made[r], store, **{**BY_HAND, **options})
        for step in range(1, 1_000_000):
            if collective:
                together.wait(60)
            pace(r, step)
            if told.get(r) == step:
                watch.request()
            made[r].at_step = step
            watch.check()
            if watch.saved is not None or watch.error is not None:
                break
        return watch

    return run_ranks(comms(world), rank)


@pytest.mark.parametrize("told", [{0: 3}, {2: 3}, {0: 3, 1: 3, 2: 3}, {0: 3, 1: 4}, {1: 5, 2: 3}, {0: 1}])
def test_whoever_is_told_all_save_once_at_one_step(told: dict[int, int]):
    store = MemoryStore()
    found = each(loop(3, store, told))
    first = min(told.values())
    (step,) = {one.saved.step for one in found}
    assert first < step <= first + 3
    assert Repository(store).steps() == [step]
    assert all(one.requested for one in found)


@pytest.mark.parametrize("seed", range(15))
def test_ranks_that_are_a_step_apart_agree(seed: int):
    """A collective lets a rank be as far as the next one: that is as far apart as they can be."""
    draw = random.Random(seed)
    world = draw.choice([2, 3, 4])
    told = {r: draw.randint(1, 6) for r in draw.sample(range(world), draw.randint(1, world))}
    pauses = {(r, step): draw.random() * 0.004 for r in range(world) for step in range(1, 20)}
    store, wait = MemoryStore(), threading.Event()
    found = each(loop(world, store, told, pace=lambda r, step: wait.wait(pauses.get((r, step), 0)) and None))
    (step,) = {one.saved.step for one in found}
    assert min(told.values()) < step <= min(told.values()) + 3
    assert Repository(store).steps() == [step]


@pytest.mark.parametrize("fast", [0, 1])
@pytest.mark.parametrize("teller", [0, 1])
def test_ranks_that_nothing_keeps_together_catch_up_with_the_one_ahead(fast: int, teller: int):
    store, ahead, begun = MemoryStore(), threading.Event(), threading.Event()

    def pace(r: int, step: int) -> None:
        if r == fast and step == 30:
            ahead.set()
        if r == fast and step == 31:
            begun.wait(60)
        if r != fast and step == 2:
            ahead.wait(60)
            begun.set()

    told = {fast: 30} if teller == fast else {1 - fast: 3}
    found = each(loop(2, store, told, collective=False, pace=pace))
    (step,) = {one.saved.step for one in found}
    assert step > 30
    assert Repository(store).steps() == [step]


def test_a_rank_that_does_not_come_is_named():
    made, store = job(2), MemoryStore()
    said, learnt = threading.Event(), threading.Event()

    def rank(r: int) -> Any:
        watch = ckpt.on_preemption(made[r], store, **BY_HAND, timeout=0.3)
        if r == 1:
            said.wait(60)
            watch.check()
            learnt.set()
            return watch
        watch.request()
        watch.check()
        said.set()
        learnt.wait(60)
        assert not watch.check()
        return watch

    first, second = each(run_ranks(comms(2), rank))
    assert isinstance(first.error, RankFailure)
    assert "rank 1: did not come to step boundary" in str(first.error)
    assert (first.saved, second.saved) == (None, None)
    assert Repository(store).steps() == []


def test_a_save_that_fails_is_the_same_on_all_ranks_and_not_the_end():
    def full() -> None:
        raise StoreFull("no space left", "k")

    found = each(loop(2, Gated(MemoryStore(), finish=full), {1: 2}))
    assert str(found[0].error) == str(found[1].error)
    assert "no space left" in str(found[0].error)


def test_then_exit_ends_all_ranks_as_the_signal_would():
    store = MemoryStore()
    results = loop(2, store, {0: 2}, then="exit")
    assert [(type(one), one.code) for one in results] == [(SystemExit, 128 + signal.SIGTERM)] * 2
    assert len(Repository(store).steps()) == 1


def test_then_a_function_gets_the_report():
    got: list[Any] = []
    found = each(loop(2, MemoryStore(), {0: 2}, then=got.append))
    assert sorted(map(id, got)) == sorted(id(one.saved) for one in found)


def test_step_and_extra_are_asked_when_it_is_time():
    store, now = MemoryStore(), {"epoch": 0}

    def pace(r: int, step: int) -> None:
        now["epoch"] = step

    found = each(loop(1, store, {0: 7}, pace=pace, step=lambda: 100 + now["epoch"], extra=lambda: {"now": dict(now)}))
    assert found[0].saved.step == 107
    fresh = job(1)
    assert each(run_ranks(comms(1), lambda r: ckpt.load(fresh[r], store)))[0].extra["now"] == {"epoch": 7}


def test_a_save_of_this_very_step_is_enough():
    made, store = job(1), MemoryStore()
    made[0].at_step = 4

    def rank(r: int) -> Any:
        ckpt.save(made[r], store)
        watch = ckpt.on_preemption(made[r], store, **BY_HAND)
        watch.request()
        assert watch.check()
        assert not watch.check()
        return watch

    (one,) = each(run_ranks(comms(1), rank))
    assert (one.saved, one.error) == (None, None)
    assert Repository(store).steps() == [4]


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_in_flight_is_finished_first(fails: bool):
    made, store, finish, together = job(2), MemoryStore(), Gate(), threading.Barrier(2)

    def ends() -> None:
        finish.pass_through()
        if fails:
            raise StoreFull("no space left", "k")

    def rank(r: int) -> Any:
        watch = ckpt.on_preemption(made[r], store, **BY_HAND)
        made[r].at_step = 1
        handle = ckpt.async_save(made[r], Gated(store, finish=ends))
        if r == 0:
            watch.request()
            finish.open_when(finish.reached)
        while watch.saved is None and watch.error is None:
            together.wait(60)
            made[r].at_step += 1
            watch.check()
        assert handle.durable.done()
        return watch

    found = each(run_ranks(comms(2), rank))
    (step,) = {one.saved.step for one in found}
    assert Repository(store).steps() == [step] if fails else [1, step]


def test_two_of_them_do_not_disturb_each_other():
    made, store = job(2), MemoryStore()
    together = threading.Barrier(2)

    def rank(r: int) -> Any:
        watches = [ckpt.on_preemption(made[r], store, **BY_HAND) for _ in range(2)]
        watches[1].request()
        for step in range(1, 8):
            together.wait(60)
            made[r].at_step = step
            for one in watches:
                one.check()
        return [one.saved is not None for one in watches]

    assert each(run_ranks(comms(2), rank)) == [[False, True]] * 2


class Counted:
    """A key-value store that notes what it is asked."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.calls = inner, list[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self.inner, name)


def test_while_nobody_is_told_a_boundary_is_one_look():
    made, ranks = job(2), comms(2)
    kv = ranks[0].kv = Counted(ranks[0].kv)  # type: ignore[assignment]

    def rank(r: int) -> None:
        watch = ckpt.on_preemption(made[r], MemoryStore(), **BY_HAND)
        for _ in range(5):
            assert not watch.check()

    each(run_ranks(ranks, rank))
    assert kv.calls == ["check"] * 5  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------- signals


def test_a_signal_is_noticed_and_the_handler_before_is_called_behind_the_save():
    made, store, order = job(1)[0], MemoryStore(), list[Any]()

    def before(signum: int, frame: object) -> None:
        order.append((signum, Repository(store).steps()))

    kept = signal.signal(signal.SIGUSR1, before)
    try:
        with ckpt.on_preemption(made, store, signals=(signal.SIGUSR1,), then="continue") as watch:
            assert not watch.check()
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert watch.requested
            assert order == []
            assert watch.check()
            os.kill(os.getpid(), signal.SIGUSR1)  # the same preemption still
            assert not watch.check()
        assert order == [(signal.SIGUSR1, [0])]
        assert signal.getsignal(signal.SIGUSR1) is before
    finally:
        signal.signal(signal.SIGUSR1, kept)


def test_closing_twice_or_behind_another_handler_harms_nobody():
    kept = signal.getsignal(signal.SIGUSR1)
    watch = ckpt.on_preemption(job(1)[0], MemoryStore(), signals=(signal.SIGUSR1,))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    watch.close()
    watch.close()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    signal.signal(signal.SIGUSR1, kept)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"then": "stop"}, "then='stop': expected 'exit', 'continue' or a function"),
        ({"signals": (signal.SIGKILL,)}, "cannot be handled"),
        ({"signals": (signal.SIGUSR1, 9999)}, "9999"),
        ({"timeout": -1}, "timeout=-1"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], text: str):
    kept = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(ConfigError, match=text):
        ckpt.on_preemption(job(1)[0], MemoryStore(), **options)
    assert signal.getsignal(signal.SIGUSR1) == kept


def test_signals_belong_to_the_main_thread():
    (result,) = run_ranks(comms(2)[:1] * 2, lambda r: ckpt.on_preemption(job(1)[0], MemoryStore()))[:1]
    assert isinstance(result, ConfigError)
    assert "main thread" in str(result)


# ----------------------------------------------------------------------------------------------------- boundaries


class Loop:
    """A loop with two micro-steps a step, on one rank."""

    def __init__(self, **options: Any) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.store = MemoryStore()
        self.engine = (self.model, self.optimizer)
        self.watch = ckpt.on_preemption(self.engine, self.store, **{**BY_HAND, **options})

    def micro(self) -> None:
        self.model(torch.ones(2)).sum().backward()

    @property
    def steps(self) -> list[int]:
        return Repository(self.store).steps()


def test_a_boundary_is_the_first_forward_behind_an_optimizer_step():
    one = Loop()
    one.watch.request()
    one.micro()
    one.micro()
    assert one.steps == []  # nothing was ever stepped
    one.optimizer.step()
    one.model.eval()
    one.micro()
    one.model.train()
    with torch.no_grad():
        one.model(torch.ones(2))
    assert one.steps == []  # an evaluation, which other ranks may not make
    one.micro()
    assert one.steps == [1]


def test_with_gradients_accumulated_no_forward_but_the_first_is_a_boundary():
    one = Loop()
    one.micro()
    one.optimizer.step()
    one.micro()
    one.watch.request()
    one.micro()
    assert one.steps == []
    one.optimizer.step()
    assert one.steps == []
    one.micro()
    assert one.steps == [1] if one.watch.saved is None else [one.watch.saved.step]
    assert one.watch.saved is not None
    assert one.watch.saved.step == 2


def test_who_checks_by_hand_is_not_saved_elsewhere():
    one = Loop()
    one.watch.check()
    one.watch.request()
    one.micro()
    one.optimizer.step()
    one.micro()
    assert one.steps == []
    assert one.watch.check()
    assert one.steps == [1]


def test_behind_close_nothing_is_watched(caplog: pytest.LogCaptureFixture):
    one = Loop()
    one.watch.request()
    one.watch.close()
    one.micro()
    one.optimizer.step()
    one.micro()
    assert one.steps == []
    assert "training has ended before the ranks could save" in caplog.text
    assert not one.model._forward_pre_hooks


def test_an_engine_without_a_known_boundary_is_checked_by_hand(caplog: pytest.LogCaptureFixture):
    watch = ckpt.on_preemption(job(1)[0], MemoryStore(), **BY_HAND)
    assert "a FakeEngine has no step boundary that is known: call check()" in caplog.text
    watch.request()
    assert watch.check()


def test_an_adapter_with_a_module_has_one():
    made, store = job(1)[0], MemoryStore()
    made.the_module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(made.the_module.parameters())
    watch = ckpt.on_preemption(made, store, **BY_HAND)
    watch.request()
    optimizer.step()
    made.the_module(torch.ones(1))
    assert watch.saved is not None


def test_of_two_that_are_closed_in_the_order_they_were_made_none_swallows_signals():
    """The second one puts the first one's handler back, which has long been closed."""
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        (made,) = job(1)
        options: dict[str, Any] = {"signals": (signal.SIGUSR1, signal.SIGUSR1), "then": "continue"}
        first = ckpt.on_preemption(made, MemoryStore(), **options)
        second = ckpt.on_preemption(made, MemoryStore(), **options)
        first.close()
        second.close()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_function_of_the_user_that_raises_fails_the_save_on_all_ranks():
    calls: list[int] = []

    def extra() -> dict[str, Any]:
        calls.append(1)
        if len(calls) % 2:  # one of the two ranks in each try
            raise ValueError("no cursor")
        return {}

    store = MemoryStore()
    watches = loop(2, store, {0: 2}, extra=extra, timeout=20)
    for one in watches:
        assert isinstance(one.error, RankFailure)
        assert "ValueError: no cursor" in str(one.error)
    assert Repository(store).steps() == []
