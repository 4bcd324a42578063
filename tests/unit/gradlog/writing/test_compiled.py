"""A step of an optimizer that is compiled is logged, and the hooks are not traced with it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters

import ckpt
from ckpt.engine.shared_ending import Ending
from ckpt.errors import ReplayError
from ckpt.gradlog.writing.capture import Capture
from tests.unit.gradlog.test_checkpointer import Loop, equal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


# Of the compiler's own code, and about hooks in general.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def train(loop: Loop, step: Callable[[], object], steps: int, keeper: ckpt.Checkpointer | None) -> None:
    for number in range(steps):
        torch.manual_seed(1000 + number)
        loop.optimizer.zero_grad()
        loop.model(torch.randn(5, 6)).square().mean().backward()
        step()
        loop.scheduler.step()
        if keeper is not None:
            keeper.step()


@pytest.mark.parametrize("hook", [False, True])
def test_a_compiled_step_is_logged_without_compiling_hooks(hook: bool, tmp_path: Path) -> None:
    loop = Loop(optimizer=torch.optim.SGD, momentum=0.9)
    with (
        torch._dynamo.config.patch(fail_on_recompile_limit_hit=True),
        ckpt.Checkpointer(loop.engine, tmp_path, full_every=100, hook=hook) as keeper,
    ):
        train(loop, torch.compile(loop.optimizer.step, backend="eager"), 12, None if hook else keeper)
        assert keeper.number == 12
        assert keeper._log is not None
        assert keeper._log.broken is None
        assert traced(type(loop.optimizer).step)
        assert not traced(Capture._hook, Capture._take, Ending.begin, Ending.end)
    assert counters["frames"]["total"] < 16  # traced hooks make it 70
    again = Loop(seed=9, optimizer=torch.optim.SGD, momentum=0.9)
    report = ckpt.load(again.engine, tmp_path)  # by this kernel the same bits
    assert (report.step, report.exact) == (12, True)
    assert equal(again.state(), loop.state())


def traced(*functions: Any) -> list[str]:
    """Return names of those that the compiler has compiled."""
    return [one.__qualname__ for one in functions if _debug_get_cache_entry_list(inspect.unwrap(one).__code__)]


def test_a_compiled_step_that_rounds_otherwise_is_told_as_what_it_may_be(tmp_path: Path) -> None:
    loop = Loop()
    with ckpt.Checkpointer(loop.engine, tmp_path, full_every=100) as keeper:
        train(loop, torch.compile(loop.optimizer.step, backend="eager"), 3, keeper)
    again = Loop(seed=9)
    with pytest.raises(ReplayError, match=r"repeated, is not what it was: .*compiled \(torch\.compile\)"):
        ckpt.load(again.engine, tmp_path)
    assert ckpt.load(again.engine, tmp_path, strict=False).step == 3
