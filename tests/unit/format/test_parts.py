"""Index parts with encoded chunks; the rest of what a part may not say is in test_manifest.py."""

from __future__ import annotations

import json

import msgspec
import pytest

from ckpt.errors import MalformedData
from ckpt.format.codec import decompress, stored_least, stored_most
from ckpt.format.digest import digest
from ckpt.format.manifest import DERIVED, ChunkEntry, IndexPart, PackRef, encode_index
from ckpt.format.parts import decode_part
from ckpt.layout.spec import TensorSpec

D = digest(b"x")
SPECS = (TensorSpec("b", "param", "float32", (2, 3)),)
PACK = PackRef(key="steps/3/a-1/packs/p.safetensors", nbytes=1000, header=D)
RAW = ChunkEntry(0, (0, 0), (1, 3), D, 0, 100, 12)
CHUNK = ChunkEntry(0, (1, 0), (1, 3), D, 0, 112, 12, codec=2, stored=20)
PART = IndexPart(rank=0, packs=(PACK,), chunks=(RAW, CHUNK), codecs=("zstd", "shuffle4+zstd"))


def changed(part: IndexPart, **fields) -> bytes:
    chunk = msgspec.structs.replace(CHUNK, **fields)
    return encode_index(msgspec.structs.replace(part, chunks=(RAW, chunk)))


def test_a_part_comes_back_and_says_where_bytes_are():
    part = decode_part(encode_index(PART), SPECS, "f")
    assert part == PART
    assert [part.codec_of(chunk) for chunk in part.chunks] == [None, "shuffle4+zstd"]
    assert [chunk.length for chunk in part.chunks] == [12, 20]


def test_the_end_of_the_pack_counts_stored_bytes():
    assert decode_part(changed(PART, start=980), SPECS, "f").chunks[1].start == 980
    with pytest.raises(MalformedData, match=r"\[981, \+20\) are not in steps/3"):
        decode_part(changed(PART, start=981), SPECS, "f")


def test_a_part_without_encoded_chunks_says_nothing_of_codecs():
    plain = IndexPart(rank=0, packs=(PACK,), chunks=(RAW,))
    document = json.loads(decompress(encode_index(plain), limit=10_000, where="f"))
    assert list(document) == ["rank", "packs", "chunks", "objects"]
    assert document["chunks"] == [[0, [0, 0], [1, 3], D, 0, 100, 12, []]]
    assert decode_part(encode_index(plain), SPECS, "f") == plain


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"codec": 3}, "codec number 3 of 2"),
        ({"codec": -1}, "codec number -1 of 2"),
        ({"codec": 0}, "20 bytes stored, codec number 0 of 2"),
        ({"pack": DERIVED}, "codec number 2 of 2"),
        ({"stored": 0}, "0 bytes encoded, expected 10 to 75 for 12"),
        ({"stored": stored_least(12) - 1}, "9 bytes encoded"),
        ({"stored": stored_most(12) + 1}, "76 bytes encoded"),
        ({"stored": -5}, "-5 bytes encoded"),
    ],
)
def test_an_encoded_chunk_that_cannot_be(fields, message):
    with pytest.raises(MalformedData, match=message):
        decode_part(changed(PART, **fields), SPECS, "f")


@pytest.mark.parametrize("codec", ["shuffle8+zstd"])
def test_planes_must_fit(codec):
    with pytest.raises(MalformedData, match="12 bytes cannot be encoded with shuffle8"):
        decode_part(changed(msgspec.structs.replace(PART, codecs=("zstd", codec))), SPECS, "f")


def test_a_codec_of_a_later_release_is_named():
    part = msgspec.structs.replace(PART, codecs=("zstd", "shuffle4+zstd", "lz77"))
    with pytest.raises(MalformedData, match="f: codec 'lz77', this release knows zstd, shuffle2"):
        decode_part(encode_index(part), SPECS, "f")
