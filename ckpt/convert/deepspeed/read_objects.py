"""What a DeepSpeed checkpoint holds beside tensors, as the adapter of the live engine stores it.

The same trees as :func:`ckpt.engine.deepspeed_objects.capture_objects` returns, so that a load into an engine goes on
from an imported checkpoint as from one of ours. What DeepSpeed does not write (the class of the optimizer, generators,
the number of micro-steps) is made up where it follows from the rest, and left out else; a note says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.convert.deepspeed.read_files import attributes
from ckpt.convert.deepspeed.read_job import MODEL_KEYS
from ckpt.convert.opened import Loose
from ckpt.convert.torchfile.file import Inert
from ckpt.convert.torchfile.stored import loaded
from ckpt.errors import ConfigError, UnsupportedFeature
from ckpt.runtime.extras import ENGINE, VALUE
from ckpt.runtime.objects import encode_object
from ckpt.words import some

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt.convert.deepspeed.read_model import Model

MAX_CLIENT_BYTES = 256 << 20
"""Bytes of tensors in one entry of ``client_state``, which is kept in memory."""
_STAGES = {"optimizer_states": 1, "gradients": 2, "weights": 3}

Groups = dict[tuple[int, int | None], list[dict[str, Any]]]


def objects_of(model: Model, optimizers: Mapping[int, dict[str, Any]], groups: Groups, wrapper: str) -> list[Loose]:
    """Return the engine's objects and the user's.

    Args:
        model: the model that was read.
        optimizers: model-parallel rank -> what DeepSpeed's wrapper wrote.
        groups: (model-parallel rank, expert-parallel rank or None) -> parameter groups.
        wrapper: class of the wrapper; empty if the user's optimizer steps the parameters themselves.
    """
    ranks: dict[tuple[str, str], tuple[Any, list[int]]] = {}
    for (mp, expert), named in sorted(groups.items(), key=lambda one: (one[0][0], one[0][1] or 0)):
        trees = _trees(model, mp, optimizers.get(mp, {}), named, wrapper)
        for dp in range(model.job.dp):
            if expert is None or expert == expert_rank(model, groups, mp, dp):
                for name, tree in trees.items():
                    ranks.setdefault((name, repr(tree)), (tree, []))[1].append(model.job.rank(mp, dp))
    found = [Loose(name, ENGINE, tuple(sorted(who)), tree) for (name, _), (tree, who) in ranks.items()]
    model.builder.usual.append("DeepSpeed saves no random generators: a load leaves them as they are")
    classes = {class_of(one) for one in groups.values() if one}
    model.builder.usual += [
        f"DeepSpeed saves no class of the optimizer: {f'by its options it is {name}' if name else 'it stays unknown'}"
        for name in sorted(classes)
    ]
    return found + _client_state(model)


def expert_rank(model: Model, groups: Groups, mp: int, dp: int) -> int:
    """Return which of the expert-parallel ranks a data-parallel rank is."""
    ep = sum(1 for m, _ in groups if m == mp)
    inner = not model.job.config.get("use_data_before_expert_parallelism", False)
    return dp % ep if inner else dp // (model.job.dp // ep)


def _trees(
    model: Model, mp: int, optimizer: dict[str, Any], groups: list[dict[str, Any]], wrapper: str
) -> dict[str, Any]:
    tree = model.job.models[mp]
    pipeline = model.job.pp > 1 or tree.get("module") is None
    inner = class_of(groups)
    found: dict[str, Any] = {
        "engine": _counters(model, tree, pipeline, optimizer),
        "setup": {
            "zero_stage": _stage(model, optimizer),
            "dtype": model.job.dtype,
            "data_parallel_world_size": model.job.dp,
            "gradient_accumulation_steps": model.job.accumulation,
            "train_batch_size": model.job.batch,
            "wrapper": wrapper or inner.rpartition(".")[2],
        },
        "scheduler": _scheduler(model, tree.get("lr_scheduler")),
        "loss_scaler": _scaler(model, optimizer),
        "flags": _flags(optimizer, wrapper),
    }
    if not groups:
        model.builder.notes.append("no parameter groups of the optimizer: its hyperparameters are left out")
        if optimizer:  # there is one, whose state was left out: so that a load misses it
            found["optimizer"] = None
    else:
        found["optimizer"] = {"class": inner, "groups": [_group(model, group) for group in groups]}
    section = model.job.config.get("zero_optimization")
    if isinstance(section, dict) and section.get("round_robin_gradients"):
        found["setup"]["round_robin_gradients"] = True
    if pipeline:
        found["setup"]["pipeline"] = True
    modules = {n: _carried(model, f"extra state of {n!r}", one[mp]) for n, one in model.extra.items() if mp in one}
    if modules:
        found["modules"] = modules
    if tree.get("random_ltd") is not None:
        found["random_ltd"] = _carried(model, "random_ltd", tree["random_ltd"])
    return found


def _carried(model: Model, what: str, tree: Any) -> Any:
    """Return a tree with its tensors, or None and a word on it if there is something in it that is no plain value."""
    try:
        return loaded(model.job.files.store, tree)
    except UnsupportedFeature as error:
        model.builder.lost.append(f"{what} was left out: {error}")
        return None


def _group(model: Model, group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group without options that are no plain values."""
    named = {n: _carried(model, f"option {n!r} of the optimizer", v) for n, v in group["options"].items()}
    kept = {n: v for n, v in named.items() if v is not None or group["options"][n] is None}
    return {"params": group["params"], "options": kept}


def _counters(model: Model, tree: dict[str, Any], pipeline: bool, optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return the engine's counters. Saved between two steps, so the micro-steps follow; a pipeline does not count."""
    return {
        "global_steps": model.job.step,
        "global_samples": tree.get("global_samples", 0),
        "micro_steps": 0 if pipeline else model.job.step * model.job.accumulation,
        "skipped_steps": tree.get("skipped_steps", 0),
        "_step_applied": model.job.step > 0 and not optimizer.get("overflow", False),
        "_unmanaged_backward_count": 0,
    }


def _stage(model: Model, optimizer: dict[str, Any]) -> int:
    said = optimizer.get("zero_stage")
    if isinstance(said, Inert):
        said = said.args[0] if said.args else said.attributes.get("_value_")
    said = getattr(said, "value", said)
    said = _STAGES.get(said, said) if isinstance(said, str) else said
    return said if isinstance(said, int) else model.job.zero


def _flags(optimizer: dict[str, Any], wrapper: str) -> dict[str, Any]:
    if not wrapper:
        return {}
    overflow = bool(optimizer.get("overflow", False))
    return {"overflow": overflow, "custom_loss_scaler": False, "external_loss_scale": None}


def _scaler(model: Model, optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return the moving numbers and the settings of a dynamic loss scale, and nothing of a static one."""
    held = attributes(optimizer.get("loss_scaler"))
    if not held and optimizer.get("dynamic_loss_scale"):
        held = {**optimizer, "dynamic": True}  # of a job without ZeRO
    if not held.get("dynamic"):
        return {}
    moving = ("cur_hysteresis", "cur_iter", "cur_scale", "last_overflow_iter")
    section = model.job.config.get("fp16")
    least = held.get("min_scale", section.get("min_loss_scale", 1) if isinstance(section, dict) else None)
    found = {name: held[name] for name in moving if name in held}
    settings = {name: held.get(name) for name in ("scale_factor", "scale_window")}
    return {**found, "settings": {**settings, "min_scale": least}}


# ---------------------------------------------------------------------------------------------- classes that are lost


def class_of(groups: list[dict[str, Any]]) -> str:
    """Return the class of the optimizer as far as the options of its groups give it away; empty if they do not."""
    names = set(groups[0]["options"]) if groups else set()
    adam = {"betas", "eps", "weight_decay", "lr"}
    if adam | {"decoupled_weight_decay", "maximize", "capturable"} <= names:
        decoupled = groups[0]["options"]["decoupled_weight_decay"]
        return "torch.optim.adamw.AdamW" if decoupled else "torch.optim.adam.Adam"
    own = names - {"step", "initial_lr", "name", "moe"}
    if own == adam | {"bias_correction"}:
        return "deepspeed.ops.adam.fused_adam.FusedAdam"
    if own == adam | {"bias_correction", "amsgrad"}:
        return "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam"
    if {"momentum", "dampening", "nesterov", "maximize"} <= names:
        return "torch.optim.sgd.SGD"
    if {"lr_decay", "initial_accumulator_value", "maximize"} <= names:
        return "torch.optim.adagrad.Adagrad"
    return ""


def _scheduler(model: Model, state: Any) -> dict[str, Any] | None:
    """Return a scheduler's state; its class follows from the config if DeepSpeed made it."""
    if state is None:
        return None
    section = model.job.config.get("scheduler")
    kind = section.get("type") if isinstance(section, dict) else None
    plain = _carried(model, "the scheduler", state)
    if not isinstance(plain, dict):
        return None
    own = isinstance(kind, str) and isinstance(state, dict) and set(state) == {"last_batch_iteration"}
    return {
        "class": f"deepspeed.runtime.lr_schedules.{kind}" if own else "",
        "state": plain,
    }


# ------------------------------------------------------------------------------------------------------- client state


def _client_state(model: Model) -> list[Loose]:
    """Return what the user gave to ``save_checkpoint``, each entry by its name."""
    found: dict[tuple[str, str], tuple[Any, list[int]]] = {}
    for mp, tree in model.job.models.items():
        entries: dict[Any, Any] = tree
        for name, value in entries.items():
            if not isinstance(name, str) or not name or name in MODEL_KEYS:
                continue
            try:
                plain = loaded(model.job.files.store, value, MAX_CLIENT_BYTES)
                document, tensors = encode_object(plain, f"client_state[{name!r}]")
            except (ConfigError, UnsupportedFeature) as error:
                model.builder.lost.append(f"client_state[{name!r}] was left out: {error}")
                continue
            same = (name, f"{document!r}{[t.tolist() for t in tensors if t.numel() < 1000]}")
            ranks = [model.job.rank(mp, dp) for dp in range(model.job.dp)]
            found.setdefault(same, (plain, []))[1].extend(ranks)
    for held in ("data_sampler",):
        if model.job.models[0].get(held) is not None:
            model.builder.lost.append(f"{held}: the state of DeepSpeed's own data sampler was left out")
    if found:
        names = some(sorted({name for name, _ in found}))
        model.builder.notes.append(f"client_state is carried by name, for ckpt.load(extra=…): {names}")
    return [Loose(name, VALUE, tuple(sorted(who)), tree) for (name, _), (tree, who) in found.items()]
