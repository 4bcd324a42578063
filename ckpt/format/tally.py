"""How many bytes the chunks of each role have, and how many they take in packs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ckpt.format.manifest import DERIVED, IndexPart, RoleCodec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckpt.layout.spec import TensorSpec


class RoleBytes(msgspec.Struct, kw_only=True):
    """Of one role on one rank. ``codecs``: those that some chunk has; ``why``: the reason of the rank's choice."""

    raw: int = 0
    stored: int = 0
    codecs: list[str] = []
    why: str = ""


def tally(part: IndexPart, specs: tuple[TensorSpec, ...], why: Mapping[str, str]) -> dict[str, RoleBytes]:
    """Return role -> bytes of the chunks of one part, what is stored once counted once, derived chunks left out.

    ``why``: role -> reason of the choice.
    """
    found: dict[str, RoleBytes] = {}
    places: set[tuple[int, int]] = set()
    for chunk in part.chunks:
        if chunk.pack == DERIVED or (chunk.length and (chunk.pack, chunk.start) in places):
            continue
        places.add((chunk.pack, chunk.start))
        role = specs[chunk.spec].role
        one = found.setdefault(role, RoleBytes(why=why.get(role, "")))
        one.raw += chunk.nbytes
        one.stored += chunk.length
        name = part.codec_of(chunk)
        if name is not None and name not in one.codecs:
            one.codecs.append(name)
    return found


def by_role(ranks: Iterable[Mapping[str, RoleBytes]]) -> dict[str, RoleCodec]:
    """Return what all ranks' tallies come to, roles sorted. Of their reasons, that of the rank with most bytes."""
    of_role: dict[str, list[RoleBytes]] = {}
    for rank in ranks:
        for role, one in rank.items():
            of_role.setdefault(role, []).append(one)
    return {role: _sum(of_role[role]) for role in sorted(of_role)}


def _sum(ranks: list[RoleBytes]) -> RoleCodec:
    raw, stored = sum(one.raw for one in ranks), sum(one.stored for one in ranks)
    names = sorted({name for one in ranks for name in one.codecs})
    return RoleCodec(
        codec=", ".join(names) or "none",
        raw=raw,
        stored=stored,
        ratio=round(raw / stored, 4) if stored else 1.0,
        why=max(ranks, key=lambda one: one.raw).why,
    )


def is_encoded(ranks: Iterable[Mapping[str, RoleBytes]]) -> bool:
    """Is some chunk encoded, so that the commit must name the feature :data:`ckpt.format.manifest.CODEC`?"""
    return any(one.codecs for rank in ranks for one in rank.values())
