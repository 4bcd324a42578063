"""From copies of the same box to what differs between them: which elements, how many, by how much."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckpt.analysis.claims import Difference
from ckpt.layout.box import Box
from ckpt.layout.spec import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from ckpt.format.digest import Buffer

INTEGERS = {"bool": "uint8"} | {n: n for n in ITEMSIZE if n.startswith(("int", "uint"))}
COMPONENT = {"complex32": torch.float16, "complex64": torch.float32, "complex128": torch.float64}


def is_constant(data: memoryview, itemsize: int) -> bool:
    """Are all elements bitwise equal (true of one element)? Such bytes prove nothing of ranks that agree on them."""
    raw = np.frombuffer(data, np.uint8)
    head = raw[: 16 * itemsize]
    # Nearly always the first few elements decide.
    return all(bool(np.array_equal(part[itemsize:], part[: len(part) - itemsize])) for part in (head, raw))


def difference(copies: Sequence[Buffer], dtype: str, box: Box) -> Difference | None:
    """Compare copies of one box bit by bit; two NaNs with other bits differ, and so do 0.0 and -0.0.

    Args:
        copies: row-major bytes of each copy, ``box.volume`` elements.
        dtype: this project's name of the elements' dtype.
        box: where the elements lie in their tensor.

    Returns:
        None if all copies are equal.
    """
    raw = [np.frombuffer(c, np.uint8).reshape(box.volume, ITEMSIZE[dtype]) for c in copies]
    differs = np.zeros(box.volume, bool)
    for other in raw[1:]:
        differs |= (raw[0] != other).any(axis=1)
    where = np.flatnonzero(differs)
    if not len(where):
        return None
    places = np.unravel_index(where, box.sizes) if box.sizes else ()
    lows, highs = [int(p.min()) for p in places], [int(p.max()) for p in places]
    tight = Box(
        tuple(o + low for o, low in zip(box.offsets, lows, strict=True)),
        tuple(high - low + 1 for low, high in zip(lows, highs, strict=True)),
    )
    unordered, largest = _distance([r[where] for r in raw], dtype)
    return Difference(tight, len(where), unordered, largest, len(copies))


def _distance(copies: list[npt.NDArray[np.uint8]], dtype: str) -> tuple[int, float | None]:
    """Return (elements without a distance, the largest distance of two copies of one element)."""
    if dtype in INTEGERS:
        low, high = _range(c.view(INTEGERS[dtype]) for c in copies)
        # Modulo 2^64 the difference is exact, which it would not be in float64.
        return 0, float((high.astype(np.uint64) - low.astype(np.uint64)).max())
    low, high = _range(_as_float64(c, dtype) for c in copies)
    ordered = (np.isfinite(low) & np.isfinite(high)).all(axis=1)
    if not ordered.any():
        return len(ordered), None
    with np.errstate(over="ignore"):  # the largest minus the lowest number of float64
        largest = float((high[ordered] - low[ordered]).max())
    return int((~ordered).sum()), min(largest, sys.float_info.max)


def _range(copies: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the lowest and the highest value of each element; NaN where any copy is NaN."""
    low = high = next(copies)
    for other in copies:
        low, high = np.minimum(low, other), np.maximum(high, other)
    return low, high


def _as_float64(raw: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float64]:
    kind = COMPONENT.get(dtype) or getattr(torch, dtype)
    values: npt.NDArray[np.float64] = torch.from_numpy(raw).view(kind).to(torch.float64).numpy()
    return values
