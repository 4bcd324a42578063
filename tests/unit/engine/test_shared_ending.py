"""Where a training step ends: what counts as its last call, what is refused, and that nothing of it stays behind."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckpt.engine.find import adapter_for
from ckpt.engine.shared_ending import Ending, resting, watch
from ckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

StepLR = torch.optim.lr_scheduler.StepLR


def parameter() -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    return p


class Loop:
    """A loop's objects, and how often its step has ended."""

    def __init__(self, optimizers: int = 1, schedulers: int = 1, scale: float | None = None) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.optimizers = [torch.optim.SGD([p], lr=0.1) for p in list(self.model.parameters())[:optimizers]]
        self.schedulers = [StepLR(self.optimizers[i % optimizers], 3) for i in range(schedulers)]
        self.scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        self.count = 0
        for p in self.model.parameters():
            p.grad = torch.ones_like(p)

    @property
    def engine(self) -> tuple[Any, ...]:
        return (self.model, *self.optimizers, *self.schedulers, self.scaler)

    def hook(self) -> Callable[[], None]:
        return adapter_for(self.engine).at_step_end(self.called)  # type: ignore[attr-defined, no-any-return]

    def called(self) -> None:
        self.count += 1


def test_it_is_behind_the_scheduler_that_the_step_ends():
    loop = Loop()
    loop.hook()
    for done in range(3):
        loop.optimizers[0].step()
        assert loop.count == done
        loop.schedulers[0].step()
        assert loop.count == done + 1


def test_without_a_scheduler_it_is_behind_the_optimizer():
    loop = Loop(schedulers=0)
    seen = []
    adapter_for(loop.engine).at_step_end(lambda: seen.append(loop.model.weight.detach().clone()))  # type: ignore[attr-defined]
    before = loop.model.weight.detach().clone()
    loop.optimizers[0].step()
    assert torch.equal(seen[0], loop.model.weight)
    assert not torch.equal(seen[0], before)


def test_of_several_it_is_the_last_one_in_any_order():
    loop = Loop(optimizers=2, schedulers=2)
    loop.hook()
    for order in ("ABab", "AaBb", "BbAa", "BAba"):
        before = loop.count
        for i, one in enumerate(order):
            assert loop.count == before, (order, i)
            (loop.optimizers if one.isupper() else loop.schedulers)["ab".index(one.lower())].step()
        assert loop.count == before + 1, order


def test_a_step_that_the_scaler_skips_ends_too():
    loop = Loop(schedulers=0, scale=4.0)
    assert loop.scaler is not None
    loop.hook()
    for grad in (1.0, float("inf"), 1.0):
        for p in loop.model.parameters():
            p.grad = torch.full_like(p, grad)
        loop.scaler.scale(torch.ones(()))
        loop.scaler.step(loop.optimizers[0])
        loop.scaler.update()
    assert loop.count == 3


def test_a_scaler_that_is_switched_off_need_not_be_updated():
    loop = Loop(schedulers=0, scale=4.0)
    loop.scaler = torch.amp.GradScaler("cpu", enabled=False)
    loop.hook()
    loop.scaler.step(loop.optimizers[0])
    assert loop.count == 1


def test_a_scheduler_that_does_not_step_with_the_optimizer_is_refused_before_anything_changes():
    loop = Loop()
    loop.hook()
    loop.optimizers[0].step()
    before = loop.model.weight.detach().clone()
    with pytest.raises(ConfigError, match=r"second call of .*SGD\.step\(\) before .*StepLR\.step\(\): leave it off"):
        loop.optimizers[0].step()
    assert torch.equal(before, loop.model.weight)
    assert loop.count == 0


def test_a_scheduler_that_steps_when_no_optimizer_has_is_refused():
    loop = Loop()
    loop.hook()
    epoch = loop.schedulers[0].last_epoch
    with pytest.raises(ConfigError, match="in front of one or twice behind one"):
        loop.schedulers[0].step()
    assert loop.schedulers[0].last_epoch == epoch


def test_a_scheduler_that_is_left_out_behind_a_skipped_step_is_refused_at_the_next():
    loop = Loop(scale=4.0)
    assert loop.scaler is not None
    loop.hook()
    for p in loop.model.parameters():
        p.grad = torch.full_like(p, float("inf"))
    loop.scaler.scale(torch.ones(()))
    loop.scaler.step(loop.optimizers[0])
    loop.scaler.update()
    with pytest.raises(ConfigError, match=r"second call of .*GradScaler\.step\(\) and update\(\) before"):
        loop.scaler.step(loop.optimizers[0])


def test_an_engine_without_an_optimizer_is_refused():
    with pytest.raises(ConfigError, match="no optimizer"):
        adapter_for(torch.nn.Linear(1, 1)).at_step_end(lambda: None)  # type: ignore[attr-defined]


def test_what_takes_no_hook_is_refused_and_nothing_stays():
    class Bare(torch.optim.Optimizer):
        def __init__(self) -> None:
            """Leave out all that torch's does."""

    class Native:
        state_dict = load_state_dict = step = len

    loop = Loop()
    with pytest.raises(ConfigError, match="Bare takes no hooks"):
        adapter_for((loop.model, loop.optimizers[0], Bare())).at_step_end(loop.called)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"Native\.step cannot be watched"):
        adapter_for((loop.model, loop.optimizers[0], Native())).at_step_end(loop.called)  # type: ignore[attr-defined]
    loop.optimizers[0].step()
    assert loop.count == 0


def test_while_steps_are_repeated_none_ends():
    loop = Loop()
    loop.hook()
    with resting():
        loop.optimizers[0].step()
        loop.optimizers[0].step()
    loop.optimizers[0].step()
    loop.schedulers[0].step()
    assert loop.count == 1


def test_in_the_end_all_methods_are_what_they_were():
    gc.collect()  # loops of other tests
    loop = Loop(scale=4.0)
    owners: list[tuple[type, str]] = [
        (StepLR, "step"),
        (torch.amp.GradScaler, "step"),
        (torch.amp.GradScaler, "update"),
    ]
    before = [vars(kind).get(name) for kind, name in owners]
    remove, second = loop.hook(), loop.hook()
    assert [vars(kind).get(name) for kind, name in owners] != before
    remove()
    remove()
    second()
    assert [vars(kind).get(name) for kind, name in owners] == before
    assert not loop.optimizers[0]._optimizer_step_post_hooks
    assert not loop.optimizers[0]._optimizer_step_pre_hooks


def test_a_freed_engine_takes_all_of_it_along():
    gc.collect()  # loops of other tests
    loop = Loop()
    loop.hook()
    gone = weakref.ref(loop.model)
    assert "step" in vars(StepLR)
    del loop
    gc.collect()
    assert gone() is None
    assert "step" not in vars(StepLR)


def test_copies_and_pickles_know_nothing_of_it():
    loop = Loop(scale=4.0)
    loop.hook()
    state = loop.schedulers[0].state_dict()
    assert "step" not in state
    for scheduler in (copy.deepcopy(loop.schedulers[0]), pickle.loads(pickle.dumps(loop.schedulers[0]))):
        scheduler._step_count = 2  # torch looks at its optimizer only in the first step
        scheduler.optimizer.step()
        scheduler.step()
    assert pickle.loads(pickle.dumps(loop.scaler)).get_scale() == 4.0
    copy.deepcopy(loop.optimizers[0]).step()
    copy.deepcopy(loop.model)(torch.ones(2))
    assert loop.count == 0


class Watched:
    """Calls its class's ``step`` from a subclass, and says what was called when."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def step(self, by: int = 1) -> int:
        self.said.append("base")
        return by + 1


class Sub(Watched):
    def step(self, by: int = 1) -> int:
        found = super().step(by)
        self.said.append("sub")
        return found


class Seen:
    def __init__(self, said: list[str]) -> None:
        self.said = said

    def before(self, part: int, opens: bool) -> None:
        self.said.append("before")

    def after(self, part: int) -> None:
        self.said.append("after")


def watched(owner: Any, seen: Seen) -> Callable[[], None]:
    return watch(owner, "step", weakref.WeakMethod(seen.before), weakref.WeakMethod(seen.after), 0, True)


def test_a_subclass_that_calls_its_base_is_one_call():
    one, other = Sub(), Watched()
    seen, theirs = Seen(one.said), Seen(other.said)
    undo = [watched(other, theirs), watched(one, seen)]
    assert one.step(by=4) == 5
    assert one.said == ["before", "base", "sub", "after"]
    assert other.step() == 2
    assert other.said == ["before", "base", "after"]
    assert Sub().step() == 2  # another object of the class
    for each in undo:
        each()
    one.step()
    assert one.said[4:] == ["base", "sub"]


def test_a_method_that_one_object_has_wrapped_is_wrapped_again_and_put_back():
    one = Watched()
    seen = Seen(one.said)
    inner = one.step
    one.step = theirs = lambda: inner(10)  # type: ignore[method-assign, misc, assignment]
    undo = watched(one, seen)
    assert one.step() == 11
    assert one.said == ["before", "base", "after"]
    undo()
    assert one.step is theirs
    assert "step" in vars(Watched)


def test_who_wraps_the_class_again_keeps_that():
    one = Watched()
    seen = Seen(one.said)
    original = Watched.step
    undo = watched(one, seen)
    ours = Watched.step
    Watched.step = theirs = lambda self, by=1: ours(self, by) * 10  # type: ignore[method-assign, misc, assignment]
    try:
        undo()
        assert Watched.step is theirs
        assert one.step() == 20
        assert one.said == ["base"]
    finally:
        Watched.step = original  # type: ignore[method-assign]


def test_what_is_called_may_be_gone():
    one = Watched()
    undo = watched(one, Seen(one.said))
    assert one.step() == 2
    assert one.said == ["base"]
    undo()


def test_an_error_of_the_step_ends_nothing():
    p = parameter()
    optimizer = torch.optim.SGD([p], lr=0.1)
    calls: list[int] = []
    ending = Ending(lambda: calls.append(1), ["step"])
    ending.optimizer(0, optimizer)
    p.grad = torch.ones(2)
    with pytest.raises(TypeError):
        optimizer.step(closure=3)  # type: ignore[call-overload]
    assert not calls
    optimizer.step()
    assert calls == [1]


class Engine(torch.nn.Module):
    """Steps as DeepSpeed's: every fourth call ends an accumulation window."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer, self.global_steps, self.micro_steps = torch.optim.SGD([parameter()]), 0, 0

    def step(self) -> None:
        self.micro_steps += 1
        self.global_steps += self.micro_steps % 4 == 0


class PipelineEngine(Engine):
    def train_batch(self, data: int) -> int:
        self.global_steps += 1
        return data


def test_an_engine_of_deepspeed_steps_at_the_end_of_a_window():
    from ckpt.engine.deepspeed_ending import at_step_end

    engine, other, calls = Engine(), Engine(), list[int]()
    remove = at_step_end(engine, engine.optimizer, lambda: calls.append(engine.micro_steps))
    for _ in range(9):
        engine.step()
        other.step()
    assert calls == [4, 8]
    assert "step" not in vars(engine)
    assert copy.deepcopy(engine).step() is None
    original = Engine.step.__wrapped__  # type: ignore[attr-defined]
    remove()
    assert Engine.step is original
    with pytest.raises(ConfigError, match="no optimizer"):
        at_step_end(engine, None, lambda: None)


def test_a_pipeline_of_deepspeed_steps_with_train_batch():
    from ckpt.engine.deepspeed_ending import at_step_end

    engine, calls = PipelineEngine(), list[int]()
    remove = at_step_end(engine, engine.optimizer, lambda: calls.append(engine.global_steps))
    assert [engine.train_batch(5), engine.train_batch(data=6)] == [5, 6]
    assert calls == [1, 2]
    remove()
    assert not hasattr(PipelineEngine.train_batch, "__wrapped__")


def test_an_optimizer_that_steps_where_nobody_sees_it_is_refused():
    from ckpt.engine.deepspeed_ending import at_step_end

    engine = Engine()
    remove = at_step_end(engine, engine.optimizer, lambda: None)
    engine.step()
    with pytest.raises(ConfigError, match=r"steps of SGD inside of .*Engine\.step\(\), found one outside"):
        engine.optimizer.step()
    with resting():
        engine.optimizer.step()
    remove()
    engine.optimizer.step()
    loop = Loop(schedulers=0, scale=4.0)
    loop.hook()
    with pytest.raises(ConfigError, match=r"inside of .*GradScaler\.step\(\) and update\(\), found one outside"):
        loop.optimizers[0].step()


class MegatronOptimizer:
    """Named as Megatron's base class."""

    is_stub_optimizer = False

    def __init__(self, scaler: object = None) -> None:
        self.optimizer, self.grad_scaler = torch.optim.SGD([parameter()]), scaler

    def step(self) -> tuple[bool, float, None]:
        return True, 1.0, None


class Scheduler:
    def step(self, increment: int) -> None:
        """Count."""


def test_a_megatron_loop_ends_with_the_scheduler():
    from ckpt.engine.megatron_ending import at_step_end

    optimizer, scheduler, calls = MegatronOptimizer(), Scheduler(), list[int]()
    remove = at_step_end(optimizer, scheduler, lambda: calls.append(1))
    assert optimizer.step() == (True, 1.0, None)
    assert not calls
    scheduler.step(increment=1)
    assert calls == [1]
    remove()
    at_step_end(optimizer, None, lambda: calls.append(2))
    optimizer.step()
    assert calls == [1, 2]


def test_with_a_loss_scale_nobody_knows_how_a_megatron_loop_steps_its_scheduler():
    from ckpt.engine.megatron_ending import at_step_end

    with pytest.raises(ConfigError, match="behind a skipped step"):
        at_step_end(MegatronOptimizer(object()), Scheduler(), lambda: None)
    at_step_end(MegatronOptimizer(object()), None, lambda: None)()
