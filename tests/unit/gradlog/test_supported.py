from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import ckpt
from ckpt.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


class Waves(torch.nn.Module):
    """A layer with a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.phase = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum() + self.phase.abs().square().sum()


def test_a_complex_parameter_is_refused_at_the_start_by_name(tmp_path: Path) -> None:
    model = Waves()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match=r"parameter 'phase' is torch\.complex64: .*gradients=False saves without"):
        ckpt.Checkpointer((model, optimizer), tmp_path)
    assert ckpt.steps(tmp_path) == []
    with ckpt.Checkpointer((model, optimizer), tmp_path, gradients=False, full_every=1) as keeper:
        model(torch.ones(2)).backward()
        optimizer.step()
        optimizer.zero_grad()
        keeper.step()
    assert ckpt.steps(tmp_path) == [0, 1]


def test_gradients_false_is_no_advice_for_state_that_is_not_saved_either(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"Adafactor cannot be replayed.*ckpt does not save its state either") as told:
        ckpt.Checkpointer((model, torch.optim.Adafactor(model.parameters())), tmp_path)
    assert "gradients=False" not in str(told.value)
