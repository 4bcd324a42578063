"""Small checks that every adapter needs."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from ckpt.engine.base import dtype_name
from ckpt.errors import UnsupportedLayout
from ckpt.layout.spec import ITEMSIZE

if TYPE_CHECKING:
    from torch import Tensor


PLAIN = (torch.Tensor, torch.nn.Parameter)


def class_names(value: object) -> frozenset[str]:
    """Return the names of the classes that ``value`` is an instance of: a test that needs no import of a framework."""
    kind = type(value)
    found = _names.get(kind)
    if found is None:
        found = _names[kind] = frozenset(cls.__name__ for cls in kind.__mro__)
    return found


_names: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()
"""Asked for every tensor in every save, of few types."""


def class_name(value: object) -> str:
    """Return the full name of the class of ``value``."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's memory of a tensor: of a ``DTensor`` its local part, else the tensor; without autograd."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor).detach()
    return local


def check_tensor(fqn: str, role: str, tensor: Tensor) -> None:
    """Check that a tensor is plain memory (of a ``DTensor`` its local part) of a dtype that can be stored.

    Raises:
        UnsupportedLayout: it is a meta, sparse or quantized tensor, or of a sub-byte dtype.
    """
    tensor = getattr(tensor, "_local_tensor", tensor)
    name = dtype_name(tensor.dtype)
    trouble = ""
    if tensor.is_meta:
        trouble = "is on the meta device, so it has no values"
    elif tensor.layout is not torch.strided:
        trouble = f"has layout {tensor.layout}"
    elif tensor.is_quantized or name not in ITEMSIZE:
        trouble = f"has dtype {name}"
    elif type(tensor) not in PLAIN and "DTensor" in class_names(tensor):
        trouble = "is a DTensor inside of another tensor"
    elif 0 in tensor.stride() and any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
        trouble = "has elements that share one place in memory (expand)"
    if trouble:
        raise UnsupportedLayout(f"tensor {fqn!r} ({role}) {trouble}: expected a dense tensor of {', '.join(ITEMSIZE)}")
