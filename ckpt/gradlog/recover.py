"""How far a repository brings a job back: the newest checkpoint, and the steps that all ranks have logged behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ckpt.errors import ReplayError
from ckpt.repo.lineage import Way, read_head, ways_to
from ckpt.repo.log_files import Scan, files_of, ranks_of, scan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.runtime.comm import Comm
    from ckpt.store.base import Store


class Stretch(msgspec.Struct, frozen=True, array_like=True):
    """Records ``first`` … ``last`` of log ``number``, kept by ``world`` ranks."""

    number: int
    first: int
    last: int
    world: int


@dataclass(frozen=True, slots=True)
class Recovery:
    """``base``: the checkpoint. ``stretches``: what is replayed on it, in order. ``notes``: what is not, and why."""

    base: int
    stretches: tuple[Stretch, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """The step at which the job is back."""
        return self.stretches[-1].last if self.stretches else self.base


class _Span(msgspec.Struct, array_like=True):
    number: int
    first: int
    last: int | None
    world: int


class _Way(msgspec.Struct, array_like=True):
    step: int
    spans: list[_Span]


def find_recovery(comm: Comm, store: Store, step: int | None, *, lenient: bool) -> list[Recovery]:
    """Return how to come to ``step`` (None: as far as possible), the best way first. Collective, in an operation.

    Args:
        comm: all ranks.
        store: the repository's.
        step: the step that was asked for.
        lenient: take what is sound of a damaged log; otherwise damage in the middle of one is an error.

    Raises:
        NoSuchCheckpoint: the root is empty, or nothing leads to ``step``.
        ReplayError: a log that leads there is damaged or has a gap; names the longest sound prefix.
    """

    def work() -> bytes:
        return msgspec.msgpack.encode([_way(store, one) for one in ways_to(store, step)])

    found = msgspec.msgpack.decode(comm.on_root("pick", work), type=list[_Way])
    recoveries: list[Recovery] = []
    for one in found:
        recoveries.append(_ended(comm, store, one) if one.spans else Recovery(one.step))
        if recoveries[-1].stretches:
            break  # bases further back lead to the same end, and are longer on their way
    best = max(recoveries, key=lambda one: (one.step, one.base))
    if step is not None:
        best = recoveries[0]
    if best.notes and not lenient:
        raise ReplayError(f"{'; '.join(best.notes)}. step={best.step} is as far as the log is sound")
    if step is not None and best.step != step:
        raise ReplayError(f"step {step} cannot be reached: the log of all ranks ends behind step {best.step}")
    return [best, *(one for one in recoveries if one is not best)]


def _way(store: Store, way: Way) -> _Way:
    spans = []
    for span in way.spans:
        head = read_head(store, span.number)
        if head is not None:
            spans.append(_Span(span.number, span.first, span.last, head.world))
    return _Way(way.step, spans)


def _ended(comm: Comm, store: Store, way: _Way) -> Recovery:
    """Ask how far a way goes: ranks share the work of looking, and the least that any rank has counts."""
    stretches: list[Stretch] = []
    notes: list[str] = []
    for i, span in enumerate(way.spans):
        if span.last is not None and span.last < span.first:
            continue
        scans = _scans(comm, store, span)
        last = min(one.last for one in scans)
        notes += [one.trouble for one in scans if one.trouble and one.last == last]
        if last >= span.first:
            stretches.append(Stretch(span.number, span.first, last, span.world))
        if span.last is None:
            break
        if last < span.last:  # another log goes on from where this one should have come to
            if not notes and i + 1 < len(way.spans):
                notes.append(f"log {span.number} ends behind step {last}, and what follows it begins at {span.last}")
            break
    return Recovery(way.step, tuple(stretches), tuple(notes))


def _scans(comm: Comm, store: Store, span: _Span) -> Sequence[Scan]:
    def work() -> bytes:
        there = ranks_of(store, span.number)
        if len(there) < span.world:  # some rank has nothing, which is how far all have come
            trouble = ""
            if any(files_of(store, span.number, rank) for rank in there):  # all have begun before any has a record
                gone = sorted(set(range(span.world)) - there)
                trouble = f"log {span.number}: what rank(s) {', '.join(map(str, gone[:8]))} had logged is not there"
            return msgspec.msgpack.encode([Scan(comm.rank, span.first, span.first - 1, trouble)])
        mine = range(comm.rank, span.world, comm.world)
        return msgspec.msgpack.encode([scan(store, span.number, rank, span.first, span.last) for rank in mine])

    told = [msgspec.msgpack.decode(data, type=list[Scan]) for data in comm.gather("log", work)]
    return [one for several in told for one in several]
