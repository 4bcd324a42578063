"""What one rank is going to save, as it stands at one moment."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ckpt.errors import IntegrityError
from ckpt.layout.box import Box
from ckpt.layout.spec import BUFFER, PARAM, RankLayout, TensorSpec
from ckpt.runtime.extras import Item
from ckpt.runtime.pieces import Piece, PieceTable

if TYPE_CHECKING:
    from collections.abc import Iterable


COPIED_BYTES = 64 << 20
"""Parameters that no optimizer steps are copied if they are no more than this on a rank."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A piece whose memory is ours, because training writes into the original before it can be staged."""

    spec: TensorSpec
    box: Box
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One rank's state. ``kind``: name of the adapter. ``assumed``: FQNs that count as whole though nobody but the user
    says so. Of a snapshot that is read while training goes on (``behind``): ``versions``: of live tensors that nobody
    may write into until they are staged; ``doubtful``: FQNs of parameters that no optimizer steps, so that no hook
    holds back who writes into them: they are looked at twice.
    """

    step: int
    kind: str
    layout: RankLayout
    pieces: PieceTable
    items: Sequence[Item]
    assumed: frozenset[str]
    behind: bool = False
    versions: tuple[tuple[Piece, int], ...] = ()
    doubtful: frozenset[str] = frozenset()

    def check_unchanged(self) -> None:
        """Raise if a live tensor was written into since: then what was read may be a mixture of two states.

        Raises:
            IntegrityError: names the tensor.
        """
        for piece, version in self.versions:
            if _owner(piece)._version != version:
                raise changed(f"{piece.spec} box {piece.box}")


def changed(what: str) -> IntegrityError:
    """Return the error that says that ``what`` was written into too early."""
    return IntegrityError(
        f"{what} was written into before its snapshot was staged; between async_save and the next optimizer step "
        f"nothing else may change it (handle.staged.wait() waits)"
    )


def private_pieces(pieces: Sequence[Piece], derived: Collection[str], *, stepped: bool) -> tuple[list[Piece], set[str]]:
    """Return pieces that training does not change before they are staged, and the FQNs that it may change all the same.

    What optimizers step is left where it is: their step waits for it. Buffers (running statistics) change in every
    forward, and are copied. Parameters that no optimizer steps are frozen, or changed by other means (a momentum
    encoder): copied too, unless they are more than :data:`COPIED_BYTES`.

    Args:
        pieces: what this rank holds.
        derived: FQNs of parameters that have masters.
        stepped: does all that is no buffer change in ``torch.optim.Optimizer.step`` only? Otherwise all is copied.
    """
    if not stepped:
        return [_copied(piece) for piece in pieces], set()
    states = {piece.spec.fqn for piece in pieces if piece.spec.role not in (PARAM, BUFFER)} | set(derived)
    loose = [p for p in pieces if p.spec.role == PARAM and p.spec.fqn not in states]
    small = sum(piece.tensor.nbytes for piece in loose) <= COPIED_BYTES
    copied = {piece.spec.fqn for piece in loose} if small else set()
    private = [
        _copied(one) if one.spec.role == BUFFER or (one.spec.role == PARAM and one.spec.fqn in copied) else one
        for one in pieces
    ]
    return private, {piece.spec.fqn for piece in loose} - copied


def _copied(piece: Piece) -> Copied:
    return Copied(piece.spec, piece.box, piece.tensor.detach().clone())


def _owner(piece: Piece) -> torch.Tensor:
    # In torch's eyes a DTensor and its local part are two tensors: writing through the one is no new version of the
    # other.
    owner = getattr(piece, "owner", None)
    return piece.tensor if owner is None else owner


def versions_of(pieces: Iterable[Piece]) -> tuple[tuple[Piece, int], ...]:
    """Return torch's version counters of all pieces' memory; of those made under inference mode there is none."""
    return tuple((piece, _owner(piece)._version) for piece in pieces if not _owner(piece).is_inference())


def private_item(item: Item) -> Item:
    """Return an object whose tensors are copies in host memory: the originals may be counters that training updates."""
    return replace(item, tensors=tuple(tensor.detach().to("cpu", copy=True) for tensor in item.tensors))
