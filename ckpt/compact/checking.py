"""Is the new base, bit for bit, what the job had? Read back from where it was stored, before it is committed.

Each record has a digest of all that its rank's optimizers stepped. Of a rank that has logged only a share of what it
holds, as under data parallelism, the rest is what others have logged that hold the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.convert.assemble import Assembler
from ckpt.format.digest import Running, from_raw
from ckpt.layout.spec import Shard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt.compact.records import OpenRecord
    from ckpt.compact.source import Source
    from ckpt.convert.opened import Opened
    from ckpt.gradlog.record import Entry, Part


def equal_ranks(
    source: Source, opened: Opened, last: Sequence[OpenRecord], memory: int
) -> tuple[list[int], list[int], list[int]]:
    """Return the ranks whose last record has the digest of what the new base holds, those whose has not, and those of
    which it cannot be told.

    Args:
        source: what is compacted.
        opened: the new base.
        last: each rank's last record.
        memory: bytes that may be held.

    Raises:
        DigestMismatch, MissingChunk: what was stored is not what is read back.
    """
    shared: dict[str, list[tuple[int, Part]]] = {}
    for head in source.last:
        for entry in head.entries:
            at = entry.at if len(entry.at) == len(entry.parts) else (-1,) * len(entry.parts)
            shared.setdefault(entry.layout, []).extend(zip(at, entry.parts, strict=True))
    assembler = Assembler(opened, memory=memory)
    known: dict[tuple[str, ...], str] = {}
    found: tuple[list[int], list[int], list[int]] = [], [], []
    for rank, head in enumerate(source.last):
        held = [_held(entry, shared) for entry in head.entries]
        if any(one is None for one in held):
            found[2].append(rank)
            continue
        layouts = tuple(entry.layout for entry in head.entries)
        if layouts not in known:
            known[layouts] = _digest(source, assembler, [one or [] for one in held])
        found[0 if known[layouts] == last[rank].record.digest else 1].append(rank)
    return found


def _held(entry: Entry, shared: Mapping[str, Sequence[tuple[int, Part]]]) -> list[Part] | None:
    """Return all that a rank holds of an entry, in the order of its memory; None if the logs do not tell."""
    if entry.numel == entry.held:
        return list(entry.parts)
    both = shared[entry.layout]
    if min((at for at, _ in both), default=-1) < 0 or sum(part.box.volume for _, part in both) != entry.held:
        return None
    return [part for _, part in sorted(both, key=lambda one: one[0])]


def _digest(source: Source, assembler: Assembler, held: Sequence[Sequence[Part]]) -> str:
    wants = [(n, Shard(source.key_spec(part.fqn), part.box)) for n, parts in enumerate(held) for part in parts]
    entries = [Running() for _ in held]
    for piece in assembler.pieces(shard for _, shard in wants):
        entries[wants[piece.number][0]].add(piece.data)
    whole = Running()
    for one in entries:
        whole.add(one.raw())
    return from_raw(whole.raw())
