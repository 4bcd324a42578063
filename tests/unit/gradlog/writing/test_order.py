"""A log that is written in front of the scheduler's step is told, and no other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import ckpt
from tests.unit.gradlog.test_checkpointer import Loop

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")
WORDS = "call keeper.step() behind scheduler.step()"


def run(root: Path, order: str, steps: int, *, skip: int = -1) -> Loop:
    loop = Loop()
    with ckpt.Checkpointer(loop.engine, root, full_every=100) as keeper:
        for step in range(keeper.number, keeper.number + steps):
            loop.optimizer.zero_grad()
            torch.manual_seed(step)
            loop.model(torch.randn(5, 6)).square().mean().backward()
            for part in order:
                if part == "o" and step != skip:
                    loop.optimizer.step()
                elif part == "s":
                    loop.scheduler.step()
                elif part == "k":
                    keeper.step()
    return loop


@pytest.mark.parametrize("skip", [-1, 0, 1])
def test_a_scheduler_behind_the_record_is_told_once(
    skip: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, "oks", 6, skip=skip)
    assert caplog.text.count(WORDS) == 1
    caplog.clear()
    run(tmp_path, "oks", 4)
    assert caplog.text.count(WORDS) == 1


@pytest.mark.parametrize("order", ["osk", "sok", "ok"])
def test_a_record_that_has_the_scheduler_of_its_step_is_not(
    order: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, order, 6)
    run(tmp_path, order, 4)
    assert WORDS not in caplog.text


def test_a_scheduler_that_moves_later_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    with ckpt.Checkpointer(loop.engine, tmp_path, full_every=100) as keeper:
        for epoch in range(2):
            for step in range(5):
                torch.manual_seed(5 * epoch + step)
                loop.optimizer.zero_grad()
                loop.model(torch.randn(5, 6)).square().mean().backward()
                loop.optimizer.step()
                keeper.step()
            loop.scheduler.step()
    assert WORDS not in caplog.text
