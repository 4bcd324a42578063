"""State beside tensors on the way back: engine objects, extras, generators, and what a change of ranks means for each.

Policy by kind. Of engine objects every rank gets all variants that the saved ranks had, its own first: which of them it
needs (those of the pipeline stages whose layers it now has) only the adapter can tell. A generator belongs to its rank:
it is carried to the rank of the same number, and a rank that the saved job did not have gets a seed of its own. An
extra that all ranks saved alike is given to all; one that differed by rank is given by rank number, and if the number
of ranks has changed, that is noted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt.errors import ConfigError, MalformedData, MissingChunk, MissingState
from ckpt.format.digest import raw_digest
from ckpt.runtime.extras import ENGINE, EXTRA, RNG, VALUE, checked_extra, is_stateful
from ckpt.runtime.objects import decode_object
from ckpt.runtime.reading import read_blob
from ckpt.runtime.rng import derive_rng, restore_rng
from ckpt.runtime.staging import as_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt.format.manifest import IndexPart, ObjectEntry
    from ckpt.store.base import Store

MAX_NOTES = 32
"""Notes of the engines that every rank learns of."""


@dataclass(slots=True)
class Saved:
    """The objects that this rank gets, decoded. ``engine``: one mapping a variant, this rank's own first. ``states``:
    of stateful extras; ``values``: plain ones.
    """

    engine: list[dict[str, Any]] = field(default_factory=list)
    states: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    rng: Any = None
    rng_is_own: bool = True
    notes: list[str] = field(default_factory=list)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def choose_objects(
    store: Store,
    parts: Sequence[IndexPart],
    saved_world: int,
    rank: int,
    world: int,
    extra: Mapping[str, Any],
    strict: bool,
) -> Saved:
    """Read and decode what this rank gets.

    Raises:
        ConfigError: ``extra`` is no mapping, or a name in it is none.
        MissingState: with ``strict``: an extra that was asked for and not saved, or a stateful one saved and not
            asked for.
        DigestMismatch, MissingChunk, MalformedData: damage.
    """
    checked_extra(extra)
    found: dict[tuple[str, str], list[tuple[IndexPart, ObjectEntry]]] = {}
    for part in parts:
        for entry in part.objects:
            found.setdefault((entry.kind, entry.name), []).append((part, entry))
    saved = Saved(_engine_variants(store, found, rank, saved_world))
    for (kind, name), variants in sorted(found.items()):
        if kind == ENGINE:
            continue
        part, entry = _mine(variants, rank, saved_world)
        tree = decode_entry(store, part, entry)
        if kind == RNG:
            saved.rng, saved.rng_is_own = tree, rank < saved_world
        elif kind in (EXTRA, VALUE):
            (saved.states if kind == EXTRA else saved.values)[name] = tree
            if len(variants) > 1 and world != saved_world:
                saved.notes.append(
                    f"extra {name!r} differed between the {saved_world} ranks that saved it; rank {rank} of {world} "
                    f"has taken over the state of rank {rank % saved_world}"
                )
        else:
            raise MalformedData(f"object {name!r} has unknown kind {kind!r}")
    stateful = {name for name, value in extra.items() if is_stateful(value)}
    saved.missing = tuple(
        f"extra {n!r}" for n in sorted(extra) if n not in (saved.states if n in stateful else saved.values)
    )
    saved.unexpected = tuple(f"extra {n!r}" for n in sorted(saved.states) if n not in stateful)
    if strict and (saved.missing or saved.unexpected):
        raise MissingState(
            "the extras of this load are not those of the save; pass extra= as to ckpt.save, or strict=False",
            saved.missing,
            saved.unexpected,
        )
    return saved


def _engine_variants(
    store: Store, found: Mapping[tuple[str, str], list[tuple[IndexPart, ObjectEntry]]], rank: int, saved_world: int
) -> list[dict[str, Any]]:
    """Return the engine objects of one rank for each combination of variants that occurs, each decoded once."""
    named = {name: variants for (kind, name), variants in sorted(found.items()) if kind == ENGINE}
    ranks = {min(entry.ranks, default=0) for variants in named.values() for _, entry in variants}
    decoded: dict[tuple[str, int], Any] = {}
    objects: dict[tuple[int, ...], dict[str, Any]] = {}
    for one in (rank % saved_world, *sorted(ranks)):
        chosen = {name: _mine(variants, one, saved_world) for name, variants in named.items()}
        key = tuple(id(entry) for _, entry in chosen.values())
        if key not in objects:
            objects[key] = {}
            for name, (part, entry) in chosen.items():
                if (name, id(entry)) not in decoded:
                    decoded[name, id(entry)] = decode_entry(store, part, entry)
                objects[key][name] = decoded[name, id(entry)]
    return list(objects.values())


def _mine(variants: list[tuple[IndexPart, ObjectEntry]], rank: int, saved_world: int) -> tuple[IndexPart, ObjectEntry]:
    wanted = rank % saved_world
    for part, entry in variants:
        if wanted in entry.ranks:
            return part, entry
    return min(variants, key=lambda pair: min(pair[1].ranks, default=saved_world))


def decode_entry(store: Store, part: IndexPart, entry: ObjectEntry) -> Any:
    """Return the tree of one object. Errors: DigestMismatch, MissingChunk, MalformedData."""
    what = f"object {entry.name!r}"
    document = read_blob(store, part.packs[entry.document.pack].key, entry.document, what)
    tensors = []
    for one in entry.tensors:
        data = bytearray()
        for blob in one.blobs:
            data += read_blob(store, part.packs[blob.pack].key, blob, what)
        try:
            tensors.append(as_tensor(data, one.dtype, one.shape))
        except RuntimeError as error:
            raise MissingChunk(f"{what}: {len(data)} bytes for a tensor {one.dtype}{list(one.shape)}") from error
    return decode_object(bytes(document), tensors, what)


def give_back(saved: Saved, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Put states into the user's objects; return plain values and the states of objects that were not passed."""
    for name, value in extra.items():
        if is_stateful(value) and name in saved.states:
            value.load_state_dict(saved.states[name])
    left = {name: state for name, state in saved.states.items() if not is_stateful(extra.get(name))}
    return {**saved.values, **left}


class Notes(msgspec.Struct, array_like=True):
    """What one rank's engine notes, for all ranks: the first notes, and whether there are more."""

    shown: list[str]
    more: bool

    @classmethod
    def of(cls, notes: Sequence[str]) -> Notes:
        """Return what to send of a rank's notes."""
        distinct = list(dict.fromkeys(notes))
        return cls(distinct[:MAX_NOTES], len(distinct) > MAX_NOTES)


def notes_of_all(told: Sequence[Notes]) -> list[str]:
    """Return each note of any rank once, the lowest rank's first; of many the first ones, and that there are more."""
    found = list(dict.fromkeys(note for one in told for note in one.shown))
    cut = any(one.more for one in told)
    if len(found) <= MAX_NOTES and not cut:
        return found
    return [*found[:MAX_NOTES], "… and more notes on some ranks: each rank's report has all of its own"]


def restore_generators(saved: Saved, rank: int) -> list[str]:
    """Put this rank's generators back, last of all, because everything before may draw from them."""
    if saved.rng is None:
        return ["the checkpoint has no random generator state"]
    if saved.rng_is_own:
        if not isinstance(saved.rng, dict):
            raise ConfigError(f"random generator state is a {type(saved.rng).__name__}, expected a dict")
        return restore_rng(saved.rng)
    seed = int.from_bytes(raw_digest(f"{rank}:{saved.rng!r}".encode())[:8], "little")
    derive_rng(seed)
    return [f"rank {rank} did not exist in the saved job: its random generators were seeded anew, from the saved state"]
