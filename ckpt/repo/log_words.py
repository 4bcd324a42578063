"""Whose a record is: the few words of it that say for which step, rank and run it was written.

The rest of what a record says is read where it is used (:mod:`ckpt.gradlog.record`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ckpt.errors import MalformedData
from ckpt.format.digest import raw_digest
from ckpt.format.frames import VERSION
from ckpt.format.manifest import parse
from ckpt.format.pack import MAX_HEADER, parse_header

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.repo.lineage import LogHead
    from ckpt.repo.log_files import Place
    from ckpt.store.base import Store

DOCUMENT = "record"
"""Name of the tensor that holds a record's words."""
MAX_DOCUMENT = 1 << 28
FIRST = 64 << 10
"""Bytes of a record that are read at first: nearly always its header is in them."""


ENGINE = "engine"
"""Kind of an object that says how far the engine is (:mod:`ckpt.runtime.extras`)."""
_NOTHING = msgspec.Raw(b"[]")


class _Object(msgspec.Struct, frozen=True):
    kind: str
    document: str


class _Words(msgspec.Struct, frozen=True):
    """``calls``, ``samples``: only whether there are any matters here, so they are left as they are."""

    step: int
    rank: int
    run: str = ""
    calls: msgspec.Raw = _NOTHING
    samples: msgspec.Raw = _NOTHING
    objects: tuple[_Object, ...] = ()


class Whose(NamedTuple):
    """What a record says of its rank's step. ``taken``: else it was skipped. ``steps``: does it show that this rank
    steps anything at all? ``engine``: tells what the engine, a scaler included, counts behind it from what it counts
    behind another step.
    """

    taken: bool
    steps: bool
    engine: bytes = b""


class _RankHead(msgspec.Struct, frozen=True):
    """What must be right in the head of a rank's part for its records to be read at all."""

    format: int
    rank: int
    world: int
    run: str = ""


def check_record(store: Store, place: Place, rank: int, run: str, data: bytes = b"") -> Whose:
    """Check that a record is of the rank and the run that its place says. Returns what it says of the step.

    Args:
        store: the repository's.
        place: of the record.
        rank: whose it should be.
        run: of the log, as ``log.json`` says it.
        data: the first bytes of the payload, if somebody has read them.

    Raises:
        MalformedData: it is another's, or is no record.
    """
    where = f"{place.key}: the record of step {place.step}"

    def piece(start: int, nbytes: int) -> bytes:
        found = data[start : start + nbytes]
        return found if len(found) == nbytes else store.get(place.key, place.start + start, nbytes)

    length = 8 + int.from_bytes(piece(0, min(8, place.nbytes)), "little")
    if length > min(place.nbytes, 8 + MAX_HEADER):
        raise MalformedData(f"{where}: a header of {length} bytes in a record of {place.nbytes}")
    table = parse_header(piece(0, length), place.nbytes, where)
    if DOCUMENT not in table:
        raise MalformedData(f"{where}: tensor {DOCUMENT!r} is not there")
    _, _, start, stop = table[DOCUMENT]
    if stop - start > MAX_DOCUMENT:
        raise MalformedData(f"{where}: a document of {stop - start} bytes, at most {MAX_DOCUMENT} are read")
    words = parse(piece(start, stop - start), _Words, where)
    if (words.step, words.rank) != (place.step, rank):
        raise MalformedData(f"{where}: says step {words.step} and rank {words.rank}, expected {place.step} and {rank}")
    check_run(words.run, run, where)
    taken = not _is_empty(words.calls)
    said = [one.document for one in words.objects if one.kind == ENGINE]
    return Whose(taken, taken or not _is_empty(words.samples), engine_of(said))


def engine_of(documents: Sequence[str]) -> bytes:
    """Return what tells these documents of an engine from others."""
    return raw_digest(msgspec.msgpack.encode(documents))


def _is_empty(array: msgspec.Raw) -> bool:
    return b"".join(bytes(memoryview(array)[:64]).split()) == b"[]"


def check_rank_head(data: bytes, head: LogHead, rank: int, key: str) -> None:
    """Check what a rank says of its part of a log, as far as no record can be read without it.

    Raises:
        MalformedData: it is another rank's, of another log, or nothing that this release can read.
    """
    said = parse(data, _RankHead, key)
    if (said.format, said.rank, said.world) != (VERSION, rank, head.world):
        raise MalformedData(
            f"{key}: of version {said.format} and rank {said.rank} of {said.world}, expected {VERSION} and {rank} of "
            f"{head.world}"
        )
    check_run(said.run, head.run, key)


def check_run(said: str, run: str, where: str) -> None:
    """Check that something belongs to a log, of which ``log.json`` says ``run``.

    Raises:
        MalformedData: it belongs to another.
    """
    if said != run:
        raise MalformedData(
            f"{where}: of run {said[:40] or 'unknown'}, expected {run or 'unknown'} (log.json): another log's"
        )
