"""Chunks of any content and size come back; frames of any content do not get out what was not asked for."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import MalformedData
from ckpt.format.codec import CODECS, decode, encode, stored_least, stored_most
from ckpt.format.planes import shuffle, unshuffle

codecs = st.sampled_from(sorted(CODECS))


@st.composite
def chunks(draw) -> tuple[str, bytes]:
    """A codec, and whole elements of its width: runs, noise, and both."""
    codec = draw(codecs)
    count = draw(st.integers(0, 3000))
    noise = np.random.default_rng(draw(st.integers(0, 2**32))).integers(0, 256, count * CODECS[codec], np.uint8)
    noise[: draw(st.integers(0, len(noise)))] = draw(st.integers(0, 255))
    return codec, noise.tobytes()


@settings(max_examples=200, deadline=None)
@given(chunks())
def test_what_is_encoded_comes_back(chunk):
    codec, data = chunk
    encoded = encode(data, codec, CODECS[codec])
    assert stored_least(len(data)) <= len(encoded) <= stored_most(len(data))
    assert decode(encoded, codec, len(data), "c") == data
    assert encode(data, codec, CODECS[codec]) == encoded


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=800), st.sampled_from([2, 4, 8]))
def test_planes_are_every_nth_byte(data, width):
    whole = data[: len(data) // width * width]
    planes = shuffle(whole, width)
    assert planes == b"".join(whole[i::width] for i in range(width))
    out = memoryview(bytearray(len(whole)))
    unshuffle(planes, width, out)
    assert out == whole


@settings(max_examples=300, deadline=None)
@given(chunks(), st.data())
def test_a_spoiled_frame_is_refused_or_gives_as_many_bytes(chunk, data):
    """Which bytes, the digest judges."""
    codec, content = chunk
    frame = bytearray(encode(content, codec, CODECS[codec]))
    for _ in range(data.draw(st.integers(1, 4))):
        if frame:
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with suppress(MalformedData):
        assert decode(frame, codec, len(content), "c").nbytes == len(content)


@settings(max_examples=200, deadline=None)
@given(chunks(), st.integers(-64, 64), codecs)
def test_another_size_or_a_piece_is_never_taken_for_the_chunk(chunk, change, other):
    codec, content = chunk
    frame = encode(content, codec, CODECS[codec])
    nbytes = max(0, len(content) + change)
    if nbytes != len(content):
        for name in (codec, other):
            with suppress(MalformedData):
                assert decode(frame, name, nbytes, "c") is None
    if change:
        piece = frame + bytes(change) if change > 0 else frame[:change]
        with suppress(MalformedData):
            assert piece == frame or decode(piece, codec, len(content), "c") is None


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), codecs, st.integers(0, 4096))
def test_noise_is_refused(noise, codec, nbytes):
    for data in (noise, zstandard.FRAME_HEADER + noise):
        with suppress(MalformedData):
            assert decode(data, codec, nbytes, "c").nbytes == nbytes
