"""A rank's records, one step after the other, without what nobody asks for: the words of a record, and ranges of it.

A whole record may be larger than the memory that a worker has. So only its table and its document are read, and of the
gradients the elements of a bundle. That every byte is what was written was seen before, when the log was looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.engine.base import torch_dtype
from ckpt.errors import MalformedData, MissingChunk, ReplayError, StoreError
from ckpt.format.codec import decode_into, stored_most
from ckpt.format.pack import parse_header
from ckpt.gradlog.lossless import multiplied
from ckpt.gradlog.record import DOCUMENT, MAX_DOCUMENT, VERSION, Record, decode
from ckpt.layout.spec import ITEMSIZE
from ckpt.repo.log_files import files_of, places_in
from ckpt.runtime.staging import as_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from ckpt.gradlog.record import Call, Gradient, RankHead
    from ckpt.repo.log_files import Place
    from ckpt.store.base import Store

FIRST_READ = 64 << 10
"""Bytes that are read of a record before its table is known to be longer."""
AHEAD = 1 << 20
"""Bytes that are read at least of a gradient."""
MOST_HEADER = 64 << 20
MOST_BLOCK = 256 << 20


class OpenRecord:
    """A record whose document was read. ``where``: for messages. Of what is read of its gradients a little is kept,
    since whoever reads them asks for one piece after the other.
    """

    def __init__(self, store: Store, place: Place) -> None:
        self._store, self._place, self.where = store, place, f"{place.key}: step {place.step}"
        self._kept: tuple[str, int, memoryview] = "", 0, memoryview(b"")
        self._places: dict[int, tuple[Gradient, int, int]] | None = None
        head = self._bytes(0, min(FIRST_READ, place.nbytes))
        length = 8 + int.from_bytes(head[:8], "little")
        if place.nbytes < 8 or length > min(place.nbytes, MOST_HEADER):
            raise MalformedData(f"{self.where}: a header of {length} bytes in a record of {place.nbytes}")
        if length > len(head):
            head = self._bytes(0, length)
        self._table = parse_header(bytes(head[:length]), place.nbytes, self.where)
        start, stop = self._span(DOCUMENT)
        if stop - start > MAX_DOCUMENT:
            raise MalformedData(f"{self.where}: a document of {stop - start} bytes, at most {MAX_DOCUMENT} are read")
        self.record = decode(bytes(self._bytes(start, stop - start)), Record, self.where)
        if self.record.format != VERSION or self.record.step != place.step:
            raise MalformedData(
                f"{self.where}: of version {self.record.format} and step {self.record.step}, expected {VERSION}"
            )

    def _span(self, name: str) -> tuple[int, int]:
        if name not in self._table:
            raise MalformedData(f"{self.where}: tensor {name!r} is not there")
        _, _, start, stop = self._table[name]
        return start, stop

    def _bytes(self, start: int, nbytes: int) -> memoryview:
        """Return bytes of the payload, in memory of their own."""
        data = memoryview(bytearray(nbytes))
        if nbytes and self._store.read_into(self._place.key, self._place.start + start, data) != nbytes:
            raise StoreError(f"{self._place.key}: shorter than it was a moment ago", self._place.key)
        return data

    def tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a whole tensor, in memory of its own; for small ones.

        Raises:
            MalformedData: there is none of this name, or with another number of bytes.
        """
        start, stop = self._span(name)
        return as_tensor(self._bytes(start, stop - start), dtype, shape)

    def gradient(self, call: Call, head: RankHead, entry: int, first: int, stop: int) -> torch.Tensor | None:
        """Return elements ``[first, stop)`` of what was logged of an entry's gradient, 1-D, as the optimizer saw them.

        None: this call has none of the entry.

        Raises:
            MalformedData: the record does not hold what it says.
        """
        if self._places is None:
            self._places = self._places_of(call, head)
        if entry not in self._places:
            return None
        gradient, at, total = self._places[entry]
        return self._range(gradient, at + first, at + stop, total)

    def _places_of(self, call: Call, head: RankHead) -> dict[int, tuple[Gradient, int, int]]:
        """Return entry -> the tensor that it is in, where it begins, and how many elements are in all."""
        found: dict[int, tuple[Gradient, int, int]] = {}
        for one in call.gradients:
            for number in one.entries:
                if not 0 <= number < len(head.entries):
                    raise MalformedData(f"{self.where}: a gradient of entry {number}, there are {len(head.entries)}")
            total, at = sum(head.entries[n].numel for n in one.entries), 0
            for number in one.entries:
                found[number] = one, at, total
                at += head.entries[number].numel
        return found

    def _range(self, gradient: Gradient, first: int, stop: int, total: int) -> torch.Tensor:
        where = f"{self.where}: {gradient.name}"
        if gradient.dtype not in ITEMSIZE or gradient.wide not in ITEMSIZE:
            raise MalformedData(f"{where}: dtypes {gradient.dtype!r} and {gradient.wide!r}")
        width = ITEMSIZE[gradient.dtype]
        start, end = self._span(gradient.name)
        if gradient.codec:
            data = self._decoded(gradient, first * width, stop * width, total * width, where)
        elif end - start != total * width:
            raise MalformedData(f"{where}: {end - start} bytes for {total} elements of {gradient.dtype}")
        else:
            data = self._ahead(gradient.name, start + first * width, (stop - first) * width, end)
        stored = as_tensor(data, gradient.dtype, (stop - first,))
        if not gradient.scale:
            return stored.to(torch_dtype(gradient.wide))
        try:
            return multiplied(stored, float.fromhex(gradient.scale))
        except (ValueError, OverflowError) as error:
            raise MalformedData(f"{where}: multiplier {gradient.scale[:40]!r}") from error

    def _ahead(self, name: str, start: int, nbytes: int, end: int) -> memoryview:
        """Return bytes of the payload that may not be written to; short pieces are read together with what follows."""
        kept, begin, data = self._kept
        if kept != name or not begin <= start <= start + nbytes <= begin + len(data):
            begin, data = start, self._bytes(start, min(max(nbytes, AHEAD), end - start))
            self._kept = name, begin, data
        return data[start - begin : start - begin + nbytes]

    def _decoded(self, gradient: Gradient, first: int, stop: int, nbytes: int, where: str) -> memoryview:
        """Return bytes ``[first, stop)`` of what was encoded; only blocks that hold some of them are read."""
        block, lengths = gradient.block, gradient.blocks
        start, end = self._span(gradient.name)
        fits = 0 < block <= MOST_BLOCK and len(lengths) == -(-nbytes // block) and sum(lengths) == end - start
        if not fits or not all(0 <= one <= stored_most(block) for one in lengths):
            raise MalformedData(f"{where}: {len(lengths)} blocks of {block} bytes for {nbytes}")
        out = memoryview(bytearray(stop - first))
        begin = start + sum(lengths[: first // block])
        for i in range(first // block, -(-stop // block)):
            low, high = i * block, min((i + 1) * block, nbytes)
            if self._kept[:2] != (gradient.name, low):
                whole = memoryview(bytearray(high - low))
                decode_into(self._bytes(begin, lengths[i]), gradient.codec, whole, where)
                self._kept = gradient.name, low, whole
            whole = self._kept[2]
            a, b = max(first, low), min(stop, high)
            out[a - first : b - first] = whole[a - low : b - low]
            begin += lengths[i]
        return out


def records_of(store: Store, number: int, rank: int, first: int, last: int) -> Iterator[OpenRecord]:
    """Yield a rank's records of steps ``first`` to ``last``, in order.

    Raises:
        MissingChunk: one is not there.
        MalformedData: one is none, or is another rank's.
    """
    step = first
    files = files_of(store, number, rank)
    for i, (_, key) in enumerate(files):
        if i + 1 < len(files) and files[i + 1][0] <= step:
            continue
        for place in places_in(store, key):
            if isinstance(place, str) or place.step < step:
                continue
            if place.step > step or step > last:
                break
            found = OpenRecord(store, place)
            if found.record.rank != rank:
                raise MalformedData(f"{found.where}: of rank {found.record.rank}, expected {rank}")
            yield found
            step += 1
        if step > last:
            return
    if step <= last:
        raise MissingChunk(f"log {number} of rank {rank} has no record of step {step}")


def only_call(one: OpenRecord) -> Call | None:
    """Return what the optimizers did in a step; None if it was skipped.

    Raises:
        ReplayError: they took several steps at once.
    """
    if len(one.record.calls) > 1:
        raise ReplayError(f"{one.where}: {len(one.record.calls)} steps of the optimizers in one record, expected one")
    return one.record.calls[0] if one.record.calls else None
