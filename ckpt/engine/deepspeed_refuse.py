"""What the DeepSpeed adapter cannot express, found before anything is read or written.

DeepSpeed has many modes, and each of them changes where state lives. Saving one that was never proved would save half
of it, so this is a list of what is refused; whatever passes it and still looks unfamiliar is refused further down,
where partitions and state entries are read (:mod:`ckpt.engine.deepspeed_layout`, ``shared_state``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.engine.shared_check import class_names
from ckpt.errors import ConfigError, UnsupportedLayout

if TYPE_CHECKING:
    from collections.abc import Iterable

_CLASSES = {
    "DualPipeVEngine": "DualPipeV (two stages on each rank, whose layers are not numbered in one row)",
    "DualPipeVModule": "DualPipeV (two stages on each rank, whose layers are not numbered in one row)",
    "SuperOffloadOptimizer_Stage3": "SuperOffload (the optimizer state lives in another process)",
    "ZenFlowZeroOptimizer": "ZenFlow (part of the state belongs to gradients that are not applied yet)",
    "OnebitAdam": "1-bit optimizers (their error feedback differs on every rank)",
    "OnebitLamb": "1-bit optimizers (their error feedback differs on every rank)",
    "ZeroOneAdam": "1-bit optimizers (their error feedback differs on every rank)",
}


def ask(engine: Any, name: str, default: Any = None) -> Any:
    """Return ``engine.name()`` or the attribute ``engine.name``; ``default`` if this DeepSpeed has neither."""
    value = getattr(engine, name, default)
    return value() if callable(value) else value


def refuse_unsupported(engine: Any, others: Iterable[str] = ()) -> None:
    """Check the engine as a whole.

    Args:
        engine: a ``DeepSpeedEngine``.
        others: what was found besides: tensors that cannot be named or placed, one line each.

    Raises:
        UnsupportedLayout: a feature whose state this adapter cannot express; ``problems`` lists all of them.
    """
    problems = [
        f"{type(part).__name__}: {_CLASSES[name]}"
        for part in (engine, engine.module, engine.optimizer, getattr(engine.optimizer, "optimizer", None))
        for name in sorted(class_names(part) & _CLASSES.keys())
    ]
    problems += [text for refused, text in _features(engine) if refused]
    problems += others
    if problems:
        raise UnsupportedLayout(f"{type(engine).__name__} cannot be saved or loaded", tuple(problems))


def _features(engine: Any) -> list[tuple[bool, str]]:
    optimizer = engine.optimizer
    offload = ask(engine, "zero_offload_param")
    device = getattr(getattr(offload, "device", None), "value", getattr(offload, "device", None))
    return [
        (
            any("AutoEPMoELayer" in class_names(module) for module in engine.module.modules()),
            "AutoEP (experts that DeepSpeed has put in place of the model's own)",
        ),
        (bool(getattr(optimizer, "swap_optimizer", False)), "optimizer state on NVMe"),
        (device == "nvme", "parameters on NVMe"),
        (ask(engine, "zero_hpz_partition_size", 1) > 1, "hpZ (zero_hpz_partition_size > 1)"),
        (ask(engine, "mics_shard_size", -1) > 0, "MiCS (mics_shard_size > 0)"),
        (bool(ask(engine, "zero_quantized_weights", False)), "quantized weights (zero_quantized_weights)"),
        (
            bool(ask(engine, "zero_quantized_nontrainable_weights", False)),
            "quantized frozen weights (zero_quantized_nontrainable_weights)",
        ),
        (bool(getattr(optimizer, "zenflow", False)), "ZenFlow"),
        (
            bool(getattr(optimizer, "offloaded_states", None)),
            "states moved away by offload_states(): call reload_states() first",
        ),
        (bool(ask(engine, "is_deepcompile_active", False)), "DeepCompile"),
        (
            bool(ask(engine, "curriculum_learning_enabled", False))
            and getattr(engine, "training_dataloader", None) is not None,
            "curriculum learning by the engine's own data sampler (its state is files of clusters beside a cursor)",
        ),
        (bool(ask(engine, "amp_enabled", False)), "apex amp (its masters are hidden in the optimizer)"),
    ]


def refuse_mid_accumulation(engine: Any) -> None:
    """Check that no gradients of a half-done accumulation window are pending; no state names them.

    Raises:
        ConfigError: micro-steps were run since the last optimizer step.
    """
    gas = ask(engine, "gradient_accumulation_steps", 1)
    boundary = getattr(engine, "_is_gradient_accumulation_boundary", None)
    # Whoever sets the boundary by hand (accelerate) calls step() at boundaries only: micro_steps then counts steps.
    inside = engine.micro_steps % gas != 0 if boundary is None else not boundary
    if inside:
        raise ConfigError(
            f"engine is inside a gradient accumulation window: expected micro_steps to be a multiple of "
            f"gradient_accumulation_steps ({gas}), found {engine.micro_steps}. Save or load after the engine.step() "
            f"that ends the window."
        )


def refuse_pending_gradients(engine: Any, stepped: Iterable[Any]) -> None:
    """Check that the engine does not stand between a backward pass and the step that uses it up.

    ``stepped``: the model's parameters that the optimizer steps; what others keep in ``.grad`` is nobody's business.

    Raises:
        ConfigError: there are gradients that no state names.
    """
    found = _pending(engine.optimizer, stepped)
    # A pipeline's train_batch enters a backward pass on every stage and leaves it on the last one only.
    depth = 0 if "PipelineEngine" in class_names(engine) else getattr(engine.optimizer, "_backward_active_depth", 0)
    if ask(engine, "_running_engine_backward", False) or depth:
        found = "a backward pass is running"
    elif getattr(engine, "_unmanaged_backward_count", 0):
        found = "a backward pass was not followed by a step"
    if found:
        raise ConfigError(
            f"engine is inside a gradient accumulation window: {found}. Save or load after the engine.step() that "
            f"ends the window."
        )


def _pending(optimizer: Any, stepped: Iterable[Any]) -> str:
    """Name what holds gradients. As observed: every wrapper keeps them elsewhere, and forgets them in its own way."""
    if "DeepSpeedZeroOptimizer_Stage3" in class_names(optimizer):
        # Not averaged_gradients: zero_grad(), which drops them for good by these two, leaves them standing.
        if optimizer._epilogue_ran_this_backward or optimizer.micro_step_id > 0:
            return "a backward pass was not followed by a step"
        return ""
    for name in ("averaged_gradients", "all_grad_tensors"):  # ZeRO-1 and 2
        if any(held is not None for held in getattr(optimizer, name, {}).values()):
            return f"the optimizer holds {name}"
    if getattr(optimizer, "cpu_offload", False) and optimizer.micro_step_id >= 0:
        return "a backward pass was not followed by a step"  # its gradients are in .grad of the masters, as at any time
    if any(map(any, getattr(optimizer, "fp32_groups_has_gradients", ()))):  # BF16_Optimizer
        return "the optimizer holds fp32 gradients"
    held = [g for p in stepped for g in (p.grad, getattr(p, "grad_accum", None)) if g is not None]
    return "parameters have gradients" if any(bool(g.any()) for g in held) else ""
