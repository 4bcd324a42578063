"""Compression: of metadata, and of chunks. What comes out is bounded before it is opened: a small file must not expand
to fill the memory.

A chunk's codec is named in the index by one of :data:`CODECS`. A name says exactly what a reader has to undo, and will
never mean anything else; levels are the writer's business.
"""

from __future__ import annotations

import threading

import zstandard

from ckpt.errors import ConfigError, MalformedData
from ckpt.format.planes import Buffer, shuffle, unshuffle

LEVEL = 3
"""Of metadata: JSON of hex digests, written once a step."""
CHUNK_LEVEL = 1
"""Of chunks: level 3 takes longer and makes floating-point numbers no smaller (ADR 0008)."""
PLANES_HASH_LOG = 6
"""Of byte planes: log2 of the entries in zstd's table of matches, the least that it allows. Planes of numbers hardly
repeat, they are unevenly distributed: what finding accidental matches costs is better spent on nothing (ADR 0008).
"""

CODECS: dict[str, int] = {"zstd": 1, "shuffle2+zstd": 2, "shuffle4+zstd": 4, "shuffle8+zstd": 8}
"""Name of a chunk's codec -> byte planes. ``shuffle<n>+zstd``: the planes of elements of n bytes, in one zstd frame."""

_BLOCK = 128 << 10
"""Bytes that one block of a zstd frame holds at most (RFC 8878)."""


class _Contexts(threading.local):
    """zstd's working memory, kept for the next chunk. A context serves one thread at a time, so each has its own."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=CHUNK_LEVEL, write_content_size=True)
        fast = zstandard.ZstdCompressionParameters.from_level(
            CHUNK_LEVEL, hash_log=PLANES_HASH_LOG, write_content_size=True
        )
        self.planes_compressor = zstandard.ZstdCompressor(compression_params=fast)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def compress(data: bytes) -> bytes:
    """Return one zstd frame that records its content size."""
    return zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress(data)


def decompress(data: Buffer, *, limit: int, where: str) -> bytes:
    """Return the content of one zstd frame.

    Raises:
        MalformedData: not one whole frame, no content size, or more than ``limit`` bytes; ``where`` names the file.
    """
    try:
        size = zstandard.frame_content_size(data)
        if size < 0 or size > limit:
            raise MalformedData(f"{where}: content of {size} bytes, expected 0 to {limit}")
        # A frame that lies about its size fails in the decompressor, which never writes past `size`.
        return _contexts.decompressor.decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise MalformedData(f"{where}: not a whole zstd frame ({error})") from error


def codec_of(itemsize: int) -> str:
    """Return the name of the codec that suits elements of ``itemsize`` bytes."""
    name = f"shuffle{itemsize}+zstd"
    return name if name in CODECS else "zstd"


def encode(data: Buffer, codec: str, itemsize: int) -> bytes:
    """Return a chunk's bytes encoded. Whoever gets no fewer bytes than it gave stores the chunk raw instead.

    Safe to call from several threads, and runs without the GIL. Takes as much memory as ``data`` and the result.

    Args:
        data: contiguous bytes of whole elements.
        codec: one of :data:`CODECS` (:func:`codec_of` chooses).
        itemsize: bytes of an element.

    Raises:
        ConfigError: no such codec, or one for elements of another size.
    """
    width = CODECS.get(codec)
    nbytes = memoryview(data).nbytes
    if width not in (1, itemsize) or nbytes % width:
        raise ConfigError(f"codec {codec!r} for {nbytes} bytes of elements of {itemsize}: not one of {list(CODECS)}")
    if not nbytes:
        return b""
    if width == 1:
        return _contexts.compressor.compress(data)
    return _contexts.planes_compressor.compress(shuffle(data, width))


def decode(data: Buffer, codec: str, nbytes: int, where: str) -> memoryview:
    """Return the ``nbytes`` bytes of a chunk that :func:`encode` made ``data`` of; writable.

    Raises:
        MalformedData: ``data`` is not one whole frame of exactly so many bytes, or ``codec`` is not known; never
            allocates more than twice ``nbytes`` to find out. ``where`` names the chunk.
    """
    out = memoryview(bytearray(nbytes))
    decode_into(data, codec, out, where)
    return out


def decode_into(data: Buffer, codec: str, out: memoryview, where: str) -> None:
    """Decode into ``out``: contiguous, writable, exactly the bytes of the chunk. Takes as much memory again.

    Raises:
        MalformedData: as :func:`decode`; nothing was written.
    """
    width = _planes(codec, out.nbytes, where)
    content = _content(data, out.nbytes, where)
    if width == 1:
        out.cast("B")[:] = content
    else:
        unshuffle(content, width, out)


def _planes(codec: str, nbytes: int, where: str) -> int:
    width = CODECS.get(codec)
    if width is None:
        raise MalformedData(f"{where}: codec {codec[:200]!r}, this release knows {', '.join(CODECS)}")
    if nbytes % width:
        raise MalformedData(f"{where}: codec {codec!r} for {nbytes} bytes, which are no whole elements")
    return width


def _content(data: Buffer, nbytes: int, where: str) -> bytes:
    found = memoryview(data).nbytes
    if not stored_least(nbytes) <= found <= stored_most(nbytes):
        raise MalformedData(
            f"{where}: {found} bytes encoded, expected {stored_least(nbytes)} to {stored_most(nbytes)} for {nbytes}"
        )
    if not nbytes:
        return b""
    content = decompress(data, limit=nbytes, where=where)
    if len(content) != nbytes:
        raise MalformedData(f"{where}: content of {len(content)} bytes, expected {nbytes}")
    return content


def stored_least(nbytes: int) -> int:
    """Return how many bytes a frame of ``nbytes`` bytes has at least: magic, header, and one byte and its length for
    each block of 128 KiB.
    """
    return 6 + 4 * -(-nbytes // _BLOCK) if nbytes else 0


def stored_most(nbytes: int) -> int:
    """Return how many bytes a frame of ``nbytes`` bytes has at most (``ZSTD_COMPRESSBOUND``)."""
    return nbytes + (nbytes >> 8) + (max(_BLOCK - nbytes, 0) >> 11) if nbytes else 0
