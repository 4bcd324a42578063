"""Which hosts have copies of log records in memory, and bringing them to the hosts that lack them, for a load.

Each host tells once what it has. A host without a copy that another one has (it took the place of one that was lost, or
its ranks need records of others) gets it from there, before steps are replayed.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ckpt.errors import CkptError, ConfigError
from ckpt.gradlog.copies.memory import HostMemory, Keeper, folder_for, free_bytes
from ckpt.gradlog.copies.near import Near
from ckpt.repo.log_files import segment_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ckpt.gradlog.copies.memory import Copying
    from ckpt.runtime.comm import Comm

ROUND = 16 << 20
"""Bytes that one rank sends another at once."""
NUMBER = 8
"""Bytes of a length."""

Spans = list[tuple[int, int]]
"""Numbers as (first, last)."""


class Held(msgspec.Struct, array_like=True):
    """Copies of one rank's records of a run."""

    run: str
    rank: int
    steps: Spans


class _Told(msgspec.Struct, array_like=True):
    """What a rank says. ``identity``: of the memory that it sees. ``held``: there, said by the first who sees it."""

    identity: str
    held: list[Held]


class Wanted(msgspec.Struct, array_like=True):
    """Records ``first`` … ``last`` of some ranks of a run, which one rank will read."""

    run: str
    ranks: Spans
    first: int
    last: int


class _Item(NamedTuple):
    """A record that goes from one rank to another."""

    run: str
    rank: int
    step: int


class Copies:
    """What all hosts have in memory of a repository's records. Making one is collective, in an entered operation.

    Args:
        comm: all ranks.
        url: of the repository.
        room: bytes of records that this rank may keep when it has looked at them.
    """

    def __init__(self, comm: Comm, url: str, room: int = 0) -> None:
        self._comm, self._url = comm, url
        self.near = Near(None, room)
        self._members: dict[str, list[int]] = {}
        self._held: dict[tuple[str, int], dict[str, set[int]]] = {}
        self._here = ""
        found = HostMemory.there(url)
        if not any(comm.gather("copies", lambda: b"1" if found is not None else b"")):
            return
        told = [msgspec.msgpack.decode(one, type=_Told) for one in comm.gather("copies held", self._tell)]
        for rank, one in enumerate(told):
            if one.identity:
                self._members.setdefault(one.identity, []).append(rank)
        for members in self._members.values():
            first = told[members[0]]
            for held in first.held:
                self._held.setdefault((held.run, held.rank), {})[first.identity] = numbers_of(held.steps)

    def _tell(self) -> bytes:
        with suppress(ConfigError):  # a host without such memory reads from the store
            self.near.memory = HostMemory.make(self._url)
        if self.near.memory is None:
            return msgspec.msgpack.encode(_Told("", []))
        self._here = self.near.memory.identity()
        # Only the first rank of a host is listened to, and nobody knows yet who that is.
        return msgspec.msgpack.encode(
            _Told(self._here, [Held(*key, spans_of(steps)) for key, steps in self.near.memory.held().items()])
        )

    def looker(self, run: str, rank: int) -> int | None:
        """Return the rank of this job that looks at a log rank's records best, whose host has copies; None: no host."""
        holders = self._held.get((run, rank))
        if not holders:
            return None
        members = self._members[max(sorted(holders), key=lambda one: len(holders[one]))]
        return rank if rank in members else members[rank % len(members)]

    def bring(self, wanted: Sequence[Wanted]) -> int:
        """Bring what ranks need, and their hosts lack, from hosts that have it. Collective, in an entered operation.

        What does not fit into half of the memory that is free is left to be read from the store, the oldest first.

        Args:
            wanted: by this rank.

        Returns:
            Bytes that came here.

        Raises:
            RankFailure: a rank is gone, or its memory cannot be written.
        """
        comm = self._comm
        if not self._held:  # the same on all ranks
            return 0
        said = comm.gather("copies wanted", lambda: msgspec.msgpack.encode(wanted))
        come, go = self._plan([msgspec.msgpack.decode(one, type=list[Wanted]) for one in said])
        if not any(comm.gather("copies planned", lambda: b"1" if come else b"")):
            return 0
        if self.near.memory is None:  # this rank takes part in what all do, with nothing to send and nothing to get
            return _transfer(comm, HostMemory(folder_for(self._url)), {}, {}, 0)
        room = free_bytes(self.near.memory.folder) // 2 // len(self._members[self._here])
        return _transfer(comm, self.near.memory, come, go, room)

    def _plan(self, told: Sequence[Sequence[Wanted]]) -> tuple[dict[int, list[_Item]], dict[int, list[_Item]]]:
        """Return source -> what comes here from it, and target -> what goes there from here, in the order of going.

        A rank looks at what its own host wants or has, not at what others send each other.
        """
        come: dict[int, list[_Item]] = {}
        go: dict[int, list[_Item]] = {}
        mine = [key for key, holders in self._held.items() if self._here in holders]
        for identity, members in self._members.items():
            wishes = [one for rank in members for one in told[rank]]
            for run, r in sorted(mine if identity != self._here else self._held):
                missing = _wanted_steps(wishes, run, r) - self._held[run, r].get(identity, set())
                if not missing:
                    continue
                number = members.index(r) if r in members else r % len(members)
                for holder, steps in sorted(self._held[run, r].items()):
                    items = [_Item(run, r, step) for step in sorted(missing & steps, reverse=True)]
                    missing -= steps
                    source, target = self._members[holder][number % len(self._members[holder])], members[number]
                    if items and target == self._comm.rank:
                        come.setdefault(source, []).extend(items)
                    if items and source == self._comm.rank:
                        go.setdefault(target, []).extend(items)
        return come, go


def _wanted_steps(wishes: Iterable[Wanted], run: str, rank: int) -> set[int]:
    found: set[int] = set()
    for one in wishes:
        if one.run == run and any(first <= rank <= last for first, last in one.ranks):
            found.update(range(one.first, one.last + 1))
    return found


def _transfer(
    comm: Comm,
    memory: HostMemory,
    come: Mapping[int, list[_Item]],
    go: Mapping[int, list[_Item]],
    room: int,
) -> int:
    """Carry records in rounds, each of which all ranks take together or none does."""
    lengths = {target: [_length(memory, item) for item in items] for target, items in go.items()}
    told = comm.scatter(
        "copies' lengths",
        lambda: {target: _packed(sizes) for target, sizes in lengths.items()},
        lambda: {source: NUMBER * len(items) for source, items in come.items()},
    )
    incoming = {}
    for source, items in sorted(come.items()):
        sizes = _unpacked(told[source])
        count = _fitting(sizes, room)
        room -= sum(sizes[:count])
        incoming[source] = _Incoming(memory, items[:count], sizes[:count])
    accepted = comm.scatter(
        "copies accepted",
        lambda: {source: _packed([len(one.items)]) for source, one in incoming.items()},
        lambda: dict.fromkeys(go, NUMBER),
    )
    outgoing = {}
    for target, items in go.items():
        (count,) = _unpacked(accepted[target])
        outgoing[target] = _Outgoing(memory, items[:count], lengths[target][:count])
    most = max((-(-one.left // ROUND) for one in incoming.values()), default=0)
    rounds = max(int(one) for one in comm.gather("copies' rounds", lambda: str(most).encode()))
    for _ in range(rounds):
        come_now = {source: min(one.left, ROUND) for source, one in incoming.items() if one.left}
        parts = comm.scatter("copies", partial(_take, outgoing), partial(dict, come_now))
        comm.run("copies kept", partial(_put, incoming, parts))
    return sum(one.nbytes for one in incoming.values())


def _take(outgoing: Mapping[int, _Outgoing]) -> dict[int, bytes]:
    return {target: one.take(ROUND) for target, one in outgoing.items() if one.left}


def _put(incoming: Mapping[int, _Incoming], parts: Mapping[int, bytes]) -> None:
    for source, data in parts.items():
        incoming[source].put(memoryview(data))


class _Outgoing:
    """Records that are read one behind the other, as one sequence of bytes. ``left``: how many are to come."""

    def __init__(self, memory: HostMemory, items: Sequence[_Item], sizes: Sequence[int]) -> None:
        self.left = sum(sizes)
        self._memory, self._parts = memory, self._pieces(items, sizes)
        self._rest = b""

    def _pieces(self, items: Sequence[_Item], sizes: Sequence[int]) -> Iterator[bytes]:
        for item, size in zip(items, sizes, strict=True):
            key = segment_key(*item)
            for at in range(0, size, ROUND):
                count = min(ROUND, size - at)
                data = b""
                with suppress(CkptError):  # it was removed a moment ago: its digest will tell
                    data = self._memory.store.get(key, at, count)
                yield data.ljust(count, b"\0")

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes, or what is left."""
        count = min(count, self.left)
        while len(self._rest) < count:
            self._rest += next(self._parts)
        taken, self._rest = self._rest[:count], self._rest[count:]
        self.left -= count
        return taken


class _Incoming:
    """Records that come as one sequence of bytes, each a file once it is whole. ``left``: bytes that are to come.
    ``nbytes``: those of the records that were kept; the others are read from the store.
    """

    def __init__(self, memory: HostMemory, items: Sequence[_Item], sizes: Sequence[int]) -> None:
        self.items, self.left, self.nbytes = items, sum(sizes), 0
        self._keeper = Keeper(memory, self.left)
        self._todo = [(item, size) for item, size in zip(items, sizes, strict=True) if size][::-1]
        self._copy: Copying | None = None
        self._missing = self._size = 0

    def put(self, data: memoryview) -> None:
        """Take the next bytes."""
        self.left -= len(data)
        while data:
            if self._copy is None:
                item, self._size = self._todo.pop()
                self._copy, self._missing = self._keeper.begin(*item, self._size), self._size
            part = data[: self._missing]
            self._copy.write(part)
            self._missing -= len(part)
            if not self._missing:
                with self._copy as copy:
                    pass
                self.nbytes += self._size if copy.kept else 0
                self._copy = None
            data = data[len(part) :]


def _length(memory: HostMemory, item: _Item) -> int:
    with suppress(CkptError):
        return memory.store.size(segment_key(*item)) or 0
    return 0


def _fitting(sizes: Sequence[int], room: int) -> int:
    """Return how many of the first records fit."""
    for count, size in enumerate(sizes):
        room -= size
        if room < 0:
            return count
    return len(sizes)


def _packed(numbers: Iterable[int]) -> bytes:
    return b"".join(number.to_bytes(NUMBER, "little") for number in numbers)


def _unpacked(data: bytes) -> list[int]:
    return [int.from_bytes(data[at : at + NUMBER], "little") for at in range(0, len(data), NUMBER)]


def spans_of(numbers: Iterable[int]) -> Spans:
    """Return numbers, ascending, as spans."""
    spans: Spans = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans


def numbers_of(spans: Spans) -> set[int]:
    """Return the numbers in spans."""
    return {number for first, last in spans for number in range(first, last + 1)}
