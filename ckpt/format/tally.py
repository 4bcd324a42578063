"""How many bytes the chunks of each role have, and how many they take in packs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt.format.manifest import DERIVED, IndexPart, RoleCodec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckpt.layout.spec import TensorSpec


@dataclass(slots=True)
class _Bytes:
    raw: int = 0
    stored: int = 0
    codecs: set[str] = field(default_factory=set)


def tally(
    parts: Iterable[IndexPart], specs: tuple[TensorSpec, ...], noted: Mapping[str, RoleCodec]
) -> dict[str, RoleCodec]:
    """Return per role, sorted, how the chunks of a step are stored, those of earlier steps that it refers to included.

    What is stored once is counted once; derived chunks are left out.

    Args:
        parts: of the step's index.
        specs: those that chunks refer to.
        noted: what the save has noted of its own chunks, for the reasons.
    """
    found: dict[str, _Bytes] = {}
    places: set[tuple[str, int]] = set()
    for part in parts:
        for chunk in part.chunks:
            place = None if chunk.pack == DERIVED else (part.packs[chunk.pack].key, chunk.start)
            if place is None or (chunk.length and place in places):
                continue
            places.add(place)
            one = found.setdefault(specs[chunk.spec].role, _Bytes())
            one.raw += chunk.nbytes
            one.stored += chunk.length
            if chunk.nbytes:
                one.codecs.add(part.codec_of(chunk) or "none")
    return {role: _told(found[role], noted.get(role)) for role in sorted(found)}


def _told(one: _Bytes, noted: RoleCodec | None) -> RoleCodec:
    return RoleCodec(
        codec=", ".join(sorted(one.codecs)) or "none",
        raw=one.raw,
        stored=one.stored,
        ratio=round(one.raw / one.stored, 4) if one.stored else 1.0,
        why=noted.why if noted is not None else "",
    )
