"""Files of ``torch.save`` for the tests of what reads them."""

from __future__ import annotations

import io
from typing import Any

import torch

from ckpt.store.memory import MemoryStore


def saved(value: Any, **how: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **how)
    return file.getvalue()


def store_of(**files: Any) -> MemoryStore:
    """``name__ext=value``: bytes as they are, anything else by ``torch.save``."""
    store = MemoryStore()
    for name, value in files.items():
        store.put(name.replace("__", "."), value if isinstance(value, bytes) else saved(value))
    return store


class Watched(MemoryStore):
    """Counts the bytes that are read."""

    read = 0

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        data = super().get(key, start, nbytes)
        self.read += len(data)
        return data


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit, whatever the dtype."""
    expected = expected.detach()
    alike = (found.dtype, found.shape) == (expected.dtype, expected.shape)
    return alike and bytes_of(found) == bytes_of(expected)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""
