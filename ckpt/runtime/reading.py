"""The data path of a load: ranges of packs, read once per rank, checked, and copied into live tensors.

Seam for the broadcast: :func:`read_chunks` yields verified chunks in plan order. A reader that gets some of them from a
peer instead of the store replaces this function and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.errors import DigestMismatch, MissingChunk, ObjectNotFound, PlanError
from ckpt.format.digest import digest
from ckpt.plan.load_plan import is_count
from ckpt.runtime.staging import as_tensor, copy_into

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch

    from ckpt.format.manifest import BlobEntry, ChunkEntry
    from ckpt.plan.load_plan import ChunkRead
    from ckpt.runtime.pieces import Piece
    from ckpt.store.base import Store

SPAN_BYTES = 8 << 20
"""Neighbouring chunks of a pack are read together up to this many bytes: the memory that a load needs."""
GAP_BYTES = 64 << 10
"""Unwanted bytes between two chunks that are read over rather than seeked over."""


def read_chunks(store: Store, reads: Sequence[ChunkRead]) -> Iterator[tuple[ChunkRead, memoryview]]:
    """Yield each chunk with its verified bytes; they are valid until the next one is asked for.

    Raises:
        DigestMismatch, MissingChunk: names tensor, box, pack and position.
    """
    buffer = bytearray()
    for span in _spans(reads):
        first = span[0].entry.start
        nbytes = max(r.entry.start + r.entry.nbytes for r in span) - first
        if len(buffer) < nbytes:
            buffer = bytearray(nbytes)
        view = memoryview(buffer)[:nbytes]
        got = _read_into(store, span[0].key, first, view, f"{span[0].spec} chunk {span[0].entry.box}")
        for read in span:
            at = read.entry.start - first
            what = f"{read.spec} chunk {read.entry.box}"
            yield read, _verified(view[at : at + read.entry.nbytes], read.entry, got - at, what, read.key)


def _spans(reads: Iterable[ChunkRead]) -> Iterator[list[ChunkRead]]:
    span: list[ChunkRead] = []
    end = 0
    for read in reads:
        start, stop = read.entry.start, read.entry.start + read.entry.nbytes
        fits = span and read.key == span[0].key and start >= span[0].entry.start
        if fits and start <= end + GAP_BYTES and max(stop, end) - span[0].entry.start <= SPAN_BYTES:
            span.append(read)
            end = max(end, stop)
        else:
            if span:
                yield span
            span, end = [read], stop
    if span:
        yield span


def _read_into(store: Store, key: str, start: int, view: memoryview, what: str) -> int:
    try:
        return store.read_into(key, start, view)
    except ObjectNotFound as error:
        raise MissingChunk(f"{what}: pack {key} is not in {store.url}") from error


def _verified(data: memoryview, entry: ChunkEntry | BlobEntry, got: int, what: str, key: str) -> memoryview:
    if got < entry.nbytes:
        raise MissingChunk(f"{what}: pack {key} ends {entry.nbytes - max(got, 0)} bytes before the chunk does")
    found = digest(data)
    if found != entry.digest:
        raise DigestMismatch(f"{what}: in pack {key} at {entry.start}: expected {entry.digest}, found {found}")
    return data


def read_blob(store: Store, key: str, blob: BlobEntry, what: str) -> bytearray:
    """Return the verified bytes of a blob (a piece of an object)."""
    data = bytearray(blob.nbytes)
    got = _read_into(store, key, blob.start, memoryview(data), what)
    _verified(memoryview(data), blob, got, what, key)
    return data


def place_chunks(store: Store, reads: Sequence[ChunkRead], targets: Sequence[Piece], beat: Callable[[], None]) -> int:
    """Read chunks and copy each into the live tensors that want it. Returns the bytes read.

    Raises:
        PlanError: a number (0-d) that the target's dtype cannot hold exactly.
    """
    total = 0
    for read, data in read_chunks(store, reads):
        chunk = as_tensor(data, read.spec.dtype, read.entry.sizes)
        for use in read.uses:
            target = targets[use.target]
            source = chunk[use.box.relative_to(read.entry.box)]
            if source.dtype != target.tensor.dtype and is_count(read.spec, target.spec):
                source = _exact(source, target)
            copy_into(target.tensor[use.box.relative_to(target.box)], source)
        total += read.entry.nbytes
        beat()
    return total


def _exact(number: torch.Tensor, target: Piece) -> torch.Tensor:
    converted = number.to(target.tensor.dtype)
    if converted.item() != number.item():
        raise PlanError(f"{target.spec}: the stored value {number.item()} is not exact in this dtype")
    return converted


def check_packs(store: Store, reads: Iterable[ChunkRead], sizes: dict[str, int]) -> None:
    """Raise before any tensor is touched if a pack is absent or has another size than recorded in ``sizes``."""
    wanted: dict[str, list[ChunkRead]] = {}
    for read in reads:
        wanted.setdefault(read.key, []).append(read)
    for key, of_pack in sorted(wanted.items()):
        found, expected = store.size(key), sizes[key]
        if found != expected:
            state = "is not there" if found is None else f"has {found} bytes"
            what = f"{of_pack[0].spec} chunk {of_pack[0].entry.box}"
            more = f" and {len(of_pack) - 1} more" if len(of_pack) > 1 else ""
            raise MissingChunk(f"{what}{more}: pack {key} {state}, expected {expected} bytes in {store.url}")
