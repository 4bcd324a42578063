"""What is in the gradient logs of a repository: step by step over all ranks, and how far it leads.

Ranks are looked at by several threads, record by record, and nothing is kept of a record but its numbers: memory grows
with the steps alone.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

from ckpt.errors import CkptError, NoSuchCheckpoint, is_damage
from ckpt.format.manifest import CommitBody
from ckpt.gradlog.replaying.reading import read_rank_head
from ckpt.gradlog.telling import Group, Said, changed_between, numel_of, read_words, said_of
from ckpt.repo.lineage import LogHead, Span, chain_of
from ckpt.repo.log_files import TORN, Place, Runs, Trouble, look, ranks_of
from ckpt.repo.log_joint import Parted, Taking, first_parted
from ckpt.repo.log_needs import Needs, needs_of
from ckpt.repo.log_words import Whose, check_run, engine_of
from ckpt.repo.repository import Repository
from ckpt.runtime.extras import ENGINE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckpt.store.base import Store

THREADS = 8


@dataclass(slots=True)
class Step:
    """One step over all ranks of its log.

    ``ranks``: that have a sound record of it, ``world`` in all. ``nbytes``, ``stored``, ``raw``: as in
    :class:`~ckpt.gradlog.telling.Said`, summed up. ``square``: None if a rank does not know it. ``seconds``: of the
    slowest rank, since the step before. ``changed``: options that were set since the step before. ``reached``: does a
    checkpoint and the log lead here?
    """

    step: int
    log: int
    world: int
    ranks: int = 0
    nbytes: int = 0
    stored: int = 0
    raw: int = 0
    skipped: bool = False
    square: float | None = 0.0
    seconds: float = 0.0
    dtypes: set[str] = field(default_factory=set)
    multipliers: set[float] = field(default_factory=set)
    lr: dict[Group, float] = field(default_factory=dict)
    loss_scale: float | None = None
    changed: set[str] = field(default_factory=set)
    reached: bool = False

    @property
    def norm(self) -> float | None:
        """The gradient's norm over all ranks, as the optimizers saw it; None if unknown, or skipped."""
        known = self.square is not None and self.square >= 0 and math.isfinite(self.square)
        if self.skipped or self.ranks < self.world or self.square is None or not known:
            return None
        return math.sqrt(self.square)

    def add(self, said: Said, changed: Iterable[str]) -> None:
        """Take note of one rank's record."""
        self.ranks += 1
        self.nbytes += said.nbytes
        self.stored += said.stored
        self.raw += said.raw
        self.skipped = self.skipped or said.skipped
        self.square = None if self.square is None or said.square is None else self.square + said.square
        self.seconds = max(self.seconds, said.seconds)
        self.dtypes |= said.dtypes
        self.multipliers |= said.multipliers
        self.lr |= said.lr
        self.loss_scale = said.loss_scale if self.loss_scale is None else self.loss_scale
        self.changed.update(changed)


@dataclass(slots=True)
class RankPart:
    """One rank's part of a log. ``sound``: its records that are. ``parameters``: elements that it logs; None if its
    head cannot be read. ``torn``: why its last record does not count; empty if it does. ``taking``: which steps it
    took.
    """

    rank: int
    sound: Runs = field(default_factory=Runs)
    records: int = 0
    nbytes: int = 0
    parameters: int | None = None
    torn: str = ""
    troubles: list[str] = field(default_factory=list)
    software: dict[str, str] = field(default_factory=dict)
    kernels: list[str] = field(default_factory=list)
    taking: Taking = field(default_factory=Taking)


@dataclass(slots=True)
class Log:
    """One log. ``first``, ``last``: the records of it that count, ``last`` None: to its end. ``absent``: how many ranks
    have no part in it.
    """

    head: LogHead
    first: int
    last: int | None
    ranks: list[RankPart]
    absent: int

    def sound_to(self, first: int) -> int:
        """Return the last step that all ranks have, without a gap from ``first`` on; ``first - 1`` if there is none.

        Of all ranks it must be the same step.
        """
        parted = self.parted(first)
        return self._all_have(first) if parted is None else parted.end

    def parted(self, first: int) -> Parted | None:
        """Return where, from ``first`` on, the ranks' records stop being of the same steps; None: nowhere."""
        return first_parted({part.rank: part.taking for part in self.ranks}, first, self._all_have(first))

    def _all_have(self, first: int) -> int:
        return first - 1 if self.absent else min(part.sound.sound_to(first) for part in self.ranks)

    @property
    def end(self) -> int:
        """The last step that all ranks have, without a gap from the first that counts."""
        return self.sound_to(self.first)


@dataclass(slots=True)
class History:
    """``checkpoints``: steps of those that the logs pass through. ``base``: the newest one's commit. ``reaches``: the
    step to which checkpoints and logs lead; None without a checkpoint. ``others``: numbers of logs that are not on the
    newest history. ``whole``: was every byte looked at? ``unread``: number -> why, of logs that say of themselves what
    cannot be read: nobody knows where they belong, and one of a high number may be the newest history.
    """

    logs: list[Log]
    steps: list[Step]
    checkpoints: list[int]
    base: CommitBody | None
    reaches: int | None
    others: list[int]
    whole: bool
    unread: dict[int, str] = field(default_factory=dict)

    @property
    def damaged(self) -> bool:
        """Is there damage or a gap, whether or not a later checkpoint makes up for it?"""
        if self.unread or any(part.troubles for log in self.logs for part in log.ranks):
            return True
        return any(map(self._is_short, self.logs, self.logs[1:]))

    def _is_short(self, log: Log, after: Log) -> bool:
        """Does a log end before the step behind which the next one goes on, though that begins at no checkpoint?"""
        if log.last is None or self.reaches is None or after.head.attempt:
            return False
        reached = sum(one.reached for one in self.steps if one.log == log.head.number)
        return reached < log.last - log.first + 1


def history_of(store: Store, *, whole: bool = True, threads: int = THREADS) -> History:
    """Look at the logs of the newest history.

    Args:
        store: the repository's.
        whole: look at every byte; else at headers and words alone, so that damage within gradients is not found.
        threads: ranks that are looked at at once.

    Raises:
        NoSuchCheckpoint: there is no log.
        StoreError: the store is busy or refuses this user.
    """
    Repository(store).check_marker()
    needs = needs_of(store)
    if not needs.heads and not needs.damaged:
        raise NoSuchCheckpoint(f"no gradient log in {store.url}")
    spans = list(needs.ways[0].spans) if needs.ways else _all_of(needs) if needs.heads else []
    steps: dict[int, Step] = {}
    logs: list[Log] = []
    ends: dict[int, _Behind] = {}
    for span in spans:
        log, ends = _look_at(store, needs.heads[span.number], span, ends, _Tally(steps), whole, threads)
        logs.append(log)
    reaches = _mark_reached(needs, logs, steps)
    base = Repository(store).read_commit(needs.ways[-1].step) if needs.ways else None
    others = sorted({*needs.heads, *needs.headless} - {span.number for span in spans})
    rows = [steps[step] for step in sorted(steps)]
    unread = {number: str(error) for number, error in sorted(needs.damaged.items())}
    return History(logs, rows, [way.step for way in needs.ways], base, reaches, others, whole, unread)


def _all_of(needs: Needs) -> list[Span]:
    """Return the newest logs whole: no checkpoint leads to them."""
    chain = chain_of(needs.heads, max(needs.heads))
    stops: list[int | None] = [*(after.start for after in chain[1:]), None]
    return [Span(head.number, head.start + 1, stop) for head, stop in zip(chain, stops, strict=True)]


@dataclass(slots=True)
class _Behind:
    """What a rank's last record says of the options behind it."""

    step: int
    options: dict[Group, str]


class _Tally:
    """Where all threads put what they find."""

    def __init__(self, steps: dict[int, Step]) -> None:
        self._steps, self._lock = steps, Lock()

    def add(self, step: int, head: LogHead, said: Said, changed: Sequence[str]) -> None:
        with self._lock:
            self._steps.setdefault(step, Step(step, head.number, head.world)).add(said, changed)


def _look_at(
    store: Store, head: LogHead, span: Span, before: dict[int, _Behind], tally: _Tally, whole: bool, threads: int
) -> tuple[Log, dict[int, _Behind]]:
    """Look at one log. ``before``: rank -> what the last record of the log before says."""
    there = sorted(rank for rank in ranks_of(store, head.number) if rank < head.world)
    looks = [_RankLook(store, head, span, rank, before.get(rank), tally) for rank in there]
    with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-log") as pool:
        list(pool.map(lambda one: one.run(whole), looks))
    behind = {one.part.rank: one.behind for one in looks if one.behind is not None}
    return Log(head, span.first, span.last, [one.part for one in looks], head.world - len(there)), behind


class _RankLook:
    """One rank's part of a log being looked at."""

    def __init__(
        self, store: Store, head: LogHead, span: Span, rank: int, behind: _Behind | None, tally: _Tally
    ) -> None:
        self._store, self._head, self._span, self._tally = store, head, span, tally
        self.part, self.behind = RankPart(rank), behind
        self._numel: list[int] = []

    def run(self, whole: bool) -> None:
        """Take note of all records."""
        part, span = self.part, self._span
        headless = self._read_head()
        try:
            for one in look(self._store, span.number, part.rank, span.first, span.last, whole=whole):
                if isinstance(one, Trouble) and one.kind == TORN:
                    part.torn = one.text
                elif isinstance(one, Trouble):
                    part.troubles.append(one.text)
                elif headless:
                    part.troubles.append(headless)
                    return
                else:
                    self._take(one)
        except CkptError as error:
            part.troubles.append(_damage(error))

    def _read_head(self) -> str:
        """Read what the rank says of its part. Returns what is wrong with that; empty if nothing is."""
        part, number = self.part, self._span.number
        try:
            said = read_rank_head(self._store, number, part.rank, self._head.run)
            self._numel = numel_of(said, f"log {number} of rank {part.rank}")
        except CkptError as error:
            return _damage(error)
        part.parameters = sum(self._numel)
        part.software = said.software
        part.kernels = [str(one.get("class", "")) for one in said.kernels]
        return ""

    def _take(self, place: Place) -> None:
        """Take note of a record."""
        behind = self.behind if self.behind is not None and self.behind.step == place.step - 1 else None
        try:
            record, stored = read_words(self._store, place, self.part.rank)
            check_run(record.run, self._head.run, f"{place.key}: the record of step {place.step}")
            said = said_of(record, stored, self._numel, place)
            changed = [] if behind is None else changed_between(behind.options, said.before, place.key)
        except CkptError as error:
            self.part.troubles.append(_damage(error))
            return
        self.behind = _Behind(place.step, said.behind)
        engine = engine_of([one.document for one in record.objects if one.kind == ENGINE])
        self.part.taking.add(place.step, Whose(not record.skipped, bool(record.calls or record.samples), engine))
        self.part.sound.add(place.step)
        self.part.records += 1
        self.part.nbytes += said.nbytes
        self._tally.add(place.step, self._head, said, changed)


def _damage(error: CkptError) -> str:
    if not is_damage(error):
        raise error
    return str(error)


def _mark_reached(needs: Needs, logs: Sequence[Log], steps: dict[int, Step]) -> int | None:
    """Mark the steps that some checkpoint leads to, and return the last one."""
    if not needs.ways:
        return None
    last = needs.ways[-1].step
    by_number = {log.head.number: log for log in logs}
    for way in needs.ways:
        at = way.step
        for span in way.spans:
            log = by_number[span.number]
            stop = log.sound_to(span.first)
            if span.last is not None:
                stop = min(stop, span.last)
            for step in range(at + 1, stop + 1):
                if step in steps:
                    steps[step].reached = True
            at = max(at, stop)
            if span.last is None or stop < span.last:
                break
        last = max(last, at)
    return last
