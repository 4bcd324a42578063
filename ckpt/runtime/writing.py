"""What one rank writes of a checkpoint: its packs, and its part of the index."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ckpt.errors import CkptError
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
from ckpt.runtime.extras import Item, item_entry, item_outputs
from ckpt.runtime.pipeline import Output, Settled, Written, write_outputs
from ckpt.store.base import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckpt.plan.save_plan import SavePlan
    from ckpt.runtime.comparing import Answer

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
    """What one rank owns of a checkpoint. ``entries`` lack only their place; those not ``DERIVED`` are ``outputs``, in
    the same order. ``objects``: with the ranks that have exactly the same.
    """

    outputs: list[Output]
    entries: list[ChunkEntry]
    objects: list[tuple[Item, tuple[int, ...]]]


def write_own(attempt: Attempt, rank: int, layout: str, content: Content, beat: Callable[[], None]) -> Done:
    """Write a rank's packs and its index part, durably.

    Args:
        attempt: where to write.
        rank: this rank; names its files.
        layout: digest of the job's layout; tells which parts of the parent's index can hold the same chunks.
        content: what to write.
        beat: called after every chunk.
    """
    groups = [item_outputs(item, rank) for item, _ in content.objects]
    everything = content.outputs + [output for group in groups for output in group]

    def pack_key(number: int) -> str:
        return attempt.key(f"packs/rank{rank:05d}-{number:03d}.safetensors")

    parent = Parent(attempt, rank, layout)
    written = write_outputs(attempt.store, everything, parent.place_of, pack_key, beat)
    remember(attempt.store, everything, written)
    places = iter(written.places)
    chunks = []
    for entry in content.entries:
        pack, start = (DERIVED, 0) if entry.pack == DERIVED else next(places)
        chunks.append(msgspec.structs.replace(entry, pack=pack, start=start))
    objects = tuple(
        item_entry(item, ranks, group, [next(places) for _ in group])
        for (item, ranks), group in zip(content.objects, groups, strict=True)
    )
    part = IndexPart(rank=rank, packs=tuple(written.packs), chunks=tuple(chunks), objects=objects)
    ref = Repository(attempt.store).write_index(attempt.key(f"index/part-{rank:05d}.json.zst"), part)
    return Done(
        part=ref,
        packs=written.packs[: written.new_packs],
        written=written.new_bytes,
        reused=written.reused_bytes,
        derived=sum(e.nbytes for e in content.entries if e.pack == DERIVED),
        stored=written.file_bytes + ref.nbytes,
    )


_proved: dict[str, set[tuple[str, int, str]]] = {}
"""Store -> (pack, start, digest) of what this process wrote or referenced in its last save there."""


class Parent:
    """The bytes of an earlier step that need not be written again. Only a saving: any trouble means writing."""

    def __init__(self, attempt: Attempt, rank: int, layout: str) -> None:
        self.store = attempt.store
        self._places: dict[tuple[str, int], tuple[PackRef, int]] = {}
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
                if there[pack]:
                    self._places[entry.digest, entry.nbytes] = (pack, entry.start)

    def place_of(self, digest_: str, nbytes: int) -> tuple[PackRef, int] | None:
        """Return where these bytes are, or None.

        Bytes that this process did not write are read once and checked: a step that refers to rotten bytes would be
        committed as good.
        """
        found = self._places.get((digest_, nbytes))
        if found is None or (found[0].key, found[1], digest_) in _proved.get(self.store.url, ()):
            return found
        buffer = memoryview(bytearray(nbytes))
        try:
            sound = self.store.read_into(found[0].key, found[1], buffer) == nbytes and digest(buffer) == digest_
        except CkptError:
            sound = False
        if not sound:
            log.warning("pack %s is damaged at %d: these bytes are written again", found[0].key, found[1])
        return found if sound else None


def remember(store: Store, outputs: list[Output], written: Written) -> None:
    """Note what this save wrote or checked, in place of what the last one did."""
    places = zip(outputs, written.places, strict=True)
    _proved[store.url] = {(written.packs[pack].key, start, o.digest) for o, (pack, start) in places}


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
