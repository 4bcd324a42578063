"""What a torch training loop hands over as its engine: a module, stages of a pipeline, optimizers, schedulers, scaler.

Torch has no engine object; its loops have a few local variables. They are told apart by type, so their order is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ckpt.engine.shared_check import class_name, class_names
from ckpt.engine.shared_ranks import group_ranks
from ckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_KEYS = {
    "model": "module", "module": "module", "models": "module",
    "optimizer": "optimizer", "optimizers": "optimizer",
    "scheduler": "scheduler", "lr_scheduler": "scheduler", "schedulers": "scheduler",
    "scaler": "scaler", "grad_scaler": "scaler",
}  # fmt: skip
"""Keys of an engine that is a dict, and what must be behind each."""

_EXPECTED = (
    "expected (model, optimizer), with a scheduler and a GradScaler if there are any, in any order; a dict of the same "
    f"under keys of {sorted(_KEYS)}; or a module alone. A list of modules is one model in parts; instead of a module a "
    "PipelineStage, a list of them, or a pipeline schedule may stand"
)


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A module that this rank runs. ``stage``: its number among the stages of a pipeline, None if there is none."""

    module: torch.nn.Module
    stage: int | None = None


@dataclass(slots=True)
class Parts:
    """An engine taken apart. ``pipeline``: the ranks of this rank's pipeline, in stage order; empty without one."""

    models: list[ModelPart] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    scalers: list[Any] = field(default_factory=list)
    pipeline: tuple[int, ...] = ()

    @property
    def scaler(self) -> Any:
        """The gradient scaler, or None."""
        return self.scalers[0] if self.scalers else None


def is_torch(engine: object) -> bool:
    """Is this something that :func:`parts_of` either takes apart or refuses with a reason?"""
    return isinstance(engine, tuple | list | Mapping) or _role(engine) == "module"


def parts_of(engine: object) -> Parts:
    """Take an engine apart.

    Raises:
        ConfigError: something in it is not recognised, or there are too many of something; lists all that is wrong.
    """
    if isinstance(engine, Mapping) and any(isinstance(value, torch.Tensor) for value in engine.values()):
        raise ConfigError(
            f"engine of type {class_name(engine)}: a state dict of tensors does not say who holds what: pass the "
            "module itself, or (model, optimizer); ckpt.analyze takes a state dict to look for equal content"
        )
    parts, problems = Parts(), list[str]()
    for where, item, grouped, expected in _items(engine):
        role = _role(item)
        if role is None or (expected is not None and role != expected):
            shown = f"a {class_name(item)}" + (f", expected: {expected}" if expected else "")
            hint = ": an engine of DeepSpeed is passed alone" if "DeepSpeedEngine" in class_names(item) else ""
            problems.append(f"{where} is {shown}{hint}")
        elif role == "module":
            if parts.models and not grouped:
                problems.append(f"{where} is a second model ({class_name(item)}): parts of one model go into a list")
            _add_model(parts, item)
        else:
            {"optimizer": parts.optimizers, "scheduler": parts.schedulers, "scaler": parts.scalers}[role].append(item)
    if not parts.models and not problems:
        problems.append("there is no module in it")
    if len(parts.scalers) > 1:
        problems.append(f"there are {len(parts.scalers)} gradient scalers, at most one is possible")
    if problems:
        raise ConfigError(f"engine of type {class_name(engine)}: {'; '.join(problems)}. {_EXPECTED}")
    return parts


def _items(engine: object) -> Iterator[tuple[str, Any, bool, str | None]]:
    """Yield (where, item, is it in a list of its own, what its key promises)."""
    if isinstance(engine, Mapping):
        for key, value in engine.items():
            yield from _flat(f"engine[{key!r}]", value, _KEYS.get(key, f"a key of {sorted(_KEYS)}"))
    elif isinstance(engine, tuple | list):
        for i, value in enumerate(engine):
            yield from _flat(f"engine[{i}]", value, None)
    else:
        yield "engine", engine, False, None


def _flat(where: str, value: Any, expected: str | None) -> Iterator[tuple[str, Any, bool, str | None]]:
    if isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield f"{where}[{i}]", item, i > 0, expected
    elif value is not None:  # a loop without a scheduler
        yield where, value, False, expected


def _role(item: object) -> str | None:
    names = class_names(item)
    if "DeepSpeedEngine" in names:
        return None
    if isinstance(item, torch.nn.Module) or names & {"_PipelineStageBase", "_PipelineSchedule"}:
        return "module"
    if isinstance(item, torch.optim.Optimizer):
        return "optimizer"
    if "GradScaler" in names:
        return "scaler"
    if all(callable(getattr(item, name, None)) for name in ("state_dict", "load_state_dict", "step")):
        return "scheduler"
    return None


def _add_model(parts: Parts, item: Any) -> None:
    if isinstance(item, torch.nn.Module):
        parts.models.append(ModelPart(item))
        return
    for stage in _stages(item):
        parts.models.append(ModelPart(stage.submod, stage.stage_index))
        if dist.is_initialized():
            parts.pipeline = group_ranks(stage.group or dist.group.WORLD)


def _stages(item: Any) -> Iterable[Any]:
    if "_PipelineStageBase" in class_names(item):
        return [item]
    return item._stages if hasattr(item, "_stages") else [item._stage]
