"""Compression of metadata, with a bound on what may come out (a small file must not expand to fill the memory)."""

from __future__ import annotations

import zstandard

from ckpt.errors import MalformedData

LEVEL = 3


def compress(data: bytes) -> bytes:
    """Return one zstd frame that records its content size."""
    return zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress(data)


def decompress(data: bytes, *, limit: int, where: str) -> bytes:
    """Return the content of one zstd frame.

    Raises:
        MalformedData: not one whole frame, no content size, or more than ``limit`` bytes; ``where`` names the file.
    """
    try:
        size = zstandard.frame_content_size(data)
        if size < 0 or size > limit:
            raise MalformedData(f"{where}: content of {size} bytes, expected 0 to {limit}")
        # A frame that lies about its size fails in the decompressor, which never writes past `size`.
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise MalformedData(f"{where}: not a whole zstd frame ({error})") from error
