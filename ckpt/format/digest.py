"""Digests of bytes. The algorithm's name travels with every value: ``"xxh3-128:<32 hex digits>"``.

xxh3-128 guards against accidents (bit rot, torn writes, silent corruption), not against an adversary who can choose
bytes; docs/adr/0002-digest.md has the measurement behind the choice.
"""

from __future__ import annotations

import re

import xxhash

from ckpt.errors import MalformedData

Buffer = bytes | bytearray | memoryview

ALGORITHM = "xxh3-128"
SIZE = 16
"""Bytes of a raw digest."""
_FORM = re.compile(rf"{ALGORITHM}:[0-9a-f]{{{2 * SIZE}}}")


def digest(data: Buffer) -> str:
    """Return the digest of a bytes-like object (any contiguous buffer; released while hashing: the GIL)."""
    return f"{ALGORITHM}:{xxhash.xxh3_128_hexdigest(data)}"


def raw_digest(data: Buffer) -> bytes:
    """Return the 16 raw bytes, big-endian, for exchange between ranks."""
    return xxhash.xxh3_128_digest(data)


class Running:
    """The digest of bytes that come in pieces."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def add(self, data: Buffer) -> None:
        """Take the next piece."""
        self._state.update(data)

    def raw(self) -> bytes:
        """Return the 16 raw bytes of the digest of all that came so far."""
        return self._state.digest()

    def __str__(self) -> str:
        return f"{ALGORITHM}:{self._state.hexdigest()}"


def from_raw(raw: bytes) -> str:
    """Return the written form of a raw digest."""
    return f"{ALGORITHM}:{raw.hex()}"


def has_form(text: str) -> bool:
    """Is this a digest that this release can verify?"""
    return _FORM.fullmatch(text) is not None


def check_form(text: str, where: str) -> str:
    """Return ``text`` if it is a digest that this release can verify.

    Raises:
        MalformedData: unknown algorithm or wrong length; ``where`` names the file.
    """
    if not has_form(text):
        raise MalformedData(f"{where}: digest {text[:80]!r}: expected '{ALGORITHM}:' and {2 * SIZE} hex digits")
    return text
