"""From the pieces of a record to the gradients that this rank's optimizers step, with no copy of it in between."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ckpt.format.codec import decode_into
from ckpt.gradlog.replaying.stored import form_of
from ckpt.layout.box import Box, boxes_of_range
from ckpt.runtime.staging import as_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from ckpt.gradlog.record import Gradient, RankHead
    from ckpt.gradlog.replaying.mapping import Copy
    from ckpt.gradlog.replaying.opened import Opened
    from ckpt.gradlog.replaying.stored import Form


class _Wanted(NamedTuple):
    """Elements ``[start, stop)`` of what is stored, a part of which a copy wants."""

    start: int
    stop: int
    copy: Copy


class Filling:
    """Takes a record's gradient and puts it where it is wanted.

    Args:
        one: the record.
        head: of the rank that logged it.
        gradient: which of its gradients.
        copies: entry -> what is wanted of it.

    Raises:
        MalformedData: the record does not hold what it says.
    """

    def __init__(self, one: Opened, head: RankHead, gradient: Gradient, copies: dict[int, list[Copy]]) -> None:
        self._where, self._gradient = f"{one.where}: {gradient.name}", gradient
        wanted: list[_Wanted] = []
        at = 0
        for entry in gradient.entries:
            for copy in copies.get(entry, ()):
                start = at + copy.start
                wanted.append(_Wanted(start, start + prod(copy.sizes), copy))
            at += head.entries[entry].numel
        # Parts of an entry lie one behind the other, so that ends are in order too.
        self._wanted = sorted(wanted, key=lambda one: (one.start, one.stop))
        start, stop = one.span(gradient.name)
        self._form = form_of(gradient, at, stop - start, one.where)
        self._blocks = 0
        self._decoded = memoryview(b"")
        self._done = 0
        self._first = 0

    def cuts(self, most: int) -> Iterator[int]:
        """Yield where the stored bytes may be cut: between elements, or between blocks of a codec."""
        if not self._gradient.codec:
            step = most - most % self._form.width
            yield from range(step, self._form.nbytes, step)
            if self._form.nbytes:
                yield self._form.nbytes
            return
        end = 0
        for length in self._gradient.blocks:
            end += length
            yield end

    def take(self, data: memoryview) -> None:
        """Put the next elements in their places."""
        if self._gradient.codec:
            data = self._decode(data)
        self._put(as_tensor(data, self._form.dtype, (data.nbytes // self._form.width,)))

    def _decode(self, data: memoryview) -> memoryview:
        block = self._gradient.block
        low = self._blocks * block
        nbytes = min(block, self._form.nbytes - low)
        if nbytes > len(self._decoded):
            self._decoded = memoryview(bytearray(nbytes))
        out = self._decoded[:nbytes]
        decode_into(data, self._gradient.codec, out, self._where)
        self._blocks += 1
        return out

    def _put(self, values: torch.Tensor) -> None:
        first = self._done
        self._done += len(values)
        while self._first < len(self._wanted) and self._wanted[self._first].stop <= first:
            self._first += 1
        for one in self._wanted[self._first :]:
            if one.start >= self._done:
                break
            low, high = max(first, one.start), min(self._done, one.stop)
            if low < high:
                put_range(one.copy, values[low - first : high - first], low - one.start, self._form)


def put_range(copy: Copy, values: torch.Tensor, low: int, form: Form) -> None:
    """Put elements from ``low`` on of a part, which come row by row, where a copy wants them.

    Args:
        copy: which of the part's elements are wanted, and where.
        values: as they are stored, 1-D.
        low: where they begin in the part.
        form: how they are stored.
    """
    if low == 0 and len(values) == prod(copy.sizes):
        form.put(values.view(copy.sizes)[copy.inside.relative_to(Box.whole(copy.sizes))], copy.view)
        return
    for box in boxes_of_range(copy.sizes, low, low + len(values)):
        common = box.intersect(copy.inside)
        if common is not None:
            at = _flat(box.offsets, copy.sizes) - low
            there = values[at : at + box.volume].view(box.sizes)[common.relative_to(box)]
            form.put(there, copy.view[common.relative_to(copy.inside)])


def _flat(offsets: Sequence[int], sizes: Sequence[int]) -> int:
    at = 0
    for offset, size in zip(offsets, sizes, strict=True):
        at = at * size + offset
    return at
