"""One save on all ranks, told from top to bottom. Each step succeeds on all of them or fails on all.

agree → plan → begin attempt → stage (digest, and store what is owned) → settle → finish packs and index part → commit.
docs/format.md has the crash table: what a crash between any two of these leaves behind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ckpt.errors import ConfigError, RankFailure, ReplicaDivergence
from ckpt.format.digest import from_raw
from ckpt.layout.spec import BUFFER
from ckpt.report import SaveReport
from ckpt.runtime.agree import Hello, cached_plan, exchange_hellos, job_plan, layout_digest
from ckpt.runtime.attempt import begin, kept_alive, remove, see
from ckpt.runtime.behind import unheard
from ckpt.runtime.choosing import SAMPLE_BYTES, ZSTD, check_asked, decide
from ckpt.runtime.comparing import IN_SAVE, Question, ask, underived
from ckpt.runtime.describing import host_name
from ckpt.runtime.digesting import Digests, views
from ckpt.runtime.extras import item_outputs, owned_items
from ckpt.runtime.memory import blocks_of
from ckpt.runtime.packing import Packer
from ckpt.runtime.publish import check_written, publish, totals_of
from ckpt.runtime.settling import Found, compare, outputs_of, settle
from ckpt.runtime.snapshot import changed
from ckpt.runtime.stage import stage_chunks
from ckpt.runtime.staging import tensor_bytes
from ckpt.runtime.writing import Content, Done, Parent, divergences_of, remember, write_part
from ckpt.store.blocks import Part

if TYPE_CHECKING:
    from ckpt.format.manifest import Divergence
    from ckpt.plan.local_plan import Chunk
    from ckpt.plan.save_plan import SavePlan
    from ckpt.report import Stopwatch
    from ckpt.runtime.agree import JobPlan
    from ckpt.runtime.comm import Comm
    from ckpt.runtime.extras import Item
    from ckpt.runtime.packing import Output
    from ckpt.runtime.settling import Settled
    from ckpt.runtime.snapshot import Snapshot
    from ckpt.runtime.writing import Attempt
    from ckpt.store.base import Store

log = logging.getLogger("ckpt")

POLICIES = ("warn", "error", "keep-all")
ENOUGH_BYTES = 64 << 20
"""What a save in the foreground holds at most of its budget."""
SHOWN = 8
"""Findings, or names of a rank, that a message lists."""


def _nothing() -> None:
    """Watch nothing."""


@dataclass(frozen=True, slots=True)
class Watcher:
    """Who looks on while a save runs. ``total``: told once how many bytes this rank has to look at. ``advance``: bytes
    looked at; ``stored``: bytes about to be stored, by another thread; both may raise to end the save. ``staged``:
    called once training may change the state again. ``committing``: the last moment at which the save can be ended.
    """

    total: Callable[[int], None] = field(default=lambda _: None)
    advance: Callable[[int], None] = field(default=lambda _: None)
    stored: Callable[[int], None] = field(default=lambda _: None)
    staged: Callable[[], None] = _nothing
    committing: Callable[[], None] = _nothing


@dataclass(frozen=True, slots=True)
class Ways:
    """How to save; the arguments of :func:`ckpt.save`, as the user gave them. ``log``: number of the gradient log that
    passes through the state.
    """

    overwrite: bool
    policy: str
    codec: str | Mapping[str, str]
    budget: int | None
    log: int | None = None

    def check(self) -> None:
        """Raise :class:`ConfigError` for what is none of the values possible."""
        if self.policy not in POLICIES:
            raise ConfigError(f"on_divergence={self.policy!r}: expected one of {', '.join(POLICIES)}")
        check_asked(self.codec)
        blocks_of(self.budget)

    def said(self) -> tuple[str, ...]:
        """Return what all ranks must have asked for alike."""
        codec = self.codec if isinstance(self.codec, str) else dict(sorted(self.codec.items()))
        return (f"overwrite={self.overwrite}", f"on_divergence={self.policy}", f"codec={codec}")


class SaveJob:
    """One save on one rank; each phase is a method.

    Args:
        comm: all ranks; the operation has been entered.
        watch: started when the save was called.
        prepare: returns the store and this rank's snapshot; what it raises is raised on all ranks.
        ways: how to save.
        watcher: who looks on.
    """

    store: Store
    snapshot: Snapshot

    def __init__(
        self,
        comm: Comm,
        watch: Stopwatch,
        prepare: Callable[[], tuple[Store, Snapshot]],
        ways: Ways,
        watcher: Watcher | None = None,
    ) -> None:
        self.comm, self.watch, self.ways, self.watcher = comm, watch, ways, watcher or Watcher()
        self._prepare = prepare
        self._cached = cached_plan()
        self._reasons: dict[str, str] = {}

    def run(self) -> SaveReport:
        """Save.

        Raises:
            CkptError: the same on every rank; nothing was committed, except as :func:`ckpt.save` says of ``commit``.
        """
        comm = self.comm
        with self.watch.phase("describe"):
            hellos = exchange_hellos(comm, self._hello)
        with self.watch.phase("plan"):
            job = job_plan(comm, self.snapshot.layout, hellos, self._cached)
        attempt = begin(comm, self.store, self.snapshot.step, overwrite=self.ways.overwrite)
        with kept_alive(comm, attempt):
            try:
                with self._packer(attempt) as packer:
                    own, divergences = self._write(attempt, job, packer, hellos)
            except BaseException:
                remove(attempt)
                raise
            # From here on a rank cannot know whether the others will commit, so nothing is removed any more.
            with self.watch.phase("commit"):
                report = self._commit(attempt, job, hellos, own, divergences)
        remember(attempt.store, self._stored)
        return report

    def _hello(self) -> Hello:
        self.store, self.snapshot = self._prepare()
        one = self.snapshot
        return Hello(
            call="save",
            root=self.store.url,
            step=one.step,
            options=self.ways.said(),
            engine=one.kind,
            layout=layout_digest(one.layout),
            cached=self._cached.layout if self._cached else b"",
            objects={f"{i.kind}:{i.name}": i.identity for i in one.items},
            host=host_name(),
            failed=unheard(),
        )

    # -- stage, settle, write -------------------------------------------------------------------------------------

    def _packer(self, attempt: Attempt) -> Packer:
        key = f"packs/rank{self.comm.rank:05d}"

        def on_part(nbytes: int) -> None:
            self.watcher.stored(nbytes)
            if nbytes:  # else this is a wait for the store, which is no sign of life
                self.comm.beat()

        def pack_key(number: int) -> str:
            return attempt.key(f"{key}-{number:03d}.safetensors")

        blocks = blocks_of(self.ways.budget)
        # Who waits for the end anyway gains nothing from more on the way than keeps the store busy.
        return Packer(self.store, blocks if self.snapshot.behind else Part(blocks, ENOUGH_BYTES), pack_key, on_part)

    def _write(
        self, attempt: Attempt, job: JobPlan, packer: Packer, hellos: list[Hello]
    ) -> tuple[Done, list[Divergence]]:
        comm, plan, mine = self.comm, job.plan, Digests()
        objects = owned_items(self.snapshot.items, [h.objects for h in hellos], comm.rank)
        blobs = [item_outputs(item, comm.rank) for item, _ in objects]
        routes = job.routes(comm.rank)

        def stage() -> dict[int, bytes]:
            see(comm, attempt)
            packer.known = Parent(attempt, comm.rank, from_raw(job.layout)).place_of
            packer.encoded = self._choose_codecs(job)
            self.watcher.total(job.held_bytes(comm.rank))
            flat = [output for outputs in blobs for output in outputs]
            one = self.snapshot
            stage_chunks(mine, plan, comm.rank, one.pieces, flat, packer, self._beat, behind=one.behind)
            return routes.payloads(mine)

        with self.watch.phase("stage"):
            received = comm.scatter("digest", stage, routes.sizes)
        self.watch.phases["digest"] = mine.seconds
        with self.watch.phase("settle"):
            encoded = comm.gather(
                "settle", lambda: msgspec.msgpack.encode(compare(plan, comm.rank, routes, mine, received))
            )
            found = [one for data in encoded for one in msgspec.msgpack.decode(data, type=list[Found])]
            settled = settle(plan, mine, found)
            # Every rank has the same verdicts, so they all look closer, or none does.
            differing = [Question(i, tuple(v.copies.values())) for i, v in settled.verdicts.items()]
            answers = ask(comm, plan, self.snapshot.pieces, differing, IN_SAVE)
            divergences = divergences_of(plan, settled, answers)
            self._judge(divergences)
            store = partial(self._content, job, packer, mine, settled, objects, blobs)
            if found:  # copies of other ranks have to be stored, which may fail on some
                content, underived_ = comm.run("settle", store)
                self.watcher.staged()

        def write() -> Done:
            own, shown = store() if not found else (content, underived_)
            if not found:
                self.watcher.staged()
            done = self._finish(attempt, packer, own)
            done.underived, done.underived_shown = shown
            done.assumed = sorted({one.fqn for one in divergences} & self.snapshot.assumed)[:SHOWN]
            return done

        with self.watch.phase("write"):
            return comm.run("write", write), divergences

    def _content(
        self,
        job: JobPlan,
        packer: Packer,
        mine: Digests,
        settled: Settled,
        objects: list[tuple[Item, tuple[int, ...]]],
        blobs: list[list[Output]],
    ) -> tuple[Content, tuple[int, list[str]]]:
        """Store what only the verdicts made this rank's; the last look at live memory."""

        def keep_all(i: int) -> bool:
            # Buffers may differ by right (BatchNorm statistics); a resumed rank gets its own back. And what nobody has
            # said to be whole on all tensor-parallel ranks may be slices: keeping one of them would lose the others.
            spec = plan.chunks[i].spec
            return self.ways.policy == "keep-all" or spec.role == BUFFER or spec.fqn in self.snapshot.assumed

        plan, pieces, rank = job.plan, self.snapshot.pieces, self.comm.rank
        outputs, entries = outputs_of(plan, rank, mine, settled, pieces, keep_all, behind=self.snapshot.behind)
        stored = [
            (item, ranks, group, [packer.add(output) for output in group])
            for (item, ranks), group in zip(objects, blobs, strict=True)
        ]
        content = Content(outputs, packer.add_late(outputs, self.comm.beat), entries, stored)
        wrong = [i for i, cast in mine.casts.items() if cast != mine.held[i]]
        shown = list(map(str, underived(plan, rank, pieces, wrong)))
        self._look_twice(plan, mine)
        self.snapshot.check_unchanged()
        return content, (sum(plan.chunks[i].nbytes for i in wrong), shown)

    def _look_twice(self, plan: SavePlan, mine: Digests) -> None:
        numbers = [i for i in plan.held(self.comm.rank) if plan.chunks[i].spec.fqn in self.snapshot.doubtful]
        for i, data, _ in views(plan, numbers, self.comm.rank, self.snapshot.pieces, behind=True):
            if mine.of(data) != mine.held[i]:
                raise changed(f"{plan.chunks[i].spec} chunk {plan.chunks[i].box}")

    def _choose_codecs(self, job: JobPlan) -> frozenset[str]:
        """Return the roles whose chunks this rank encodes, by a look at a little of what it owns of each."""
        plan, rank = job.plan, self.comm.rank
        check_asked(self.ways.codec, {spec.role for spec in job.graph.specs})
        largest: dict[str, Chunk] = {}
        for i in plan.held(rank):
            chunk = plan.chunks[i]
            if plan.owners[i] == rank and chunk.nbytes > (
                largest[chunk.spec.role].nbytes if chunk.spec.role in largest else 0
            ):
                largest[chunk.spec.role] = chunk
        chosen = decide(self.store.url, {r: partial(self._sample, c) for r, c in largest.items()}, self.ways.codec)
        self._reasons = {role: choice.why for role, choice in chosen.items()}
        return frozenset(role for role, choice in chosen.items() if choice.codec == ZSTD)

    def _sample(self, chunk: Chunk) -> list[tuple[memoryview, int]]:
        flat = self.snapshot.pieces.view(chunk.spec, chunk.box).reshape(-1)
        return [(tensor_bytes(flat[: SAMPLE_BYTES // chunk.spec.itemsize]), chunk.spec.itemsize)]

    def _finish(self, attempt: Attempt, packer: Packer, content: Content) -> Done:
        self._stored = content
        done = write_part(attempt, self.comm.rank, packer, content)
        done.reasons = self._reasons
        self.watcher.committing()
        return done

    def _beat(self, nbytes: int) -> None:
        self.watcher.advance(nbytes)
        self.comm.beat()

    def _judge(self, divergences: list[Divergence]) -> None:
        if divergences and self.ways.policy == "error":
            more = f"; … and {len(divergences) - SHOWN} more" if len(divergences) > SHOWN else ""
            raise ReplicaDivergence("; ".join(map(str, divergences[:SHOWN])) + more)
        if self.comm.rank == 0:
            for one in divergences[:SHOWN]:
                log.warning("%s", one)
            if len(divergences) > SHOWN:
                log.warning("… and %d more diverging chunks", len(divergences) - SHOWN)

    # -- commit ---------------------------------------------------------------------------------------------------

    def _commit(
        self, attempt: Attempt, job: JobPlan, hellos: list[Hello], own: Done, divergences: list[Divergence]
    ) -> SaveReport:
        comm = self.comm
        done = [msgspec.msgpack.decode(data, type=Done) for data in comm.share("written", msgspec.msgpack.encode(own))]
        totals = totals_of(job, done, divergences)
        if comm.rank == 0:
            _tell(done)

        def work() -> bytes:
            check_written(attempt, done, comm.beat)
            hosts = tuple(h.host for h in hellos)
            found = publish(attempt, job, hellos[0].engine, hosts, done, divergences, totals, log=self.ways.log)
            return msgspec.msgpack.encode(found)

        try:
            size = comm.on_root("commit", work)
        except RankFailure as error:
            # Rank 0 was lost while it published: nobody can know how far it came.
            doubt = "the step may be there all the same, ckpt.latest tells"
            raise RankFailure("commit", {r: f"{text}; {doubt}" for r, text in error.failures.items()}) from error
        return SaveReport(
            step=attempt.step,
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


def _tell(done: list[Done]) -> None:
    # A rank knows the tensors of its own pipeline stage.
    doubtful = sorted({name for d in done for name in d.assumed})
    if doubtful:
        log.warning(
            "diverging tensors that count as whole on every tensor-parallel rank, as no framework says otherwise: "
            "%s; every rank's copy is kept. If they are slices, give them a rule with dim (docs/rules.md)",
            ", ".join(doubtful[:SHOWN]) + (", …" if len(doubtful) > SHOWN else ""),
        )
    nbytes, shown = sum(d.underived for d in done), next((d.underived_shown for d in done if d.underived_shown), [])
    if nbytes:
        log.info("%d bytes of params are not cast(master) and were stored: %s", nbytes, shown[0])
