"""A checkpointer that the engine calls: it counts as one that the loop calls, refuses what it cannot, and lets go."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckpt
from ckpt.errors import CkptError, ConfigError
from tests.harness.environment import REPO, rank_environment
from tests.unit.gradlog.test_checkpointer import Loop, equal, loaded

if TYPE_CHECKING:
    from pathlib import Path


def test_a_loop_that_calls_nothing_is_logged_and_comes_back(tmp_path: Path) -> None:
    loop = Loop()
    with ckpt.Checkpointer(loop.engine, tmp_path, full_every=4, hook=True) as keeper:
        loop.train(7, 0)
        assert (keeper.number, keeper.last_full) == (7, 4)
    loop.train(1, 7)  # nobody looks any more
    again, report = loaded(tmp_path)
    assert (report.step, report.replayed, report.exact) == (7, 3, True)
    whole = Loop()
    whole.train(7, 0)
    assert equal(again.state(), whole.state())


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    loop = Loop()
    with ckpt.Checkpointer(loop.engine, tmp_path, full_every=100, hook=True):
        loop.train(5, 0)
    second = Loop(seed=3)
    with ckpt.Checkpointer(second.engine, tmp_path, full_every=100, hook=True) as keeper:
        assert keeper.number == 5  # what was replayed was not counted again
        second.train(4, 5)
        assert keeper.number == 9
    _, report = loaded(tmp_path)
    assert (report.step, report.exact) == (9, True)


def test_a_call_beside_the_hook_is_refused(tmp_path: Path) -> None:
    loop = Loop()
    with (
        ckpt.Checkpointer(loop.engine, tmp_path, hook=True) as keeper,
        pytest.raises(ConfigError, match="whose hook=True calls it: expected one of both"),
    ):
        loop.train(1, 0, keeper)


def test_without_gradients_full_saves_come_by_themselves(tmp_path: Path) -> None:
    loop = Loop()
    with ckpt.Checkpointer(loop.engine, tmp_path, full_every=3, gradients=False, keep=None, hook=True):
        loop.train(7, 0)
    assert ckpt.steps(tmp_path) == [0, 3, 6]


def test_what_cannot_be_told_is_refused_before_anything_is_saved(tmp_path: Path) -> None:
    class Own:
        """An adapter of a user's own, which says nothing of where steps end."""

        kind = "own"

        def __init__(self, engine: Any) -> None:
            self._inner = ckpt.engine.find.adapter_for(engine)  # type: ignore[attr-defined]

        def __getattr__(self, name: str) -> Any:
            if name == "at_step_end":
                raise AttributeError(name)
            return getattr(self._inner, name)

    with pytest.raises(ConfigError, match=r"'own' has no at_step_end.*call Checkpointer\.step\(\)"):
        ckpt.Checkpointer(Own(Loop().engine), tmp_path, hook=True)
    with pytest.raises(ConfigError, match="no optimizer"):
        ckpt.Checkpointer(torch.nn.Linear(1, 1), tmp_path, gradients=False, hook=True)
    assert not list(tmp_path.glob("*"))


def test_a_checkpointer_that_cannot_be_made_leaves_no_hook(tmp_path: Path) -> None:
    loop = Loop()
    with ckpt.Checkpointer(loop.engine, tmp_path, hook=True):
        pass
    other = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(other.parameters())
    with pytest.raises(CkptError):
        ckpt.Checkpointer((other, optimizer), tmp_path, hook=True)
    assert not optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_step_pre_hooks


def test_a_load_into_the_running_job_ends_no_steps(tmp_path: Path) -> None:
    loop = Loop()
    with ckpt.Checkpointer(loop.engine, tmp_path, full_every=100, hook=True) as keeper:
        loop.train(5, 0)
        keeper.flush()
        ckpt.load(loop.engine, tmp_path, step=3)
        assert keeper.number == 5


def test_a_checkpointer_that_nobody_keeps_lives_as_long_as_the_engine(tmp_path: Path) -> None:
    loop = Loop()
    gone = weakref.ref(ckpt.Checkpointer(loop.engine, tmp_path, full_every=100, hook=True))
    gc.collect()
    loop.train(3, 0)
    keeper = gone()
    assert keeper is not None
    assert keeper.number == 3
    keeper.flush()
    if keeper._handle is not None:
        keeper._handle.durable.wait(30)
    del loop, keeper
    gc.collect()
    assert gone() is None
    _, report = loaded(tmp_path)
    assert report.step == 3


AT_EXIT = """
import sys
import ckpt
from tests.unit.gradlog.test_checkpointer import Loop

loop = Loop()
ckpt.Checkpointer(loop.engine, sys.argv[1], full_every=100, flush_every=1000, hook=True)
loop.train(4, 0)
"""


def test_what_waits_at_the_end_of_the_process_is_made_durable(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", AT_EXIT, str(tmp_path)], check=True, cwd=REPO, env=rank_environment())
    _, report = loaded(tmp_path)
    assert (report.step, report.exact) == (4, True)
