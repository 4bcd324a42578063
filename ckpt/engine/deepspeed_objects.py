"""The part of a DeepSpeed engine's state that is not tensors: counters, scheduler, loss scaler, hyperparameters.

Put back into an engine that may differ in every way: what both sides have is carried, what cannot be is said in a note.
Numbers that move during training come from the checkpoint; what the user wrote into the new engine's config (window of
the loss scaler, which kernel the optimizer uses) stays as it is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ckpt.engine.deepspeed_layout import inner_optimizer
from ckpt.engine.deepspeed_refuse import ask
from ckpt.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt.engine.deepspeed_layout import Partition

_COUNTERS = (
    "global_steps", "global_samples", "micro_steps", "skipped_steps", "_step_applied", "_unmanaged_backward_count",
)  # fmt: skip

_FLAGS = ("overflow", "custom_loss_scaler", "external_loss_scale")

_KERNEL_CHOICES = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Group options that say how a step is computed, not what it computes: they belong to the machine at hand."""

_SCALER_MOVES = {"cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"}

_SCALER_SETTINGS = {
    "scale_factor": ("scale_factor",),
    "scale_window": ("scale_window",),
    "min_scale": ("min_scale", "min_loss_scale"),  # DynamicLossScaler's name, LossScaleConfig's name
}


def capture_objects(engine: Any, partitions: list[Partition]) -> dict[str, Any]:
    """Return what :func:`restore_objects` puts back: plain Python values, and group options that are tensors."""
    optimizer, scheduler = engine.optimizer, engine.lr_scheduler
    return {
        "engine": {name: getattr(engine, name) for name in _COUNTERS if hasattr(engine, name)},
        "setup": _setup(engine),
        "optimizer": _capture_groups(inner_optimizer(optimizer), partitions),
        "scheduler": None if scheduler is None else {"class": _class(scheduler), "state": scheduler.state_dict()},
        "loss_scaler": _capture_scaler(optimizer),
        "flags": {name: _plain_flag(getattr(optimizer, name)) for name in _FLAGS if hasattr(optimizer, name)},
    }


def restore_objects(engine: Any, partitions: list[Partition], objects: Mapping[str, Any]) -> list[str]:
    """Put ``objects`` back and return notes about what could not be.

    Raises:
        LayoutError: the optimizer's groups hold other parameters than the checkpoint's.
    """
    notes: list[str] = []
    optimizer = engine.optimizer
    inner = inner_optimizer(optimizer)
    if inner is not None and objects.get("optimizer"):
        notes += _restore_groups(inner, partitions, objects["optimizer"])
    notes += _restore_counters(engine, objects.get("engine", {}), objects.get("setup", {}))
    notes += _restore_scheduler(engine.lr_scheduler, objects.get("scheduler"))
    notes += _restore_scaler(optimizer, objects.get("loss_scaler"))
    for name, value in objects.get("flags", {}).items():
        if hasattr(optimizer, name):
            setattr(optimizer, name, value)
    return notes


def _setup(engine: Any) -> dict[str, Any]:
    low = "fp16" if ask(engine, "fp16_enabled", False) else "bf16" if ask(engine, "bfloat16_enabled", False) else "fp32"
    return {
        "zero_stage": int(ask(engine, "zero_optimization_stage", 0)),
        "dtype": low,
        "data_parallel_world_size": int(ask(engine, "seq_dp_world_size", 1)),
        "gradient_accumulation_steps": int(ask(engine, "gradient_accumulation_steps", 1)),
        "train_batch_size": int(ask(engine, "train_batch_size", 0)),
        "wrapper": None if engine.optimizer is None else type(engine.optimizer).__name__,
    }


def _class(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _plain_flag(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


# ------------------------------------------------------------------------------------------------------------ counters


def _restore_counters(engine: Any, counters: Mapping[str, Any], setup: Mapping[str, Any]) -> list[str]:
    for name, value in counters.items():
        if name in _COUNTERS:
            setattr(engine, name, value)
    notes = []
    here = _setup(engine)
    before, now = setup.get("gradient_accumulation_steps"), here["gradient_accumulation_steps"]
    if before not in (None, now):
        # What matters is that a window starts here; micro_steps of the other window length would end it early.
        engine.micro_steps = engine.global_steps * now
        notes.append(f"gradient_accumulation_steps is {now}, was {before}: micro_steps set to {engine.micro_steps}")
    before, now = setup.get("train_batch_size"), here["train_batch_size"]
    if before not in (None, now):
        notes.append(f"train_batch_size is {now}, was {before}: global_samples counts what was really seen")
    return notes


def _restore_scheduler(scheduler: Any, saved: Mapping[str, Any] | None) -> list[str]:
    if saved is None and scheduler is None:
        return []
    if saved is None:
        return [f"no scheduler was saved: {type(scheduler).__name__} starts from its beginning"]
    if scheduler is None:
        return [f"scheduler {saved['class']} was saved, this engine has none: its state was left out"]
    here, there = _class(scheduler), saved["class"]
    if here != there:
        return [f"scheduler {there} was saved, this engine's is {here}: it starts from its beginning"]
    scheduler.load_state_dict(saved["state"])
    return []


# --------------------------------------------------------------------------------------------------------- loss scaler


def _scaler_of(optimizer: Any) -> Any:
    """Return the object that holds a *dynamic* loss scale, or None. ZeRO-0's wrappers keep it in another class."""
    scaler = getattr(optimizer, "loss_scaler", None)
    if getattr(scaler, "dynamic", False):
        return scaler
    config = getattr(optimizer, "loss_scale_config", None)
    return config if getattr(config, "dynamic_loss_scale", False) else None


def _capture_scaler(optimizer: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    scaler = _scaler_of(optimizer)
    if scaler is not None:
        found = {name: getattr(scaler, name) for name in sorted(_SCALER_MOVES) if hasattr(scaler, name)}
        found["settings"] = {name: _setting(scaler, name) for name in _SCALER_SETTINGS}
    autocast = getattr(optimizer, "torch_autocast_gradscaler", None)
    if autocast is not None:
        found["autocast"] = autocast.state_dict()
    return found


def _setting(scaler: Any, name: str) -> Any:
    return next((getattr(scaler, alias) for alias in _SCALER_SETTINGS[name] if hasattr(scaler, alias)), None)


def _restore_scaler(optimizer: Any, saved: Mapping[str, Any] | None) -> list[str]:
    saved = saved or {}
    scaler = _scaler_of(optimizer)
    notes = []
    autocast = getattr(optimizer, "torch_autocast_gradscaler", None)
    if autocast is not None and "autocast" in saved:
        autocast.load_state_dict(saved["autocast"])
    elif autocast is not None or "autocast" in saved:
        notes.append("only one side has an autocast gradient scaler: its state was left out")
    if scaler is None:
        if "cur_scale" in saved:
            notes.append(f"dynamic loss scale {saved['cur_scale']:g} was saved, this engine has none: it was left out")
        return notes
    if "cur_scale" not in saved:
        return [*notes, f"no dynamic loss scale was saved: it starts from {scaler.cur_scale:g}"]
    for name in sorted(_SCALER_MOVES):
        if hasattr(scaler, name) and name in saved:
            setattr(scaler, name, saved[name])
        elif hasattr(scaler, name) or name in saved:
            notes.append(f"loss scaler: only one side has {name}: it was left out")
    for name, before in saved.get("settings", {}).items():
        now = _setting(scaler, name)
        if before != now:
            notes.append(f"loss scaler: {name} is {now} as configured here, was {before}")
    return notes


# ----------------------------------------------------------------------------------------------------- parameter groups


def members_by_group(inner: Any, partitions: list[Partition]) -> list[list[str]]:
    """Return, for each of the optimizer's groups, the FQNs of the parameters that it steps, on all ranks together."""
    members: list[list[str]] = [[] for _ in inner.param_groups]
    for partition in partitions:
        members[partition.group] += partition.members
    return members


def _capture_groups(inner: Any, partitions: list[Partition]) -> dict[str, Any] | None:
    if inner is None:
        return None
    groups = []
    for group, members in zip(inner.param_groups, members_by_group(inner, partitions), strict=True):
        options = {k: v for k, v in group.items() if k != "params"}
        plain = {k: v for k, v in options.items() if _is_plain(v)}
        groups.append({"params": members, "options": plain, "left_out": sorted(options.keys() - plain.keys())})
    return {"class": _class(inner), "groups": groups}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str) or isinstance(value, torch.Tensor)


def _restore_groups(inner: Any, partitions: list[Partition], saved: Mapping[str, Any]) -> list[str]:
    notes: list[str] = []
    same = saved["class"] == _class(inner)
    if not same:
        notes.append(f"optimizer is {_class(inner)}, was {saved['class']}: options that both know were carried")
    for index, source in enumerate(_match_groups(members_by_group(inner, partitions), saved["groups"])):
        group = inner.param_groups[index]
        if source["left_out"]:
            notes.append(f"optimizer group {index}: options {source['left_out']} are not plain data and were not saved")
        for name, value in source["options"].items():
            if name in _KERNEL_CHOICES:
                if name in group and (now := group[name]) != value:
                    notes.append(f"optimizer group {index}: {name} is {now} as configured here, was {value}")
            elif same or name in group:
                group[name] = _in_kind_of(group.get(name), value)
    return sorted(set(notes), key=notes.index)


def _in_kind_of(present: Any, value: Any) -> Any:
    if isinstance(present, torch.Tensor):  # a learning rate that a captured graph reads: the tensor must stay
        with torch.no_grad():
            return present.copy_(torch.as_tensor(value))
    if isinstance(value, torch.Tensor):
        return value.item() if isinstance(present, int | float) else value.clone()
    return tuple(value) if isinstance(present, tuple) else value


def _match_groups(present: list[list[str]], saved: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the saved group of each present one: the one with the same members, wherever it stands in the list."""
    by_members = {frozenset(group["params"]): group for group in saved}
    problems = []
    found = []
    for index, members in enumerate(present):
        source = by_members.get(frozenset(members))
        if source is None:
            problems.append(_difference(index, members, saved))
        else:
            found.append(source)
    if problems or len(present) != len(saved):
        expected, here = [len(g["params"]) for g in saved], [len(m) for m in present]
        message = f"optimizer groups differ: expected groups of {expected} parameters as saved, found {here}"
        raise LayoutError(message, tuple(problems))
    return found


def _difference(index: int, members: list[str], saved: list[Mapping[str, Any]]) -> str:
    here = set(members)
    there = set(saved[index]["params"]) if index < len(saved) else set()
    return f"group {index}: only here {sorted(here - there)}, only in the checkpoint {sorted(there - here)}"
