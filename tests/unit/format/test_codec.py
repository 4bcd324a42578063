from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard

from ckpt.errors import ConfigError, MalformedData
from ckpt.format.codec import (
    CODECS,
    codec_of,
    compress,
    decode,
    decode_into,
    decompress,
    encode,
    stored_least,
    stored_most,
)


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


# ------------------------------------------------------------------------------------------------------------- chunks


def numbers(nbytes: int, scale: float = 0.02) -> bytes:
    """Bytes of float32 numbers such as weights."""
    return (np.random.default_rng(0).standard_normal(nbytes // 4 + 1) * scale).astype(np.float32).tobytes()[:nbytes]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("nbytes", [0, 8, 16, 4096, (128 << 10) + 8, 4 << 20])
@pytest.mark.parametrize("make", [numbers, bytes, os.urandom], ids=["numbers", "zeros", "random"])
def test_a_chunk_comes_back(codec, nbytes, make):
    data = make(nbytes)
    encoded = encode(data, codec, CODECS[codec])
    assert stored_least(nbytes) <= len(encoded) <= stored_most(nbytes)
    back = decode(encoded, codec, nbytes, "c")
    assert back == data
    assert not back.readonly
    target = memoryview(bytearray(nbytes))
    decode_into(encoded, codec, target, "c")
    assert target == data


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda d: memoryview(b"x" + d)[1:]])
def test_any_buffer_is_taken_aligned_or_not(codec, kind):
    data = numbers(4096)
    encoded = encode(kind(data), codec, CODECS[codec])
    assert encoded == encode(data, codec, CODECS[codec])
    assert decode(kind(encoded), codec, len(data), "c") == data


def test_decoding_goes_straight_into_typed_memory():
    data = np.arange(1000, dtype=np.float32).reshape(10, 100)
    target = np.zeros_like(data)
    for codec in ("zstd", "shuffle4+zstd"):
        target[:] = 0
        decode_into(encode(data.tobytes(), codec, 4), codec, memoryview(target), "c")
        assert (target == data).all()


def test_what_is_in_a_frame_is_the_planes_of_the_elements():
    """The format, not the implementation: any zstd and a transpose read it."""
    data = bytes(range(240))
    for codec, width in CODECS.items():
        content = zstandard.ZstdDecompressor().decompress(encode(data, codec, width))
        assert content == b"".join(data[i::width] for i in range(width))


def test_planes_make_numbers_smaller_and_random_bytes_no_larger_than_zstd_bounds():
    data = numbers(1 << 20)
    assert len(encode(data, "shuffle4+zstd", 4)) < 0.9 * len(data)
    assert len(encode(data, "shuffle4+zstd", 4)) < 0.95 * len(encode(data, "zstd", 4))


@pytest.mark.parametrize(("itemsize", "codec"), [(1, "zstd"), (2, "shuffle2+zstd"), (8, "shuffle8+zstd"), (16, "zstd")])
def test_the_codec_follows_from_the_item_size(itemsize, codec):
    assert codec_of(itemsize) == codec
    assert decode(encode(bytes(64), codec, itemsize), codec, 64, "c") == bytes(64)


@pytest.mark.parametrize(
    ("codec", "nbytes", "itemsize"),
    [("zstd9", 8, 4), ("", 8, 4), ("shuffle3+zstd", 6, 3), ("shuffle4+zstd", 8, 2), ("shuffle4+zstd", 6, 4)],
)
def test_a_writer_that_is_wired_wrongly_is_told(codec, nbytes, itemsize):
    with pytest.raises(ConfigError, match=r"shuffle2\+zstd"):
        encode(bytes(nbytes), codec, itemsize)


def test_many_threads_encode_at_once():
    """A context of zstd's serves one thread: shared ones corrupt each other's frames."""
    pieces = [numbers(1 << 18, 0.01 * i + 0.01) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(4):
            frames = list(pool.map(lambda data: encode(data, "shuffle4+zstd", 4), pieces))
            back = list(pool.map(lambda frame: decode(frame, "shuffle4+zstd", 1 << 18, "c"), frames))
            assert back == pieces
    assert frames == [encode(data, "shuffle4+zstd", 4) for data in pieces]


@pytest.mark.parametrize("level", [1, 3, 19, -5])
def test_a_reader_does_not_care_about_the_level(level):
    """Nor about a checksum, which other writers of zstd add."""
    data = numbers(1 << 16)
    frame = zstandard.ZstdCompressor(level=level, write_checksum=True).compress(data)
    assert decode(frame, "zstd", len(data), "c") == data
