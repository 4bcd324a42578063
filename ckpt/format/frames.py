"""Frames: how records of a gradient log lie one behind the other in a file that may end anywhere.

::

    8 bytes   magic
    8 bytes   little-endian: step
    8 bytes   little-endian: bytes of the payload
    16 bytes  digest (xxh3-128) of the step, the length and the payload
    24 bytes  zero
    payload   a safetensors file of its own, padded with zeros to a multiple of 8 bytes

Who appends a frame and is killed leaves a torn one at the end: its digest says so, and the log is one record shorter.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ckpt.errors import MalformedData
from ckpt.format.digest import Buffer, Running

VERSION = 1
"""Of everything below ``log/``."""
MAX_STEP = 10**18
MAX_WORLD = 1 << 20
"""Ranks of a log; nobody asks for the parts of more."""
MAGIC = b"CKPTLOG\x01"
HEADER = 64
MAX_PAYLOAD = 1 << 40
_FIELDS = struct.Struct("<8sQQ16s24x")


class Frame(NamedTuple):
    """The header of a frame. ``start``: of the payload, in the file; ``nbytes``: of the payload, unpadded."""

    step: int
    start: int
    nbytes: int
    digest: bytes

    @property
    def end(self) -> int:
        """Where the next frame begins."""
        return self.start + self.nbytes + -self.nbytes % 8


def seal(step: int, nbytes: int) -> Running:
    """Return the digest of a frame before the first byte of its payload."""
    running = Running()
    running.add(struct.pack("<QQ", step, nbytes))
    return running


def frame_of(step: int, payload: list[Buffer]) -> list[Buffer]:
    """Return a frame as the buffers that make it, header first; the payload's own are not copied."""
    nbytes = sum(memoryview(part).nbytes for part in payload)
    running = seal(step, nbytes)
    for part in payload:
        running.add(part)
    return [_FIELDS.pack(MAGIC, step, nbytes, running.raw()), *payload, bytes(-nbytes % 8)]


def parse_frame(header: Buffer, at: int, where: str) -> Frame:
    """Return the frame whose header stands at ``at`` of a file.

    Raises:
        MalformedData: no frame begins there, or its header is cut off; ``where`` names the file.
    """
    if memoryview(header).nbytes < HEADER:
        raise MalformedData(f"{where}: {memoryview(header).nbytes} bytes at {at}, expected a header of {HEADER}")
    magic, step, nbytes, digest = _FIELDS.unpack_from(header)
    if magic != MAGIC or nbytes > MAX_PAYLOAD or step >= MAX_STEP:
        raise MalformedData(f"{where}: no record begins at byte {at}")
    return Frame(step, at + HEADER, nbytes, digest)
