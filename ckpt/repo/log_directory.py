"""Who has logged what, of the whole job in few bytes: so a rank of another layout reads the heads of those alone whose
gradients it needs.

A row says which elements of a parameter a rank has logged, as a range in row-major order (of a box that does not lie
so, from its first element to its last: a few heads too many are read then). Ranks that follow one another at equal
distances, as partitions do, are one row, whatever their number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ckpt.errors import MalformedData, ObjectNotFound
from ckpt.format.codec import compress, decompress
from ckpt.format.frames import VERSION
from ckpt.format.manifest import parse
from ckpt.repo.lineage import log_key
from ckpt.repo.log_files import DIRECTORY
from ckpt.repo.log_words import check_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckpt.layout.box import Box
    from ckpt.store.base import Store

MOST_BYTES = 1 << 26
"""Of a directory, decoded; nothing larger is read."""
MOST = 1 << 62


class Row(msgspec.Struct, frozen=True, array_like=True):
    """``count`` ranges of ``numel`` elements: number i is elements from ``start + i * by`` on, of rank ``rank + i *
    step``.
    """

    rank: int
    start: int
    numel: int
    count: int = 1
    step: int = 0
    by: int = 0

    def overlapping(self, low: int, high: int) -> Iterator[int]:
        """Yield the ranks whose ranges share elements with ``[low, high)``."""
        if self.by < 1:
            first, last = 0, self.count - 1 if self.start < high and low < self.start + self.numel else -1
        else:
            first = max(0, (low - self.start - self.numel) // self.by + 1)
            last = min(self.count - 1, (high - 1 - self.start) // self.by)
        for i in range(first, last + 1):
            yield self.rank + i * self.step


class Directory(msgspec.Struct, frozen=True, kw_only=True):
    """``run``: of the log. ``rows``: FQN -> who has logged what of it."""

    format: int
    world: int
    run: str
    rows: dict[str, list[Row]]

    def ranks(self, boxes: Iterable[tuple[str, Sequence[int], Box]]) -> set[int]:
        """Return the ranks that have logged some of these boxes (FQN, shape of the tensor, box), maybe a few more."""
        found = set[int]()
        for fqn, shape, box in boxes:
            if box.volume:
                low, high = range_of(shape, box)
                for row in self.rows.get(fqn, ()):
                    found.update(row.overlapping(low, high))
        return found


class Logged(NamedTuple):
    """A box of a tensor whose gradient ``rank`` logs."""

    fqn: str
    shape: tuple[int, ...]
    box: Box
    rank: int


def range_of(shape: Sequence[int], box: Box) -> tuple[int, int]:
    """Return from where to where a box (that is not empty) has elements, in row-major order of a tensor's."""
    first = last = 0
    for size, offset, extent in zip(shape, box.offsets, box.sizes, strict=True):
        first, last = first * size + offset, last * size + offset + extent - 1
    return first, last + 1


def directory_of(logged: Iterable[Logged], world: int, run: str) -> Directory:
    """Return what says who logs what."""
    ranges: dict[str, list[tuple[int, int, int]]] = {}
    for one in logged:
        if one.box.volume:
            ranges.setdefault(one.fqn, []).append((*range_of(one.shape, one.box), one.rank))
    rows = {fqn: _in_rows(_joined(sorted(some))) for fqn, some in sorted(ranges.items())}
    return Directory(format=VERSION, world=world, run=run, rows=rows)


def _joined(ranges: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return ranges of which no two of a rank lie one right behind the other."""
    found: list[tuple[int, int, int]] = []
    for start, stop, rank in ranges:
        if found and found[-1][2] == rank and found[-1][1] == start:
            found[-1] = (found[-1][0], stop, rank)
        else:
            found.append((start, stop, rank))
    return found


def _in_rows(ranges: Sequence[tuple[int, int, int]]) -> list[Row]:
    found: list[Row] = []
    for start, stop, rank in ranges:
        last = found[-1] if found else None
        if last is not None and last.numel == stop - start:
            before = last.count - 1
            step, by = rank - last.rank - before * last.step, start - last.start - before * last.by
            if by > 0 and (last.count == 1 or (step, by) == (last.step, last.by)):
                found[-1] = Row(last.rank, last.start, last.numel, last.count + 1, step, by)
                continue
        found.append(Row(rank, start, stop - start))
    return found


def write_directory(store: Store, number: int, said: Directory) -> None:
    """Store it. Logs are read without one too, at the price of every head."""
    data = msgspec.json.encode(said)
    if len(data) <= MOST_BYTES:
        store.put(f"{log_key(number)}/{DIRECTORY}", compress(data))


def read_directory(store: Store, number: int, world: int, run: str) -> Directory | None:
    """Return the directory of a log of ``world`` ranks; None: it has none, as those of earlier releases.

    Raises:
        MalformedData: what this release cannot read, what is another log's, or a row of ranks that there cannot be.
    """
    key = f"{log_key(number)}/{DIRECTORY}"
    try:
        data = store.get(key, 0, MOST_BYTES)
    except ObjectNotFound:
        return None
    said = parse(decompress(data, limit=MOST_BYTES, where=key), Directory, key)
    check_run(said.run, run, key)
    if (said.format, said.world) != (VERSION, world):
        raise MalformedData(f"{key}: of version {said.format} and {said.world} ranks, expected {VERSION} and {world}")
    for fqn, rows in said.rows.items():
        for row in rows:
            ends = row.rank, row.rank + (row.count - 1) * row.step
            sound = 1 <= row.count <= world and min(ends) >= 0 and max(ends) < world
            if not (sound and 0 <= row.start <= MOST and 1 <= row.numel <= MOST and 0 <= row.by <= MOST):
                raise MalformedData(f"{key}: {fqn[:80]!r} logged by {row}, of {world} ranks")
    return said
