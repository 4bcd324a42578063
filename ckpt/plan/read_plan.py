"""ReadPlan: which rank reads which stored bytes, and who hands them on to whom. Pure; every rank computes the same.

Each chunk that anybody needs is read from the store by one of the ranks that need it and then handed on along a chain
of the others, so that each link between two ranks carries it once (a serial chain moves large data as fast as one link
is, whatever the number of ranks: BlitzScale, OSDI'25; AITurbo, FAST'26). Hosts are visited one after the other, so the
bytes enter each host once.

All ranks work through their units in one order. That is what keeps chains of bounded buffers from waiting for each
other in a circle: of all units that are not done, the first has room everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ckpt.format.codec import compress, decompress
from ckpt.format.digest import raw_digest
from ckpt.format.manifest import DERIVED, MAX_INDEX, ChunkEntry, IndexPart
from ckpt.layout.spec import MASTER, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    Runs = npt.NDArray[np.int64]
    """Numbers as ascending runs, one row each: first, one behind the last."""

SPAN_BYTES = 8 << 20
"""Neighbouring chunks are read and handed on together up to this many bytes."""


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a pack that hold a chunk, or several whose content is equal.

    ``phase``: chunks of a later phase are placed over those of an earlier one. A master can stand in for a param of
    which only some bytes are stored (0, then 1); ranks' own diverging copies come last (2).
    """

    phase: int
    key: str
    entry: ChunkEntry
    codec: str | None
    spec: TensorSpec
    """one of the tensors that have these bytes, for messages"""


class Places:
    """Every place of a checkpoint, numbered in the order of phases, packs and positions: the same on all ranks.

    ``phased``: False puts all in one phase, for who places no chunk over another one.
    """

    def __init__(self, specs: Sequence[TensorSpec], parts: Iterable[IndexPart], *, phased: bool = True) -> None:
        self._parts = tuple(parts)  # keeps the entries, whose ids are the keys of `_number`
        found: dict[tuple[int, str, int, int, int, str, str | None], list[tuple[IndexPart, ChunkEntry]]] = {}
        for part in self._parts:
            for entry in part.chunks:
                if entry.pack != DERIVED and entry.nbytes:
                    phase = 2 if entry.ranks else int(specs[entry.spec].role != MASTER)
                    phase = phase if phased else 0
                    where = (part.packs[entry.pack].key, entry.start, entry.length, entry.nbytes)
                    found.setdefault((phase, *where, entry.digest, part.codec_of(entry)), []).append((part, entry))
        self.order: list[Place] = []
        self._number: dict[int, int] = {}
        for identity in sorted(found, key=lambda k: (k[0], _natural(k[1]), *k[2:6], k[6] or "")):
            for _, entry in found[identity]:
                self._number[id(entry)] = len(self.order)
            first = found[identity][0][1]
            self.order.append(Place(identity[0], identity[1], first, identity[6], specs[first.spec]))

    def number(self, entry: ChunkEntry) -> int:
        """Return the number of the place of a stored chunk with bytes."""
        return self._number[id(entry)]


def _natural(key: str) -> tuple[int, str]:
    """Order pack 10 behind pack 9: a run of one rank's places is then a run of neighbouring packs."""
    return len(key), key


@dataclass(frozen=True, slots=True)
class Unit:
    """What is read at once and handed on at once.

    ``start``, ``stored``: the range of pack ``key``. ``items``: place numbers and where each begins in the ``nbytes``
    bytes that are handed on: the range itself or, if its chunks are ``encoded``, their own bytes one after the other.
    ``chain``: the reader, then who gets it from whom.
    """

    number: int
    phase: int
    key: str
    start: int
    stored: int
    nbytes: int
    items: tuple[tuple[int, int], ...]
    encoded: bool
    chain: tuple[int, ...]


def runs_of_numbers(numbers: Iterable[int]) -> Runs:
    """Return a set of numbers as runs."""
    ascending = np.unique(np.fromiter(numbers, np.int64))
    if not len(ascending):
        return np.empty((0, 2), np.int64)
    cuts = np.flatnonzero(np.diff(ascending) != 1) + 1
    firsts, lasts = ascending[np.r_[0, cuts]], ascending[np.r_[cuts - 1, len(ascending) - 1]]
    return np.stack([firsts, lasts + 1], axis=1)


def encode_runs(runs: Runs) -> bytes:
    """Return runs as a few bytes: most begin soon behind the one before."""
    return compress(np.diff(runs.reshape(-1), prepend=0).astype("<i8").tobytes())


def decode_runs(data: bytes) -> Runs:
    """Return the runs of :func:`encode_runs`."""
    steps = np.frombuffer(decompress(data, limit=MAX_INDEX, where="the runs that a rank needs"), "<i8")
    return np.cumsum(steps, dtype=np.int64).reshape(-1, 2)


def plan_alone(places: Sequence[Place], needs: Runs, rank: int, *, gap: int, span: int = SPAN_BYTES) -> list[Unit]:
    """Return how one rank reads all that it needs by itself; ranges at most ``gap`` unwanted bytes apart are one."""
    numbers = [n for first, stop in needs for n in range(first, stop)]
    cut = _cut(places, [(n, 0) for n in numbers], gap, span)
    return [unit_of(places, number, items, (rank,)) for number, (items, _) in enumerate(cut)]


def plan_together(
    places: Sequence[Place], needs: Sequence[Runs], hosts: Sequence[str], *, span: int = SPAN_BYTES
) -> list[Unit]:
    """Return all units of the job, in the order in which every rank works through its own.

    Args:
        places: of the checkpoint.
        needs: for each rank the numbers of the places that it needs; ranks that need the same may share one array.
        hosts: name of each rank's host.
        span: most bytes of a unit, unless one chunk has more.
    """
    group_of, members = _groups(len(places), needs)
    wanted = np.flatnonzero(group_of >= 0)
    cut = _cut(places, [(int(n), int(group_of[n])) for n in wanted], 0, span)
    sizes = [sum(places[n].entry.length for n in items) for items, _ in cut]
    readers = _readers([group for _, group in cut], sizes, members, hosts)
    before: dict[int, int] = {}
    order = []
    for at, (items, _) in enumerate(cut):
        phase, reader = places[items[0]].phase, readers[at]
        # Ranks read at about one speed: a unit comes when its reader has read what it reads before.
        order.append((phase, before.get(reader, 0), reader, at))
        before[reader] = before.get(reader, 0) + sizes[at]
    chains: dict[tuple[int, int], tuple[int, ...]] = {}
    units = []
    for number, (_, _, reader, at) in enumerate(sorted(order)):
        items, group = cut[at]
        if (group, reader) not in chains:
            chains[group, reader] = chain_from(reader, members[group], hosts)
        units.append(unit_of(places, number, items, chains[group, reader]))
    return units


def unit_of(places: Sequence[Place], number: int, items: Sequence[int], chain: tuple[int, ...]) -> Unit:
    """Return the unit of places that lie in one range."""
    entries = [places[n].entry for n in items]
    first, encoded = places[items[0]], places[items[0]].codec is not None
    start, stop = entries[0].start, max(e.start + e.length for e in entries)
    at = np.cumsum([0, *(e.nbytes for e in entries)]) if encoded else [e.start - start for e in entries]
    nbytes = int(at[-1]) if encoded else stop - start
    offsets = tuple((n, int(a)) for n, a in zip(items, at, strict=False))
    return Unit(number, first.phase, first.key, start, stop - start, nbytes, offsets, encoded, chain)


def _cut(
    places: Sequence[Place], numbers: Sequence[tuple[int, int]], gap: int, span: int
) -> list[tuple[list[int], int]]:
    """Cut numbered places, each with its group, into runs that lie together and that the same ranks need."""
    found: list[tuple[list[int], int]] = []
    last: tuple[int, int, str, bool] | None = None
    start = end = raw = 0
    for n, group in numbers:
        place = places[n]
        entry, alike = place.entry, (group, place.phase, place.key, place.codec is not None)
        stop = entry.start + entry.length
        near = end <= entry.start <= end + (0 if alike[3] else gap)  # encoded chunks have no gap to be read over
        if alike == last and near and max(stop - start, raw + entry.nbytes) <= span:
            found[-1][0].append(n)
        else:
            found.append(([n], group))
            last, start, raw = alike, entry.start, 0
        end, raw = stop, raw + entry.nbytes
    return found


def _groups(count: int, needs: Sequence[Runs]) -> tuple[npt.NDArray[np.int64], list[tuple[int, ...]]]:
    """Return for each place the number of the set of ranks that need it (-1: nobody), and those sets.

    Every distinct need has a random mark; the marks of all that need a place, added bit by bit, name their set. They
    are added at the ends of runs only: the work grows with the runs, not with ranks times places.
    """
    same: dict[bytes, list[int]] = {}
    for rank, runs in enumerate(needs):
        if len(runs):
            same.setdefault(runs.tobytes(), []).append(rank)
    marks = np.zeros((count + 1, 2), np.uint64)
    for data, ranks in same.items():
        mark = np.frombuffer(raw_digest(data), np.uint64)
        np.bitwise_xor.at(marks, needs[ranks[0]].reshape(-1), mark)
    names = np.bitwise_xor.accumulate(marks, axis=0)[:count]
    _, first, group_of = np.unique(names, axis=0, return_index=True, return_inverse=True)
    members: list[list[int]] = [[] for _ in first]
    for ranks in same.values():
        runs = needs[ranks[0]]
        at = np.searchsorted(runs[:, 0], first, side="right") - 1
        for group in np.flatnonzero((at >= 0) & (first < runs[at, 1])):
            members[group] += ranks
    nobody = np.array([not m for m in members], bool)
    group_of = group_of.reshape(-1).astype(np.int64)
    if count:
        group_of[nobody[group_of]] = -1
    return group_of, [tuple(sorted(m)) for m in members]


def _readers(
    groups: Sequence[int], sizes: Sequence[int], members: Sequence[tuple[int, ...]], hosts: Sequence[str]
) -> list[int]:
    """Choose a reader for each unit: as even as can be over hosts, then over the ranks of each.

    Units that only few can read are given away first; the others fill up what is uneven. Within a group each reader
    gets a run of neighbouring units, so that it opens few packs and reads forward in them.
    """
    of_group: dict[int, list[int]] = {}
    for at, group in enumerate(groups):
        of_group.setdefault(group, []).append(at)
    load, host_load = dict.fromkeys(range(len(hosts)), 0), dict.fromkeys(hosts, 0)
    readers = [0] * len(groups)
    for group in sorted(of_group, key=lambda g: (len(members[g]), of_group[g][0])):
        units = of_group[group]
        total = sum(sizes[at] for at in units)
        shares: list[tuple[int, int]] = []
        by_host = _by_host(members[group], hosts)
        for host, share in zip(by_host, fill_up([host_load[h] for h in by_host], total), strict=True):
            ranks = by_host[host]
            shares += zip(ranks, fill_up([load[r] for r in ranks], share), strict=True)
        ends, done = np.cumsum([share for _, share in shares]), 0
        for at in units:
            middle = done + sizes[at] / 2
            readers[at] = rank = shares[min(int(np.searchsorted(ends, middle, side="right")), len(shares) - 1)][0]
            load[rank] += sizes[at]
            host_load[hosts[rank]] += sizes[at]
            done += sizes[at]
    return readers


def fill_up(loads: Sequence[int], total: int) -> list[int]:
    """Return how much of ``total`` each gets so that the largest load becomes as small as can be."""
    order = sorted(range(len(loads)), key=lambda i: (loads[i], i))
    lowest = 0
    for count in range(1, len(order) + 1):
        lowest = count
        level = loads[order[count]] if count < len(order) else None
        if level is None or sum(level - loads[i] for i in order[:count]) >= total:
            break
    shares = [0] * len(loads)
    level, extra = divmod(total + sum(loads[i] for i in order[:lowest]), lowest)
    for place, i in enumerate(order[:lowest]):
        shares[i] = level + (place < extra) - loads[i]
    return shares


def _by_host(ranks: Sequence[int], hosts: Sequence[str]) -> Mapping[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank in ranks:
        found.setdefault(hosts[rank], []).append(rank)
    return found


def chain_from(reader: int, members: Sequence[int], hosts: Sequence[str]) -> tuple[int, ...]:
    """Return the order in which ``members`` get what ``reader`` reads: its own host's first, then host after host.

    Hosts form a ring and each chain begins at its reader, so that all links between hosts are used alike.
    """
    by_host = _by_host(members, hosts)
    names = list(by_host)
    first = names.index(hosts[reader])
    turn = by_host[hosts[reader]].index(reader)
    chain: list[int] = []
    for name in names[first:] + names[:first]:
        ranks = by_host[name]
        at = turn % len(ranks)
        chain += ranks[at:] + ranks[:at]
    return tuple(chain)
