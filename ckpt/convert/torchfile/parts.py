"""The parts of a plain ``torch.save`` of a training loop: model, optimizer, step, and the rest. Pure.

Nobody prescribes the words for them; these are the ones that people use, tried in this order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ckpt.convert.torchfile.file import Stored, stored_in
from ckpt.words import some

if TYPE_CHECKING:
    from collections.abc import Mapping

_MODEL = ("model", "state_dict", "module", "model_state_dict", "model_state", "net", "network", "weights", "params")
_OPTIMIZERS = ("optimizer_states", "optimizers")
_SCHEDULER = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict", "lr_schedulers")
_STEP = ("step", "global_step", "global_steps", "iteration", "iter", "steps", "num_steps")
_RANDOM = ("rng", "random")
"""In a key: its tensors are the states of generators."""
EXTRA_STATE = "_extra_state"
"""``nn.Module``'s own name for what ``get_extra_state`` returns."""


@dataclass(slots=True)
class Parts:
    """``tensors``: of the model, by name. ``extra_states``: of modules, by module. ``optimizer``: an optimizer's state
    dict. ``scheduler``: one's state dict. ``step``: None if nothing says it. ``rest``: everything else by its key.
    """

    tensors: dict[str, Stored] = field(default_factory=dict)
    extra_states: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] | None = None
    scheduler: dict[str, Any] | None = None
    step: int | None = None
    rest: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def parts_of(tree: Mapping[Any, Any]) -> Parts:
    """Return the parts of what a file holds.

    Without one of the words for a model, all tensors that the file has outside of optimizers are the model's: by their
    path, if there are several dictionaries of them.
    """
    found = Parts()
    left = {str(key): state_of(value) for key, value in tree.items()}
    found.step = next((left.pop(key) for key in _STEP if _is_count(left.get(key))), None)
    found.optimizer = _optimizer(left, found.notes)
    found.scheduler = next((_taken(left, key) for key in _SCHEDULER if _is_state(left.get(key))), None)
    word = next((key for key in _MODEL if _is_model(key, left.get(key)) and isinstance(left[key], dict)), None)
    keys = [word] if word else _of_model(left)
    if len(keys) == 1 and isinstance(left[keys[0]], dict):
        model = left.pop(keys[0])
        others = [key for key, value in left.items() if isinstance(value, dict) and _is_model(key, value)]
        if others:
            found.notes.append(f"the model is what stands under {keys[0]!r}; objects beside it: {some(others)}")
    else:
        model = {key: left.pop(key) for key in keys}
    found.rest = left
    _add_model(model, found)
    return found


def state_of(value: Any) -> Any:
    """Return the state dict of a module that trusted code has made (its tensors are places); anything else as it is."""
    if not isinstance(value, torch.nn.Module):
        return value
    found: dict[str, Any] = {}
    for prefix, module in value.named_modules(remove_duplicate=False):
        persistent = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in {**module._parameters, **persistent}.items():
            found[f"{prefix}.{name}".lstrip(".")] = tensor
    return found


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _of_model(left: Mapping[str, Any]) -> list[str]:
    """Return the keys that are the model's. Single numbers beside whole models are somebody's losses."""
    found = [key for key, value in left.items() if _is_model(key, value)]
    bare = [key for key in found if isinstance(left[key], Stored)]
    numbers = [key for key in bare if left[key].shape == ()]
    return [key for key in found if key not in numbers] if len(numbers) == len(bare) < len(found) else found


def _is_model(key: str, value: Any) -> bool:
    if _is_optimizer(value) or any(word in key for word in _RANDOM):
        return False
    if isinstance(value, dict):
        return any(stored.shape != () for _, stored in stored_in(value))
    return isinstance(value, Stored) or key.rpartition(".")[2] == EXTRA_STATE


def _optimizer(left: dict[str, Any], notes: list[str]) -> dict[str, Any] | None:
    """Take the one optimizer out of what is left; of several it cannot be told whose parameters are whose."""
    for key in _OPTIMIZERS:
        if isinstance(left.get(key), list) and len(left[key]) == 1 and _is_optimizer(left[key][0]):
            return _taken(left, key)
    keys = [key for key, value in left.items() if _is_optimizer(value)]
    if len(keys) == 1:
        return _taken(left, keys[0])
    if keys:
        notes.append(f"the optimizers {some(keys)} are kept as objects: nothing tells which parameters are whose")
    return None


def _is_optimizer(value: Any) -> bool:
    state, groups = (value.get("state"), value.get("param_groups")) if isinstance(value, dict) else (None, None)
    return isinstance(state, dict) and isinstance(groups, list)


def _is_state(value: Any) -> bool:
    """Is this a state dict, or a list of one?"""
    return isinstance(value, dict) or (isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict))


def _taken(left: dict[str, Any], key: str) -> dict[str, Any]:
    value = left.pop(key)
    return dict(value[0] if isinstance(value, list) else value)


def _add_model(model: Mapping[str, Any], found: Parts) -> None:
    for path, value in _leaves(model):
        name = ".".join(path)
        if path[-1] == EXTRA_STATE or name.endswith(f".{EXTRA_STATE}"):
            found.extra_states[name.removesuffix(EXTRA_STATE).removesuffix(".")] = value
        elif isinstance(value, Stored) and name not in found.tensors:
            found.tensors[name] = value
        elif isinstance(value, Stored):
            found.lost.append(f"tensor {name!r} is there twice, once as a path: the first one counts")
        elif value is not None:
            found.rest.setdefault("model", {})[name] = value


def _leaves(tree: Mapping[Any, Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return (path, value) of all that nested dictionaries hold; the extra state of a module stays whole."""
    found: list[tuple[tuple[str, ...], Any]] = []
    for key, value in tree.items():
        here = (*path, str(key))
        nested = isinstance(value, dict) and not here[-1].endswith(EXTRA_STATE)
        found += _leaves(value, here) if nested else [(here, value)]
    return found
