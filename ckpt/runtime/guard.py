"""An engine that holds half of one state and half of another must not train, and must not be saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from ckpt.errors import ConfigError

if TYPE_CHECKING:
    import torch

_FLAG = "_ckpt_half_loaded"


def mark_half_loaded(module: torch.nn.Module | None) -> None:
    """Make forward raise until a load succeeds. Called when a load has failed after it began to write."""
    if module is None or getattr(module, _FLAG, None) is not None:
        return

    def refuse(*_: Any) -> NoReturn:
        raise ConfigError("a ckpt.load into this engine failed midway, its state is a mixture: load a checkpoint again")

    setattr(module, _FLAG, module.register_forward_pre_hook(refuse, prepend=True))


def mark_whole(module: torch.nn.Module | None) -> None:
    """Let forward run again."""
    handle = getattr(module, _FLAG, None)
    if module is not None and handle is not None:
        handle.remove()
        delattr(module, _FLAG)


def check_whole(module: torch.nn.Module | None) -> None:
    """Raise :class:`ConfigError` if the last load into this engine failed midway."""
    if getattr(module, _FLAG, None) is not None:
        raise ConfigError("the last ckpt.load into this engine failed midway, its state is a mixture: not saved")
