"""Where a training step begins, for each kind of engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckpt.engine.shared_boundary import at_step_begin


class Calls:
    """Counts the boundaries; ``step`` is what an optimizer's step means to them."""

    def __init__(self, engine: object) -> None:
        self.count = 0
        self.end = at_step_begin(engine, self._call)
        p = torch.nn.Parameter(torch.zeros(1))
        self.step = torch.optim.SGD([p]).step

    def _call(self) -> None:
        self.count += 1


class PipelineEngine(torch.nn.Module):
    """Named as DeepSpeed's."""

    def train_batch(self, data: int) -> int:
        return data + 1


class _PipelineSchedule:
    """Named as torch's base class of them."""

    def step(self, data: int) -> int:
        return data + 1


class Schedule(_PipelineSchedule):
    pass


class _BaseDataParallel(torch.nn.Module):
    """Named as Megatron's."""

    def zero_grad_buffer(self, data: int = 0) -> int:
        return data + 1


class Wrapped(_BaseDataParallel):
    pass


@pytest.mark.parametrize(
    ("make", "method"),
    [
        (PipelineEngine, "train_batch"),
        (lambda: (Schedule(), torch.nn.Linear(1, 1)), "step"),
        (lambda: {"model": [Wrapped(), Wrapped()], "optimizer": object()}, "zero_grad_buffer"),
    ],
)
def test_where_ranks_wait_for_each_other_in_forward_the_call_before_it_counts(make: Any, method: str):
    engine = make()
    parts = next(iter(engine.values())) if isinstance(engine, dict) else engine
    owner = parts[0] if isinstance(parts, tuple | list) else parts
    calls = Calls(engine)
    assert getattr(owner, method)(3) == 4
    assert calls.count == 0  # nothing was stepped since
    calls.step()
    assert getattr(owner, method)(data=5) == 6
    assert getattr(owner, method)(5) == 6
    assert calls.count == 1
    assert calls.end is not None
    calls.end()
    calls.step()
    assert getattr(owner, method)(5) == 6
    assert calls.count == 1
    assert method not in vars(owner)


def test_who_has_wrapped_it_again_keeps_that():
    engine = Schedule()
    calls = Calls(engine)
    inner = engine.step
    engine.step = lambda data: inner(data) * 10  # type: ignore[method-assign]
    assert calls.end is not None
    calls.end()
    assert engine.step(1) == 20


def test_a_stage_without_its_schedule_has_no_boundary():
    class _PipelineStageBase:
        pass

    assert at_step_begin((_PipelineStageBase(), torch.nn.Linear(1, 1)), lambda: None) is None


def test_it_comes_in_front_of_hooks_that_are_there():
    model, order = torch.nn.Linear(1, 1), list[str]()
    model.register_forward_pre_hook(lambda *_: order.append("theirs"), prepend=True)
    at_step_begin(model, lambda: order.append("ours"))
    torch.optim.SGD(model.parameters()).step()
    model(torch.ones(1))
    assert order == ["ours", "theirs"]
