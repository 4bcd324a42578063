"""From what ranks have logged to the gradients that this rank's optimizers step, whatever layout either has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ckpt.engine.base import Stepped, torch_dtype
from ckpt.errors import MalformedData, ReplayError
from ckpt.format.codec import decode_into
from ckpt.gradlog.lossless import multiplied
from ckpt.gradlog.share import local_of
from ckpt.layout.box import Box, overlaps
from ckpt.layout.spec import ITEMSIZE
from ckpt.runtime.staging import as_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpt.gradlog.record import Call, Gradient, Part, RankHead, Tensors


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of one logged part that go into one stepped tensor's gradient.

    ``start``: of the part, in its entry's logged elements. ``inside``: which of the part's elements; ``view``: their
    place in the gradient.
    """

    rank: int
    entry: int
    start: int
    sizes: tuple[int, ...]
    inside: tuple[slice, ...]
    view: torch.Tensor


@dataclass(slots=True)
class Target:
    """A stepped tensor, its gradient's memory, and where that comes from. ``numel``: elements that must come."""

    stepped: Stepped
    grad: torch.Tensor
    copies: list[Copy] = field(default_factory=list)
    numel: int = 0


def targets_of(stepped: Sequence[Stepped], heads: Mapping[int, RankHead]) -> list[Target]:
    """Return where each stepped tensor's gradient comes from.

    Args:
        stepped: what this rank steps.
        heads: rank of the log -> what its records hold.

    Raises:
        ReplayError: nobody has logged the gradient of something that is stepped here.
    """
    logged = _logged(heads)
    found = []
    for one in stepped:
        grad = torch.zeros_like(one.key, requires_grad=False)
        found.append(_target(one, logged, grad, local_of(grad)))
    return found


def check_logged(stepped: Sequence[Stepped], heads: Mapping[int, RankHead]) -> None:
    """Check that :func:`targets_of` will find everything, without memory for gradients. Errors as there."""
    logged = _logged(heads)
    for one in stepped:
        blank = torch.empty(local_of(one.key).shape, dtype=one.key.dtype, device="meta")
        _target(one, logged, blank, blank)


Logged = dict[str, list[tuple[int, int, int, "Part"]]]
"""FQN -> (rank, entry, position in the entry's logged elements, part)."""


def _logged(heads: Mapping[int, RankHead]) -> Logged:
    logged: Logged = {}
    for rank, head in heads.items():
        for number, entry in enumerate(head.entries):
            start = 0
            for part in entry.parts:
                logged.setdefault(part.fqn, []).append((rank, number, start, part))
                start += part.box.volume
    return logged


def _target(stepped: Stepped, logged: Logged, grad: torch.Tensor, local: torch.Tensor) -> Target:
    target = Target(stepped, grad)
    for fqn, shape, box, view in stepped.places(local):
        sources = logged.get(fqn, [])
        if any(part.shape != shape for _, _, _, part in sources):
            raise ReplayError(f"{fqn!r}: the log has shape {list(sources[0][3].shape)}, expected {list(shape)}")
        covered = 0
        boxes = [part.box for _, _, _, part in sources]
        for s, _, common in overlaps(boxes, [box]):
            rank, entry, start, part = sources[s]
            place = view[common.relative_to(box)]
            target.copies.append(Copy(rank, entry, start, part.sizes, common.relative_to(part.box), place))
            covered += common.volume
        if covered != box.volume:
            raise ReplayError(f"{fqn!r} box {box}: the log has the gradient of {covered} of {box.volume} elements")
        target.numel += box.volume
    return target


def needed_ranks(stepped: Iterable[Stepped], heads: Mapping[int, RankHead]) -> set[int]:
    """Return the ranks of a log whose records this rank's gradients come from."""
    boxes: dict[str, list[Box]] = {}
    for one in stepped:
        for fqn, _, box, _ in one.places(torch.empty(local_of(one.key).shape, dtype=one.key.dtype, device="meta")):
            boxes.setdefault(fqn, []).append(box)
    return {
        rank
        for rank, head in heads.items()
        if any(
            part.fqn in boxes and any(part.box.intersect(box) for box in boxes[part.fqn])
            for entry in head.entries
            for part in entry.parts
        )
    }


class CallGradients:
    """The gradients of one rank's record of one step of the optimizers, by entry."""

    def __init__(self, head: RankHead, call: Call, tensors: Tensors) -> None:
        self._head, self._tensors = head, tensors
        self._where: dict[int, tuple[Gradient, int]] = {}
        self._read: dict[str, torch.Tensor] = {}
        for gradient in call.gradients:
            at = 0
            for entry in gradient.entries:
                if not 0 <= entry < len(head.entries):
                    raise MalformedData(f"{tensors.where}: a gradient of entry {entry}, there are {len(head.entries)}")
                self._where[entry] = gradient, at
                at += head.entries[entry].numel

    def __contains__(self, entry: int) -> bool:
        return entry in self._where

    def of(self, entry: int) -> torch.Tensor:
        """Return the logged elements of an entry's gradient, 1-D, as the optimizer saw them."""
        gradient, at = self._where[entry]
        return self._whole(gradient)[at : at + self._head.entries[entry].numel]

    def _whole(self, gradient: Gradient) -> torch.Tensor:
        found = self._read.get(gradient.name)
        if found is None:
            numel = sum(self._head.entries[entry].numel for entry in gradient.entries)
            found = self._read[gradient.name] = self._decoded(gradient, numel)
        return found

    def _decoded(self, gradient: Gradient, numel: int) -> torch.Tensor:
        where = f"{self._tensors.where}: {gradient.name}"
        if gradient.dtype not in ITEMSIZE or gradient.wide not in ITEMSIZE:
            raise MalformedData(f"{where}: dtypes {gradient.dtype!r} and {gradient.wide!r}")
        if gradient.codec:
            data = _decode(self._tensors.raw(gradient.name), gradient, numel * ITEMSIZE[gradient.dtype], where)
            stored = as_tensor(data, gradient.dtype, (numel,))
        else:
            stored = self._tensors.tensor(gradient.name, gradient.dtype, (numel,))
        if not gradient.scale:
            return stored.to(torch_dtype(gradient.wide))
        try:
            scale = float.fromhex(gradient.scale)
        except (ValueError, OverflowError) as error:
            raise MalformedData(f"{where}: multiplier {gradient.scale[:40]!r}") from error
        return multiplied(stored, scale)


def _decode(raw: memoryview, gradient: Gradient, nbytes: int, where: str) -> memoryview:
    block = gradient.block
    if block < 1 or len(gradient.blocks) != -(-nbytes // block) or sum(gradient.blocks) != raw.nbytes:
        raise MalformedData(f"{where}: {len(gradient.blocks)} blocks of {block} bytes for {nbytes}")
    out = memoryview(bytearray(nbytes))
    at = 0
    for i, length in enumerate(gradient.blocks):
        decode_into(raw[at : at + length], gradient.codec, out[i * block : (i + 1) * block], where)
        at += length
    return out
