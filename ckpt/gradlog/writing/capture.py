"""What a hook in front of every optimizer step keeps: the gradients that the step is about to use, and its settings.

It is the one point at which a gradient is reduced, unscaled, clipped, and not yet used: every framework's own step ends
in ``torch.optim.Optimizer.step``, and nothing between the two changes it. DeepSpeed calls it once for each group
(ZeRO-1, 2) or each sub-group (ZeRO-3): what follows without stepping a tensor twice is one step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ckpt.engine.base import dtype_name
from ckpt.engine.shared_ending import untraced
from ckpt.errors import ConfigError
from ckpt.gradlog.record import Options, options_document
from ckpt.gradlog.share import check_gradient
from ckpt.gradlog.writing.lossless import Keeper, Kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ckpt.gradlog.share import Own


_PIECE = 1 << 15
"""Elements whose squares are summed at once."""
_STATE = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
"""Options of torch's optimizers, and the state that each of them needs."""


@dataclass(slots=True)
class Taken:
    """Gradients of some entries, one behind the other, on the CPU. ``wide``: the dtype that they had."""

    entries: tuple[int, ...]
    wide: str
    kept: Kept


@dataclass(slots=True)
class Step:
    """One step of the optimizers: what they used. ``options``: (optimizer, group) -> JSON of the hyperparameters."""

    taken: list[Taken] = field(default_factory=list)
    options: dict[tuple[int, int], str] = field(default_factory=dict)
    entries: set[int] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        """Bytes of all that was kept."""
        return sum(one.kept.data.nbytes for one in self.taken)


class Capture:
    """Hooks on the optimizers of one rank.

    Args:
        own: what is stepped here, and what this rank logs of it.
        before: called with the numbers of the entries that a step is about to change, before it does.

    What fails in a hook never fails the optimizer's step: it is kept in ``failed``, and from then on nothing is taken.
    """

    def __init__(self, own: Sequence[Own], before: Callable[[Iterable[int]], None]) -> None:
        self.own = own
        self.failed: Exception | None = None
        self.steps: list[Step] = []
        self.paused = False
        self.drained = self._begun = 0
        """steps that were begun between the last two calls of :meth:`drain`; of more than two none is kept"""
        self._before = before
        self._numbers = {id(one.stepped.key): i for i, one in enumerate(own)}
        self.optimizers: list[torch.optim.Optimizer] = list(dict.fromkeys(one.stepped.optimizer for one in own))
        self.shown: list[torch.optim.Optimizer] = list(dict.fromkeys(one.stepped.shown for one in own))
        self._keepers: dict[tuple[int, str], Keeper] = {}
        self._last: set[int] = set()
        self._stateful: dict[tuple[int, int], set[str]] = {}
        for number, one in enumerate(self.optimizers):
            if one.state:  # else the first step makes what its options ask for
                self._stateful |= {(number, i): _stateful(one, group) for i, group in enumerate(one.param_groups)}
        self._hooks = [one.register_step_pre_hook(untraced(self._hook)) for one in self.optimizers]

    def close(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def drain(self) -> list[Step]:
        """Return what was taken since the last call."""
        steps, self.steps = self.steps, []
        self.drained, self._begun = self._begun, 0
        return steps

    def _hook(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.paused or self.failed is not None:
            return
        try:
            with torch.no_grad():
                check_plain(optimizer, args, kwargs)
                if not _is_skipped(optimizer):
                    self._take(optimizer)
        except Exception as error:  # told by whoever ends the step; the training must not die of its log
            self.failed = error

    def _take(self, optimizer: torch.optim.Optimizer) -> None:
        number = self.optimizers.index(optimizer)
        found: dict[str, list[int]] = {}
        groups = set()
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                entry = self._numbers.get(id(p))
                if entry is None:
                    raise RuntimeError(f"optimizer {number} steps a tensor of shape {list(p.shape)} that was not there")
                found.setdefault(dtype_name(p.grad.dtype), []).append(entry)
                groups.add(self.own[entry].entry.group)
        entries = {entry for several in found.values() for entry in several}
        if not self.steps or self._last & entries:
            self._begun += 1
            self._last = set()
            if len(self.steps) < 2:  # nobody drains: whatever comes of it, it must not fill the memory
                self.steps.append(Step())
        self._last |= entries
        if self._begun > 2:
            return
        step = self.steps[-1]
        self._before(entries)
        step.entries |= entries
        for wide, several in found.items():
            self._keep(step, number, wide, sorted(several))
        for index in groups:
            options = self._group(optimizer, index)
            self._check_state(optimizer, number, index, options)
            document = options_document(options, f"options of optimizer group {index}")
            step.options.setdefault((number, index), document)  # of the first call: a kernel may count in its group

    def _check_state(self, optimizer: torch.optim.Optimizer, number: int, index: int, options: dict[str, Any]) -> None:
        """Check that no option asks for state which the log does not explain, since the checkpoint has none of it."""
        now = _stateful(optimizer, options)
        new = now - self._stateful.setdefault((number, index), now)
        for name in sorted(new):
            raise ConfigError(
                f"option {name!r} of optimizer group {index} was switched on ({name}={options[name]!r}) behind the "
                f"optimizer's first step: its state {_STATE[name]!r} begins somewhere that the log does not know"
            )

    def _group(self, optimizer: torch.optim.Optimizer, index: int) -> dict[str, Any]:
        """Return the options of a group by its number; DeepSpeed shows the optimizer one group at a time."""
        keys = {id(one.stepped.key) for one in self.own if one.entry.group == index}
        groups = optimizer.param_groups
        found = next((g for g in groups if any(id(p) in keys for p in g["params"])), None)
        return {k: v for k, v in (found or groups[index]).items() if k != "params"}

    def _keep(self, step: Step, number: int, wide: str, entries: list[int]) -> None:
        parts = []
        for entry in entries:
            one = self.own[entry]
            grad: Any = one.stepped.key.grad
            parts += list(one.take(check_gradient(one.stepped, grad)))
        if not sum(part.numel() for part in parts):  # that it was stepped is told, of a shard without elements too
            grad = self.own[entries[0]].stepped.key.grad
            step.taken.append(Taken(tuple(entries), wide, Kept(torch.empty(0, dtype=grad.dtype))))
            return
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        keeper = self._keepers.setdefault((number, wide), Keeper())
        kept = keeper.keep(flat)
        if kept.data.device.type != "cpu":
            kept = type(kept)(kept.data.cpu(), kept.scale)
        step.taken.append(Taken(tuple(entries), wide, kept))


def _stateful(optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> set[str]:
    """Return which options of a group are on that need state of their own, made with the rest of the state."""
    lazy = isinstance(optimizer, torch.optim.SGD)  # begins its momentum whenever it needs it
    return {name for name in _STATE if options.get(name) and not lazy}


def check_plain(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check that the gradient is what the step will use.

    Raises:
        ConfigError: it is computed, or unscaled, inside of the step.
    """
    if len(args) > 1 or kwargs.get("closure") is not None:  # the first argument is the optimizer
        raise ConfigError("optimizer.step(closure) computes the gradient inside of the step, where no hook sees it")
    if getattr(optimizer, "grad_scale", None) is not None:
        raise ConfigError(
            "a fused optimizer unscales the gradient inside of its step: call scaler.unscale_(optimizer) before "
            "scaler.step(optimizer)"
        )


def _is_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Will a fused optimizer find that the gradient has overflowed, and leave everything as it is?"""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and bool(found.item())


def options_of(optimizers: Sequence[torch.optim.Optimizer]) -> tuple[Options, ...]:
    """Return the hyperparameters of all groups as they are now."""
    return tuple(
        Options(
            optimizer=i,
            group=g,
            document=options_document({k: v for k, v in group.items() if k != "params"}, f"optimizer group {g}"),
        )
        for i, one in enumerate(optimizers)
        for g, group in enumerate(one.param_groups)
    )


def sum_of_squares(taken: Iterable[Taken]) -> float:
    """Return the sum of the squares of the gradients as the optimizers saw them."""
    total = 0.0
    for one in taken:
        data, scale = one.kept.data, one.kept.scale or 1.0
        # What is stored has a multiplier of its own, down to 1e-38: in single precision its squares overflow. A piece
        # in double precision stays in the processor's cache.
        for at in range(0, len(data), _PIECE):
            wide = data[at : at + _PIECE].double().mul_(scale)
            total += float(torch.dot(wide, wide))
    return total
