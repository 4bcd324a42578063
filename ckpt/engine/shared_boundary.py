"""Where a training step begins: the moment at which the one before is complete, on every rank alike.

Behind ``optimizer.step()`` it is not: DeepSpeed and Megatron call the torch optimizer from inside their own step, which
then still has low-precision parameters to rebuild, and a scheduler steps after that. The next step's first call is: it
comes when all is done. It must also come before the ranks talk to each other, or a rank that stops there would leave
others in a communication: a pipeline's later stages run forward only when the earlier ones have sent something, so
there it is the call that starts the whole pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckpt.engine.base import EngineAdapter
from ckpt.engine.shared_check import class_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STARTERS = (
    ("PipelineEngine", "train_batch"),  # DeepSpeed's pipelines
    ("_PipelineSchedule", "step"),  # torch's
    ("_BaseDataParallel", "zero_grad_buffer"),  # Megatron's, which every one of its loops has to call first
)
"""Class of a part of an engine -> its method that a training step begins with; in any other engine it is forward."""


def at_step_begin(engine: object, call: Callable[[], None]) -> Callable[[], None] | None:
    """Have ``call`` called in front of everything that a training step does.

    With gradient accumulation most forwards are inside a step: the first one behind a step of an optimizer begins one.
    What is no training (a module in ``eval()``, or gradients switched off) is left out.

    Returns:
        A function that ends it; None if this engine has no such place that is known.
    """
    stepped = False

    def after_optimizer(*_: Any) -> None:
        nonlocal stepped
        stepped = True

    def at_begin() -> None:
        nonlocal stepped
        if stepped:
            stepped = False
            call()

    remove = _in_front(engine, at_begin)
    if remove is None:
        return None
    counting = register_optimizer_step_post_hook(after_optimizer)

    def end() -> None:
        remove()
        counting.remove()

    return end


def _in_front(engine: object, call: Callable[[], None]) -> Callable[[], None] | None:
    parts = list(_parts(engine))
    for name, method in STARTERS:
        for part in parts:
            if name in class_names(part):
                return _wrap(part, method, call)
    if any("_PipelineStageBase" in class_names(part) for part in parts):
        return None  # its forward comes when other ranks have sent something
    modules = [part for part in parts if isinstance(part, torch.nn.Module)]
    if not modules and isinstance(engine, EngineAdapter):
        modules = [module for module in (engine.module(),) if module is not None]
    if not modules:
        return None

    def hook(module: torch.nn.Module, *_: Any) -> None:
        if module.training and torch.is_grad_enabled():
            call()

    # In front of hooks that are there already: FSDP2's gather the parameters.
    return modules[0].register_forward_pre_hook(hook, prepend=True).remove


def _parts(engine: object) -> Iterator[object]:
    if isinstance(engine, Mapping):
        engine = tuple(engine.values())
    if not isinstance(engine, tuple | list):
        yield engine
        return
    for part in engine:
        yield from _parts(part)


def _wrap(owner: Any, method: str, call: Callable[[], None]) -> Callable[[], None]:
    original = getattr(owner, method)

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call()
        return original(*args, **kwargs)

    setattr(owner, method, wrapped)

    def undo() -> None:
        if vars(owner).get(method) is wrapped:
            delattr(owner, method)

    return undo
