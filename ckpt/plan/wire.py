"""Layouts as bytes: what ranks exchange to agree on who holds what.

The rank's number is not in the bytes of what it holds: ranks that hold the same (data parallelism) send equal bytes,
and they are decoded once. What differs by rank, its process groups, travels beside them, as runs of ranks: a group of
all ranks comes from all ranks, but is a few bytes from each and expanded once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from ckpt.errors import CkptError, MalformedData
from ckpt.format.digest import raw_digest
from ckpt.layout.box import Box
from ckpt.layout.runs import Run, ranks_of, runs_of
from ckpt.layout.spec import RankLayout, Shard, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_MEMBERS = 1 << 24
"""Ranks of all different groups together that are expanded: a mesh has as many as ranks times axes."""


class _Envelope(msgspec.Struct, array_like=True):
    held: bytes
    groups: list[tuple[str, tuple[Run, ...]]]
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
    groups = [(axis, runs_of(ranks)) for axis, ranks in sorted(layout.groups)]
    held = msgspec.msgpack.encode(_Wire(table, shards, sorted(layout.aliases), sorted(layout.derived)))
    return msgspec.msgpack.encode(_Envelope(held, groups, sorted(layout.unused)))


def encode_rows(
    specs: list[tuple[str, str, str, tuple[int, ...]]],
    shards: list[tuple[int, tuple[int, ...], tuple[int, ...]]],
    aliases: list[tuple[str, str]],
    derived: list[str],
) -> bytes:
    """Return what :func:`encode_layout` returns of a layout without groups, whose rows are known, ascending."""
    return msgspec.msgpack.encode(_Envelope(msgspec.msgpack.encode(_Wire(specs, shards, aliases, derived)), [], []))


def decode_layouts(encoded: Sequence[bytes]) -> list[RankLayout]:
    """Return one layout per rank; ``encoded[r]`` came from rank ``r``. Equal groups are one tuple.

    Raises:
        MalformedData: bytes that no rank sends.
    """
    seen: dict[bytes, RankLayout] = {}
    groups = _Groups()
    layouts = []
    for rank, data in enumerate(encoded):
        try:
            envelope = msgspec.msgpack.decode(data, type=_Envelope)
            if envelope.held not in seen:
                wire = msgspec.msgpack.decode(envelope.held, type=_Wire)
                specs = [TensorSpec(*row) for row in wire.specs]
                shards = tuple(Shard(specs[i], Box(offsets, sizes)) for i, offsets, sizes in wire.shards)
                seen[envelope.held] = RankLayout(rank, shards, tuple(wire.aliases), tuple(wire.derived))
            named = tuple((axis, groups.ranks(runs)) for axis, runs in envelope.groups)
        except (msgspec.DecodeError, IndexError, CkptError) as error:
            raise MalformedData(f"layout from rank {rank}: {error}") from error
        layouts.append(replace(seen[envelope.held], rank=rank, groups=named, unused=tuple(envelope.unused)))
    return layouts


class _Groups:
    """Groups that were expanded already."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[Run, ...], tuple[int, ...]] = {}
        self._members = 0

    def ranks(self, runs: tuple[Run, ...]) -> tuple[int, ...]:
        """Return the ranks of a group, the same object for equal runs."""
        if runs not in self._ranks:
            self._members += sum(count for _, count, _ in runs)
            if self._members > MAX_MEMBERS or any(count < 1 for _, count, _ in runs):
                raise MalformedData(f"different groups of {self._members} ranks in all, expected at most {MAX_MEMBERS}")
            self._ranks[runs] = ranks_of(runs)
        return self._ranks[runs]


def combined(digests: list[bytes]) -> bytes:
    """Return the digest of a whole job's layout from the raw digests of its ranks' layouts, in rank order."""
    return raw_digest(b"".join(digests))
