from __future__ import annotations

from ckpt.format.digest import digest
from ckpt.format.manifest import DERIVED, ChunkEntry, IndexPart, PackRef, RoleCodec
from ckpt.format.tally import tally
from ckpt.layout.spec import TensorSpec

SPECS = (
    TensorSpec("w", "master", "float32", (400,)),
    TensorSpec("w", "param", "bfloat16", (400,)),
    TensorSpec("e", "buffer", "bfloat16", (0,)),
)
D = digest(b"x")


def chunk(spec: int, nbytes: int, start: int, codec: int = 0, stored: int = 0, pack: int = 0) -> ChunkEntry:
    return ChunkEntry(spec, (0,), (400,), D, pack, start, nbytes, (), codec, stored)


def part(rank: int, *chunks: ChunkEntry) -> IndexPart:
    packs = tuple(PackRef(key=f"steps/{n}/a/packs/{rank}.safetensors", nbytes=10_000) for n in (1, 2))
    return IndexPart(rank=rank, packs=packs, chunks=chunks, codecs=("shuffle4+zstd", "shuffle2+zstd"))


def test_bytes_are_counted_per_role_as_stored():
    parts = [
        part(
            0,
            chunk(0, 1000, 8, 1, 700),
            chunk(0, 1000, 8, 1, 700),  # stored once
            chunk(0, 600, 708),
            chunk(1, 800, 0, pack=DERIVED),
            chunk(1, 300, 1308, 2, 100),
            chunk(2, 0, 1308),
        ),
        part(1, chunk(1, 100, 8, 2, 100), chunk(1, 200, 8, 2, 100, pack=1)),
    ]
    noted = {"master": RoleCodec(codec="zstd", raw=1, stored=1, ratio=1.0, why="because")}
    assert tally(parts, SPECS, noted) == {
        "buffer": RoleCodec(codec="none", raw=0, stored=0, ratio=1.0, why=""),
        "master": RoleCodec(codec="none, shuffle4+zstd", raw=1600, stored=1300, ratio=1.2308, why="because"),
        "param": RoleCodec(codec="shuffle2+zstd", raw=600, stored=300, ratio=2.0, why=""),
    }


def test_a_step_of_derived_params_only_has_nothing_to_tell():
    assert tally([part(0, chunk(1, 800, 0, pack=DERIVED))], SPECS, {}) == {}
