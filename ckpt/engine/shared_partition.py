"""Partition: the one shape that every optimizer's view of the parameters is reduced to.

An optimizer steps tensors of its own, flat or not, whole or a slice, and keys its state by them. Which elements of
which global tensors lie where in them is a list of :class:`Piece`; state of the same shape lies alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ckpt.engine.base import Stepped
from ckpt.engine.shared_check import local_tensor
from ckpt.layout.tiling import Tiling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckpt.layout.box import Box
    from ckpt.layout.tiling import FlatPart

_WRAPPERS_OF_MODULE_NAMES = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""torch.compile and activation checkpointing rename parameters; a checkpoint must not depend on either."""


def clean_name(name: str) -> str:
    """Return the name of a parameter or buffer without what wrapper modules add to it."""
    for part in _WRAPPERS_OF_MODULE_NAMES:
        name = name.replace(part, "")
    return name


class Named(NamedTuple):
    """A parameter's identity: global name, and which elements of the global tensor this rank's ``param`` is.

    ``tiling.local`` is the shape that the framework thinks the parameter has: for ZeRO-3 before its own cutting.
    """

    fqn: str
    tiling: Tiling
    param: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the global tensor."""
        return self.tiling.shape

    @property
    def numel(self) -> int:
        """Elements of the local tensor."""
        return self.tiling.numel


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``[start, start + numel)`` of a flattened local tensor, found at ``offset`` in a partition."""

    fqn: str
    tiling: Tiling
    start: int
    numel: int
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the global tensor."""
        return self.tiling.shape


@dataclass(slots=True)
class Partition:
    """One tensor that the inner optimizer steps.

    ``key``: its key in ``inner.state``, 1-D for flat partitions, else of its only parameter's local shape. ``group``:
    index in ``inner.param_groups``. ``members``: FQNs of all parameters of this partition on *all* ranks that share it.
    ``pieces``: what this rank holds of them. ``separate``: it is a copy beside the model's own parameters, so it holds
    masters.
    """

    key: torch.Tensor
    group: int
    separate: bool
    members: list[str]
    pieces: list[Piece] = field(default_factory=list)
    flat: bool = True

    def views(self, tensor: torch.Tensor, piece: Piece) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield the boxes of ``piece`` and the memory of each in ``tensor``, which is laid out like ``key``."""
        if self.flat:
            yield from flat_views(tensor, piece.offset, piece.tiling, piece.start, piece.numel)
        else:
            yield from tile_views(tensor, piece.tiling)

    def padding(self, tensor: torch.Tensor, piece: Piece) -> Iterator[torch.Tensor]:
        """Yield the memory in ``tensor`` that belongs to ``piece`` and is nobody's state (a padded vocabulary)."""
        if self.flat:
            yield from flat_padding(tensor, piece.offset, piece.tiling, piece.start, piece.numel)
        else:
            yield from padding_views(tensor, piece.tiling)


def stepped_of(
    optimizer: torch.optim.Optimizer, partitions: Iterable[Partition], shown: torch.optim.Optimizer | None = None
) -> list[Stepped]:
    """Return what an optimizer steps, for those who log its gradients or repeat its steps.

    ``shown``: the optimizer around it whose groups schedulers move; None: itself.
    """

    def places(one: Partition) -> Callable[[torch.Tensor], Iterator[tuple[str, tuple[int, ...], Box, torch.Tensor]]]:
        def yielded(tensor: torch.Tensor) -> Iterator[tuple[str, tuple[int, ...], Box, torch.Tensor]]:
            for piece in one.pieces:
                for box, view in one.views(tensor, piece):
                    yield piece.fqn, piece.shape, box, view

        return yielded

    outer = optimizer if shown is None else shown
    return [Stepped(optimizer, one.key, one.group, tuple(one.members), places(one), outer) for one in partitions]


def flat_views(
    flat: torch.Tensor, offset: int, tiling: Tiling, start: int, numel: int
) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield box and view for elements ``[start, start + numel)`` of a local tensor, found at ``flat[offset]``.

    The views share the memory of ``flat`` (1-D), so writing into them writes into the engine.
    """
    memory = local_tensor(flat).narrow(0, offset, numel)
    for box, part in tiling.of_range(start, start + numel):
        yield box, _part_of(memory, part)


def flat_padding(flat: torch.Tensor, offset: int, tiling: Tiling, start: int, numel: int) -> Iterator[torch.Tensor]:
    """Yield the padding among elements ``[start, start + numel)`` of a local tensor, found at ``flat[offset]``."""
    memory = local_tensor(flat).narrow(0, offset, numel)
    for part in tiling.padding_of_range(start, start + numel):
        yield _part_of(memory, part)


def tile_views(tensor: torch.Tensor, tiling: Tiling) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield box and view for everything that a local tensor of shape ``tiling.local`` holds."""
    memory = local_tensor(tensor)
    for tile in tiling.tiles:
        yield tile.box, memory[_slices(tile.local)] if tile.box.sizes != tuple(memory.shape) else memory


def padding_views(tensor: torch.Tensor, tiling: Tiling) -> Iterator[torch.Tensor]:
    """Yield the padding of a local tensor of shape ``tiling.local``."""
    memory = local_tensor(tensor)
    for hole in tiling.padding:
        yield memory[_slices(hole)]


def clear_padding(entries: Iterable[Named]) -> None:
    """Set the padding of plain tensors to zero: rows of a padded vocabulary are nobody's state, so no load fills them.

    :meth:`ckpt.engine.shared_state.StateLoad.attach` does the same for what the optimizer keeps.
    """
    for entry in entries:
        for hole in padding_views(entry.param, entry.tiling):
            hole.zero_()


def _part_of(flat: torch.Tensor, part: FlatPart) -> torch.Tensor:
    count = 1
    for size in part.sizes:
        count *= size
    return flat.narrow(0, part.start, count).view(part.sizes)[part.index]


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
