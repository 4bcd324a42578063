from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ckpt.engine.shared_partition import Partition
from ckpt.engine.shared_state import Elementwise, kinds_of_fresh

if TYPE_CHECKING:
    import pytest


def test_a_trial_step_on_the_cpu_leaves_the_gpus_of_the_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched() -> int:
        raise AssertionError("the generators of all GPUs are asked for")

    monkeypatch.setattr(torch.cuda, "device_count", touched)
    weight = torch.nn.Parameter(torch.zeros(3))
    found = kinds_of_fresh(torch.optim.Adam([weight]), Partition(weight, 0, False, ["weight"], []))
    assert found is not None
    assert {role for role, kind in found.items() if isinstance(kind, Elementwise)} == {"exp_avg", "exp_avg_sq"}
