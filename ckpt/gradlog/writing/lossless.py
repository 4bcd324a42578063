"""The fewest bytes that hold a gradient exactly: half precision and one multiplier where that is all there is in it.

Mixed-precision training reduces gradients in bf16 or fp16, widens them to fp32, and multiplies all of them by one
number, which undoes the loss scale and clips. What the optimizer sees then has 24 significant bits, of which all but
the multiplier's are known from 8 (or 11). The multiplier is not asked for, since every framework and every training
loop applies it elsewhere: it is found in the numbers themselves, and proved by multiplying back, bit by bit. Where no
multiplier fits (gradients accumulated in fp32), they are kept as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

HALVES = (torch.bfloat16, torch.float16)
_BITS = {torch.bfloat16: 8, torch.float16: 11}
"""Significant bits of an element, the leading one included."""
_HIGHEST = {torch.bfloat16: 100, torch.float16: 14}
"""Exponent of the largest element once it is divided by a multiplier that was found: as high as is safe, because below
its smallest normal number a format loses bits.
"""
SAMPLE = 64
"""Elements that a multiplier is looked for in. All elements prove it afterwards."""
_ULPS = 3
_BLOCK = 1 << 16
"""Elements that are proved at once: few enough to stay in the processor's cache."""
_BLOCK_CUDA = 1 << 26


@dataclass(frozen=True, slots=True)
class Kept:
    """A gradient in as few bytes as hold it. ``data``: 1-D, contiguous. ``scale``: the multiplier, exactly a fp32
    number; None: ``data`` is the gradient itself, in its own dtype.
    """

    data: torch.Tensor
    scale: float | None = None

    def restored(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the gradient in the dtype that it had."""
        if self.scale is None:
            return self.data.to(dtype)
        return multiplied(self.data, self.scale)


def multiplied(half: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``half`` widened to fp32, times ``scale`` (an fp32 number)."""
    wide = half.to(torch.float32)
    return wide if scale == 1.0 else wide.mul_(scale)


class Keeper:
    """Finds the fewest bytes for one gradient after the other, beginning with what fitted the one before."""

    def __init__(self) -> None:
        self._last: list[tuple[torch.dtype, float]] = []

    def keep(self, grad: torch.Tensor) -> Kept:
        """Return the gradient in the fewest bytes that hold it exactly. ``grad``: 1-D, contiguous; is not kept."""
        if grad.dtype != torch.float32:
            return Kept(grad.clone())
        for dtype, scale in self._guesses(grad):
            half = _halved(grad, dtype, scale)
            if half is not None:
                self._last = [(dtype, scale), *(one for one in self._last if one != (dtype, scale))][:2]
                return Kept(half, scale)
        return Kept(grad.clone())

    def _guesses(self, grad: torch.Tensor) -> Iterator[tuple[torch.dtype, float]]:
        sample = _sample(grad)
        known = [*self._last, *((dtype, 1.0) for dtype in HALVES)]
        tried = set()
        for dtype, scale in known:
            if (dtype, scale) not in tried and _fits(sample, dtype, scale):
                yield dtype, scale
            tried.add((dtype, scale))
        for dtype in HALVES:
            for found in scales_of(sample, dtype):
                scale = _raised(found, grad) if dtype == torch.float16 else found
                if (dtype, scale) not in tried:
                    yield dtype, scale


def scales_of(sample: torch.Tensor, dtype: torch.dtype, most: int = 4) -> list[float]:
    """Return multipliers that make every element of ``sample`` an element of ``dtype``, at most ``most``.

    The largest element is some number of ``dtype`` times the multiplier: for each number that it can be, up to its
    power of two, the multiplier follows but for a few last bits. All of them are tried at once.
    """
    finite = sample[torch.isfinite(sample) & (sample != 0)].abs().cpu()
    if not len(finite):
        return []
    bits = _BITS[dtype]
    largest = finite.max()
    candidates = torch.arange(1 << (bits - 1), 1 << bits, dtype=torch.float64).mul_(2.0 ** (1 - bits))
    exponent = _HIGHEST[dtype]
    near = (largest.double() / (candidates * 2.0**exponent)).float()
    offsets = torch.arange(-_ULPS, _ULPS + 1, dtype=torch.int32)
    scales = (near.view(torch.int32)[:, None] + offsets).reshape(-1).view(torch.float32)
    scales = scales[torch.isfinite(scales) & (scales >= torch.finfo(torch.float32).tiny)]
    halves = (finite / scales[:, None]).to(dtype)
    good = (halves.float() * scales[:, None] == finite).all(dim=1)
    return [float(one) for one in scales[good][:most]]


def _raised(scale: float, grad: torch.Tensor) -> float:
    """Return the multiplier times the power of two that keeps the largest of all elements below fp16's largest number.

    A sample need not have it, and the multiplier of fp16 gradients is known but for a power of two.
    """
    low, high = torch.aminmax(grad)
    largest = max(-float(low), float(high)) / scale
    if not math.isfinite(largest) or largest < 2.0 ** (_HIGHEST[torch.float16] + 1):
        return scale
    return scale * 2.0 ** (math.frexp(largest)[1] - _HIGHEST[torch.float16] - 1)


def _sample(grad: torch.Tensor) -> torch.Tensor:
    """Return some of the elements that are not zero: embeddings have gradients in few rows."""
    stride = max(1, len(grad) // (SAMPLE * 64))
    some = grad[::stride]
    some = some[some != 0]
    if len(some) < SAMPLE and stride > 1:
        some = grad[grad != 0]
    return some[:: max(1, len(some) // SAMPLE)][:SAMPLE].cpu()


def _fits(sample: torch.Tensor, dtype: torch.dtype, scale: float) -> bool:
    return torch.equal(multiplied((sample / scale).to(dtype), scale), sample) or bool(torch.isnan(sample).any())


def _halved(grad: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor | None:
    """Return ``grad / scale`` in ``dtype``, or None if that times ``scale`` is not ``grad``, bit by bit."""
    half = torch.empty(len(grad), dtype=dtype, device=grad.device)
    block = _BLOCK if grad.device.type == "cpu" else _BLOCK_CUDA
    for at in range(0, len(grad), block):
        part, out = grad[at : at + block], half[at : at + block]
        out.copy_(part if scale == 1.0 else part / scale)
        if not _same_bits(multiplied(out, scale), part):
            return None
    return half


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Are both, in fp32, the same bit by bit? -0.0 is not 0.0 here, and a NaN is itself."""
    if one.device.type != "cpu":
        return torch.equal(one.view(torch.int32), other.view(torch.int32))
    bits = np.int64 if len(one) % 2 == 0 else np.int32  # numpy compares four times as fast as torch does
    return bool((one.numpy().view(bits) == other.numpy().view(bits)).all())
