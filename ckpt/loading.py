"""One load, told from top to bottom. Every rank of the job calls it; each step succeeds on all ranks or fails on all.

pick the step → index → what does the engine want → plan → who reads what → are all packs there → read, hand on, check,
place → rebuild derived parameters → scheduler, counters, extras, RNG. Nothing of the engine is touched before the plan
is known to be complete.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt.engine.find import adapter_for
from ckpt.errors import CkptError, LayoutError, NoSuchCheckpoint, is_damage
from ckpt.gradlog.copies.bringing import Copies
from ckpt.gradlog.copies.near import room_for
from ckpt.gradlog.replaying.deviation import NONE, Deviation
from ckpt.gradlog.replaying.recover import Recovery, find_recovery
from ckpt.gradlog.replaying.replay import Outcome
from ckpt.gradlog.replaying.resume import Replays
from ckpt.layout.mesh import problems_of_claims
from ckpt.layout.spec import Shard
from ckpt.plan.load_plan import Catalog, Difference, LoadPlan, build_load_plan, check_difference, swap_notes
from ckpt.plan.wire import decode_layouts, encode_layout
from ckpt.repo.lineage import ROOT as LOGS
from ckpt.repo.repository import Index, Repository, checked_step
from ckpt.report import LoadReport, Stopwatch
from ckpt.runtime.agree import Hello, exchange_hellos
from ckpt.runtime.behind import wait_for_last
from ckpt.runtime.describing import claims_of, host_name
from ckpt.runtime.guard import mark_half_loaded, mark_whole
from ckpt.runtime.pieces import PieceTable
from ckpt.runtime.reading_mode import AUTO, checked_budget, checked_read, choose
from ckpt.runtime.restoring import Restore
from ckpt.runtime.revive import Notes, Saved, choose_objects, give_back, notes_of_all, restore_generators
from ckpt.runtime.torch_comm import communicator
from ckpt.store.blocks import DEFAULT_BUDGET
from ckpt.store.limited import limited
from ckpt.store.open import Root, default_root, open_store
from ckpt.words import listed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt.engine.base import EngineAdapter, EngineState
    from ckpt.runtime.comm import Comm
    from ckpt.store.base import Store

log = logging.getLogger("ckpt")

FIRST, AFTER = "read", "read rest"
"""What is read before the engine rebuilds derived parameters, and what behind it."""


def load(
    engine: object,
    root: Root | None = None,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    strict: bool = True,
    fallback: bool = False,
    cast: bool = False,
    timeout: float | None = None,
    read: str = AUTO,
    budget: int | None = None,
    io_limit: float | None = None,
    replay: bool = True,
) -> LoadReport:
    """Load a checkpoint into ``engine``, in place, whatever layout saved it. Collective: every rank must call it.

    Where a :class:`ckpt.Checkpointer` has logged gradients behind the checkpoint, the logged steps are replayed, so
    that the job is back at the last step that all ranks had logged.

    Args:
        engine: as in :func:`ckpt.save`; its world size, ZeRO stage and precision may differ from the saved job's.
        root: path or URL of the repository (docs/stores.md); default ``CKPT_ROOT``, else ``./checkpoints``.
        step: which checkpoint, or which logged step behind one; default: the newest there is.
        extra: name -> object with ``load_state_dict`` to put the saved state into. Plain values come back in the
            report's ``extra``, and may be left out; objects that were saved may not. What is named must be there.
        strict: raise if checkpoint and engine do not hold the same state; else go on and report the difference. Never
            covers a scheduler, loss scaler or gradient scaler that only one side has: that is a note in the report.
            Also whether a replayed step has to come out as it was, where the same code repeats it in the same layout.
        fallback: if the newest checkpoint is damaged, take the newest one before it that is whole, and say so. The
            damaged steps stay: a job that comes to them again saves with ``overwrite=True``.
        cast: convert tensors whose dtype differs, and list them; otherwise that is an error.
        timeout: seconds without a sign of life after which a rank counts as lost (default ``CKPT_TIMEOUT``, 300).
        read: ``once``: each chunk is read from the store by one rank, and ranks hand it on to those that need it.
            ``each``: every rank reads what it needs. ``auto``: once from a store behind a network, once for each host
            from the hosts' own disks, each for itself from memory (tmpfs).
        budget: bytes of host memory that the load may use on each rank beside the live state, a whole number, at
            least 16 MiB (default 256 MiB).
        io_limit: most bytes per second that this rank may read from the store, a positive number.
        replay: False: checkpoints only, as if there were no gradient log.

    Raises:
        ConfigError: an argument is wrong, or ranks do not ask for the same.
        BudgetTooSmall: ``budget`` is.
        NoSuchCheckpoint: the root holds none, or not this step.
        MissingState: missing or unexpected state or ``extra`` (with ``strict``), or a dtype that differs (without
            ``cast``).
        LayoutError: a tensor of another shape, groups that do not tile the world, rules that fit nothing, or (with
            ``strict``) optimizer groups that were cut differently.
        ReplayError: the gradient log has a gap, is damaged (``fallback``: its sound beginning is replayed), was made
            by another optimizer, has steps of what is frozen here, or (``strict``) a step does not come out as it was.
        IntegrityError, FormatError: damage, named by tensor and file; :class:`RankFailure` if only some ranks met it
            (``once``: the error of the rank that was to read it, on all).

    An asynchronous save of this process that is in flight is finished first. How it ended is told by the next save.

    An error before the first byte is placed leaves the engine as it was. After one that comes later the engine refuses
    to run forward and to be saved, until a load succeeds.
    """
    watch = Stopwatch()
    wait_for_last()  # it may still be reading what this load writes into
    comm = communicator()
    with comm.joint("load", timeout):
        one = _Load(comm, watch, engine, default_root(root), step, extra, strict, cast)
        one.agree(fallback, read, DEFAULT_BUDGET if budget is None else budget, io_limit, replay)
        skipped: list[str] = []
        for candidate in one.candidates(fallback, replay):
            try:
                return one.run(candidate, tuple(skipped))
            except CkptError as error:
                if not is_damage(error):
                    raise
                if not fallback:
                    log.error("%s is damaged; fallback=True takes the newest whole step before it", candidate.name)
                    raise
                skipped.append(f"{candidate.name}: {error}")
                log.warning("%s is damaged, falling back to what comes before: %s", candidate.name, error)
        raise NoSuchCheckpoint("no checkpoint is whole: " + "; ".join(skipped))


class _Ready:
    """What this rank has found and decided before the engine is touched, and what came of it.

    ``source``: where index and objects are read. ``engine``: the adapter's notes on this rank. ``own``: notes on what
    each rank carries over for itself. ``returned``: what the user gets back.
    """

    source: Store
    index: Index
    catalog: Catalog
    state: EngineState
    plan: LoadPlan
    saved: Saved
    engine: list[str]
    own: list[str]
    returned: dict[str, Any]
    replays: Replays | None = None
    replayed: Outcome | None = None


class _Load:
    """One load on one rank; each phase is a method."""

    def __init__(
        self,
        comm: Comm,
        watch: Stopwatch,
        engine: object,
        root: Root,
        step: int | None,
        extra: Mapping[str, Any] | None,
        strict: bool,
        cast: bool,
    ) -> None:
        self.comm, self.watch, self.engine, self.root, self.step_asked = comm, watch, engine, root, step
        self.extra, self.strict, self.cast = extra or {}, strict, cast

    store: Store
    adapter: EngineAdapter
    hosts: tuple[str, ...]
    read: str
    budget: int
    copies: Copies | None = None
    """of log records, in the memory of hosts"""

    def agree(self, fallback: bool, read: str, budget: int, io_limit: float | None, replay: bool) -> None:
        """Check that all ranks ask for the same."""

        def hello() -> Hello:
            self.read, self.budget = checked_read(read), checked_budget(budget)
            self.store = limited(open_store(self.root), io_limit)
            self.adapter = adapter_for(self.engine)
            step = None if self.step_asked is None else checked_step(self.step_asked)
            options = [f"strict={self.strict}", f"cast={self.cast}", f"fallback={fallback}"]
            options += [f"read={read}", f"budget={budget}", f"replay={replay}"]
            return Hello(
                call="load",
                root=self.store.url,
                step=step,
                options=tuple(options),
                engine=self.adapter.kind,
                host=host_name(),
            )

        self.hosts = tuple(hello.host for hello in exchange_hellos(self.comm, hello))

    def candidates(self, fallback: bool, replay: bool) -> list[Recovery]:
        """Return the ways to try, the same on all ranks: rank 0 looks, so that nobody sees a newer one.

        It also decides how they are read, because to some ranks the same path may look like another file system.
        """

        def work() -> bytes:
            self.read = choose(self.read, self.hosts, self.store.url)
            repo = Repository(self.store)
            logged = replay and bool(self.store.children(LOGS))
            newest = self.step_asked if logged else repo.pick(self.step_asked)
            steps = repo.steps() if fallback else []
            return msgspec.msgpack.encode((self.read, logged, newest, steps))

        found = msgspec.msgpack.decode(self.comm.on_root("pick", work), type=tuple[str, bool, int | None, list[int]])
        self.read, logged, newest, steps = found
        ways = [Recovery(newest)] if newest is not None and not logged else []
        if logged:
            room = room_for(self.store.url, self.hosts.count(self.hosts[self.comm.rank]))
            self.copies = copies = Copies(self.comm, self.store.url, room)
            ways = find_recovery(self.comm, self.store, self.step_asked, lenient=fallback, copies=copies)
            ways = ways[: None if fallback else 1]
        return [*ways, *(Recovery(step) for step in reversed(steps) if step < ways[0].base)]

    def run(self, way: Recovery, skipped: tuple[str, ...]) -> LoadReport:
        comm, ready, step = self.comm, _Ready(), way.base
        restore = Restore(comm, self.store, self.read, self.budget, self.hosts)
        with self.watch.phase("plan"):
            ready.source = restore.open(step)
            self._check_claims(comm.gather("describe", lambda: self._describe(step, ready)))
            encoded = comm.gather("plan", lambda: self._plan(ready, way))
            ranks = [msgspec.msgpack.decode(data, type=Difference) for data in encoded]
            missing, unexpected, casts = check_difference(ready.catalog, ranks, strict=self.strict, cast=self.cast)
            late = any(one.late for one in ranks)
            stages = {FIRST: ready.plan.first, **({AFTER: ready.plan.after} if late else {})}
            restore.plan(ready.index, stages, ready.state.shards)
        state, saved = ready.state, ready.saved
        module = self.adapter.module()
        mark_half_loaded(module)
        with self.watch.phase("read"):
            restore.carry(FIRST, state.shards)
        with self.watch.phase("finish"):
            if way.stretches and self.copies is not None:
                self.copies.bring(ready.replays.wanted() if ready.replays is not None else [])
            if late:  # otherwise one meeting of all ranks does for everything that is left
                comm.run("refresh", self.adapter.refresh)
                restore.carry(AFTER, state.shards)
            if way.stretches:  # a rank that fails at that must not leave others in the engine's collectives
                comm.run("replay", lambda: self._repeat(ready, refresh=not late))
            told = comm.gather("finish", lambda: self._finish(ready, restore, refresh=not late))
        diverged = _on_divergences(ready.index, same_world=ready.index.root.world == comm.world)
        mark_whole(module)
        # What the engines note differs between pipeline stages, and by the partitions that a rank holds.
        ends = [msgspec.msgpack.decode(one, type=_End) for one in told]
        engines = notes_of_all([end.notes for end in ends])
        swapped = swap_notes(ranks)
        for note in ready.own if comm.rank else [*engines, *diverged, *swapped, *ready.own]:
            log.warning("load of step %d: %s", way.step, note)
        replayed = ready.replayed or Outcome()
        off = NONE.with_others([end.deviation for end in ends])
        report = LoadReport(
            step=way.step,
            root=self.store.url,
            saved_world=ready.index.root.world,
            bytes_read=restore.chunk_bytes,
            seconds=self.watch.seconds,
            missing=missing + saved.missing,
            unexpected=unexpected + saved.unexpected,
            casts=casts,
            notes=tuple(dict.fromkeys([*way.notes, *ready.engine, *engines, *diverged, *swapped, *ready.own])),
            skipped=skipped,
            extra=ready.returned,
            phases=self.watch.phases,
            read=self.read,
            read_by_rank=tuple(end.read for end in ends),
            bytes_received=restore.received,
            base=step if way.stretches else None,
            exact=_of_all([end.exact for end in ends]),
            deviation=off.largest if off.compared else None,
            compared=off.compared,
            differing=off.differ,
            log_bytes=replayed.bytes_read,
            log_bytes_from_memory=replayed.bytes_from_memory,
        )
        if report.replay and not comm.rank:
            log.info("load of step %d: %s", way.step, report.replay)
        return report

    def _describe(self, step: int, ready: _Ready) -> bytes:
        """Read what the checkpoint holds and ask what the engine does. Returns what this rank claims of its place."""
        ready.index = index = Repository(ready.source).read_index(step)
        ready.catalog = catalog = Catalog(index.specs, index.parts, index.root.derived, index.root.aliases)
        ready.state = state = self.adapter.describe_for_load(catalog.by_fqn())
        return encode_layout(claims_of(self.comm.rank, state))

    @staticmethod
    def _check_claims(encoded: Sequence[bytes]) -> None:
        """Check groups and rules before the plan, which with a wrong group would read what is another rank's."""
        problems = problems_of_claims(decode_layouts(encoded))
        if problems:
            raise LayoutError("the ranks' groups and rules do not fit together", tuple(problems))

    def _plan(self, ready: _Ready, way: Recovery) -> bytes:
        """Decide everything, and touch nothing of the engine. Returns what the ranks have to compare."""
        index, catalog, state = ready.index, ready.catalog, ready.state
        PieceTable(state.shards)  # checks shapes
        same_world = index.root.world == self.comm.world
        ready.plan = plan = build_load_plan(
            catalog,
            [Shard(s.spec, s.box) for s in state.shards],
            state.derived,
            own_copies_of=self.comm.rank if same_world else None,
        )
        ready.saved = choose_objects(
            ready.source, index.parts, index.root.world, self.comm.rank, self.comm.world, self.extra, self.strict
        )
        if way.stretches:
            near = None if self.copies is None else self.copies.near
            ready.replays = Replays(
                self.store, self.adapter, way, state, self.comm.rank, self.comm.world, strict=self.strict, near=near
            )
        return msgspec.msgpack.encode(self._with_objects(plan.difference, ready.saved))

    def _with_objects(self, tensors: Difference, saved: Saved) -> Difference:
        """Add to the difference in tensors what the engine would miss of the other objects, or have no place for."""
        found = self.adapter.compare(saved.engine)
        missing = tensors.missing + found.missing
        return replace(tensors, missing=missing, unexpected=found.unexpected, conflicts=found.conflicts)

    def _repeat(self, ready: _Ready, *, refresh: bool) -> None:
        """Take over what was read, and repeat logged steps on it."""
        if refresh:
            self.adapter.refresh()
        ready.engine = self.adapter.finish(ready.saved.engine)
        if ready.replays is not None:
            ready.replayed = ready.replays.run(ready.saved, self.comm.beat)

    def _finish(self, ready: _Ready, restore: Restore, *, refresh: bool) -> bytes:
        """Put everything back that is not a chunk. Returns what all ranks are told of this one."""
        if ready.replays is None:
            self._repeat(ready, refresh=refresh)
        elif ready.replayed is not None:
            ready.replays.put_back(ready.saved, ready.replayed)
            ready.engine += ready.replayed.notes
            if self.copies is not None:
                self.copies.near.forget()
        ready.returned = give_back(ready.saved, self.extra)
        ready.own = ready.saved.notes + restore_generators(ready.saved, self.comm.rank)  # last: all else may draw
        replayed = ready.replayed or Outcome()
        end = _End(Notes.of(ready.engine), restore.store.bytes_read, replayed.exact, replayed.deviation)
        return msgspec.msgpack.encode(end)


class _End(msgspec.Struct, array_like=True):
    """What all ranks are told of one that has done its part. ``read``: bytes that it got from the store."""

    notes: Notes
    read: int
    exact: bool | None = None
    deviation: Deviation = NONE


def _of_all(exact: Sequence[bool | None]) -> bool | None:
    """Return whether it is exact on all ranks: not if one is not, and nobody knows if one does not."""
    return False if False in exact else None if None in exact else True


def _on_divergences(index: Index, *, same_world: bool) -> list[str]:
    """Return a note on tensors whose replicas differed at the save, where a rank does not get its own copy back."""
    apart = {index.specs[c.spec].key for part in index.parts for c in part.chunks if c.ranks} if same_world else set()
    names = sorted({f"{d.fqn} ({d.role})" for d in index.root.divergences if (d.fqn, d.role) not in apart})
    said = f"replicas differed at the save, all ranks have got the copy that was kept: {listed(names, 5)}"
    return [said] if names else []


def steps(root: Root | None = None) -> list[int]:
    """Return the committed steps of a root, ascending. No collective: any process may ask.

    These are checkpoints. Steps that a gradient log adds behind them can be loaded too, and are not listed here: ``ckpt
    log`` and ``ckpt ls`` tell how far it leads.

    Raises:
        StoreError: the root cannot be read; an error is never "no checkpoints".
    """
    return Repository(open_store(default_root(root))).steps()


def latest(root: Root | None = None) -> int | None:
    """Return the newest committed step, or None if the root holds no checkpoint (or does not exist).

    This is a checkpoint. :func:`load` comes further where a gradient log leads on from it.

    Raises:
        StoreError: the root cannot be read.
    """
    return max(steps(root), default=None)
