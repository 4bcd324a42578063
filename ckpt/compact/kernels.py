"""The optimizers that repeat the steps, here on the CPU: made once, and given other tensors again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ckpt.engine.deepspeed_kernels import COUNTING, PREFIX, count_up, make_optimizer
from ckpt.errors import ConfigError, ReplayError
from ckpt.gradlog.supported import ELEMENTWISE
from ckpt.gradlog.writing.log import software

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt.gradlog.record import RankHead

_CPU = ("AVX2", "AVX512", "AVX512_VNNI", "VSX", "Z VECTOR", "SVE256", "NO AVX", "DEFAULT", "NO VSX", "NO ZVECTOR")


class Kernel:
    """One class of optimizer, with what decides which of its code computes a step.

    Raises:
        ConfigError: it cannot be made here.
    """

    def __init__(self, said: Mapping[str, Any]) -> None:
        self.name = str(said.get("class"))
        self.settings: dict[str, Any] = dict(said.get("options") or {})
        if self.name not in ELEMENTWISE:
            raise ReplayError(f"steps of {self.name} cannot be repeated")
        self.of_deepspeed = self.name.startswith(PREFIX)
        self.counts = self.name.endswith(COUNTING)
        self._optimizer: torch.optim.Optimizer | None = None

    def _made(self, options: Mapping[str, Any]) -> torch.optim.Optimizer:
        if self._optimizer is None:
            groups = [{"params": [torch.zeros(1)]}]
            if self.of_deepspeed:
                self._optimizer = make_optimizer(self.name, groups, options, self.settings)
            else:
                kind = getattr(torch.optim, self.name.rpartition(".")[2], None)
                if kind is None:
                    raise ConfigError(f"this torch ({torch.__version__}) has no optimizer {self.name}")
                self._optimizer = kind(groups)
        return self._optimizer

    def options(self, said: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
        """Return a group's hyperparameters as the kernel gets them here; ``tensors``: those that were tensors."""
        found = {name: value for name, value in said.items() if name != "params"}
        for name in tensors:
            if name in found:
                found[name] = torch.as_tensor(found[name])
        # They choose among loops that compute the same, and the CPU has no captured graphs.
        for name in ("capturable", "differentiable"):
            if name in found:
                found[name] = False
        return found

    def step(
        self, groups: Sequence[tuple[torch.Tensor, dict[str, Any], dict[str, Any]]], where: str
    ) -> list[dict[str, Any]]:
        """Take one step.

        Args:
            groups: (tensor with its gradient, its options, its state).
            where: for messages.

        Returns:
            The state of each tensor.

        Raises:
            ReplayError: the kernel has failed.
        """
        optimizer = self._made(groups[0][1])
        optimizer.param_groups = [{**options, "params": [key]} for key, options, _ in groups]
        optimizer.state.clear()
        for key, _, state in groups:
            if state:
                optimizer.state[key] = state
        try:
            type(optimizer).step(optimizer)
        except (RuntimeError, KeyError, TypeError, ValueError, AssertionError) as error:
            raise ReplayError(f"{where}: {self.name} has failed: {type(error).__name__}: {error}") from error
        states = [optimizer.state[key] for key, _, _ in groups]
        optimizer.param_groups = []  # what is kept would stay in memory beside the next bundle
        optimizer.state.clear()
        return states

    def wind(self, options: Mapping[str, Any], last: int) -> None:
        """Bring the kernel to where it is in a job that has taken ``last`` steps; 0: to where it begins anew.

        DeepSpeed's Adam multiplies its powers of beta from step to step, and rounds each time.
        """
        if self.counts:
            count_up(self._made(options), dict(options), last)


def why_not_exact(heads: Sequence[RankHead], number: int) -> list[str]:
    """Return why optimizer ``number`` of a log cannot be expected to give the same bits here; empty if it can."""
    here = software()
    found: dict[str, None] = {}
    for head in heads:
        if number >= len(head.kernels):
            continue
        name = str(head.kernels[number].get("class"))
        device = head.software.get("device", "")
        offloaded = "DeepSpeedCPU" in name
        if device.upper() not in _CPU and not offloaded:
            found[f"it was stepped on {device or 'an unknown device'}, here on the CPU"] = None
        elif device.upper() in _CPU and (device.upper() == "DEFAULT") != (here["device"].upper() == "DEFAULT"):
            found[f"it was stepped with {device} instructions, here with {here['device']}"] = None
        for package in ("torch", *(("deepspeed",) if name.startswith(PREFIX) else ())):
            if head.software.get(package) != here.get(package):
                was, now = head.software.get(package, "unknown"), here.get(package, "not installed")
                found[f"{package} was {was}, here it is {now}"] = None
    return list(found)
