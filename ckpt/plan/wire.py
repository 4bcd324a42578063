"""Layouts as bytes: what ranks exchange to agree on who holds what.

The rank's number is not in the bytes of what it holds: ranks that hold the same (data parallelism) send equal bytes,
and they are decoded once. What differs by rank, its process groups, travels beside them.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from ckpt.errors import CkptError, MalformedData
from ckpt.format.digest import raw_digest
from ckpt.layout.box import Box
from ckpt.layout.spec import RankLayout, Shard, TensorSpec


class _Envelope(msgspec.Struct, array_like=True):
    held: bytes
    groups: list[tuple[str, tuple[int, ...]]]
    unused: list[str]


class _Wire(msgspec.Struct, array_like=True):
    specs: list[tuple[str, str, str, tuple[int, ...]]]
    shards: list[tuple[int, tuple[int, ...], tuple[int, ...]]]
    aliases: list[tuple[str, str]]
    derived: list[str]


def encode_layout(layout: RankLayout) -> bytes:
    """Return the canonical bytes of a layout: equal layouts, in any order of shards, give equal bytes."""
    specs = sorted({shard.spec for shard in layout.shards})
    number = {spec: i for i, spec in enumerate(specs)}
    shards = sorted((number[s.spec], s.box.offsets, s.box.sizes) for s in layout.shards)
    table = [(s.fqn, s.role, s.dtype, s.shape) for s in specs]
    held = msgspec.msgpack.encode(_Wire(table, shards, sorted(layout.aliases), sorted(layout.derived)))
    return msgspec.msgpack.encode(_Envelope(held, sorted(layout.groups), sorted(layout.unused)))


def decode_layouts(encoded: list[bytes]) -> list[RankLayout]:
    """Return one layout per rank; ``encoded[r]`` came from rank ``r``."""
    seen: dict[bytes, RankLayout] = {}
    layouts = []
    for rank, data in enumerate(encoded):
        try:
            envelope = msgspec.msgpack.decode(data, type=_Envelope)
            if envelope.held not in seen:
                wire = msgspec.msgpack.decode(envelope.held, type=_Wire)
                specs = [TensorSpec(*row) for row in wire.specs]
                shards = tuple(Shard(specs[i], Box(offsets, sizes)) for i, offsets, sizes in wire.shards)
                seen[envelope.held] = RankLayout(rank, shards, tuple(wire.aliases), tuple(wire.derived))
        except (msgspec.DecodeError, IndexError, CkptError) as error:
            raise MalformedData(f"layout from rank {rank}: {error}") from error
        groups, unused = tuple(envelope.groups), tuple(envelope.unused)
        layouts.append(replace(seen[envelope.held], rank=rank, groups=groups, unused=unused))
    return layouts


def combined(digests: list[bytes]) -> bytes:
    """Return the digest of a whole job's layout from the raw digests of its ranks' layouts, in rank order."""
    return raw_digest(b"".join(digests))
