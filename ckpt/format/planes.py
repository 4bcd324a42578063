"""Byte planes: the first bytes of all elements, then the second bytes, and so on.

Floating-point numbers of one tensor are alike in sign and exponent and random in their last bits. A compressor that
sees the exponents side by side finds what they have in common; in the elements' own order random bytes stand between.
"""

from __future__ import annotations

import numpy as np

Buffer = bytes | bytearray | memoryview


def shuffle(data: Buffer, width: int) -> memoryview:
    """Return the ``width`` byte planes of ``data``, one after the other.

    Args:
        data: whole elements of ``width`` bytes.
        width: 2, 4 or 8.
    """
    elements = np.frombuffer(data, f"<u{width}")
    planes = np.empty((width, elements.size), np.uint8)
    for i in range(width):
        # Shifting whole elements and keeping the low byte is done in vector registers: up to four times as fast as
        # copying every `width`-th byte. numpy casts in small blocks, so this takes no memory, and leaves the GIL.
        np.right_shift(elements, 8 * i, out=planes[i], casting="unsafe")
    return planes.reshape(-1).data


def unshuffle(planes: Buffer, width: int, out: memoryview) -> None:
    """Write the elements whose byte planes these are into ``out``, which has the same number of bytes."""
    source = np.frombuffer(planes, np.uint8).reshape(width, -1)
    target = np.frombuffer(out, np.uint8).reshape(-1, width)
    for i in range(width):
        np.positive(source[i], out=target[:, i])  # an assignment may hold the GIL
