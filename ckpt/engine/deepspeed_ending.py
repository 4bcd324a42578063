"""Where a step of a DeepSpeed engine ends: behind ``engine.step()``, or ``train_batch()`` of a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.engine.shared_check import class_name, class_names
from ckpt.engine.shared_ending import INSTEAD, Ending
from ckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable


class _Boundary(Ending):
    """The one call of a step. Most of ``engine.step()`` do nothing: the engine's count says which have stepped.

    It counts steps that an overflow made it skip, too.
    """

    def __init__(self, call: Callable[[], None], name: str, engine: Any) -> None:
        super().__init__(call, [name])
        self._engine, self._before = engine, 0

    def begin(self, part: int, opens: bool, *_: Any) -> None:
        super().begin(part, opens)
        self._before = self._engine.global_steps

    def end(self, part: int, *_: Any) -> None:
        if self._engine.global_steps > self._before:
            super().end(part)
        else:
            self.left()


def at_step_end(engine: Any, inner: Any, call: Callable[[], None]) -> Callable[[], None]:
    """Have ``call`` called behind each call of the engine's that ends an accumulation window; return what ends that.

    Args:
        engine: DeepSpeed's.
        inner: its torch optimizer.
        call: the function.

    Raises:
        ConfigError: there is no optimizer, or something takes no hook.
    """
    if inner is None:
        raise ConfigError(f"hook=True: the engine has no optimizer whose steps could be seen: {INSTEAD}")
    name = "train_batch" if "PipelineEngine" in class_names(engine) else "step"
    ending = _Boundary(call, f"{class_name(engine)}.{name}()", engine)
    try:
        ending.held_by(inner)
        ending.method(0, engine, name, opens=True)
    except BaseException:
        ending.remove()
        raise
    return ending.remove
