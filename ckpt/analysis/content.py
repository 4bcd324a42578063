"""Undeclared redundancy: what is held twice among tensors of which nothing but the bytes is known. Pure.

After AITurbo (FAST'26), which deduplicates by checksums of chunks and needs no word from the engine. Two chunks are the
same if their bytes are, whatever their names; bytes of which all elements are equal are no evidence and are counted
apart, because the same report that calls zero moments duplicates is wrong one step later. Several probes are combined
by comparing the sequence of all their digests: the same is what was the same in every probe.

Limits: a tensor is cut along its rows from its first row on, so a slice of it is found if it begins at a cut and has
the same row length. A transposed copy, or one in another dtype (but for casts of float32 to 16 bits), is not found.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt.analysis.domains import spans
from ckpt.errors import ConfigError
from ckpt.layout.box import Box
from ckpt.layout.spec import ITEMSIZE
from ckpt.words import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

VALUE, CONSTANT, SHARED = 0, 1, 2
"""Kinds of chunk. ``CONSTANT``: all elements bitwise equal. ``SHARED``: the memory of an earlier chunk of the rank."""

Key = tuple[bytes, int]
"""Content of a chunk: its digests, one a probe, and its size."""


class ContentTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that a rank hands in."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class RankContent(msgspec.Struct, frozen=True, array_like=True):
    """What one rank hands in, chunk by chunk in the order of its tensors.

    ``digests``, ``kinds``: of each chunk. ``casts``: for each tensor that might be the source of a 16-bit copy, dtype
    -> digests of its chunks cast to it. ``aliases``: tensor -> earlier tensor of this rank that is the same memory.
    """

    tensors: tuple[ContentTensor, ...]
    digests: tuple[bytes, ...]
    kinds: tuple[int, ...]
    casts: dict[int, dict[str, tuple[bytes, ...]]] = {}
    aliases: dict[int, int] = {}


@dataclass(frozen=True, slots=True)
class Place:
    """Elements ``[start, stop)`` of the flattened tensor ``name``, held alike by these ranks."""

    name: str
    ranks: tuple[int, ...]
    start: int
    stop: int

    def plain(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {"name": self.name, "ranks": spans(self.ranks), "elements": [self.start, self.stop]}


@dataclass(frozen=True, slots=True)
class Group:
    """Places with equal content. ``nbytes``: of one copy. ``whole``: the places are whole tensors.

    ``source``: of a derivation, the tensors of which the places are casts.
    """

    places: tuple[Place, ...]
    nbytes: int
    whole: bool
    source: tuple[Place, ...] = ()

    @property
    def copies(self) -> int:
        """How often the content is held."""
        return sum(len(place.ranks) for place in self.places)

    def plain(self) -> dict[str, Any]:
        """Return JSON-able values."""
        cast = {"source": [p.plain() for p in self.source]} if self.source else {}
        places = [p.plain() for p in self.places]
        return {"bytes": self.nbytes, "copies": self.copies, "whole": self.whole, "places": places, **cast}


def cuts(shape: Sequence[int], elements: int) -> Iterator[Box]:
    """Yield the boxes of a tensor's chunks, in row-major order; none of a tensor without elements."""
    whole = Box.whole(shape)
    if whole.volume:
        yield from whole.cut(elements)


class _Class:
    """Tensors that are equal chunk by chunk. ``starts``: first element of each chunk, and the end."""

    def __init__(self, tensor: ContentTensor, keys: list[Key], kinds: Sequence[int], starts: list[int]) -> None:
        self.itemsize, self.keys, self.kinds, self.starts = ITEMSIZE[tensor.dtype], keys, kinds, starts
        self.members: dict[str, list[int]] = {}

    def places(self, first: int = 0, last: int | None = None) -> tuple[Place, ...]:
        start, stop = self.starts[first], self.starts[len(self.keys) if last is None else last]
        return tuple(Place(name, tuple(ranks), start, stop) for name, ranks in self.members.items())

    @property
    def nbytes(self) -> int:
        return self.starts[-1] * self.itemsize


@dataclass(frozen=True)
class ContentReport:
    """What several ranks' tensors have in common, from one probe or several; the same on every rank.

    ``chunk_elements``: largest chunk. All else follows from ``ranks``.
    """

    ranks: tuple[RankContent, ...]
    chunk_elements: int
    probes: int = 1

    def __and__(self, other: ContentReport) -> ContentReport:
        return ContentReport.combine([self, other])

    @classmethod
    def combine(cls, reports: Sequence[ContentReport]) -> ContentReport:
        """Return what is the same in every probe.

        A chunk is constant if it was in every probe: one probe in which it had values is evidence.

        Raises:
            ConfigError: no report, or the ranks have not handed in the same tensors, cut alike.
        """
        if len({(tuple(r.tensors for r in one.ranks), one.chunk_elements) for one in reports}) != 1:
            raise ConfigError(f"{count(len(reports), 'content report')}: expected one or more of the same tensors")
        merged = []
        for mine in zip(*(report.ranks for report in reports), strict=True):
            casts = {
                t: {dtype: _joined([one.casts[t][dtype] for one in mine]) for dtype in dtypes}
                for t, dtypes in mine[0].casts.items()
            }
            kinds = tuple(map(min, zip(*(one.kinds for one in mine), strict=True)))
            aliases = {t: of for t, of in mine[0].aliases.items() if all(one.aliases.get(t) == of for one in mine)}
            digests = _joined([one.digests for one in mine])
            merged.append(RankContent(mine[0].tensors, digests, kinds, casts, aliases))
        return cls(tuple(merged), reports[0].chunk_elements, sum(r.probes for r in reports))

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Bytes in memory by what they are.

        ``held``: all of them, the sum of what follows. ``unique``: the first copy of everything. ``derivable``: first
        copies of 16-bit content that is the cast of float32 content. ``within``, ``across``: further copies on the same
        rank, on other ranks. ``constant``: of chunks of equal elements, copies or not.
        """
        found = dict.fromkeys(("held", "unique", "derivable", "within", "across", "constant"), 0)
        casts = {d for rank in self.ranks for of in rank.casts.values() for ds in of.values() for d in ds}
        everywhere: set[Key] = set()
        for rank in self.ranks:
            here: set[Key] = set()
            for key, kind in zip(_keys(rank, self.chunk_elements), rank.kinds, strict=True):
                if kind == SHARED:
                    continue
                if kind == CONSTANT:
                    what = "constant"
                elif key in here:
                    what = "within"
                elif key in everywhere:
                    what = "across"
                else:
                    what = "derivable" if key[0] in casts else "unique"
                found["held"] += key[1]
                found[what] += key[1]
                here.add(key)
            everywhere |= here
        return found

    @cached_property
    def same_memory(self) -> tuple[tuple[int, str, str], ...]:
        """(rank, name, earlier name) of tensors that are one memory under two names."""
        return tuple(
            (r, rank.tensors[t].name, rank.tensors[of].name)
            for r, rank in enumerate(self.ranks)
            for t, of in rank.aliases.items()
        )

    @cached_property
    def duplicates(self) -> tuple[Group, ...]:
        """Whole tensors that are equal, then runs of chunks that are, largest copies first."""
        whole = [Group(c.places(), c.nbytes, True) for c in self._classes if sum(map(len, c.members.values())) > 1]
        return tuple(sorted((*whole, *self._runs()), key=lambda g: (not g.whole, -g.nbytes * (g.copies - 1))))

    @cached_property
    def derivations(self) -> tuple[Group, ...]:
        """16-bit tensors that are the cast of a float32 tensor, chunk by chunk."""
        sources: dict[tuple[bytes, ...], dict[str, Place]] = {}
        for r, rank in enumerate(self.ranks):
            for t, dtypes in rank.casts.items():
                tensor = rank.tensors[t]
                for digests in dtypes.values():
                    places = sources.setdefault(digests, {})
                    ranks = (*places[tensor.name].ranks, r) if tensor.name in places else (r,)
                    places[tensor.name] = Place(tensor.name, ranks, 0, Box.whole(tensor.shape).volume)
        found = []
        for one in self._classes:
            source = sources.get(tuple(digest for digest, _ in one.keys))
            if source:
                found.append(Group(one.places(), one.nbytes, True, tuple(source.values())))
        return tuple(found)

    @cached_property
    def _classes(self) -> list[_Class]:
        """Tensors with values, the same memory counted once, by content."""
        found: dict[tuple[Key, ...], _Class] = {}
        for r, rank in enumerate(self.ranks):
            keys, at = list(_keys(rank, self.chunk_elements)), 0
            for t, tensor in enumerate(rank.tensors):
                starts = [0]
                for box in cuts(tensor.shape, self.chunk_elements):
                    starts.append(starts[-1] + box.volume)
                mine, kinds = keys[at : at + len(starts) - 1], rank.kinds[at : at + len(starts) - 1]
                at += len(mine)
                if t in rank.aliases or all(kind == CONSTANT for kind in kinds):
                    continue
                one = found.setdefault(tuple(mine), _Class(tensor, mine, kinds, starts))
                one.members.setdefault(tensor.name, []).append(r)
        return list(found.values())

    def _runs(self) -> Iterator[Group]:
        """Yield runs of chunks that tensors have in common which are not equal as a whole."""
        where: dict[Key, list[tuple[int, int]]] = {}
        for c, one in enumerate(self._classes):
            for p, (key, kind) in enumerate(zip(one.keys, one.kinds, strict=True)):
                if kind != CONSTANT:
                    where.setdefault(key, []).append((c, p))
        for c, one in enumerate(self._classes):
            p = 0
            while p < len(one.keys):
                others = where.get(one.keys[p], [])
                first = p
                p += 1
                if len(others) < 2 or others[0] != (c, first):
                    continue
                while p < len(one.keys) and where.get(one.keys[p]) == [(d, q + p - first) for d, q in others]:
                    p += 1
                places = [place for d, q in others for place in self._classes[d].places(q, q + p - first)]
                yield Group(tuple(places), (one.starts[p] - one.starts[first]) * one.itemsize, False)

    def to_json(self) -> bytes:
        """Return the report as one JSON document, the same bytes for the same content."""
        return msgspec.json.encode(self.plain(), order="sorted")

    def plain(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        return {
            "world": len(self.ranks),
            "probes": self.probes,
            "chunk_elements": self.chunk_elements,
            "bytes": dict(self.sizes),
            "same_memory": [{"rank": r, "name": name, "as": of} for r, name, of in self.same_memory],
            "duplicates": [g.plain() for g in self.duplicates],
            "derivations": [g.plain() for g in self.derivations],
        }

    def __str__(self) -> str:
        sizes = ", ".join(f"{n} {what}" for what, n in self.sizes.items())
        found = f"{count(len(self.duplicates), 'group')} of duplicates, {count(len(self.derivations), 'derivation')}"
        return f"{count(len(self.ranks), 'rank')}, {count(self.probes, 'probe')}: {found}; bytes: {sizes}"


def _joined(digests: Sequence[tuple[bytes, ...]]) -> tuple[bytes, ...]:
    return tuple(map(b"".join, zip(*digests, strict=True)))


def _keys(rank: RankContent, elements: int) -> Iterator[Key]:
    digests = iter(rank.digests)
    for tensor in rank.tensors:
        for box in cuts(tensor.shape, elements):
            yield next(digests), box.volume * ITEMSIZE[tensor.dtype]
