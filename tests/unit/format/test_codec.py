from __future__ import annotations

import pytest
import zstandard

from ckpt.errors import MalformedData
from ckpt.format.codec import compress, decompress


@pytest.mark.parametrize("data", [b"", b"x", b"{}" * 10_000])
def test_round_trip(data):
    assert decompress(compress(data), limit=len(data), where="f") == data


def test_a_bomb_is_refused_by_its_declared_size_before_it_is_opened():
    bomb = compress(bytes(1 << 26))
    assert len(bomb) < 10_000
    with pytest.raises(MalformedData, match="f: content of 67108864 bytes, expected 0 to 1000"):
        decompress(bomb, limit=1000, where="f")


def test_a_frame_that_lies_about_its_size_is_refused():
    """Content larger than the header says must not be written past the buffer, nor be returned."""
    frame = bytearray(compress(bytes(1000)))
    params = zstandard.get_frame_parameters(bytes(frame))
    assert params.content_size == 1000
    at = frame.index((1000 - 256).to_bytes(2, "little"))
    frame[at : at + 2] = (500 - 256).to_bytes(2, "little")
    assert zstandard.frame_content_size(bytes(frame)) == 500
    with pytest.raises(MalformedData, match="not a whole zstd frame"):
        decompress(bytes(frame), limit=10_000, where="f")


def test_a_frame_without_a_content_size_is_refused():
    data = zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 100)
    with pytest.raises(MalformedData, match="content of -1 bytes"):
        decompress(data, limit=10_000, where="f")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d[:-1],
        lambda d: d + b"\0",
        lambda d: d * 2,
        lambda d: b"",
        lambda d: b"{}",
        lambda d: b"\x50\x2a\x4d\x18\x04\0\0\0abcd",
    ],
    ids=["cut", "longer", "two frames", "empty", "not zstd", "skippable"],
)
def test_anything_but_one_whole_frame_is_refused(spoil):
    with pytest.raises(MalformedData, match=r"^f: "):
        decompress(spoil(compress(b"some text of some length")), limit=10_000, where="f")
