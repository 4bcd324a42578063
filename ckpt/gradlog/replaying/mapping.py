"""From what ranks have logged to the gradients that this rank's optimizers step, whatever layout either has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ckpt.engine.base import Stepped
from ckpt.errors import ReplayError
from ckpt.gradlog.share import local_of
from ckpt.layout.box import Box, overlaps

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpt.gradlog.record import Part, RankHead


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of one logged part that go into one stepped tensor's gradient.

    ``start``: of the part, in its entry's logged elements. ``sizes``: of the part. ``inside``: which of its elements,
    as a box of a tensor of these sizes; ``view``: their place in the gradient.
    """

    rank: int
    entry: int
    start: int
    sizes: tuple[int, ...]
    inside: Box
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
            offsets = tuple(a - b for a, b in zip(common.offsets, part.offsets, strict=True))
            target.copies.append(Copy(rank, entry, start, part.sizes, Box(offsets, common.sizes), place))
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


def ranks_with(stepped: Iterable[Stepped], heads: Mapping[int, RankHead]) -> set[int]:
    """Return the ranks that step something of the same, whoever logs it."""
    names = {fqn for one in stepped for fqn in one.members}
    return {r for r, head in heads.items() if any(not names.isdisjoint(entry.members) for entry in head.entries)}


def by_source(targets: Iterable[Target]) -> dict[int, dict[int, list[Copy]]]:
    """Return rank -> entry -> what is wanted of what that rank has logged of that entry."""
    found: dict[int, dict[int, list[Copy]]] = {}
    for target in targets:
        for copy in target.copies:
            found.setdefault(copy.rank, {}).setdefault(copy.entry, []).append(copy)
    return found
