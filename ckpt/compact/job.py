"""One compaction from top to bottom: how far the log goes, bundles, index, is it the same, commit, drop the log.

Until the commit the base and its log stay as they are; what is dropped afterwards, nothing needs any more. Who is
killed leaves everything loadable, and goes on when it is called again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt.compact.checking import equal_ranks
from ckpt.compact.cuts import bundles_of
from ckpt.compact.dropping import Dropped, drop_log
from ckpt.compact.index import NewIndex
from ckpt.compact.kernels import why_not_exact
from ckpt.compact.loose import Loose
from ckpt.compact.objects import last_records, objects_of
from ckpt.compact.packs import JOURNAL
from ckpt.compact.source import open_base
from ckpt.compact.stepping import Judged
from ckpt.compact.workers import run_bundles
from ckpt.compact.working import WRITER, Work, elements_of
from ckpt.convert.assemble import LEAST_MEMORY
from ckpt.convert.meter import Meter
from ckpt.convert.ours.committing import TEMP, Place, claim, kept_alive
from ckpt.errors import CheckpointExists, CkptError, ConfigError, MissingChunk, ReplayError
from ckpt.format.digest import raw_digest
from ckpt.format.manifest import CODEC, DERIVED, VERSION, CommitBody
from ckpt.gradlog.replaying.recover import find_recovery
from ckpt.gradlog.retention import retire
from ckpt.gradlog.writing.log import software
from ckpt.repo.lineage import ways
from ckpt.repo.repository import Repository, attempt_prefix
from ckpt.runtime.comm import Comm
from ckpt.runtime.publish import now
from ckpt.store.blocks import Blocks
from ckpt.store.open import address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.compact.packs import BundleDone
    from ckpt.compact.records import OpenRecord
    from ckpt.compact.source import Source
    from ckpt.convert.opened import Opened
    from ckpt.format.manifest import IndexPart
    from ckpt.gradlog.replaying.recover import Recovery
    from ckpt.repo.repository import Index
    from ckpt.store.base import Store

MEMORY = 2 << 30
TOLERANCE = 1e-2
PREFIX = "compact-"


@dataclass(frozen=True, slots=True)
class Options:
    """How a log is compacted.

    ``step``: of the new base; None: as far as the log goes. ``sound``: take what is sound of a damaged log.
    ``keep_log``: drop nothing. ``keep``: then remove all but so many full checkpoints of this history; None: none.
    ``workers``: processes; ``memory``: bytes that they hold together. ``tolerance``: by how much of its size a value
    that the log remembers may be off. ``progress``: called with (elements stepped,
    elements to step).
    """

    step: int | None = None
    sound: bool = False
    keep_log: bool = False
    keep: int | None = None
    workers: int = 1
    memory: int = MEMORY
    tolerance: float = TOLERANCE
    dry_run: bool = False
    progress: Callable[[int, int], None] | None = None


@dataclass(slots=True)
class Compacted:
    """What was done, or with ``dry_run`` would be. ``base``: the step that it began at; ``step``: of the new base,
    equal to ``base`` if no log leads on from there.

    ``exact``: has every rank's last record the digest of what the new base holds? None: it cannot be told. ``kernels``:
    of each optimizer its class, its options, and why it cannot be expected to give the same bits here (empty: it can).
    ``judged``: values that the log remembers beside what was computed. ``bytes_written``, ``bytes_kept``: of chunks.
    """

    root: str
    base: int
    step: int
    steps: int = 0
    world: int = 0
    bundles: int = 0
    resumed: int = 0
    exact: bool | None = None
    kernels: list[dict[str, Any]] = field(default_factory=list)
    judged: Judged = field(default_factory=Judged)
    bytes_written: int = 0
    bytes_kept: int = 0
    dropped: Dropped = field(default_factory=Dropped)
    removed: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    dry_run: bool = False
    seconds: float = 0.0


def compact(store: Store, options: Options | None = None) -> Compacted:
    """Replay a repository's gradient log offline, on the CPU, and commit what comes out as a full checkpoint.

    Args:
        store: the repository's root.
        options: how.

    Raises:
        NoSuchCheckpoint: there is nothing to begin with, or nothing leads to the step that was asked for.
        ReplayError: the log is damaged, does not fit the base, or what comes out is further off than allowed.
        ConfigError: an option is wrong, or a kernel of the job's is not there.
        BudgetTooSmall: the memory is too little for so many workers.
        CheckpointExists: somebody has committed that step meanwhile.
        IntegrityError, FormatError, StoreError: of base or log. The base and its log stay as they are.
    """
    ways_of = options or Options()
    began = time.monotonic()
    _check(ways_of)
    way = find_recovery(Comm(None, 0, 1), store, ways_of.step, lenient=ways_of.sound)[0]
    found = Compacted(store.url, way.base, way.step, notes=list(way.notes), dry_run=ways_of.dry_run)
    if way.stretches:
        _Job(store, way, ways_of, found).run()
    _drop(store, way, ways_of, found)
    found.seconds = time.monotonic() - began
    return found


def _check(ways_of: Options) -> None:
    if ways_of.workers < 1 or ways_of.memory < 1 or ways_of.tolerance < 0:
        said = f"workers={ways_of.workers}, memory={ways_of.memory}, tolerance={ways_of.tolerance}"
        raise ConfigError(f"{said}: expected at least 1, 1 and 0")
    if ways_of.keep is not None and ways_of.keep < 1:
        raise ConfigError(f"keep={ways_of.keep}: expected a whole number from 1 on")


def _drop(store: Store, way: Recovery, ways_of: Options, found: Compacted) -> None:
    """Remove the log up to the new base; also what a run that was killed right behind its commit has left."""
    number = way.stretches[-1].number if way.stretches else None
    if number is None:
        commit = Repository(store).read_commit(way.base)
        if commit.attempt.startswith(PREFIX):
            number = commit.log
            if not ways_of.dry_run:
                _tidy(store, attempt_prefix(way.base, commit.attempt))
    if ways_of.keep_log:
        return
    if number is not None:
        found.dropped = drop_log(store, number, way.step, dry_run=ways_of.dry_run)
    if found.dropped.in_use:
        found.notes.append(f"{found.dropped.in_use} file(s) of the log stay: a job appends to them")
    if ways_of.keep is not None and not ways_of.dry_run and any(one.step == way.step for one in ways(store)):
        found.removed = retire(store, ways_of.keep)


class _Job:
    """One compaction; each phase is a method."""

    def __init__(self, store: Store, way: Recovery, ways_of: Options, found: Compacted) -> None:
        self._store, self._way, self._ways, self._found = store, way, ways_of, found
        self._repo = Repository(store)
        self._base: Index = self._repo.read_index(way.base)
        self._source: Source = open_base(store, way.base, way.stretches)
        self._share = ways_of.memory // ways_of.workers

    def run(self) -> None:
        source, found = self._source, self._found
        found.steps = sum(one.last - one.first + 1 for one in source.stretches)
        found.world = source.world
        found.kernels = _kernels(source)
        bundles = list(bundles_of(source.last, elements_of(source, self._share)))
        found.bundles = len(bundles)
        if self._repo.has(source.step):
            raise CheckpointExists(f"step {source.step} is committed already in {self._store.url}")
        if self._ways.dry_run:
            return
        last = last_records(source)
        place = Place(source.step, _name(self._base, source, last), complete=False)
        claim(self._store, place)
        with kept_alive(self._store, place):
            work = Work(
                address=address(self._store) if self._ways.workers > 1 else "",
                base=self._way.base,
                stretches=source.stretches,
                prefix=place.prefix,
                memory=self._share,
                threads=max(1, (os.cpu_count() or 1) // self._ways.workers),
                resume=True,
            )
            weights = {one.number: sum(s.size for s in one.slices) * found.steps for one in bundles}
            meter = Meter(sum(weights.values()), self._ways.progress)

            def told(done: BundleDone) -> None:
                found.resumed += done.present
                meter.add(weights[done.bundle.number])

            done = run_bundles(self._store, source, work, bundles, self._ways.workers, told)
            self._publish(place, done, last)
        _tidy(self._store, place.prefix)

    def _publish(self, place: Place, done: Sequence[BundleDone], last: Sequence[OpenRecord]) -> None:
        source, found = self._source, self._found
        for one in done:
            found.judged.join(one.judged)
        self._refuse_deviation()
        loose = Loose(source)
        index = NewIndex(source, self._base, done, loose)
        objects, notes = objects_of(source, last)
        found.notes += [*notes, *index.lost]
        parts = index.parts(self._store, place.prefix, Blocks(WRITER), objects)
        self._check_stored(parts)
        opened = replace(source.opened, specs=index.specs, parts=tuple(parts), step=source.step, objects=())
        self._judge(opened, last)
        refs = [
            self._repo.write_index(f"{place.prefix}/index/part-{rank:05d}.json.zst", part, overwrite=True)
            for rank, part in enumerate(parts)
        ]
        root = index.root(place.attempt, refs)
        ref = self._repo.write_index(f"{place.prefix}/index/root.json.zst", root, overwrite=True)
        self._repo.commit(self._body(place, index, parts, ref))

    def _refuse_deviation(self) -> None:
        judged = self._found.judged
        if judged.worst > self._ways.tolerance:
            raise ReplayError(
                f"what comes out is off by up to {judged.worst:.3g} of the values that the log remembers, first in "
                f"step {judged.first}; at most {self._ways.tolerance:.3g} are allowed. Nothing was committed"
            )

    def _check_stored(self, parts: Sequence[IndexPart]) -> None:
        for pack in {pack.key: pack for part in parts for pack in part.packs}.values():
            size = self._store.size(pack.key)
            if size != pack.nbytes:
                raise MissingChunk(f"{pack.key}: expected {pack.nbytes} bytes, found {size}")

    def _judge(self, opened: Opened, last: Sequence[OpenRecord]) -> None:
        found = self._found
        equal, other, unknown = equal_ranks(self._source, opened, last, max(LEAST_MEMORY, self._share // 2))
        found.exact = False if other or found.judged.off else None if unknown else True
        if found.exact is None and not found.judged.off and equal:
            found.notes.append(f"of {len(unknown)} rank(s) the log does not tell whether all bits are the same")
        if found.exact is False:
            why = "; ".join(dict.fromkeys(line for one in found.kernels for line in one["why"]))
            found.notes.append(
                f"the new base is not bit for bit what the job had{f' ({why})' if why else ''}: of "
                f"{found.judged.compared} values that the log remembers {found.judged.off} differ, by at most "
                f"{found.judged.worst:.3g} of their size"
            )

    def _body(self, place: Place, index: NewIndex, parts: Sequence[IndexPart], ref: Any) -> CommitBody:
        base, source, graph = self._base.commit, self._source, index.graph()
        prefix = f"{place.prefix}/"
        chunks = [
            (chunk, None if chunk.pack == DERIVED else part.packs[chunk.pack])
            for part in parts
            for chunk in part.chunks
        ]
        new = [chunk.nbytes for chunk, pack in chunks if pack is not None and pack.key.startswith(prefix)]
        kept = [chunk.nbytes for chunk, pack in chunks if pack is not None and not pack.key.startswith(prefix)]
        self._found.bytes_written, self._found.bytes_kept = sum(new), sum(kept)
        totals = {
            **base.totals,
            **({"bytes_held": graph.bytes_held(), "bytes_unique": graph.bytes_unique()} if graph is not None else {}),
            "bytes_written": sum(new),
            "bytes_reused": sum(kept),
            "bytes_derived": sum(chunk.nbytes for chunk, pack in chunks if pack is None),
            "chunks": len(chunks),
        }
        here = {name: version for name, version in software().items() if name in ("ckpt", "torch")}
        return CommitBody(
            format=VERSION,
            features=(CODEC,) if any(part.codecs for part in parts) else (),
            step=source.step,
            attempt=place.attempt,
            world=source.world,
            engine=base.engine,
            created=now(),
            software={**base.software, **here},
            totals=totals,
            index=ref,
            degrees=base.degrees if source.world == base.world else {},
            log=source.stretches[-1].number,
        )


def _tidy(store: Store, prefix: str) -> None:
    """Remove the journals of a compaction that is committed; what is left, ``ckpt gc`` takes."""
    with suppress(CkptError):
        for info in list(store.walk(f"{prefix}/index")):
            if info.key.rpartition("/")[2].startswith((JOURNAL, TEMP)):
                store.delete(info.key)


def _name(base: Index, source: Source, last: Sequence[OpenRecord]) -> str:
    """Return the name of the attempt: the same again for the same base, log and software."""
    said = (
        base.commit.attempt,
        base.commit.index.digest,
        [(one.number, one.first, one.last, one.world) for one in source.stretches],
        [one.record.digest for one in last],
        sorted(software().items()),
    )
    return PREFIX + raw_digest(msgspec.msgpack.encode(said)).hex()


def _kernels(source: Source) -> list[dict[str, Any]]:
    """Return what made the steps, and why it cannot be expected to give the same bits here."""
    found: list[dict[str, Any]] = []
    for stretch in source.stretches:
        heads = source.heads[stretch.number]
        for number in range(max((len(head.kernels) for head in heads), default=0)):
            said = next(head.kernels[number] for head in heads if number < len(head.kernels))
            row = {"class": said.get("class"), "options": said.get("options"), "why": why_not_exact(heads, number)}
            if row not in found:
                found.append(row)
    return found
