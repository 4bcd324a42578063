"""How Megatron-core names tensors in its checkpoints, in the words of our adapter of it. Pure.

Layers of a homogeneous stack are one tensor with an axis for the layer in front, experts one with an axis for the
expert behind that; both are tensors of their own for us, ``decoder.layers.3.mlp.experts.experts.0.linear_fc1.weight``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from ckpt.layout.box import Box
from ckpt.layout.spec import MASTER

if TYPE_CHECKING:
    from collections.abc import Iterator

STATE = re.compile(r"(?:chained_(?P<chain>\d+)\.)?optimizer\.state\.(?P<role>[^.]+)\.(?P<name>.+)")
EXTRA = re.compile(r"(?P<name>.+)\._extra_state(?:/shard_(?P<place>[\d.]+)_(?P<shape>[\d.]+))?")
OUTPUT, WORDS = "output_layer.weight", "embedding.word_embeddings.weight"
ROLES = {"fp32_param": MASTER, "param": MASTER}
_STACK = re.compile(r"(?:^|\.)layers\.(?!\d+\.)")
_EXPERTS = re.compile(r"\.experts\.experts\.(?!\d+\.)")


@dataclass(frozen=True, slots=True)
class Key:
    """What a key says: how many axes are in front, and the names of what is behind them."""

    key: str
    layers: bool
    experts: bool

    @classmethod
    def of(cls, key: str) -> Key:
        """Return it.

        >>> Key.of("decoder.layers.mlp.experts.experts.linear_fc1.weight").axes, Key.of("decoder.layers.3.x.bias").axes
        (2, 0)
        """
        return cls(key, bool(_STACK.search(key)), bool(_EXPERTS.search(key)))

    @property
    def axes(self) -> int:
        """Number of axes in front."""
        return self.layers + self.experts

    def name(self, at: tuple[int, ...]) -> str:
        """Return the name of the tensor at an index of the axes in front.

        >>> Key.of("decoder.layers.mlp.experts.experts.linear_fc1.weight").name((3, 0))
        'decoder.layers.3.mlp.experts.experts.0.linear_fc1.weight'
        """
        name = self.key
        if self.experts:
            name = _EXPERTS.sub(f".experts.experts.{at[-1]}.", name, count=1)
        if self.layers:
            found = _STACK.search(name)
            name = f"{name[: found.end()]}{at[0]}.{name[found.end() :]}" if found else name
        return name

    def module(self, at: tuple[int, ...], shape: tuple[int, ...]) -> str:
        """Return what our adapter calls the module of an extra state that is at an index of a grid of objects.

        >>> Key.of("decoder.layers.mlp.experts.experts.linear_fc1").module((3, 1), (4, 2))
        'decoder.layers.3.mlp.experts.experts.linear_fc1[1]'
        """
        name = Key(self.key, self.layers, False).name(at)
        left, sizes = at[self.layers :], shape[self.layers :]
        return f"{name}{list(left)}" if any(size > 1 for size in sizes) else name

    def indexes(self, box: Box) -> Iterator[tuple[int, ...]]:
        """Yield the indexes of the axes in front that a box has elements of."""
        ranges = zip(box.offsets[: self.axes], box.sizes[: self.axes], strict=True)
        yield from product(*(range(start, start + count) for start, count in ranges))

    def inner(self, box: Box) -> Box:
        """Return a box without the axes in front."""
        return Box(box.offsets[self.axes :], box.sizes[self.axes :])
