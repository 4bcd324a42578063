"""How a training job is saved: now, or behind its next forward and backward.

What a save does, step by step, is told in ``runtime/save_job.py``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ckpt.engine.find import adapter_for
from ckpt.errors import ConfigError, SaveInFlight
from ckpt.repo.repository import checked_step
from ckpt.report import SaveReport, Stopwatch
from ckpt.runtime.agree import exchange_hellos, hello_of
from ckpt.runtime.behind import in_flight, launch, meeting, missed, wait_for_last
from ckpt.runtime.capture import Moment
from ckpt.runtime.describing import layout_of
from ckpt.runtime.extras import collect
from ckpt.runtime.guard import check_whole
from ckpt.runtime.handle import SaveHandle
from ckpt.runtime.pieces import PieceTable
from ckpt.runtime.save_job import SaveJob, Watcher, Ways
from ckpt.runtime.snapshot import Snapshot, private_item, private_pieces, versions_of
from ckpt.runtime.timeout import checked_timeout, default_timeout
from ckpt.runtime.torch_comm import background_communicator, communicator
from ckpt.store.limited import limited
from ckpt.store.open import Root, default_root, open_store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt.runtime.pieces import Piece
    from ckpt.store.base import Store

log = logging.getLogger("ckpt")

ON_BUSY = ("wait", "refuse")


def save(
    engine: object,
    root: Root | None = None,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    on_divergence: str = "warn",
    codec: str | Mapping[str, str] = "auto",
    budget: int | None = None,
    io_limit: float | None = None,
    timeout: float | None = None,
) -> SaveReport:
    """Save the whole training state of ``engine``; durable when it returns. Collective: every rank must call it.

    Args:
        engine: a ``deepspeed.DeepSpeedEngine``, a tuple like ``(model, optimizer, scheduler)`` of torch's or Megatron's
            objects (docs/engines.md), any of them in a :class:`ckpt.Parallel`, or an object with the methods of
            :class:`ckpt.engine.base.EngineAdapter`. It must stand between two optimizer steps.
        root: path or URL of the repository (``file://``, ``s3://bucket/prefix``, docs/stores.md); default
            ``CKPT_ROOT``, else ``./checkpoints``.
        step: number of the checkpoint; default: the engine's count of optimizer steps.
        extra: name -> object with ``state_dict``/``load_state_dict`` (a data loader), or a plain JSON-able value.
            A mapping inside of one comes back as a plain dict, whatever its class.
        overwrite: replace the step if it is committed already; otherwise that is an error.
        on_divergence: what to do if ranks that should hold the same bytes do not: ``"warn"`` (log, record in the
            checkpoint, keep the majority's copy, and every copy of a buffer), ``"error"``, or ``"keep-all"``.
        codec: how chunks are stored: ``"auto"`` (compressed where the store is slower than the compressor, measured
            for each role), ``"none"``, ``"zstd"``, or a mapping of roles to these.
        budget: bytes of host memory that each rank may use beside the state, a whole number, at least 8 MiB (default
            256 MiB).
        io_limit: bytes a second that each rank moves at most, a positive number.
        timeout: seconds without a sign of life after which a rank counts as lost (default ``CKPT_TIMEOUT``, 300).

    Returns:
        What was held, unique, written and reused, in bytes.

    Raises:
        RankFailure: a step failed on some ranks, or some did not call; the same error on every rank.
        ConfigError, LayoutError, BudgetTooSmall, StoreError, CheckpointExists: the same cause on every rank.
        CkptError: the asynchronous save before, which is finished first, has failed, and a rank has not heard of it.

    After an error nothing is committed, the previous steps are untouched, and training can go on. The one exception is
    a :class:`RankFailure` in step ``commit``: rank 0 was lost while it published, and the step may be there or not.
    """
    watch = Stopwatch()
    wait_for_last()
    comm = communicator()

    def prepare() -> tuple[Store, Snapshot]:
        ways.check()
        return _store(root, io_limit), _snapshot(comm.rank, engine, step, extra, private=False)

    with comm.joint("save", timeout):
        ways = Ways(overwrite, on_divergence, codec, budget)
        return SaveJob(comm, watch, prepare, ways).run()


def async_save(
    engine: object,
    root: Root | None = None,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    on_divergence: str = "warn",
    codec: str | Mapping[str, str] = "auto",
    budget: int | None = None,
    io_limit: float | None = None,
    on_busy: str = "wait",
    timeout: float | None = None,
) -> SaveHandle:
    """Save as :func:`save` does, behind the training: returns at once. Every rank must call it at the same step.

    The state is read while the next forward and backward run, which do not change it; what they do change (buffers,
    counters, schedulers, generators, ``extra``) is copied before the call returns. A hook in front of every
    ``torch.optim.Optimizer.step`` of this process waits for what has not been read yet. Whoever changes parameters or
    optimizer state by other means waits for ``handle.staged`` first.

    ``on_busy``: if the asynchronous save before is not durable yet, ``"wait"`` for it, or ``"refuse"`` (which costs a
    short meeting of the ranks in each call). It must be the same on all ranks: those that differ in it wait for each
    other until the timeout. All other arguments are those of :func:`save`; ``budget`` is how much a rank may hold that
    is not stored yet: what it owns beyond that is stored before the next optimizer step, at the rate of ``io_limit``.

    Returns:
        ``handle.staged.wait()``, ``handle.durable.wait()``, ``handle.progress()``, ``handle.cancel()``. What fails in
        the background fails on all ranks: it is logged, raised by ``wait`` and, if a rank has not asked, by the next
        save. Training goes on. At the end of the interpreter an unfinished save is finished; call
        ``handle.durable.wait()`` before ``torch.distributed.destroy_process_group()``.

    Raises:
        ConfigError: ``on_busy`` or ``timeout`` is none.
        SaveInFlight: with ``on_busy="refuse"``.
        CkptError: the asynchronous save before has failed, and a rank has not heard of it.
    """
    ways = Ways(overwrite, on_divergence, codec, budget)
    return begin(engine, root, ways, step=step, extra=extra, io_limit=io_limit, on_busy=on_busy, timeout=timeout)


def begin(
    engine: object,
    root: Root | None,
    ways: Ways,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    io_limit: float | None = None,
    on_busy: str = "wait",
    timeout: float | None = None,
) -> SaveHandle:
    """Begin an asynchronous save; :func:`async_save` says how."""
    watch = Stopwatch()
    if on_busy not in ON_BUSY:
        raise ConfigError(f"on_busy={on_busy!r}: expected one of {', '.join(ON_BUSY)}")
    patience = default_timeout() if timeout is None else checked_timeout(timeout, f"timeout={timeout!r}")
    if on_busy == "wait":
        wait_for_last()
    comm = background_communicator(timeout)
    meeting(comm)
    _settle_last(on_busy, timeout)
    found: tuple[Store, Snapshot] | Exception
    try:
        ways.check()
        found = _store(root, io_limit), _snapshot(comm.rank, engine, step, extra, private=True)
    except Exception as error:  # told on all ranks alike, in the background: the others are on their way by now
        found = error
    handle = SaveHandle(step if isinstance(found, Exception) else found[1].step)
    now = Moment.now([] if isinstance(found, Exception) else found[1].pieces.devices())

    def prepare() -> tuple[Store, Snapshot]:
        if isinstance(found, Exception):
            raise found
        return found

    def run() -> SaveReport:
        with now.beside(), comm.joint("async_save", timeout):
            return SaveJob(comm, watch, prepare, ways, watcher).run()

    watcher = Watcher(handle.expect, handle.advance, handle.store, lambda: handle.staged.reach(None), handle.committing)
    launch(handle, run, patience, comm.pulse)
    return handle


def _settle_last(on_busy: str, timeout: float | None) -> None:
    """Come to terms with the asynchronous save before, if there was one.

    Args:
        on_busy: see :func:`async_save`.
        timeout: seconds, as everywhere.

    Raises:
        SaveInFlight: it is not durable on some rank, and ``on_busy`` is ``"refuse"``.
        CkptError: it has failed, and a rank has not heard of it.
    """
    last = in_flight()
    # All ranks have failed alike, or did not even take part: then they all come to talk about it.
    failed = missed() or (last is not None and last.durable.peek() is not None)
    if on_busy == "wait" and not failed:
        return
    front = communicator()
    with front.joint("async_save", timeout):
        exchange_hellos(front, lambda: hello_of("async_save"))
        busy = front.gather("busy", lambda: b"" if last is None or last.durable.done() else b"1")
    ranks = [rank for rank, one in enumerate(busy) if one]
    if ranks:
        raise SaveInFlight(
            f"the asynchronous save before this one is not durable yet on rank(s) {', '.join(map(str, ranks[:8]))}"
        )


def _store(root: Root | None, io_limit: float | None) -> Store:
    return limited(open_store(default_root(root)), io_limit)


def _snapshot(
    rank: int, engine: object, step: int | None, extra: Mapping[str, Any] | None, *, private: bool
) -> Snapshot:
    """Return what this rank has, as it is now; with ``private``, nothing in it changes in forward and backward."""
    adapter = adapter_for(engine)
    check_whole(adapter.module())
    state = adapter.describe()
    number = checked_step(adapter.step() if step is None else step)
    items = collect(state.objects, extra)
    pieces: Sequence[Piece] = state.shards
    doubtful: set[str] = set()
    if private:
        stepped = getattr(adapter, "stepped_by_torch", False)
        pieces, doubtful = private_pieces(pieces, state.derived, stepped=stepped)
    return Snapshot(
        step=number,
        kind=adapter.kind,
        layout=layout_of(rank, state),
        pieces=PieceTable(pieces),
        items=[private_item(one) for one in items] if private else items,
        assumed=frozenset(state.assumed),
        behind=private,
        versions=versions_of(pieces) if private else (),
        doubtful=frozenset(doubtful),
    )
