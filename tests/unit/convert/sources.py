"""Opened checkpoints made by hand, of any tensors and roles, whose bytes are in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ckpt.convert.opened import Builder, Loose
from ckpt.layout.box import Box
from ckpt.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpt.convert.opened import Opened

ADAM = ("param", "master", "exp_avg", "exp_avg_sq", "step")


class Source:
    """Collects tensors. Each element is ``first + its row-major index``: a wrong place shows as a wrong number."""

    def __init__(self, format: str = "test") -> None:
        self._store = MemoryStore()
        self.builder = Builder(format, "made by hand", self._store)
        self._files = 0

    def add(self, fqn: str, role: str, shape: Sequence[int], dtype: str = "float32", first: float = 0) -> Source:
        """Add one tensor; of bfloat16 the upper halves of float32."""
        spec = self.builder.spec(fqn, role, dtype, shape)
        if 0 in shape:
            return self
        size = int(np.prod(shape))
        if dtype == "bfloat16":
            raw = (np.arange(first, first + size).astype("f4").view("u4") >> 16).astype("u2").tobytes()
        else:
            raw = np.arange(first, first + size).astype(dtype).tobytes()
        return self.put(spec.fqn, role, shape, dtype, raw)

    def put(self, fqn: str, role: str, shape: Sequence[int], dtype: str, raw: bytes) -> Source:
        """Add one tensor of these bytes."""
        self._files += 1
        key = f"file{self._files}"
        self._store.put(key, raw)
        self.builder.add(self.builder.spec(fqn, role, dtype, shape), Box.whole(shape), key, 0)
        return self

    def weights(self, tensors: Mapping[str, Sequence[int]], roles: Iterable[str] = ("param",)) -> Source:
        """Add tensors, each with these roles: ``step`` is a number, ``param`` beside a master in bfloat16."""
        roles = tuple(roles)
        for fqn, shape in tensors.items():
            for n, role in enumerate(roles):
                low = role == "param" and "master" in roles
                self.add(fqn, role, () if role == "step" else shape, "bfloat16" if low else "float32", 100 * n)
        return self

    def groups(self, *groups: Sequence[str]) -> Source:
        """Say which parameter groups the optimizer has, and in which order."""
        tree = {"class": "AdamW", "groups": [{"params": list(g), "options": {"lr": n}} for n, g in enumerate(groups)]}
        self.builder.objects.append(Loose("optimizer", "engine", (0,), tree))
        return self

    def open(self) -> Opened:
        """Return it."""
        return self.builder.build()
