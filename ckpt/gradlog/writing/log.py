"""The gradient log of one rank while the job trains: hooks, records, and the thread that makes them durable.

What a step costs the training: one pass over the gradient (into half precision, where that holds it), one digest of
what was stepped behind the step and one in front of the next, and the small state. Encoding, framing and storing happen
behind the next forward and backward.
"""

from __future__ import annotations

import logging
import time
import uuid
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from ckpt.engine.base import dtype_name
from ckpt.errors import ConfigError, ReplayError
from ckpt.format.codec import codec_of, encode
from ckpt.format.frames import frame_of
from ckpt.gradlog.record import (
    VERSION,
    Call,
    Gradient,
    Inner,
    Object,
    Options,
    RankHead,
    Record,
    encode_record,
)
from ckpt.gradlog.replaying.deviation import Sampler
from ckpt.gradlog.share import share
from ckpt.gradlog.supported import kernel_of, refuse_unsupported
from ckpt.gradlog.writing.capture import Capture, Step, Taken, options_of, sum_of_squares
from ckpt.gradlog.writing.order import Order
from ckpt.gradlog.writing.segments import SegmentWriter
from ckpt.gradlog.writing.watch import Buffers, Watch
from ckpt.layout.spec import BUFFER, PARAM
from ckpt.repo.lineage import LogHead, begin_log, log_key
from ckpt.repo.log_directory import directory_of, write_directory
from ckpt.repo.log_files import RANK_HEAD, rank_prefix
from ckpt.runtime.extras import ENGINE, collect
from ckpt.runtime.publish import now
from ckpt.runtime.staging import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ckpt.engine.base import EngineState, LiveShard, ReplayableAdapter, Stepped
    from ckpt.format.digest import Buffer
    from ckpt.gradlog.copies.peers import Peers
    from ckpt.gradlog.record import Loose
    from ckpt.gradlog.share import Shared
    from ckpt.runtime.comm import Comm
    from ckpt.runtime.extras import Item
    from ckpt.store.base import Store

log = logging.getLogger("ckpt")

BLOCK = 4 << 20
"""Bytes that are encoded at once."""
CODECS = ("none", "zstd")


class GradientLog:
    """A log that begins at the state the engine is in. Making one is collective, inside of an operation.

    Args:
        comm: all ranks.
        store: the repository's.
        adapter: of the engine.
        describe: the adapter's.
        head: where the log begins: ``start``, and ``attempt`` or ``follows``.
        flush_every: records that are made durable together, at least 1.
        budget: bytes of records that may wait to be stored.
        codec: ``none`` or ``zstd`` (byte planes).
        peers: copies of the records in hosts' memory, if any are kept.

    Raises:
        ConfigError: the engine's optimizers cannot be logged; says why.
        LayoutError: what the ranks step does not form whole tensors.
    """

    def __init__(
        self,
        comm: Comm,
        store: Store,
        adapter: ReplayableAdapter,
        describe: Callable[[], EngineState],
        head: LogHead,
        *,
        flush_every: int = 1,
        budget: int = 256 << 20,
        codec: str = "none",
        peers: Peers | None = None,
    ) -> None:
        self.rank, self._adapter, self._codec, self._describe = comm.rank, adapter, codec, describe
        state = comm.run("describe", describe)
        stepped = comm.run("stepped", lambda: refuse_unsupported(adapter.stepped()))
        shared = share(comm, stepped)
        own = shared.own
        encoded = comm.on_root("log", lambda: msgspec.json.encode(begin_log(store, head)))
        self.head = msgspec.json.decode(encoded, type=LogHead)
        self.key = log_key(self.head.number)
        self._stepped, self._buffers = stepped, Buffers(adapter.modules())
        self._watch = Watch(own, loose_of(state, stepped))
        self._capture = Capture(own, self._before)
        self._sampler = Sampler(own)
        comm.run("head", lambda: self._write_head(store, comm, shared))
        copy = None if peers is None else partial(peers.copy, self.head.run)
        self._writer = SegmentWriter(store, self.key, comm.rank, flush_every=flush_every, budget=budget, copy=copy)
        self.step = self.head.start
        self.broken: str | None = None
        self.taken: int | None = None
        """optimizer steps between the last two calls; None: the log has ended before"""
        self.idle = False
        """was none taken, and is there no sign of one that was skipped?"""
        self._said: list[str] = []
        self.payload_bytes = 0
        self._since = time.monotonic()

    # -- one call behind each step ----------------------------------------------------------------------------------

    def end_step(self, step: int, extra: Mapping[str, Any] | None) -> None:
        """Log what was stepped since the last call. Nothing here is collective, and nothing fails: see ``broken``.

        Args:
            step: of the engine, behind what was stepped.
            extra: as in :func:`ckpt.save`.
        """
        self.taken, self.idle = None, False
        if self.broken is not None:
            return
        try:
            self._end_step(step, extra)
        except Exception as error:
            self.give_up(f"{type(error).__name__}: {error}")

    def _end_step(self, step: int, extra: Mapping[str, Any] | None) -> None:
        steps = self._capture.drain()
        self.taken = self._capture.drained
        trouble = self._trouble(step, steps)
        if trouble is None:
            if self._buffers.replaced():
                self._watch.watch_instead(loose_of(self._describe(), self._stepped))
            changed = self._watch.loose()  # may find that too much has changed
            before, digest = self._watch.changed, ""
            if not steps:
                self._watch.check(range(len(self._capture.own)))
                digest = self._watch.look()
            else:
                digest = self._watch.look()
            trouble = before or self._watch.changed
        if trouble is not None:
            self.give_up(trouble)
            return
        self.step = step
        self._order.logged()
        items = collect(self._adapter.counters(), extra)
        options = options_of(self._capture.shown)
        nbytes = sum(one.nbytes for one in steps) + sum(tensor.nbytes for _, tensor in changed)
        self.payload_bytes += sum(one.nbytes for one in steps)
        seconds, self._since = time.monotonic() - self._since, time.monotonic()
        # Objects may hold live tensors, which the next step changes: a record is complete before this returns.
        objects, tensors = _objects(items)
        said = [one.document for one in objects if one.kind == ENGINE]  # a scaler counts the steps that it skips
        self.idle, self._said = not steps and bool(self._capture.own) and said == self._said, said
        samples = self._sampler.told(self._sampler.take())
        make = partial(self._frame, step, steps, options, objects, tensors, changed, digest, samples, seconds)
        self._writer.submit(step, nbytes + (64 << 10), make)
        if self._writer.failed is not None:
            self.give_up(f"it could not be stored: {self._writer.failed}")

    def _before(self, entries: Iterable[int]) -> None:
        self._watch.check(entries)
        self._order.steps()

    def _trouble(self, step: int, steps: Sequence[Step]) -> str | None:
        if self._capture.failed is not None:
            return f"gradients could not be taken: {self._capture.failed}"
        taken = self._capture.drained
        if taken > 1:
            return f"the optimizers have taken {taken} steps between two calls: one call is expected behind each"
        return self._watch.changed

    def give_up(self, why: str) -> None:
        """End the log here, with a warning that says why; once."""
        if self.broken is not None:
            return
        self.broken = why
        self._capture.close()
        log.warning("the gradient log of rank %d ends behind step %d: %s", self.rank, self.step, why)

    def rotate(self) -> None:
        """Let the next record begin a new file: what comes behind a full save is kept longer than what was before."""
        self._writer.rotate()

    def paused(self) -> _Paused:
        """Return a context in which optimizer steps are not logged: what replays them calls them too."""
        return _Paused(self._capture)

    @property
    def durable(self) -> int:
        """The last step whose record of this rank is durable; the log's start if there is none."""
        return self.head.start if self._writer.durable is None else self._writer.durable

    @property
    def written(self) -> int:
        """Bytes that were stored."""
        return self._writer.written

    def flush(self) -> None:
        """Wait until what was logged is durable.

        Raises:
            ReplayError: it never will be.
        """
        self._writer.flush()
        if self._writer.failed is not None:
            raise ReplayError(f"the gradient log of rank {self.rank} could not be stored: {self._writer.failed}")

    def close(self) -> None:
        """Make durable what was logged, and take the hooks away."""
        self._capture.close()
        self._writer.close()

    # -- in the thread that stores ----------------------------------------------------------------------------------

    def _frame(
        self,
        step: int,
        steps: Sequence[Step],
        options: tuple[Options, ...],
        objects: tuple[Object, ...],
        tensors: dict[str, torch.Tensor],
        changed: Sequence[tuple[Loose, torch.Tensor]],
        digest: str,
        samples: tuple[tuple[int, float], ...],
        seconds: float,
    ) -> list[Buffer]:
        stored: dict[str, Any] = dict(tensors)
        calls = []
        for one in steps:
            gradients = tuple(self._gradient(taken, f"grad/{i}", stored) for i, taken in enumerate(one.taken))
            settings = tuple(
                Options(optimizer=o, group=g, document=document) for (o, g), document in sorted(one.options.items())
            )
            calls.append(Call(gradients=gradients, options=settings))
        stored |= {said.name: tensor for said, tensor in changed}
        record = Record(
            format=VERSION,
            step=step,
            rank=self.rank,
            calls=tuple(calls),
            options=options,
            objects=objects,
            loose=tuple(said for said, _ in changed),
            digest=digest,
            square=sum_of_squares(taken for one in steps for taken in one.taken) if steps else None,
            samples=samples,
            seconds=round(seconds, 6),
            run=self.head.run,
        )
        return frame_of(step, encode_record(record, stored))

    def _gradient(self, taken: Taken, name: str, stored: dict[str, Any]) -> Gradient:
        data, scale = taken.kept.data, taken.kept.scale
        said = Gradient(
            name=name,
            entries=taken.entries,
            dtype=dtype_name(data.dtype),
            wide=taken.wide,
            scale="" if scale is None else float(scale).hex(),
        )
        if self._codec == "none" or not data.nbytes:
            stored[name] = data
            return said
        raw, codec = tensor_bytes(data), codec_of(data.element_size())
        blocks = [encode(raw[at : at + BLOCK], codec, data.element_size()) for at in range(0, raw.nbytes, BLOCK)]
        if sum(map(len, blocks)) >= raw.nbytes:
            stored[name] = data
            return said
        stored[name] = ("uint8", blocks)
        return msgspec.structs.replace(said, codec=codec, block=BLOCK, blocks=tuple(map(len, blocks)))

    # -- once -------------------------------------------------------------------------------------------------------

    def _write_head(self, store: Store, comm: Comm, shared: Shared) -> None:
        if comm.rank == 0:
            write_directory(store, self.head.number, directory_of(shared.logged(), comm.world, self.head.run))
        head = RankHead(
            format=VERSION,
            rank=comm.rank,
            world=comm.world,
            entries=tuple(one.entry for one in shared.own),
            kernels=tuple(kernel_of(one) for one in self._capture.optimizers),
            software=software(),
            run=self.head.run,
            peers=shared.peers,
        )
        store.put(f"{rank_prefix(self.key, comm.rank)}/{RANK_HEAD}", msgspec.json.encode(head))
        self._order = Order(self._adapter, on=comm.rank == 0)


class _Paused:
    def __init__(self, capture: Capture) -> None:
        self._capture = capture

    def __enter__(self) -> None:
        self._capture.paused = True

    def __exit__(self, *_: object) -> None:
        self._capture.paused = False


def checked_codec(codec: str) -> str:
    """Return a codec's name.

    Raises:
        ConfigError: it is none.
    """
    if codec not in CODECS:
        raise ConfigError(f"codec={codec!r} of the gradient log: expected one of {', '.join(CODECS)}")
    return codec


def software() -> dict[str, str]:
    """Return the versions of what computes a step."""
    found = {}
    for name in ("ckpt", "torch", "deepspeed"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    found["device"] = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    )
    return found


def loose_of(state: EngineState, members: Sequence[Stepped]) -> list[LiveShard]:
    """Return what changes by other means than an optimizer's step, if it changes.

    Optimizers make their states at the first step, so it is not those that say which parameters are stepped.
    """
    stepped = {fqn for one in members for fqn in one.members} | state.derived
    stepped |= {one.spec.fqn for one in state.shards if one.spec.role not in (PARAM, BUFFER)}
    return [
        one
        for one in state.shards
        if one.spec.role == BUFFER or (one.spec.role == PARAM and one.spec.fqn not in stepped)
    ]


def _objects(items: Sequence[Item]) -> tuple[tuple[Object, ...], dict[str, torch.Tensor]]:
    found = []
    tensors: dict[str, torch.Tensor] = {}
    for item in items:
        names = [f"object/{item.kind}/{item.name}/{i}" for i in range(len(item.tensors))]
        copies = [tensor.detach().to("cpu", copy=True).contiguous() for tensor in item.tensors]
        inner = tuple(Inner(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in zip(names, copies, strict=True))
        found.append(Object(name=item.name, kind=item.kind, document=item.document.decode(), tensors=inner))
        tensors.update(zip(names, copies, strict=True))
    return tuple(found), tensors


def new_head(start: int, world: int, *, attempt: str = "", follows: int | None = None) -> LogHead:
    """Return what a log says that begins at ``start``; its number is given by :func:`begin_log`."""
    return LogHead(
        format=VERSION,
        number=0,
        start=start,
        world=world,
        attempt=attempt,
        follows=follows,
        created=now(),
        run=uuid.uuid4().hex,
    )
