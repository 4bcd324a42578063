"""What one rank writes of a checkpoint: its packs, and its part of the index."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ckpt.errors import CkptError, MissingChunk
from ckpt.format.codec import decode
from ckpt.format.digest import digest, from_raw
from ckpt.format.manifest import (
    DERIVED,
    BlobEntry,
    ChunkEntry,
    Divergence,
    DivergingElements,
    FileRef,
    IndexPart,
    PackRef,
)
from ckpt.repo.repository import Repository, attempt_prefix, step_prefix
from ckpt.runtime.extras import Item, item_entry
from ckpt.runtime.packing import Identity, Output, Packer, Place
from ckpt.store.base import Store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt.plan.save_plan import SavePlan
    from ckpt.runtime.comparing import Answer
    from ckpt.runtime.settling import Settled

log = logging.getLogger("ckpt")


class Done(msgspec.Struct, kw_only=True):
    """What a rank has written. ``packs``: only those made now."""

    part: FileRef
    packs: list[PackRef]
    written: int
    reused: int
    derived: int
    stored: int
    underived: int = 0
    """bytes of params that are not cast(master)"""
    underived_shown: list[str] = []
    codecs: dict[str, tuple[list[str], int, int]] = {}
    """role -> codecs used (an empty name: raw), bytes of the chunks newly written, bytes that they take in packs"""
    reasons: dict[str, str] = {}
    """role -> why this rank chose its codec"""
    encoded: bool = False
    """does this rank's part of the index refer to encoded chunks?"""
    assumed: list[str] = []
    """a few of the diverging tensors that count as whole here though no framework says so"""


@dataclass(slots=True)
class Attempt:
    """One attempt at saving a step, on one rank. ``made``: keys of the files that this rank has created."""

    store: Store
    step: int
    name: str
    parent: int | None
    """the newest committed step, whose chunks may be referenced"""
    avoid: int | None
    """the step that is being replaced: nothing of its own may be referenced"""
    made: list[str]

    def key(self, path: str) -> str:
        """Return the key of a file of this attempt and remember that it is ours."""
        key = f"{attempt_prefix(self.step, self.name)}/{path}"
        self.made.append(key)
        return key


@dataclass(frozen=True, slots=True)
class Content:
    """What one rank owns of a checkpoint, all of it stored. ``entries`` lack only their place; those not ``DERIVED``
    are at ``places``, in the same order. ``objects``: with the ranks that have exactly the same, and their places.
    """

    outputs: list[Output]
    places: list[Place]
    entries: list[ChunkEntry]
    objects: list[tuple[Item, tuple[int, ...], list[Output], list[Place]]]


def write_part(attempt: Attempt, rank: int, packer: Packer, content: Content) -> Done:
    """Make a rank's packs durable and write its part of the index."""
    made = packer.finish()
    for pack in packer.earlier():  # somebody may have removed the step that they belong to while this one was saved
        if attempt.store.size(pack.key) != pack.nbytes:
            raise MissingChunk(f"pack {pack.key}, which unchanged chunks are in, has gone from {attempt.store.url}")
    packs = [*made, *packer.earlier()]
    number = {ref.key: n for n, ref in enumerate(packs)}
    codecs = sorted({place.codec for place in content.places} - {""})
    places = iter(content.places)
    chunks = []
    for entry in content.entries:
        if entry.pack == DERIVED:
            chunks.append(msgspec.structs.replace(entry, pack=DERIVED, start=0))
            continue
        at = next(places)
        how = (codecs.index(at.codec) + 1, at.stored) if at.codec else (0, 0)
        chunks.append(msgspec.structs.replace(entry, pack=number[at.pack], start=at.start, codec=how[0], stored=how[1]))
    objects = tuple(
        item_entry(item, ranks, outputs, [(number[at.pack], at.start) for at in found])
        for item, ranks, outputs, found in content.objects
    )
    part = IndexPart(rank=rank, packs=tuple(packs), chunks=tuple(chunks), objects=objects, codecs=tuple(codecs))
    ref = Repository(attempt.store).write_index(attempt.key(f"index/part-{rank:05d}.json.zst"), part)
    return Done(
        part=ref,
        packs=made,
        written=packer.written,
        reused=packer.reused_bytes,
        derived=sum(e.nbytes for e in content.entries if e.pack == DERIVED),
        stored=packer.file_bytes + ref.nbytes,
        codecs={role: (sorted(one.codecs), one.raw, one.stored) for role, one in packer.totals.items()},
        encoded=bool(codecs),
    )


_proved: dict[str, set[tuple[str, int, str]]] = {}
"""Store -> (pack, start, digest) of what this process wrote or referenced in its last save there."""


class Parent:
    """The bytes of an earlier step that need not be written again. Only a saving: any trouble means writing."""

    def __init__(self, attempt: Attempt, rank: int, layout: str) -> None:
        self.store = attempt.store
        self._places: dict[Identity, tuple[PackRef, Place]] = {}
        if attempt.parent is None:
            return
        try:
            self._read(attempt.parent, rank, layout, "" if attempt.avoid is None else f"{step_prefix(attempt.avoid)}/")
        except CkptError as error:
            log.warning("step %s cannot be built upon, everything is written: %s", attempt.parent, error)
            self._places.clear()

    def _read(self, parent: int, rank: int, layout: str, avoid: str) -> None:
        repo = Repository(self.store)
        root = repo.read_root(repo.read_commit(parent))
        # With an unchanged layout this rank owns the same chunks as then, and needs to read only its own part.
        index = repo.read_index(parent, [rank] if root.layout == layout else None)
        there: dict[PackRef, bool] = {}
        for part in index.parts:
            blobs = [b for o in part.objects for b in (o.document, *(b for t in o.tensors for b in t.blobs))]
            places: list[ChunkEntry | BlobEntry] = [*part.chunks, *blobs]
            for entry in places:
                if entry.pack == DERIVED or (avoid and part.packs[entry.pack].key.startswith(avoid)):
                    continue
                pack = part.packs[entry.pack]
                if pack not in there:
                    there[pack] = self.store.size(pack.key) == pack.nbytes
                if not there[pack]:
                    continue
                codec = (part.codec_of(entry) or "") if isinstance(entry, ChunkEntry) else ""
                identity = entry.digest, entry.nbytes, isinstance(entry, ChunkEntry)
                self._places[identity] = (pack, Place(pack.key, entry.start, entry.length, codec))

    def place_of(self, identity: Identity) -> tuple[PackRef, Place] | None:
        """Return where these bytes are, or None.

        Bytes that this process did not write are read once and checked: a step that refers to rotten bytes would be
        committed as good.
        """
        found = self._places.get(identity)
        if found is None:
            return None
        at = found[1]
        if (at.pack, at.start, identity[0]) in _proved.get(self.store.url, ()):
            return found
        buffer = memoryview(bytearray(at.stored))
        try:
            whole = self.store.read_into(at.pack, at.start, buffer) == at.stored
            data = decode(buffer, at.codec, identity[1], at.pack) if at.codec else buffer
            sound = whole and digest(data) == identity[0]
        except CkptError:
            sound = False
        if not sound:
            log.warning("pack %s is damaged at %d: these bytes are written again", at.pack, at.start)
        return found if sound else None


def remember(store: Store, content: Content) -> None:
    """Note what this save wrote or checked, in place of what the last one did."""
    stored = [*zip(content.outputs, content.places, strict=True)]
    stored += [pair for _, _, outputs, places in content.objects for pair in zip(outputs, places, strict=True)]
    _proved[store.url] = {(at.pack, at.start, output.digest) for output, at in stored}


def divergences_of(plan: SavePlan, settled: Settled, answers: Mapping[int, Answer]) -> list[Divergence]:
    """Return the findings of this save: declared replicas whose digests differ.

    ``answers``: chunk -> what exactly differs, of those that were looked at (:mod:`ckpt.runtime.comparing`).
    """
    found = []
    for i, verdict in sorted(settled.verdicts.items()):
        chunk = plan.chunks[i]
        exact = answers[i].replicas if i in answers else None
        found.append(
            Divergence(
                fqn=chunk.spec.fqn,
                role=chunk.spec.role,
                offsets=chunk.box.offsets,
                sizes=chunk.box.sizes,
                copies={from_raw(d): ranks for d, ranks in verdict.copies.items()},
                kept=from_raw(verdict.kept),
                differing=None
                if exact is None
                else DivergingElements(
                    offsets=exact.box.offsets,
                    sizes=exact.box.sizes,
                    elements=exact.elements,
                    unordered=exact.unordered,
                    max_abs=exact.max_abs,
                    compared=exact.compared,
                ),
            )
        )
    return found
