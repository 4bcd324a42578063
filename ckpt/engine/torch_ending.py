"""Where a step of a torch loop ends: behind each optimizer's step, the scaler's update and each scheduler's step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.engine.shared_check import class_name
from ckpt.engine.shared_ending import INSTEAD, Ending
from ckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt.engine.torch_parts import Parts


def at_step_end(parts: Parts, call: Callable[[], None]) -> Callable[[], None]:
    """Have ``call`` called behind the last of these calls, whatever their order; return what ends that.

    A gradient scaler leaves out optimizers' steps that would overflow: there it is its update that counts.

    Raises:
        ConfigError: there is no optimizer, or something takes no hook.
    """
    if not parts.optimizers:
        raise ConfigError(f"hook=True: there is no optimizer in the engine whose steps could be seen: {INSTEAD}")
    scaler = parts.scaler if parts.scaler is not None and parts.scaler.is_enabled() else None
    names = [f"{class_name(scaler)}.step() and update()"] if scaler is not None else _named(parts.optimizers)
    first = len(names)
    ending = Ending(call, [*names, *_named(parts.schedulers)])
    try:
        for i, optimizer in enumerate(parts.optimizers):
            if scaler is None:
                ending.optimizer(i, optimizer)
            else:
                ending.held_by(optimizer)
        if scaler is not None:
            ending.method(0, scaler, "step", opens=True, ends=False)
            ending.method(0, scaler, "update")
        for i, scheduler in enumerate(parts.schedulers):
            ending.method(first + i, scheduler, "step")
    except BaseException:
        ending.remove()
        raise
    return ending.remove


def _named(owners: list[object]) -> list[str]:
    names = [f"{class_name(one)}.step()" for one in owners]
    return [f"{name} ({i + 1} of {len(names)})" for i, name in enumerate(names)] if len(names) > 1 else names
