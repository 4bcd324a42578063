"""Kernels outside of an engine: the same bits as in the job's process, however a tensor is cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ckpt.compact.cuts import GRAIN
from ckpt.compact.kernels import Kernel, why_not_exact
from ckpt.engine.deepspeed_kernels import make_optimizer
from ckpt.errors import ConfigError, ReplayError
from ckpt.gradlog.record import RankHead
from ckpt.gradlog.writing.log import software

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True}
SIZE = GRAIN + 1003
BASE, END = 60, 70

DEEPSPEED = {
    "FusedAdam": ("deepspeed.ops.adam.fused_adam.FusedAdam", {"adam_w_mode": True}),
    "FusedAdam, L2": ("deepspeed.ops.adam.fused_adam.FusedAdam", {"adam_w_mode": False}),
    "DeepSpeedCPUAdam": (
        "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam",
        {"adam_w_mode": True, "fp32_optimizer_states": True},
    ),
}


def gradient(step: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(step))


def run(
    kernel: Kernel, key: torch.Tensor, state: dict[str, Any], first: int, last: int, at: slice
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Take steps with the elements ``at`` of their gradients."""
    for step in range(first, last + 1):
        key.grad = gradient(step)[at].clone()
        (state,) = kernel.step([(key, dict(OPTIONS), state)], f"step {step}")
    return key.detach().clone(), state


@pytest.mark.parametrize("name", DEEPSPEED)
def test_slices_of_a_replay_have_the_bits_of_the_job(name: str) -> None:
    said = {"class": DEEPSPEED[name][0], "options": DEEPSPEED[name][1]}
    job = Kernel(said)
    whole, state = run(job, torch.ones(SIZE), {}, 1, BASE, slice(None))
    base, before = whole.clone(), copy.deepcopy(state)
    expected, behind = run(job, whole, state, BASE + 1, END, slice(None))
    replay = Kernel(said)
    for at in (slice(0, GRAIN), slice(GRAIN, SIZE)):
        mine = {k: v[at].clone() if isinstance(v, torch.Tensor) else v for k, v in before.items()}
        replay.wind(OPTIONS, BASE)
        found, own = run(replay, base[at].clone(), mine, BASE + 1, END, at)
        assert torch.equal(found, expected[at])
        assert own["step"] == END
        for role in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(own[role], behind[role][at]), role


def test_powers_of_beta_tell_how_many_steps_they_were_rounded_in() -> None:
    kernel = Kernel({"class": DEEPSPEED["DeepSpeedCPUAdam"][0], "options": {"adam_w_mode": True}})
    ends = []
    for last in (BASE, 0):
        state = {"step": BASE, "exp_avg": torch.ones(SIZE), "exp_avg_sq": torch.ones(SIZE)}
        kernel.wind(OPTIONS, last)
        ends.append(run(kernel, torch.ones(SIZE), state, BASE + 1, END, slice(None))[0])
    assert torch.allclose(*ends)
    assert not torch.equal(*ends)


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(ReplayError, match=r"steps of mine\.Lamb cannot be repeated"):
        Kernel({"class": "mine.Lamb"})
    with pytest.raises(ConfigError, match=r"no optimizer deepspeed\.ops\.lamb\.FusedLamb is known"):
        make_optimizer("deepspeed.ops.lamb.FusedLamb", [], {}, {})


def head(**said: str) -> RankHead:
    kernels = ({"class": "torch.optim.adamw.AdamW", "options": {}}, {"class": DEEPSPEED["FusedAdam"][0], "options": {}})
    return RankHead(format=1, rank=0, world=1, entries=(), kernels=kernels, software={**software(), **said})


def test_why_bits_cannot_be_expected_to_be_the_same() -> None:
    here = software()
    assert why_not_exact([head()], 0) == why_not_exact([head()], 1) == []
    assert why_not_exact([head(deepspeed="0.1")], 0) == []
    assert why_not_exact([head(deepspeed="0.1")], 1) == [f"deepspeed was 0.1, here it is {here['deepspeed']}"]
    assert why_not_exact([head(), head(torch="1.0")], 0) == [f"torch was 1.0, here it is {here['torch']}"]
    assert why_not_exact([head(device="H200")], 0) == ["it was stepped on H200, here on the CPU"]
    other = "AVX2" if here["device"].upper() == "DEFAULT" else "DEFAULT"
    assert why_not_exact([head(device=other)], 0) == [
        f"it was stepped with {other} instructions, here with {here['device']}"
    ]
    assert why_not_exact([head(device="")], 0) == ["it was stepped on an unknown device, here on the CPU"]
