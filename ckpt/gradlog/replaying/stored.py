"""How a gradient is stored in a record: checked before anything is made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ckpt.engine.base import torch_dtype
from ckpt.errors import MalformedData
from ckpt.format.codec import stored_most
from ckpt.gradlog.writing.lossless import multiplied
from ckpt.layout.spec import ITEMSIZE

if TYPE_CHECKING:
    from ckpt.gradlog.record import Gradient

MOST_BLOCK = 256 << 20
"""Bytes of a block that are decoded at once; this release writes blocks of 4 MiB."""


class Form(NamedTuple):
    """``dtype``: of what is stored; ``width``: bytes of an element of that. ``wide``: of the gradient. ``scale``: what
    it is multiplied with in fp32; None: with nothing. ``nbytes``: before the codec.
    """

    dtype: str
    width: int
    wide: torch.dtype
    scale: float | None
    nbytes: int

    def put(self, values: torch.Tensor, place: torch.Tensor) -> None:
        """Put stored elements where the gradient is to be, of the same shape, as the optimizer saw them.

        No memory is taken where ``place`` has the gradient's own dtype.
        """
        if values.device != place.device:
            values = values.to(place.device)  # as few bytes as there are
        if self.scale is None:
            place.copy_(values if self.wide in (values.dtype, place.dtype) else values.to(self.wide))
        elif place.dtype == torch.float32:
            place.copy_(values)
            if self.scale != 1.0:
                place.mul_(self.scale)
        else:
            place.copy_(multiplied(values, self.scale))


def form_of(gradient: Gradient, numel: int, stored: int, where: str) -> Form:
    """Return how ``numel`` elements are stored in ``stored`` bytes.

    Raises:
        MalformedData: they cannot be.
    """
    where = f"{where}: {gradient.name}"
    if gradient.dtype not in ITEMSIZE or gradient.wide not in ITEMSIZE:
        raise MalformedData(f"{where}: dtypes {gradient.dtype[:40]!r} and {gradient.wide[:40]!r}")
    width = ITEMSIZE[gradient.dtype]
    nbytes = numel * width
    if gradient.codec:
        block, lengths = gradient.block, gradient.blocks
        fits = 0 < block <= MOST_BLOCK and len(lengths) == -(-nbytes // block) and sum(lengths) == stored
        if not fits or block % width or not all(0 <= one <= stored_most(block) for one in lengths):
            raise MalformedData(f"{where}: {len(lengths)} blocks of {block} bytes for {nbytes}")
    elif stored != nbytes:
        raise MalformedData(f"{where}: {stored} bytes for {numel} elements of {gradient.dtype}")
    try:
        scale = float.fromhex(gradient.scale) if gradient.scale else None
    except (ValueError, OverflowError) as error:
        raise MalformedData(f"{where}: multiplier {gradient.scale[:40]!r}") from error
    return Form(gradient.dtype, width, torch_dtype(gradient.wide), scale, nbytes)
