"""The part of a DeepSpeed engine's state that is not tensors: counters, scheduler, loss scaler, hyperparameters.

Put back into an engine that may differ in every way: what both sides have is carried, what cannot be is said in a note.
Numbers that move during training come from the checkpoint; what the user wrote into the new engine's config (window of
the loss scaler, which kernel the optimizer uses) stays as it is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ckpt.engine.base import Mismatch
from ckpt.engine.deepspeed_layout import inner_optimizer
from ckpt.engine.deepspeed_refuse import ask
from ckpt.engine.shared_check import class_names
from ckpt.engine.shared_groups import capture_groups, match_groups, restore_groups
from ckpt.engine.shared_objects import capture_scheduler, gathered, restore_scheduler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt.engine.deepspeed_naming import Naming
    from ckpt.engine.shared_groups import Match, Source
    from ckpt.engine.shared_partition import Partition

_COUNTERS = (
    "global_steps", "global_samples", "micro_steps", "skipped_steps", "_step_applied", "_unmanaged_backward_count",
)  # fmt: skip

_FLAGS = ("overflow", "custom_loss_scaler", "external_loss_scale")

_SCALER_MOVES = {"cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"}

_SCALER_SETTINGS = {
    "scale_factor": ("scale_factor",),
    "scale_window": ("scale_window",),
    "min_scale": ("min_scale", "min_loss_scale"),  # DynamicLossScaler's name, LossScaleConfig's name
}


def capture_objects(engine: Any, partitions: list[Partition], naming: Naming) -> dict[str, Any]:
    """Return what :func:`restore_objects` puts back: plain Python values, and group options that are tensors."""
    groups = capture_groups(inner_optimizer(engine.optimizer), partitions)
    return {**capture_counters(engine, naming), "setup": _setup(engine), "optimizer": groups}


def capture_counters(engine: Any, naming: Naming) -> dict[str, Any]:
    """Return the part of it that changes from step to step, without the optimizer's groups."""
    optimizer = engine.optimizer
    found = {
        "engine": {name: getattr(engine, name) for name in _COUNTERS if hasattr(engine, name)},
        "scheduler": capture_scheduler(engine.lr_scheduler),
        "loss_scaler": _capture_scaler(optimizer),
        "flags": {name: _plain_flag(getattr(optimizer, name)) for name in _FLAGS if hasattr(optimizer, name)},
    }
    modules = {name: module.get_extra_state() for name, module in naming.stateful.items()}
    if modules:
        found["modules"] = modules
    random_ltd = getattr(engine, "random_ltd_scheduler", None)
    if random_ltd is not None:
        found["random_ltd"] = random_ltd.state_dict()
    return found


def compare_objects(
    engine: Any, partitions: list[Partition], naming: Naming, saved: Sequence[Mapping[str, Any]]
) -> Mismatch:
    """Return what :func:`restore_objects` could not put back of ``saved``."""
    inner = inner_optimizer(engine.optimizer)
    here, there = naming.stateful.keys(), gathered(saved, "modules").keys()
    missing = [f"extra state of module {name!r}" for name in sorted(here - there)]
    unexpected = [f"extra state of module {name!r}" for name in sorted(there - here)]
    conflicts: tuple[str, ...] = ()
    if inner is not None and any("optimizer" in one for one in saved):
        match = _match(inner, partitions, naming, [one.get("optimizer") for one in saved])
        trained = {entry.fqn for entry in naming.named.values() if entry.param.requires_grad}
        missing += [f"optimizer state of {fqn!r}" for fqn in match.added if fqn in trained]
        unexpected += [f"optimizer state of {fqn!r}" for fqn in match.removed]
        conflicts = match.conflicts
    return Mismatch(tuple(missing), tuple(unexpected), conflicts)


def _match(
    inner: Any, partitions: list[Partition], naming: Naming, groups: Sequence[Mapping[str, Any] | None]
) -> Match:
    several = (naming.mesh.groups.get("pp", ()), naming.mesh.groups.get("ep", ()), *naming.mesh.experts.values())
    part = any(len(ranks) > 1 for ranks in several) or len(naming.mesh.experts) > 1
    return match_groups(inner, partitions, groups, naming.aliases, part=part)


def restore_objects(
    engine: Any, partitions: list[Partition], naming: Naming, saved: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Put back what the saved job's ranks had (this rank's own first) and return notes about what could not be."""
    notes: list[str] = []
    objects = saved[0] if saved else {}
    optimizer = engine.optimizer
    inner = inner_optimizer(optimizer)
    sources: Sequence[Source | None] = ()
    groups = [one.get("optimizer") for one in saved]
    if inner is not None and any(groups):
        match = _match(inner, partitions, naming, groups)
        sources = match.sources
        notes += restore_groups(inner, match, groups)
    notes += _restore_counters(engine, objects.get("engine", {}), objects.get("setup", {}))
    notes += restore_scheduler(engine.lr_scheduler, [one.get("scheduler") for one in saved], sources)
    notes += _restore_random_ltd(getattr(engine, "random_ltd_scheduler", None), objects.get("random_ltd"))
    notes += _restore_scaler(optimizer, objects.get("loss_scaler"))
    for name, value in objects.get("flags", {}).items():
        if hasattr(optimizer, name):
            setattr(optimizer, name, value)
    states = gathered(saved, "modules")
    for name, module in naming.stateful.items():
        if name in states:
            module.set_extra_state(states[name])
    return notes


def _setup(engine: Any) -> dict[str, Any]:
    low = "fp16" if ask(engine, "fp16_enabled", False) else "bf16" if ask(engine, "bfloat16_enabled", False) else "fp32"
    # It says in which order flat groups list their members, which only a conversion into flat groups wants to know.
    shuffled = {"round_robin_gradients": True} if ask(engine, "zero_round_robin_gradients", False) else {}
    # It has a file for each layer, also with one stage.
    pipeline = {"pipeline": True} if "PipelineEngine" in class_names(engine) else {}
    return {
        **shuffled,
        **pipeline,
        "zero_stage": int(ask(engine, "zero_optimization_stage", 0)),
        "dtype": low,
        "data_parallel_world_size": int(ask(engine, "seq_dp_world_size", 1)),
        "gradient_accumulation_steps": int(ask(engine, "gradient_accumulation_steps", 1)),
        "train_batch_size": int(ask(engine, "train_batch_size", 0)),
        "wrapper": None if engine.optimizer is None else type(engine.optimizer).__name__,
    }


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


def _restore_random_ltd(scheduler: Any, saved: Any) -> list[str]:
    if scheduler is not None and saved is not None:
        scheduler.load_state_dict(saved)
    elif scheduler is not None or saved is not None:
        return ["only one side has a random-LTD scheduler: its state was left out"]
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
