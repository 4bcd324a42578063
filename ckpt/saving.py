"""One save, told from top to bottom. Every rank of the job calls it; each step succeeds on all ranks or fails on all.

describe → agree → plan → begin attempt → digest → settle → write packs and index part → commit.
docs/format.md has the crash table: what a crash between any two of these leaves behind.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt.engine.find import adapter_for
from ckpt.errors import CheckpointExists, ConfigError, RankFailure, ReplicaDivergence, SplitRoot
from ckpt.format.digest import from_raw
from ckpt.format.manifest import VERSION, CommitBody, Divergence, IndexRoot
from ckpt.layout.spec import BUFFER, RankLayout
from ckpt.repo.holders import holder_table
from ckpt.repo.repository import Repository, attempt_marker, checked_step
from ckpt.report import SaveReport, Stopwatch
from ckpt.runtime.agree import Hello, JobPlan, cached_layout, exchange_hellos, job_plan, layout_digest
from ckpt.runtime.comparing import IN_SAVE, Question, ask, underived
from ckpt.runtime.describing import host_name, layout_of
from ckpt.runtime.extras import Item, collect, owned_items
from ckpt.runtime.guard import check_whole
from ckpt.runtime.pieces import PieceTable
from ckpt.runtime.pipeline import Digests, Settled, digest_chunks, outputs_of, settle
from ckpt.runtime.torch_comm import communicator
from ckpt.runtime.writing import Attempt, Content, Done, divergences_of, write_own
from ckpt.store.open import Root, default_root, open_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt.format.holders import HolderTable
    from ckpt.runtime.comm import Comm
    from ckpt.store.base import Store

log = logging.getLogger("ckpt")

POLICIES = ("warn", "error", "keep-all")
SHOWN = 8
"""Findings, or names of a rank, that a message lists."""
VISIBLE_SECONDS = 10.0
"""How long another rank's file may take to become visible (attribute caches of network file systems)."""


def save(
    engine: object,
    root: Root | None = None,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    on_divergence: str = "warn",
    timeout: float | None = None,
) -> SaveReport:
    """Save the whole training state of ``engine``; durable when it returns. Collective: every rank must call it.

    Args:
        engine: a ``deepspeed.DeepSpeedEngine``, a tuple like ``(model, optimizer, scheduler)`` of torch's or Megatron's
            objects (docs/engines.md), any of them in a :class:`ckpt.Parallel`, or an object with the methods of
            :class:`ckpt.engine.base.EngineAdapter`. It must stand between two optimizer steps.
        root: path or ``file://`` URL of the repository; default ``CKPT_ROOT``, else ``./checkpoints``.
        step: number of the checkpoint; default: the engine's count of optimizer steps.
        extra: name -> object with ``state_dict``/``load_state_dict`` (a data loader), or a plain JSON-able value.
            A mapping inside of one comes back as a plain dict, whatever its class.
        overwrite: replace the step if it is committed already; otherwise that is an error.
        on_divergence: what to do if ranks that should hold the same bytes do not: ``"warn"`` (log, record in the
            checkpoint, keep the majority's copy, and every copy of a buffer), ``"error"``, or ``"keep-all"``.
        timeout: seconds without a sign of life after which a rank counts as lost (default ``CKPT_TIMEOUT``, 300).

    Returns:
        What was held, unique, written and reused, in bytes.

    Raises:
        RankFailure: a step failed on some ranks, or some did not call; the same error on every rank.
        ConfigError, LayoutError, StoreError, CheckpointExists: the same cause on every rank.

    After an error nothing is committed, the previous steps are untouched, and training can go on. The one exception is
    a :class:`RankFailure` in step ``commit``: rank 0 was lost while it published, and the step may be there or not.
    """
    watch = Stopwatch()
    comm = communicator()
    with comm.joint("save", timeout):
        return _Save(comm, watch, engine, default_root(root), step, extra, overwrite, on_divergence).run()


class _Save:
    """One save on one rank; each phase is a method."""

    def __init__(
        self,
        comm: Comm,
        watch: Stopwatch,
        engine: object,
        root: Root,
        step: int | None,
        extra: Mapping[str, Any] | None,
        overwrite: bool,
        on_divergence: str,
    ) -> None:
        self.comm, self.watch, self.engine, self.root, self.step_asked = comm, watch, engine, root, step
        self.extra, self.overwrite, self.policy = extra, overwrite, on_divergence

    store: Store
    layout: RankLayout
    assumed: set[str]
    pieces: PieceTable
    items: list[Item]
    step: int

    def run(self) -> SaveReport:
        comm = self.comm
        with self.watch.phase("describe"):
            hellos = exchange_hellos(comm, self._describe)
        with self.watch.phase("plan"):
            job = job_plan(comm, self.layout, hellos)
        attempt = self._begin()
        try:
            with self.watch.phase("digest"):
                mine, payloads = self._digest(job, attempt)
            settled = settle(job.plan, mine, payloads)
            # Every rank has the same verdicts, so they all look closer, or none does.
            differing = [Question(i, tuple(v.copies.values())) for i, v in settled.verdicts.items()]
            divergences = divergences_of(job.plan, settled, ask(comm, job.plan, self.pieces, differing, IN_SAVE))
            self._judge(divergences)
            with self.watch.phase("write"):
                own = comm.run("write", lambda: self._write(attempt, job, mine, settled, hellos))
            own.assumed = sorted({one.fqn for one in divergences} & self.assumed)[:SHOWN]
        except BaseException:
            _remove(attempt)
            raise
        # From here on a rank cannot know whether the others will commit, so nothing is removed any more.
        with self.watch.phase("commit"):
            encoded = comm.gather("written", lambda: msgspec.msgpack.encode(own))
            done = [msgspec.msgpack.decode(data, type=Done) for data in encoded]
            totals = _totals(job, done, divergences)
            self._tell(done)
            try:
                size = comm.on_root("commit", lambda: self._commit(attempt, job, hellos, done, divergences, totals))
            except RankFailure as error:
                # Rank 0 was lost while it published: nobody can know how far it came.
                doubt = "the step may be there all the same, ckpt.latest tells"
                raise RankFailure("commit", {r: f"{text}; {doubt}" for r, text in error.failures.items()}) from error
        return SaveReport(
            step=self.step,
            root=self.store.url,
            attempt=attempt.name,
            world=comm.world,
            bytes_held=totals["bytes_held"],
            bytes_unique=totals["bytes_unique"],
            bytes_written=totals["bytes_written"],
            bytes_reused=totals["bytes_reused"],
            bytes_derived=totals["bytes_derived"],
            bytes_stored=sum(d.stored for d in done) + msgspec.msgpack.decode(size, type=int),
            written_by_rank=tuple(d.written for d in done),
            divergences=tuple(map(str, divergences)),
            seconds=self.watch.seconds,
            bytes_underived=sum(d.underived for d in done),
            underived=tuple(text for d in done for text in d.underived_shown),
            phases=self.watch.phases,
        )

    def _describe(self) -> Hello:
        if self.policy not in POLICIES:
            raise ConfigError(f"on_divergence={self.policy!r}: expected one of {', '.join(POLICIES)}")
        self.store = open_store(self.root)
        adapter = adapter_for(self.engine)
        check_whole(adapter.module())
        state = adapter.describe()
        self.step = checked_step(adapter.step() if self.step_asked is None else self.step_asked)
        self.layout = layout_of(self.comm.rank, state)
        self.assumed = state.assumed
        self.pieces = PieceTable(state.shards)
        self.items = collect(state.objects, self.extra)
        return Hello(
            call="save",
            root=self.store.url,
            step=self.step,
            options=(f"overwrite={self.overwrite}", f"on_divergence={self.policy}"),
            engine=adapter.kind,
            layout=layout_digest(self.layout),
            cached=cached_layout(),
            objects={f"{i.kind}:{i.name}": i.identity for i in self.items},
            host=host_name(),
        )

    def _begin(self) -> Attempt:
        answer = self.comm.on_root("begin", self._begin_on_root)
        name, parent = msgspec.msgpack.decode(answer, type=tuple[str, int | None])
        made = [attempt_marker(self.step, name)] if self.comm.rank == 0 else []
        return Attempt(self.store, self.step, name, parent, self.step if self.overwrite else None, made)

    def _begin_on_root(self) -> bytes:
        repo = Repository(self.store)
        repo.initialise()
        steps = repo.steps()
        if self.step in steps and not self.overwrite:
            raise CheckpointExists(
                f"step {self.step} is committed already in {self.store.url}; pass overwrite=True to replace it"
            )
        name = f"{int(time.time()):x}-{os.urandom(4).hex()}"  # os.urandom: a save must not move the user's RNG streams
        about = msgspec.json.encode({"world": self.comm.world, "created": _now()})
        self.store.put(attempt_marker(self.step, name), about)
        others = [s for s in steps if s != self.step]
        return msgspec.msgpack.encode((name, others[-1] if others else None))

    def _see(self, attempt: Attempt) -> None:
        """Check that this rank sees what rank 0 has written: otherwise the root is not one directory."""
        key = attempt_marker(self.step, attempt.name)
        deadline = time.monotonic() + min(VISIBLE_SECONDS, self.comm.timeout / 2)
        while self.store.size(key) is None:
            if time.monotonic() > deadline:
                raise SplitRoot(
                    f"rank {self.comm.rank} does not see {key!r}, which rank 0 has just written to {self.store.url}; "
                    f"the root must be one directory that all ranks share"
                )
            self.comm.beat()
            time.sleep(0.05)

    def _digest(self, job: JobPlan, attempt: Attempt) -> tuple[Digests, list[bytes]]:
        mine = Digests()

        def work() -> bytes:
            self._see(attempt)
            digest_chunks(mine, job.plan, self.comm.rank, self.pieces, self.comm.beat)
            return mine.shared(job.plan, self.comm.rank)

        payloads = self.comm.gather("digest", work)
        return mine, payloads

    def _write(self, attempt: Attempt, job: JobPlan, mine: Digests, settled: Settled, hellos: list[Hello]) -> Done:
        def keep_all(i: int) -> bool:
            # Buffers may differ by right (BatchNorm statistics); a resumed rank gets its own back. And what nobody has
            # said to be whole on all tensor-parallel ranks may be slices: keeping one of them would lose the others.
            spec = job.plan.chunks[i].spec
            return self.policy == "keep-all" or spec.role == BUFFER or spec.fqn in self.assumed

        outputs, entries = outputs_of(job.plan, self.comm.rank, mine, settled, self.pieces, keep_all)
        objects = owned_items(self.items, [h.objects for h in hellos], self.comm.rank)
        content = Content(outputs, entries, objects)
        done = write_own(attempt, self.comm.rank, from_raw(job.layout), content, self.comm.beat)
        stored = [i for i, cast in mine.casts.items() if cast != mine.held[i]]
        done.underived = sum(job.plan.chunks[i].nbytes for i in stored)
        done.underived_shown = list(map(str, underived(job.plan, self.comm.rank, self.pieces, stored)))
        return done

    def _judge(self, divergences: list[Divergence]) -> None:
        if divergences and self.policy == "error":
            more = f"; … and {len(divergences) - SHOWN} more" if len(divergences) > SHOWN else ""
            raise ReplicaDivergence("; ".join(map(str, divergences[:SHOWN])) + more)
        if self.comm.rank == 0:
            for one in divergences[:SHOWN]:
                log.warning("%s", one)
            if len(divergences) > SHOWN:
                log.warning("… and %d more diverging chunks", len(divergences) - SHOWN)

    def _tell(self, done: list[Done]) -> None:
        # A rank knows the tensors of its own pipeline stage.
        doubtful = sorted({name for d in done for name in d.assumed})
        if doubtful and self.comm.rank == 0:
            log.warning(
                "diverging tensors that count as whole on every tensor-parallel rank, as no framework says otherwise: "
                "%s; every rank's copy is kept. If they are slices, give them a rule with dim (docs/rules.md)",
                ", ".join(doubtful[:SHOWN]) + (", …" if len(doubtful) > SHOWN else ""),
            )
        nbytes, shown = sum(d.underived for d in done), next((d.underived_shown for d in done if d.underived_shown), [])
        if nbytes and self.comm.rank == 0:
            log.info("%d bytes of params are not cast(master) and were stored: %s", nbytes, shown[0])

    def _commit(
        self,
        attempt: Attempt,
        job: JobPlan,
        hellos: list[Hello],
        done: list[Done],
        divergences: list[Divergence],
        totals: dict[str, int],
    ) -> bytes:
        """On rank 0: check that every file is there, write the index root, publish. Returns the bytes of both."""
        for rank, one in enumerate(done):
            for key, nbytes in ((one.part.key, one.part.nbytes), *((p.key, p.nbytes) for p in one.packs)):
                size = self.store.size(key)
                self.comm.beat()
                if size != nbytes:
                    raise SplitRoot(
                        f"{key}: rank {rank} wrote {nbytes} bytes, rank 0 finds "
                        f"{'nothing' if size is None else f'{size} bytes'} in {self.store.url}"
                    )
        root = IndexRoot(
            format=VERSION,
            step=self.step,
            attempt=attempt.name,
            world=self.comm.world,
            layout=from_raw(job.layout),
            specs=tuple((s.fqn, s.role, s.dtype, s.shape) for s in job.graph.specs),
            derived=tuple(sorted(job.graph.derived)),
            aliases=job.graph.aliases,
            parts=tuple(d.part for d in done),
            divergences=tuple(divergences),
            holders=_holders_of(job, tuple(h.host for h in hellos)),
        )
        repo = Repository(self.store)
        index = repo.write_index(attempt.key("index/root.json.zst"), root)
        body = CommitBody(
            format=VERSION,
            features=(),
            step=self.step,
            attempt=attempt.name,
            world=self.comm.world,
            engine=hellos[0].engine,
            created=_now(),
            software=_software(hellos[0].engine),
            totals=totals,
            index=index,
        )
        return msgspec.msgpack.encode(index.nbytes + repo.commit(body, overwrite=self.overwrite))


_last_holders: tuple[JobPlan, tuple[str, ...], HolderTable | None] | None = None


def _holders_of(job: JobPlan, hosts: tuple[str, ...]) -> HolderTable | None:
    """Return who holds what; worked out once for each layout, because rank 0 does it while the others wait."""
    global _last_holders
    if _last_holders is None or _last_holders[0] is not job or _last_holders[1] != hosts:
        _last_holders = (job, hosts, holder_table(job.graph, hosts))
    return _last_holders[2]


def _totals(job: JobPlan, done: list[Done], divergences: list[Divergence]) -> dict[str, int]:
    return {
        "bytes_held": job.graph.bytes_held(),
        "bytes_unique": job.graph.bytes_unique(),
        "bytes_written": sum(d.written for d in done),
        "bytes_reused": sum(d.reused for d in done),
        "bytes_derived": sum(d.derived for d in done),
        "chunks": len(job.plan.chunks),
        "divergences": len(divergences),
    }


def _remove(attempt: Attempt) -> None:
    """Remove what this rank has written, best effort: a full disk should not stay full. ``verify`` names the rest."""
    for key in attempt.made:
        with suppress(Exception):
            attempt.store.delete(key)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _software(engine: str) -> dict[str, str]:
    found = {}
    for name in ("ckpt", "torch", *(n for n in ("deepspeed", "megatron-core") if n.startswith(engine))):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
