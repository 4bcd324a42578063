"""DeepSpeed's own optimizers outside of an engine: the same kernels, on the CPU, for tensors of anybody's."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from ckpt.engine.deepspeed_running import MOST_STEPS, _cpu_adam, _fused_adam
from ckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

PREFIX = "deepspeed."
_MODULES = {
    "deepspeed.ops.adam.fused_adam.FusedAdam": "adam",
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": "adam",
    "deepspeed.ops.lion.fused_lion.FusedLion": "lion",
    "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion": "lion",
    "deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad": "adagrad",
}
COUNTING = ("FusedAdam", "DeepSpeedCPUAdam")
"""Classes whose kernel multiplies its powers of beta on from step to step, instead of computing them anew."""
_FAR = 10**9
"""A step at which no job is."""


def make_optimizer(
    name: str, groups: Sequence[dict[str, Any]], options: Mapping[str, Any], settings: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Return an optimizer of DeepSpeed's over tensors on the CPU.

    Args:
        name: the class, with its module.
        groups: parameter groups with their options.
        options: of one group, for kernels that want them when they are made.
        settings: what decides which code computes a step and stands in no group, such as ``adam_w_mode``.

    Raises:
        ConfigError: DeepSpeed is not there, cannot build the kernel, or has no such optimizer.
    """
    if name not in _MODULES:
        raise ConfigError(f"no optimizer {name} is known of DeepSpeed: expected one of {', '.join(_MODULES)}")
    if "deepspeed" not in sys.modules:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")  # its kernels print to standard output, behind its back
    try:
        import deepspeed

        kind = getattr(getattr(deepspeed.ops, _MODULES[name]), name.rpartition(".")[2])
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"steps of {name} cannot be repeated here: {error}; install the job's DeepSpeed") from error
    known: dict[str, Any] = {}
    if "betas" in options:
        known["betas"] = tuple(options["betas"])
    if "adam_w_mode" in settings:
        known["adam_w_mode" if name.endswith("FusedAdam") else "adamw_mode"] = settings["adam_w_mode"]
    if "fp32_optimizer_states" in settings:
        known["fp32_optimizer_states"] = settings["fp32_optimizer_states"]
    try:
        made: torch.optim.Optimizer = kind(groups, **known)
    except (RuntimeError, ImportError, TypeError, OSError) as error:
        raise ConfigError(f"the kernel of {name} cannot be made here: {error}") from error
    return made


def count_up(optimizer: Any, options: dict[str, Any], last: int) -> None:
    """Bring a kernel of :data:`COUNTING` to where it is in a job that has taken ``last`` steps without a break.

    Where it was before makes no difference: it begins anew when it meets a step that is not the next one. With 0 it
    does so in the step to come.
    """
    step = _cpu_adam(optimizer) if type(optimizer).__name__ == "DeepSpeedCPUAdam" else _fused_adam(optimizer)
    for number in (_FAR, *range(1, min(last, MOST_STEPS) + 1)):
        step(number, options)
