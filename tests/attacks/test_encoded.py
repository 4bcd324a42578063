"""Frames by somebody who wants memory, time, or other bytes than were stored. See README.md."""

from __future__ import annotations

import json
import os
import tracemalloc

import numpy as np
import pytest
import zstandard

import ckpt
from ckpt.errors import FormatError, MalformedData
from ckpt.format.codec import decode, decode_into, encode, stored_least, stored_most
from ckpt.format.digest import digest
from ckpt.format.manifest import CODEC
from ckpt.repo.repository import Repository
from ckpt.repo.verify import verify
from ckpt.store.memory import MemoryStore
from tests.attacks.forge import COMMIT, Forger, job, sealed, with_objects

NBYTES = 1 << 20
GOOD = encode((np.random.default_rng(0).standard_normal(NBYTES // 4)).astype(np.float32).tobytes(), "shuffle4+zstd", 4)
MAGIC = b"\x28\xb5\x2f\xfd"
SCRATCH = 1 << 20
"""What a decoder may take beside the chunk and its planes: its own tables."""


def frame(content: int, blocks: bytes) -> bytes:
    """A frame of one segment that declares ``content`` bytes in its header (8 bytes of it)."""
    return MAGIC + b"\xe0" + content.to_bytes(8, "little") + blocks


def rle(nbytes: int, last: bool = False) -> bytes:
    """A block that repeats one byte."""
    return (nbytes << 3 | 1 << 1 | last).to_bytes(3, "little") + b"\0"


def zeros(nbytes: int) -> bytes:
    """The smallest honest frame of so many zeros: 4 bytes for each 128 KiB."""
    full, rest = divmod(nbytes, 128 << 10)
    sizes = [128 << 10] * full + [rest] * bool(rest)
    return frame(nbytes, b"".join(rle(n, i == len(sizes) - 1) for i, n in enumerate(sizes)))


HOSTILE = {
    "a bomb": zeros(1 << 30),
    "a bomb that declares the chunk's size": frame(NBYTES, b"".join(rle(128 << 10) for _ in range(64)) + rle(1, True)),
    "a huge declared size": frame(1 << 62, rle(128 << 10, True)),
    "the largest declared size": frame((1 << 64) - 3, rle(128 << 10, True)),
    "no declared size": zstandard.ZstdCompressor(write_content_size=False).compress(bytes(NBYTES)),
    "no declared size and a huge window": MAGIC + b"\x00\xf8" + rle(128 << 10) * 8 + rle(0, True),
    "less than declared": frame(NBYTES, rle(128 << 10, True)),
    "one byte less": zeros(NBYTES - 1),
    "one byte more": zeros(NBYTES + 1),
    "cut": GOOD[:-1],
    "cut in half": GOOD[: len(GOOD) // 2],
    "trailing byte": GOOD + b"\0",
    "two frames": zeros(NBYTES) + zeros(NBYTES),
    "two halves": zeros(NBYTES // 2) * 2,
    "a frame and an empty one": zeros(NBYTES) + MAGIC + b"\x20\x00\x01\0\0",
    "a skippable frame first": b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + zeros(NBYTES),
    "a skippable frame after": zeros(NBYTES) + b"\x50\x2a\x4d\x18\x04\0\0\0abcd",
    "only a skippable frame": b"\x50\x2a\x4d\x18\x40\0\0\0" + bytes(64),
    "a dictionary that nobody has": MAGIC + b"\xe3" + bytes([1, 2, 3, 4]) + NBYTES.to_bytes(8, "little") + rle(9, True),
    "a checksum that is wrong": zstandard.ZstdCompressor(write_checksum=True).compress(bytes(NBYTES))[:-4] + b"abcd",
    "a reserved block": frame(NBYTES, (3 << 1 | 1).to_bytes(3, "little") + bytes(64)),
    "nothing": b"",
    "a magic number": MAGIC,
    "the chunk itself": bytes(NBYTES),
    "more than any frame": os.urandom(NBYTES * 2),
}


def test_the_hostile_frames_are_one_step_from_a_good_one():
    assert decode(GOOD, "shuffle4+zstd", NBYTES, "c").nbytes == NBYTES
    assert decode(zeros(NBYTES), "zstd", NBYTES, "c") == bytes(NBYTES)
    assert len(zeros(NBYTES)) <= stored_least(NBYTES) + 8


@pytest.mark.parametrize("codec", ["zstd", "shuffle4+zstd"])
@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_frame_is_refused_in_little_memory_and_writes_nothing(codec, data):
    out = memoryview(bytearray(b"\x55" * NBYTES))
    tracemalloc.start()
    try:
        with pytest.raises(MalformedData, match=r"^chunk c: "):
            decode(data, codec, NBYTES, "chunk c")
        with pytest.raises(MalformedData, match=r"^chunk c: "):
            decode_into(data, codec, out, "chunk c")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 2 * NBYTES + SCRATCH
    assert out == b"\x55" * NBYTES


@pytest.mark.parametrize(
    ("codec", "nbytes"),
    [("lz4", 8), ("", 8), ("zstd ", 8), ("x" * 10**6, 8), ("shuffle3+zstd", 6), ("shuffle8+zstd", 12)],
)
def test_an_unknown_codec_or_a_wrong_number_of_planes(codec, nbytes):
    with pytest.raises(MalformedData) as caught:
        decode(zeros(nbytes), codec, nbytes, "c")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("nbytes", [1, 3, 128 << 10, (128 << 10) + 1, 1 << 28])
def test_the_bounds_of_a_frame_are_bounds(nbytes):
    """The least that zstd allows is no less, and what zstd makes of noise is no more."""
    assert stored_least(nbytes) <= len(zeros(nbytes))
    if nbytes < 1 << 24:
        assert len(encode(os.urandom(nbytes), "zstd", 1)) <= stored_most(nbytes)


# ------------------------------------------------------------------------------------------------- in a repository


@pytest.fixture(scope="module")
def objects() -> dict[str, bytes]:
    store = MemoryStore()
    ckpt.save(job(filled=True), store, extra={"value": {"a": 1}}, codec="zstd")
    return store.objects


@pytest.fixture
def forger(objects) -> Forger:
    return Forger(objects)


CODEC_AT, STORED_AT, DIGEST_AT, PACK_AT, START_AT, NBYTES_AT = 8, 9, 3, 4, 5, 6


def encoded(forger: Forger) -> list:
    """The largest chunk that is encoded, as it stands in the part."""
    return max((c for c in forger.part["chunks"] if len(c) > CODEC_AT and c[CODEC_AT]), key=lambda c: c[NBYTES_AT])


def refused(store: MemoryStore, text: str) -> None:
    """Load and verify say so, and nothing is placed."""
    target = job(filled=False)
    fresh = [bytes(b.numpy().data) for b in target.buffers]
    with pytest.raises(ckpt.CkptError, match=text):
        ckpt.load(target, store)
    assert [bytes(b.numpy().data) for b in target.buffers] == fresh
    found = verify(Repository(store))
    assert found.damaged
    assert any(text in finding.message for finding in found.findings), found.findings


def test_the_forger_can_sign(forger):
    store = forger.store()
    assert verify(Repository(store)).findings == []
    target = job(filled=False)
    ckpt.load(target, store)
    assert target.differences() == []
    assert CODEC in forger.commit["features"]


def test_other_names_of_codecs(forger):
    for name in ("lz4", "", "zstd9", "shuffle3+zstd", "x" * 10_000):
        refused(forger.changed("part", ("codecs", 0), name), "this release knows")


@pytest.mark.parametrize("value", [99, -1, 2**70, 0, 1.5, "zstd", None])
def test_a_codec_that_the_part_does_not_list(forger, value):
    at = forger.part["chunks"].index(encoded(forger))
    store = forger.changed("part", ("chunks", at, CODEC_AT), value)
    with pytest.raises(FormatError):
        ckpt.load(job(filled=False), store)
    assert verify(Repository(store)).damaged


@pytest.mark.parametrize("value", [0, 9, -1, 2**31, 2**70, "least", "most"])
def test_a_stored_size_that_no_frame_of_the_chunk_has(forger, value):
    chunk = encoded(forger)
    value = {"least": stored_least(chunk[NBYTES_AT]) - 1, "most": stored_most(chunk[NBYTES_AT]) + 1}.get(value, value)
    at = forger.part["chunks"].index(chunk)
    store = forger.changed("part", ("chunks", at, STORED_AT), value)
    with pytest.raises(FormatError):
        ckpt.load(job(filled=False), store)
    assert verify(Repository(store)).damaged


def test_a_stored_size_beyond_the_end_of_the_pack(forger):
    chunk = encoded(forger)
    chunk[START_AT] = forger.part["packs"][chunk[PACK_AT]]["nbytes"] - chunk[STORED_AT] + 1
    refused(forger.store(), "are not in steps/1/")


def test_planes_that_do_not_fit_the_chunk(forger):
    """12 bytes are no elements of 8: found in the index, before the frame is read."""
    forger.part["codecs"].append("shuffle8+zstd")
    chunk = next(c for c in forger.part["chunks"] if c[NBYTES_AT] % 8 == 4)
    chunk[CODEC_AT:] = [len(forger.part["codecs"]), 20]
    refused(forger.store(), "cannot be encoded with shuffle8")


def test_planes_of_another_width_are_other_bytes(forger):
    chunk = encoded(forger)
    name = forger.part["codecs"][chunk[CODEC_AT] - 1]
    forger.part["codecs"].append("shuffle2+zstd" if name != "shuffle2+zstd" else "zstd")
    chunk[CODEC_AT] = len(forger.part["codecs"])
    store = forger.store()
    with pytest.raises(ckpt.CkptError, match="expected xxh3-128:"):
        ckpt.load(job(filled=False), store)
    assert verify(Repository(store)).damaged


def with_frame(forger: Forger, data: bytes, nbytes: int, shape: list[int], content: bytes) -> MemoryStore:
    """The largest tensor becomes one of ``nbytes`` zeros, stored as ``data``."""
    key = "steps/1/evil/packs/e.safetensors"
    header = json.dumps({"d": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    forger.objects[key] = len(header).to_bytes(8, "little") + header + data
    forger.part["packs"].append({"key": key, "nbytes": len(forger.objects[key])})
    chunk = encoded(forger)
    spec = forger.root["specs"][chunk[0]]
    spec[3] = shape
    forger.part["chunks"] = [c for c in forger.part["chunks"] if c[0] != chunk[0]]
    place = [digest(content), len(forger.part["packs"]) - 1, 8 + len(header), nbytes]
    forger.part["codecs"] = [*forger.part["codecs"], "zstd"]
    forger.part["chunks"].append([chunk[0], [0] * len(shape), shape, *place, [], len(forger.part["codecs"]), len(data)])
    return forger.store()


def test_a_chunk_without_bytes_cannot_be_encoded(forger):
    refused(with_frame(forger, MAGIC + b"\x20\x00\x01\0\0", 0, [0], b""), "cannot be encoded")


def test_a_bomb_as_large_as_a_chunk_may_be_is_refused_by_its_size(forger):
    """A small pack, a tensor of a petabyte: the index is refused, as no chunk is so large."""
    width = 2**50
    data = zeros(1 << 20)
    found = verify(Repository(with_frame(forger, data, width, [width // 4], b"")))
    assert found.damaged


def test_verify_takes_no_more_memory_than_the_chunk_says(forger):
    """The frame declares a GiB, the index a MiB."""
    itemsize = 4
    store = with_frame(forger, zeros(1 << 30), NBYTES, [NBYTES // itemsize], b"")
    tracemalloc.start()
    try:
        found = verify(Repository(store))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.damaged
    assert peak < 4 * NBYTES + SCRATCH


def test_encoded_chunks_that_are_not_announced(objects, forger):
    """Earlier releases would take the frames for the chunks: the feature is what tells them."""
    forger.commit["features"] = []
    found = verify(Repository(forger.store()))
    assert [f.message for f in found.findings] == [
        f"{sum(bool(c[CODEC_AT]) for c in forger.part['chunks'] if len(c) > CODEC_AT)} chunks are encoded, "
        "and the commit does not name the feature 'codec'"
    ]
    body = {**forger.commit, "features": [CODEC, "later"]}
    with pytest.raises(ckpt.CkptError, match="later"):
        ckpt.load(job(filled=False), with_objects({**objects, COMMIT: sealed(json.dumps(body).encode())}))


@pytest.mark.parametrize("seed", range(3))
def test_any_byte_of_a_pack_changed_is_found(objects, seed):
    """Encoded or not: no change gets through, and none is anything but one of our errors."""
    key = next(k for k in objects if k.endswith(".safetensors"))
    data = objects[key]
    start = 8 + int.from_bytes(data[:8], "little")
    rng = np.random.default_rng(seed)
    for at in rng.choice(range(start, len(data)), 40, replace=False):
        spoiled = bytearray(data)
        spoiled[at] ^= int(rng.integers(1, 256))
        store = with_objects({**objects, key: bytes(spoiled)})
        target = job(filled=False)
        try:
            ckpt.load(target, store)
        except ckpt.CkptError:
            continue
        assert target.differences() == []  # the byte belongs to an object or a tensor that nobody asked for
        assert verify(Repository(store)).damaged


SMALL = {
    "a huge declared size": frame(1 << 40, rle(100, True)),
    "another size": frame(1, rle(1, True)),
    "more than declared": frame(12, rle(128 << 10, True)),
    "no frame": b"x" * 20,
    "two frames": frame(6, rle(6, True)) * 2,
}


@pytest.mark.parametrize("data", SMALL.values(), ids=SMALL.keys())
def test_a_hostile_frame_in_place_of_a_chunk(forger, data):
    """The index is in order, and the frame is as long as it says."""
    chunk = encoded(forger)
    key = "steps/1/evil/packs/e.safetensors"
    header = json.dumps({"d": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    forger.objects[key] = len(header).to_bytes(8, "little") + header + data
    forger.part["packs"].append({"key": key, "nbytes": len(forger.objects[key])})
    chunk[PACK_AT], chunk[START_AT], chunk[STORED_AT] = len(forger.part["packs"]) - 1, 8 + len(header), len(data)
    store, (fqn, role, *_) = forger.store(), forger.root["specs"][chunk[0]]
    with pytest.raises(MalformedData) as caught:
        ckpt.load(job(filled=False), store)
    assert f"tensor {fqn!r} ({role})" in str(caught.value)
    assert key in str(caught.value)
    (found,) = verify(Repository(store)).findings
    assert (found.severity, found.key) == ("damage", key)
    assert f"tensor {fqn!r} ({role})" in found.message
