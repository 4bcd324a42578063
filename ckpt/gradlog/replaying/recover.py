"""How far a repository brings a job back: the newest checkpoint, and the steps that all ranks have logged behind it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ckpt.errors import ReplayError
from ckpt.repo.lineage import Way, read_head, ways_to
from ckpt.repo.log_files import Scan, files_of, ranks_of, scan
from ckpt.repo.log_joint import behind_others, first_parted
from ckpt.repo.log_needs import headless_after
from ckpt.words import listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.gradlog.copies.bringing import Copies
    from ckpt.runtime.comm import Comm
    from ckpt.store.base import Store


log = logging.getLogger("ckpt")


class Stretch(msgspec.Struct, frozen=True, array_like=True):
    """Records ``first`` … ``last`` of log ``number``, kept by ``world`` ranks. ``run``: as in ``log.json``."""

    number: int
    first: int
    last: int
    world: int
    run: str = ""


@dataclass(frozen=True, slots=True)
class Recovery:
    """``base``: the checkpoint. ``stretches``: what is replayed on it, in order. ``notes``: what is not, and why.
    ``ends``: why some rank's sound records are not replayed, where that is no damage.
    """

    base: int
    stretches: tuple[Stretch, ...] = ()
    notes: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """The step at which the job is back."""
        return self.stretches[-1].last if self.stretches else self.base

    @property
    def name(self) -> str:
        """What this is, for messages."""
        if not self.stretches:
            return f"step {self.base}"
        logs = ", ".join(str(one.number) for one in self.stretches)
        return f"step {self.base} or what leads on from it to step {self.step} (log {logs})"


class _Span(msgspec.Struct, array_like=True):
    number: int
    first: int
    last: int | None
    world: int
    run: str = ""


class _Way(msgspec.Struct, array_like=True):
    step: int
    spans: list[_Span]


def find_recovery(
    comm: Comm, store: Store, step: int | None, *, lenient: bool, copies: Copies | None = None
) -> list[Recovery]:
    """Return how to come to ``step`` (None: as far as possible), the best way first. Collective, in an operation.

    Args:
        comm: all ranks.
        store: the repository's.
        step: the step that was asked for.
        lenient: take what is sound of a damaged log; otherwise damage in the middle of one is an error.
        copies: of records in hosts' memory; those are looked at instead of the store's own.

    Raises:
        NoSuchCheckpoint: the root is empty, or nothing leads to ``step``.
        ReplayError: a log that leads there is damaged or has a gap; names the longest sound prefix.
    """

    def work() -> bytes:
        ways, doubt, given_up = ways_to(store, step)
        if doubt is not None and not lenient:  # to go back in time must be somebody's decision
            raise ReplayError(
                f"{doubt}. replay=False or the step= of a checkpoint loads what was saved in full, fallback=True goes "
                f"as far as can be read (of a ckpt.Checkpointer: in load_options)"
            )
        doubts = [] if doubt is None else [str(doubt)]
        if given_up:
            doubts.append(
                f"step {listed(given_up, 8)} is of a past that was given up: a job was brought back to before it, and "
                f"went on from there; step={given_up[-1]} loads it"
            )
        if step is None:
            last = max((span.number for way in ways for span in way.spans), default=0)
            doubts += [
                f"log {number} has records and no log.json: where it belongs is not known, and it is left out"
                for number in headless_after(store, last)
            ]
        return msgspec.msgpack.encode(([_way(store, one) for one in ways], doubts))

    found, doubts = msgspec.msgpack.decode(comm.on_root("pick", work), type=tuple[list[_Way], list[str]])
    recoveries: list[Recovery] = []
    for one in found:
        recoveries.append(_ended(comm, store, one, copies) if one.spans else Recovery(one.step))
        if recoveries[-1].stretches:
            break  # bases further back lead to the same end, and are longer on their way
    # Of two that come to the same step the one that says why it comes no further: that must not be lost.
    best = max(recoveries, key=lambda one: (one.step, one.base, bool(one.notes), bool(one.ends)))
    if step is not None:
        best = recoveries[0]
    if best.notes and not lenient:
        raise ReplayError(f"{'; '.join(best.notes)}. step={best.step} is as far as the log is sound")
    if step is not None and best.step != step:
        why = "".join(f"; {one}" for one in best.ends)
        raise ReplayError(f"step {step} cannot be reached: the log of all ranks ends behind step {best.step}{why}")
    if comm.rank == 0:
        for end in best.ends:
            log.warning("%s", end)
    others = [one for one in recoveries if one is not best]
    return [replace(best, notes=(*best.notes, *best.ends, *doubts)), *others]


def _way(store: Store, way: Way) -> _Way:
    spans = []
    for span in way.spans:
        head = read_head(store, span.number)
        if head is not None:
            spans.append(_Span(span.number, span.first, span.last, head.world, head.run))
    return _Way(way.step, spans)


def _ended(comm: Comm, store: Store, way: _Way, copies: Copies | None) -> Recovery:
    """Ask how far a way goes: ranks share the work of looking, and the least that any rank has counts."""
    stretches: list[Stretch] = []
    notes: list[str] = []
    ends: list[str] = []
    for i, span in enumerate(way.spans):
        if span.last is not None and span.last < span.first:
            continue
        scans = _scans(comm, store, span, copies)
        last = min(one.last for one in scans)
        parted = first_parted({one.rank: one.taking for one in scans}, span.first, last)
        if parted is not None:  # no damage: to come back from that must not need a human
            last = parted.end
            ends.append(parted.text(span.number))
        else:  # damage further on is of records that do not count in any case
            notes += [one.trouble for one in scans if one.trouble and one.last == last]
        if parted is None and span.last is None and not notes:
            ends += filter(None, [behind_others(span.number, span.first, {one.rank: one.last for one in scans})])
        if last >= span.first:
            stretches.append(Stretch(span.number, span.first, last, span.world, span.run))
        if span.last is None:
            break
        if last < span.last:  # another log goes on from where this one should have come to
            if not notes and i + 1 < len(way.spans):
                notes += ends
                notes.append(f"log {span.number} ends behind step {last}, and what follows it begins at {span.last}")
            break
    return Recovery(way.step, tuple(stretches), tuple(notes), tuple(ends))


def _scans(comm: Comm, store: Store, span: _Span, copies: Copies | None) -> Sequence[Scan]:
    def work() -> bytes:
        near = None if copies is None else copies.near
        mine = [rank for rank in range(span.world) if _looker(comm, span, rank, copies) == comm.rank]
        return msgspec.msgpack.encode(
            [
                scan(
                    store,
                    span.number,
                    rank,
                    span.first,
                    span.last,
                    None if near is None else partial(near.is_sound, store, span.run, rank),
                    None if near is None else partial(near.beside, span.run, rank),
                )
                for rank in mine
            ]
        )

    # One rank lists the others' folders: there are as many as ranks.
    encoded = comm.on_root("log", lambda: msgspec.msgpack.encode(_lacking(store, span)))
    trouble = msgspec.msgpack.decode(encoded, type=str | None)
    if trouble is not None:
        return [Scan(comm.rank, span.first, span.first - 1, trouble)]
    told = [msgspec.msgpack.decode(data, type=list[Scan]) for data in comm.gather("log", work)]
    return [one for several in told for one in several]


def _lacking(store: Store, span: _Span) -> str | None:
    """Return whether some rank has nothing, which is then how far all have come; and what is wrong with that, if it had
    something. None: all have a part.
    """
    there = ranks_of(store, span.number)
    if len(there) >= span.world:
        return None
    if any(files_of(store, span.number, rank) for rank in there):  # all have begun before any has a record
        gone = sorted(set(range(span.world)) - there)
        return f"log {span.number}: what rank(s) {', '.join(map(str, gone[:8]))} had logged is not there"
    return ""


def _looker(comm: Comm, span: _Span, rank: int, copies: Copies | None) -> int:
    """Return the rank of this job that looks at a log rank's records."""
    near = copies.looker(span.run, rank) if copies is not None and span.run else None
    return rank % comm.world if near is None else near
