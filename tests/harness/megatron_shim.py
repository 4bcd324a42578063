"""Megatron-core on a CPU: what it asks of CUDA without need, answered by the host.

Megatron-core names the device ``"cuda"`` for buffers and flags, asserts the legacy type string of tensors, and forks a
CUDA generator around dropout. None of that has to do with where state lives, so that a test may pretend.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Iterator

PRELOAD = (
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.pipeline_parallel",
    "megatron.core.transformer.moe.moe_layer",
)
"""What the cases import; seconds, once in the fork server."""

_HOST = torch.device("cpu")


def _host(device: Any) -> Any:
    return _HOST if isinstance(device, int | str | torch.device) and not isinstance(device, bool) else device


class _OnHost(TorchFunctionMode):
    """Read every device as the CPU: there is no other."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = _host(kwargs["device"])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **kwargs)


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def synchronize(self, *_: Any) -> None: ...


@contextlib.contextmanager
def _no_fork(self: Any, name: str = "") -> Iterator[None]:
    yield


def install() -> None:
    """Pretend, in this process, until it ends."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    torch.cuda.current_device = lambda: _HOST
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.Stream = _Stream
    torch.cuda.current_stream = lambda *_: _Stream()
    random.CudaRNGStatesTracker.fork = _no_fork
    moe_utils.te_general_gemm = None  # asked for by name, but only there with the Transformer Engine
    _OnHost().__enter__()
