"""How far what was replayed is from what was: by the values that the log remembers of each rank.

A digest says whether all of it is the same, where the same rank holds the same. In another layout nothing does, but for
values that every record tells: :data:`SAMPLES` of each rank, spread evenly over what it logs. Each is compared by every
rank that holds it now.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

import torch

from ckpt.gradlog.share import flat_of, local_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.engine.base import Stepped
    from ckpt.gradlog.record import RankHead, Record
    from ckpt.gradlog.share import Own

SAMPLES = 256
"""Stepped values that a record tells."""
MOST_COMPARED = 1 << 16
"""Values that a rank compares: where it reads the records of many, some of each."""


class Deviation(NamedTuple):
    """``compared``: values that the log remembers and that are held here; ``differ``: those of them that are not the
    same number. ``largest``: the largest difference, by the size of the value that was.
    """

    compared: int = 0
    differ: int = 0
    largest: float = 0.0

    def with_others(self, others: Sequence[Deviation]) -> Deviation:
        """Return what several ranks have found."""
        every = (self, *others)
        return Deviation(
            sum(one.compared for one in every), sum(one.differ for one in every), max(one.largest for one in every)
        )


NONE = Deviation()


class Sampler:
    """Takes the values that a record tells: the same places at every step."""

    def __init__(self, own: Sequence[Own]) -> None:
        total = sum(one.entry.numel for one in own)
        wanted = sorted({total * (2 * i + 1) // (2 * SAMPLES) for i in range(SAMPLES)}) if total else []
        self._at: list[int] = []
        self._places: list[tuple[Own, torch.Tensor]] = []
        begin = 0
        for one in own:
            places: list[int] = []
            for run in one.runs:
                count = 1
                for size in run.sizes:
                    count *= size
                here = wanted[bisect_left(wanted, begin) : bisect_left(wanted, begin + count)]
                places += [run.offset + _place(at - begin, run.sizes, run.strides) for at in here]
                self._at += here
                begin += count
            if places:
                self._places.append((one, torch.tensor(places, device=local_of(one.stepped.key).device)))

    def take(self) -> torch.Tensor:
        """Return the values as they are now, in double precision, where they are computed."""
        values = [flat_of(one.stepped.key).index_select(0, places).double() for one, places in self._places]
        return torch.cat([value.to(values[0].device) for value in values]) if values else torch.empty(0)

    def told(self, values: torch.Tensor) -> tuple[tuple[int, float], ...]:
        """Return what a record tells: position in the order of the logged elements, and value."""
        finite = values.isfinite().tolist()  # JSON has no others
        return tuple((at, value) for at, value, good in zip(self._at, values.tolist(), finite, strict=True) if good)


def _place(index: int, sizes: Sequence[int], strides: Sequence[int]) -> int:
    place = 0
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        place += index % size * stride
        index //= size
    return place


def deviation_of(stepped: Sequence[Stepped], records: Sequence[tuple[RankHead, Record]]) -> Deviation:
    """Return how far what is stepped here is from what records tell of it."""
    stride = max(1, len(records) * SAMPLES // MOST_COMPARED)
    held: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]] = {}
    for one in stepped:
        for fqn, _, box, view in one.places(local_of(one.key)):
            held.setdefault(fqn, []).append((box.offsets, box.sizes, view))
    compared = differ = 0
    largest = 0.0
    for head, record in records:
        for at, was in record.samples[::stride]:
            fqn, place = _element(head, at)
            for offsets, sizes, view in held.get(fqn, ()):
                if all(o <= p < o + n for p, o, n in zip(place, offsets, sizes, strict=True)):
                    now = float(view[tuple(p - o for p, o in zip(place, offsets, strict=True))])
                    off = abs(now - was) / max(abs(was), 1e-30)
                    compared, differ = compared + 1, differ + (now != was)
                    largest = max(largest, off if off == off else float("inf"))
    return Deviation(compared, differ, largest)


def _element(head: RankHead, at: int) -> tuple[str, tuple[int, ...]]:
    """Return (fqn, index in the global tensor) of an element by its position in the order of what a rank logs."""
    for entry in head.entries:
        for part in entry.parts:
            volume = part.box.volume
            if 0 <= at < volume:
                place = []
                for size in reversed(part.sizes):
                    place.append(at % size)
                    at //= size
                return part.fqn, tuple(o + p for o, p in zip(part.offsets, reversed(place), strict=True))
            at -= volume
    return "", ()
