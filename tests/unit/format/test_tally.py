from __future__ import annotations

import msgspec

from ckpt.format.digest import digest
from ckpt.format.manifest import DERIVED, ChunkEntry, IndexPart, RoleCodec
from ckpt.format.tally import RoleBytes, by_role, is_encoded, tally
from ckpt.layout.spec import TensorSpec

SPECS = (TensorSpec("w", "master", "float32", (400,)), TensorSpec("w", "param", "bfloat16", (400,)))
D = digest(b"x")


def chunk(spec: int, nbytes: int, start: int, codec: int = 0, stored: int = 0, pack: int = 0) -> ChunkEntry:
    return ChunkEntry(spec, (0,), (400,), D, pack, start, nbytes, (), codec, stored)


PART = IndexPart(
    rank=0,
    packs=(),
    chunks=(
        chunk(0, 1000, 8, 1, 700),
        chunk(0, 1000, 8, 1, 700),  # stored once
        chunk(0, 600, 708),
        chunk(1, 800, 0, pack=DERIVED),
        chunk(1, 300, 1308, 2, 100),
        chunk(1, 0, 1308),
    ),
    codecs=("shuffle4+zstd", "shuffle2+zstd"),
)


def test_bytes_are_counted_per_role_as_stored():
    found = tally(PART, SPECS, {"master": "because"})
    assert found == {
        "master": RoleBytes(raw=1600, stored=1300, codecs=["shuffle4+zstd"], why="because"),
        "param": RoleBytes(raw=300, stored=100, codecs=["shuffle2+zstd"]),
    }
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=dict[str, RoleBytes]) == found


def test_ranks_are_added_and_the_largest_gives_the_reason():
    ranks = [
        {"master": RoleBytes(raw=100, stored=100, why="small")},
        {"master": RoleBytes(raw=300, stored=100, codecs=["shuffle4+zstd", "zstd"], why="large"), "a": RoleBytes()},
    ]
    assert by_role(ranks) == {
        "a": RoleCodec(codec="none", raw=0, stored=0, ratio=1.0, why=""),
        "master": RoleCodec(codec="shuffle4+zstd, zstd", raw=400, stored=200, ratio=2.0, why="large"),
    }
    assert list(by_role(ranks)) == ["a", "master"]
    assert is_encoded(ranks)
    assert not is_encoded(ranks[:1])
    assert by_role([]) == {}
