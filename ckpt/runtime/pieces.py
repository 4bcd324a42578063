"""From a plan's chunks to the live memory that holds them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ckpt.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from ckpt.layout.box import Box
    from ckpt.layout.spec import TensorSpec


class Piece(Protocol):
    """A shard with its live memory (``ckpt.engine.base.LiveShard``; runtime and engine do not know each other)."""

    @property
    def spec(self) -> TensorSpec:
        """Which tensor."""

    @property
    def box(self) -> Box:
        """Which elements."""

    @property
    def tensor(self) -> torch.Tensor:
        """The live memory, of shape ``box.sizes``."""


class PieceTable:
    """Finds the live view of any box that lies inside one of this rank's pieces."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._by_key: dict[tuple[str, str], list[Piece]] = {}
        for piece in pieces:
            if tuple(piece.tensor.shape) != piece.box.sizes:
                raise LayoutError(
                    f"{piece.spec} box {piece.box}: live memory has shape {list(piece.tensor.shape)}, "
                    f"expected {list(piece.box.sizes)}"
                )
            if str(piece.tensor.dtype) != f"torch.{piece.spec.dtype}":
                raise LayoutError(
                    f"{piece.spec} box {piece.box}: live memory is {str(piece.tensor.dtype).removeprefix('torch.')}, "
                    f"expected {piece.spec.dtype}"
                )
            self._by_key.setdefault(piece.spec.key, []).append(piece)

    def view(self, spec: TensorSpec, box: Box) -> torch.Tensor:
        """Return the live memory of ``box`` (a view, shape ``box.sizes``)."""
        for piece in self._by_key.get(spec.key, ()):
            if piece.box.contains(box):
                return piece.tensor[box.relative_to(piece.box)]
        raise LayoutError(f"{spec} box {box}: not in this rank's memory")

    def devices(self) -> set[torch.device]:
        """Return the devices that this rank's pieces are on."""
        return {piece.tensor.device for pieces in self._by_key.values() for piece in pieces}

    def of(self, fqn: str, role: str) -> list[Piece]:
        """Return this rank's pieces of one tensor."""
        return self._by_key.get((fqn, role), [])
