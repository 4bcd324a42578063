"""A rank's records, one step after the other, without what nobody asks for: the words of a record, and ranges of it.

A whole record may be larger than the memory that a worker has. So only its table and its document are read, and of the
gradients the elements of a bundle. That every byte is what was written was seen before, when the log was looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.errors import MalformedData
from ckpt.format.codec import decode_into
from ckpt.gradlog.replaying.opened import Opened
from ckpt.gradlog.replaying.reading import RankReader
from ckpt.gradlog.replaying.stored import form_of
from ckpt.gradlog.writing.lossless import multiplied
from ckpt.runtime.staging import as_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from ckpt.gradlog.record import Call, Gradient, RankHead
    from ckpt.repo.log_files import Place
    from ckpt.store.base import Store

AHEAD = 1 << 20
"""Bytes that are read at least of a gradient."""


class OpenRecord(Opened):
    """A record whose document was read, and of whose gradients ranges are. Of what is read a little is kept, since
    whoever reads them asks for one piece after the other. Arguments and errors as of :class:`Opened`.
    """

    def __init__(self, store: Store, place: Place, rank: int) -> None:
        super().__init__(store, place, rank)
        self._kept = []  # many are open at once, and nobody reads one from end to end
        self._last: tuple[str, int, memoryview] = "", 0, memoryview(b"")
        self._places: dict[int, tuple[Gradient, int, int]] | None = None

    def tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a whole tensor, in memory of its own; for small ones.

        Raises:
            MalformedData: there is none of this name, or with another number of bytes.
        """
        start, stop = self.span(name)
        return as_tensor(self.bytes(start, stop - start), dtype, shape)

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
        start, end = self.span(gradient.name)
        form = form_of(gradient, total, end - start, self.where)
        width = form.width
        if gradient.codec:
            data = self._decoded(gradient, first * width, stop * width, form.nbytes)
        else:
            data = self._ahead(gradient.name, start + first * width, (stop - first) * width, end)
        stored = as_tensor(data, gradient.dtype, (stop - first,))
        return stored.to(form.wide) if form.scale is None else multiplied(stored, form.scale)

    def _ahead(self, name: str, start: int, nbytes: int, end: int) -> memoryview:
        """Return bytes of the payload that may not be written to; short pieces are read together with what follows."""
        kept, begin, data = self._last
        if kept != name or not begin <= start <= start + nbytes <= begin + len(data):
            begin, data = start, self.bytes(start, min(max(nbytes, AHEAD), end - start))
            self._last = name, begin, data
        return data[start - begin : start - begin + nbytes]

    def _decoded(self, gradient: Gradient, first: int, stop: int, nbytes: int) -> memoryview:
        """Return bytes ``[first, stop)`` of what was encoded; only blocks that hold some of them are read."""
        block, lengths = gradient.block, gradient.blocks
        out = memoryview(bytearray(stop - first))
        begin = self.span(gradient.name)[0] + sum(lengths[: first // block])
        for i in range(first // block, -(-stop // block)):
            low, high = i * block, min((i + 1) * block, nbytes)
            if self._last[:2] != (gradient.name, low):
                whole = memoryview(bytearray(high - low))
                decode_into(self.bytes(begin, lengths[i]), gradient.codec, whole, f"{self.where}: {gradient.name}")
                self._last = gradient.name, low, whole
            whole = self._last[2]
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
    reader = RankReader(store, number, rank, first)
    for step in range(first, last + 1):
        yield reader.open(step, OpenRecord)
