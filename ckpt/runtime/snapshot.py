"""What one rank is going to save, as it stands at one moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ckpt.errors import IntegrityError
from ckpt.layout.box import Box
from ckpt.layout.spec import BUFFER, RankLayout, TensorSpec
from ckpt.runtime.extras import Item
from ckpt.runtime.pieces import Piece, PieceTable

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Copied:
    """A piece whose memory is ours, because training writes into the original before it can be staged."""

    spec: TensorSpec
    box: Box
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One rank's state. ``kind``: name of the adapter. ``assumed``: FQNs that count as whole though nobody but the user
    says so. ``versions``: of live tensors that nobody may write into until they are staged. ``moment``: the point in
    the device's work at which the state is this (:func:`ckpt.runtime.capture.moment`).
    """

    step: int
    kind: str
    layout: RankLayout
    pieces: PieceTable
    items: Sequence[Item]
    assumed: frozenset[str]
    versions: tuple[tuple[Piece, int], ...] = ()
    moment: torch.cuda.Event | None = None

    def check_unchanged(self) -> None:
        """Raise if a live tensor was written into since: then what was read may be a mixture of two states.

        Raises:
            IntegrityError: names the tensor.
        """
        for piece, version in self.versions:
            if piece.tensor._version != version:
                raise IntegrityError(
                    f"{piece.spec} box {piece.box} was written into before its snapshot was staged; between "
                    "async_save and the next optimizer step nothing else may change it (handle.staged.wait() waits)"
                )


def private_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """Return pieces that forward and backward do not change: buffers are copied, everything else is the live memory.

    Parameters, masters and moments change in the optimizer's step only, which waits for them. Buffers (running
    statistics) change in every forward. Two pieces of one memory stay one copy each: they are views of other shapes.
    """
    return [
        Copied(piece.spec, piece.box, piece.tensor.detach().clone()) if piece.spec.role == BUFFER else piece
        for piece in pieces
    ]


def versions_of(pieces: Iterable[Piece]) -> tuple[tuple[Piece, int], ...]:
    """Return torch's version counters of all pieces' memory; of those made under inference mode there is none."""
    return tuple((piece, piece.tensor._version) for piece in pieces if not piece.tensor.is_inference())


def private_item(item: Item) -> Item:
    """Return an object whose tensors are copies: the originals may be counters that training updates in place."""
    return replace(item, tensors=tuple(tensor.detach().clone() for tensor in item.tensors))
