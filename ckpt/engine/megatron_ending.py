"""Where a step of a Megatron loop ends: behind the optimizer's step, and the scheduler's if there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.engine.megatron_optimizer import stepping
from ckpt.engine.shared_check import class_name
from ckpt.engine.shared_ending import INSTEAD, Ending
from ckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable


def at_step_end(optimizer: Any, scheduler: Any, call: Callable[[], None]) -> Callable[[], None]:
    """Have ``call`` called behind the last of both; return what ends that.

    Raises:
        ConfigError: nothing is stepped on this rank, something takes no hook, or loops may do it in two ways: with a
            loss scale some step the scheduler behind a step that was skipped, and some (Megatron's own) do not.
    """
    wrappers = stepping(optimizer)
    if not wrappers:
        raise ConfigError(f"hook=True: no optimizer steps anything on this rank: {INSTEAD}")
    if scheduler is not None and any(getattr(one, "grad_scaler", None) is not None for one in wrappers):
        raise ConfigError(
            f"hook=True: with a loss scale some loops step {class_name(scheduler)} behind a skipped step, and some do "
            f"not, so that nothing tells where a training step ends: {INSTEAD}"
        )
    names = [f"{class_name(one)}.step()" for one in (optimizer, scheduler) if one is not None]
    ending = Ending(call, names)
    try:
        for wrapper in wrappers:
            ending.held_by(wrapper.optimizer)
        ending.method(0, optimizer, "step", opens=True)
        if scheduler is not None:
            ending.method(1, scheduler, "step")
    except BaseException:
        ending.remove()
        raise
    return ending.remove
