"""From a store to verified bytes: ranges of packs, each read once, checked before anybody uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.errors import DigestMismatch, MissingChunk, ObjectNotFound
from ckpt.format.codec import decode_into
from ckpt.format.digest import digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpt.format.manifest import BlobEntry
    from ckpt.plan.read_plan import Place, Unit
    from ckpt.store.base import Store

GAP_BYTES = 64 << 10
"""Unwanted bytes between two chunks that a rank reads over rather than seeks over. Only where each rank reads for
itself: where they read together, somebody else reads the bytes between."""


def read_unit(store: Store, places: Sequence[Place], unit: Unit, into: memoryview) -> None:
    """Fill ``into`` with the bytes of a unit, decoded and verified.

    Raises:
        DigestMismatch, MissingChunk, MalformedData: names tensor, box, pack and position.
        StoreError: the store fails.
    """
    if not unit.encoded:
        _read_range(store, places, unit, into)
    else:
        stored = memoryview(bytearray(unit.stored))
        _read_range(store, places, unit, stored)
        for number, at in unit.items:
            place = places[number]
            entry, begin = place.entry, place.entry.start - unit.start
            where = f"{describe(place)}: in pack {unit.key} at {entry.start}"
            decode_into(stored[begin : begin + entry.length], place.codec or "", into[at : at + entry.nbytes], where)
    verify_unit(places, unit, into)


def _read_range(store: Store, places: Sequence[Place], unit: Unit, into: memoryview) -> None:
    got = _read_into(store, unit.key, unit.start, into, describe(places[unit.items[0][0]]))
    for number, _ in unit.items:
        entry = places[number].entry
        short = entry.start + entry.length - unit.start - got
        if short > 0:
            _raise_short(describe(places[number]), unit.key, min(short, entry.length))


def _raise_short(what: str, key: str, nbytes: int) -> None:
    raise MissingChunk(f"{what}: pack {key} ends {nbytes} bytes before the chunk does")


def _read_into(store: Store, key: str, start: int, view: memoryview, what: str) -> int:
    try:
        return store.read_into(key, start, view)
    except ObjectNotFound as error:
        raise MissingChunk(f"{what}: pack {key} is not in {store.url}") from error


def verify_unit(places: Sequence[Place], unit: Unit, data: memoryview) -> None:
    """Check every chunk of a unit against its digest; one without (a foreign file's index has none) is as it is.

    Raises:
        DigestMismatch: names tensor, box, pack and position.
    """
    for number, at in unit.items:
        entry = places[number].entry
        if not entry.digest:
            continue
        found = digest(data[at : at + entry.nbytes])
        if found != entry.digest:
            what = describe(places[number])
            raise DigestMismatch(f"{what}: in pack {unit.key} at {entry.start}: expected {entry.digest}, found {found}")


def describe(place: Place) -> str:
    """Return what a place is, for messages."""
    return f"{place.spec} chunk {place.entry.box}"


def read_blob(store: Store, key: str, blob: BlobEntry, what: str) -> bytearray:
    """Return the verified bytes of a blob (a piece of an object)."""
    data = bytearray(blob.nbytes)
    got = _read_into(store, key, blob.start, memoryview(data), what)
    if got < blob.nbytes:
        _raise_short(what, key, blob.nbytes - max(got, 0))
    found = digest(data)
    if found != blob.digest:
        raise DigestMismatch(f"{what}: in pack {key} at {blob.start}: expected {blob.digest}, found {found}")
    return data


def check_packs(store: Store, places: Iterable[Place], sizes: Mapping[str, int]) -> None:
    """Raise before any tensor is touched if a pack is absent or has another size than recorded in ``sizes``."""
    wanted: dict[str, list[Place]] = {}
    for place in places:
        wanted.setdefault(place.key, []).append(place)
    for key, of_pack in sorted(wanted.items()):
        found, expected = store.size(key), sizes[key]
        if found != expected:
            state = "is not there" if found is None else f"has {found} bytes"
            what = describe(of_pack[0])
            more = f" and {len(of_pack) - 1} more" if len(of_pack) > 1 else ""
            raise MissingChunk(f"{what}{more}: pack {key} {state}, expected {expected} bytes in {store.url}")
