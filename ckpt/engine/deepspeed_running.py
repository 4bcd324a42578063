"""State that DeepSpeed's CPU kernels keep where nobody sees it: the powers of beta that correct the moments' bias.

``DeepSpeedCPUAdam``, and ``FusedAdam`` on a CPU, multiply them up in fp32, step by step, inside of a C++ object. After
a load the object finds that the step has jumped and computes ``pow(beta, step)``, which differs from the product in the
last bit for most steps: the job goes on, and not as it would have. There is no way to set the product, but there is one
to have it computed: a step of one element for every step that was taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ckpt.engine.shared_check import class_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckpt.engine.shared_partition import Partition

MOST_STEPS = 10_000_000
"""Beyond, about half a minute, the powers are zero in fp32 for every beta that anybody uses."""


def multiply_up(inner: Any, partitions: Iterable[Partition]) -> None:
    """Bring the kernel's powers of beta to where they are in a job that has run all steps without a break.

    Does nothing for other optimizers, where there is no state yet, and where parameters have taken different numbers
    of steps (then the kernel computes powers anew in every step).
    """
    keys = [one.key for one in partitions]
    states = [inner.state[key] for key in keys if inner.state.get(key)] if inner is not None else []
    counts = {int(one["step"]) for one in states if type(one.get("step")) is int}
    names = class_names(inner)
    if len(counts) != 1 or not names & {"DeepSpeedCPUAdam", "FusedAdam"} or any(k.device.type != "cpu" for k in keys):
        return
    steps = min(counts.pop(), MOST_STEPS)
    groups = [group for group in inner.param_groups if "betas" in group]
    step = _cpu_adam(inner) if "DeepSpeedCPUAdam" in names else _fused_adam(inner)
    alike = len({tuple(group["betas"]) for group in groups}) == 1
    for number in range(1 if alike else steps, steps + 1):  # else each group's call starts the powers over
        for group in groups[: 1 if alike else None]:
            step(number, group)


def _blank() -> list[torch.Tensor]:
    return [torch.zeros(1) for _ in range(4)]


def _cpu_adam(inner: Any) -> Callable[[int, dict[str, Any]], None]:
    param, grad, exp_avg, exp_avg_sq = _blank()

    def step(number: int, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        inner.ds_opt_adam.adam_update(
            inner.opt_id, number, 0.0, beta1, beta2, 1.0, 0.0, True, param, grad, exp_avg, exp_avg_sq
        )

    return step


def _fused_adam(inner: Any) -> Callable[[int, dict[str, Any]], None]:
    param, grad, exp_avg, exp_avg_sq = _blank()
    lists = [[grad], [param], [exp_avg], [exp_avg_sq]]

    def step(number: int, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        inner.multi_tensor_adam(
            2048 * 32, inner._dummy_overflow_buf, lists, 0.0, beta1, beta2, 1.0, number, inner.adam_w_mode, 1, 0.0
        )

    return step
