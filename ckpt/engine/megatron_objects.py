"""What a Megatron engine holds beside tensors: groups, scheduler, loss scaler, modules' extra state, generators."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ckpt.engine.base import Mismatch
from ckpt.engine.megatron_model import axis_groups
from ckpt.engine.megatron_optimizer import inner_optimizer, stepping, wrappers_of
from ckpt.engine.shared_check import class_name
from ckpt.engine.shared_groups import capture_groups, match_groups, restore_groups
from ckpt.engine.shared_objects import capture_scheduler, gathered, restore_scheduler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt.engine.base import Context
    from ckpt.engine.megatron_model import Survey
    from ckpt.engine.shared_groups import Match
    from ckpt.engine.shared_partition import Partition

_SAME_GROUP = ("wd_mult", "lr_mult", "is_decoupled_lr")
"""Options by which Megatron itself finds a group again; a rank may step nothing of a group that others step."""

_OF_THE_LAYOUT = "is_expert_parallel"
"""Says whether the experts of a group are spread over ranks here: an option that no other layout has to take over."""

_TRACKERS = ("growth_tracker", "hysteresis_tracker")


def steps_taken(optimizer: Any) -> int:
    """Return the number of optimizer steps; ones that an overflow made the scaler skip do not count.

    A torch optimizer counts per parameter, Apex and the Transformer Engine per group.
    """
    inner = inner_optimizer(optimizer)
    if inner is None:
        return 0
    counts = [state["step"] for state in inner.state.values() if "step" in state]
    counts += [group["step"] for group in inner.param_groups if "step" in group]
    return int(max(counts, default=0))


def capture_objects(
    optimizer: Any, scheduler: Any, survey: Survey, partitions: list[Partition], context: Context
) -> dict[str, Any]:
    """Return what :func:`restore_objects` puts back."""
    return {
        **capture_counters(optimizer, scheduler, survey, context),
        "setup": {"wrappers": sorted({type(wrapper).__name__ for wrapper in wrappers_of(optimizer)})},
        "optimizer": _capture_groups(optimizer, partitions),
    }


def capture_counters(optimizer: Any, scheduler: Any, survey: Survey, context: Context) -> dict[str, Any]:
    """Return the part of it that changes from step to step, without the optimizer's groups."""
    found: dict[str, Any] = {
        "engine": {"global_steps": steps_taken(optimizer)},
        "scheduler": capture_scheduler(scheduler),
        "loss_scaler": _capture_scaler(optimizer),
    }
    if survey.extras:
        found["modules"] = {name: value for name, (_, value) in survey.extras.items()}
    states = _tracker_states()
    if states:
        found["generators"] = {"place": _place(context), "states": states}
    return found


def compare_objects(
    optimizer: Any, scheduler: Any, survey: Survey, partitions: list[Partition], saved: Sequence[Mapping[str, Any]]
) -> Mismatch:
    """Return what :func:`restore_objects` could not put back of ``saved``."""
    here, there = survey.extras.keys(), gathered(saved, "modules").keys()
    missing = [f"extra state of module {name!r}" for name in sorted(here - there)]
    unexpected = [f"extra state of module {name!r}" for name in sorted(there - here)]
    conflicts = _scheduler_conflicts(scheduler, [one.get("scheduler") for one in saved])
    inner = inner_optimizer(optimizer)
    if inner is not None and any("optimizer" in one for one in saved):
        match = match_groups(inner, partitions, [one.get("optimizer") for one in saved], survey.aliases)
        missing += [f"optimizer state of {fqn!r}" for fqn in match.added]
        trained = {entry.fqn for entry in survey.named.values() if entry.param.requires_grad}
        unexpected += [f"optimizer state of {fqn!r}" for fqn in match.removed if fqn not in trained]
        conflicts += match.conflicts
    return Mismatch(tuple(missing), tuple(unexpected), conflicts)


def restore_objects(
    optimizer: Any,
    scheduler: Any,
    survey: Survey,
    partitions: list[Partition],
    context: Context,
    saved: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Put back what the saved job's ranks had (this rank's own first) and return notes about what could not be."""
    notes: list[str] = []
    inner = inner_optimizer(optimizer)
    groups = [one.get("optimizer") for one in saved]
    if inner is not None and any(groups):
        match = _completed(inner, match_groups(inner, partitions, groups, survey.aliases), groups)
        notes += restore_groups(inner, match, groups)
    notes += _restore_scheduler(scheduler, [one.get("scheduler") for one in saved])
    notes += _restore_scaler(optimizer, saved[0].get("loss_scaler") if saved else None)
    states = gathered(saved, "modules")
    for name, (module, _) in survey.extras.items():
        if name in states:
            module.set_extra_state(states[name])
    return notes + _restore_tracker([one.get("generators") for one in saved], context)


# -------------------------------------------------------------------------------------------------------------- groups


def _capture_groups(optimizer: Any, partitions: list[Partition]) -> dict[str, Any] | None:
    found = capture_groups(inner_optimizer(optimizer), partitions)
    for group in found["groups"] if found else ():
        group["options"].pop(_OF_THE_LAYOUT, None)
    return found


def _completed(inner: Any, match: Match, saved: Sequence[Mapping[str, Any] | None]) -> Match:
    """Return the match for an optimizer of which each rank knows only the members that it steps itself.

    A group that is empty here takes the options of one that Megatron would call the same; members that other ranks step
    are not missed.
    """
    known = {
        tuple(group["options"].get(name) for name in _SAME_GROUP): (k, j)
        for k, one in reversed([*enumerate(saved)])
        for j, group in reversed([*enumerate((one or {}).get("groups", ()))])
    }
    sources = [
        known.get(tuple(group.get(name) for name in _SAME_GROUP)) if source is None and not group["params"] else source
        for source, group in zip(match.sources, inner.param_groups, strict=True)
    ]
    exact = [source is not None and not match.added for source in sources]
    return replace(match, sources=tuple(sources), exact=tuple(exact))


# ----------------------------------------------------------------------------------------------------------- scheduler


def _is_megatrons(scheduler: Any) -> bool:
    return type(scheduler).__name__ == "OptimizerParamScheduler"


def _scheduler_conflicts(scheduler: Any, saved: Sequence[Mapping[str, Any] | None]) -> tuple[str, ...]:
    """Return the settings for which Megatron's scheduler would stop the load half-way, by its own choice of options."""
    before = next((one for one in saved if one is not None), None)
    if not _is_megatrons(scheduler) or before is None or before["class"] != class_name(scheduler):
        return ()
    if scheduler.override_opt_param_scheduler or scheduler.use_checkpoint_opt_param_scheduler:
        return ()
    here = scheduler.state_dict()
    return tuple(
        f"scheduler: {name} is {here[name]!r}, was {value!r} (pass override_opt_param_scheduler or "
        f"use_checkpoint_opt_param_scheduler to the scheduler to choose)"
        for name, value in before["state"].items()
        if name != "num_steps" and name in here and here[name] != value
    )


def _restore_scheduler(scheduler: Any, saved: Sequence[Mapping[str, Any] | None]) -> list[str]:
    before = next((one for one in saved if one is not None), None)
    ours = _is_megatrons(scheduler) and before is not None and before["class"] == class_name(scheduler)
    if ours:
        scheduler.num_steps = 0  # its load_state_dict() adds to what is there
    notes = restore_scheduler(scheduler, saved, ())
    if ours:
        scheduler.step(0)  # and sets the groups' weight decay before it has taken over that of the checkpoint
    return notes


# ---------------------------------------------------------------------------------------------------------- loss scale


def _scaler_of(optimizer: Any) -> Any:
    """Return the object that holds a *dynamic* loss scale, or None; the optimizers of a chain move theirs alike."""
    scalers = [getattr(wrapper, "grad_scaler", None) for wrapper in stepping(optimizer)]
    return next((scaler for scaler in scalers if type(scaler).__name__ == "DynamicGradScaler"), None)


def _capture_scaler(optimizer: Any) -> dict[str, Any]:
    scaler = _scaler_of(optimizer)
    if scaler is None:
        return {}
    state = scaler.state_dict()
    return {"cur_scale": state["scale"].item(), **{name: state[name] for name in _TRACKERS}}


def _restore_scaler(optimizer: Any, saved: Mapping[str, Any] | None) -> list[str]:
    saved, scaler = saved or {}, _scaler_of(optimizer)
    if scaler is None:
        if "cur_scale" in saved:
            return [f"dynamic loss scale {saved['cur_scale']:g} was saved, this engine has none: it was left out"]
        return []
    if "cur_scale" not in saved:
        return [f"no dynamic loss scale was saved: it starts from {scaler.scale.item():g}"]
    for wrapper in stepping(optimizer):
        one = wrapper.grad_scaler
        state = {**one.state_dict(), **{name: saved[name] for name in _TRACKERS if name in saved}}
        one.load_state_dict({**state, "scale": torch.full_like(one.scale, saved["cur_scale"])})
    return [f"loss scaler: no {name} was saved: it starts anew" for name in _TRACKERS if name not in saved]


# ---------------------------------------------------------------------------------------------------------- generators


def _tracker() -> Any:
    module = sys.modules.get("megatron.core.tensor_parallel.random")
    return None if module is None else module.get_cuda_rng_tracker()


def _tracker_states() -> dict[str, Any]:
    """Return the generator states that dropout draws from in tensor-parallel regions; they differ by position."""
    tracker = _tracker()
    states = {} if tracker is None else tracker.get_states()
    return {k: s.get_state() if isinstance(s, torch.Generator) else s for k, s in states.items()}


def _place(context: Context) -> dict[str, list[int]]:
    """Return this rank's position among those that draw different numbers: axis -> [index, size]."""
    me = torch.distributed.get_rank()
    groups = axis_groups(context)
    return {axis: [groups[axis].index(me), len(groups[axis])] for axis in ("tp", "pp", "ep") if axis in groups}


def _restore_tracker(saved: Sequence[Mapping[str, Any] | None], context: Context) -> list[str]:
    present = _tracker_states()
    if not present and not any(saved):
        return []
    place = _place(context)
    found = next((one for one in saved if one is not None and one["place"] == place), None)
    if found is None or found["states"].keys() != present.keys():
        return ["the generators of tensor-parallel regions are as seeded here: none were saved for this position"]
    tracker = _tracker()
    states = dict(tracker.get_states())
    for name, state in found["states"].items():
        if isinstance(states[name], torch.Generator):
            states[name].set_state(state)
        else:
            states[name] = state
    tracker.set_states(states)
    return []
