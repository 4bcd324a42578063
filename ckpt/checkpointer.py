"""One object for a training loop: when to save, how full, what to keep, and the gradient log between full saves."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ckpt.engine.base import ReplayableAdapter
from ckpt.engine.find import adapter_for
from ckpt.errors import CkptError, ConfigError, NoSuchCheckpoint
from ckpt.gradlog.copies.peers import Peers, checked_peers
from ckpt.gradlog.costs import Costs
from ckpt.gradlog.hooks import Hook
from ckpt.gradlog.retention import retire
from ckpt.gradlog.rivals import tell_of_others
from ckpt.gradlog.together import LOOK_EVERY, Together
from ckpt.gradlog.writing.log import GradientLog, checked_codec, new_head
from ckpt.loading import load
from ckpt.repo.lineage import LogHead, log_behind
from ckpt.repo.repository import Repository
from ckpt.runtime.extras import checked_extra
from ckpt.runtime.memory import blocks_of
from ckpt.runtime.save_job import Ways
from ckpt.runtime.torch_comm import communicator
from ckpt.saving import begin
from ckpt.store.limited import limited, positive
from ckpt.store.open import Root, default_root, open_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt.report import LoadReport, SaveReport
    from ckpt.runtime.handle import SaveHandle

log = logging.getLogger("ckpt")

LOG_BUDGET = 256 << 20
NO_LOG = 0
"""What a full save says that no log passes through: that it is a checkpointer's, which may remove it again."""
MOST_DOUBLINGS = 10
FIRST_EVERY = 100
"""Steps to the second full save where nothing is measured yet."""
MTBF = 24 * 3600.0


class Checkpointer:
    """Keeps a job's checkpoints: full ones behind the training, and between them a log of gradients, step by step.

    Making one is collective, and resumes: if ``root`` holds anything, the newest state there is loaded into ``engine``,
    the logged steps are replayed, and ``resumed`` is the load's report. Then call :meth:`step` behind each optimizer
    step, on every rank, and :meth:`close` at the end (or use it as a context manager). With ``hook=True`` neither is
    needed.

    Args:
        engine: as in :func:`ckpt.save`.
        root: as in :func:`ckpt.save`.
        full_every: optimizer steps between full saves, or ``"auto"``: as many as make the time lost least, from what
            saving and replaying are measured to cost and from ``mtbf`` (docs/gradient-log.md).
        gradients: keep a gradient log between full saves.
        keep: full saves to keep, each with the log behind it; None: all.
        extra: as in :func:`ckpt.save`.
        resume: load what ``root`` holds.
        flush_every: steps whose log records are made durable together.
        log_codec: how gradients are stored: ``"none"``, or ``"zstd"`` (byte planes).
        log_budget: bytes of log records that a rank holds before training waits for the store.
        mtbf: mean time between failures of the whole job, in seconds.
        hook: call :meth:`step` by itself, behind the last call that a training step of this engine consists of:
            ``engine.step()`` at the end of an accumulation window, ``train_batch()`` of a pipeline; in a torch loop the
            optimizer's step, the scaler's update or the scheduler's step, whichever comes last. :meth:`close` is called
            when the process ends.
        peers: copies of each log record in the memory of other hosts, beside one in the own host's (0: none at all).
            After the loss of a host its ranks' records come from there (docs/gradient-log.md).
        peer_memory: bytes of copies that a rank keeps, the newest; None: half of what ``/dev/shm`` has free, shared by
            the host's ranks.
        budget, io_limit, timeout, on_divergence, codec: as in :func:`ckpt.save`.
        load_options: more arguments of :func:`ckpt.load`.

    Raises:
        ConfigError: an argument is wrong, or (with ``gradients``) an optimizer's steps cannot be replayed, or (with
            ``hook``) it cannot be told where a step of this engine ends.
        CkptError: whatever :func:`ckpt.load` raises.
    """

    def __init__(
        self,
        engine: object,
        root: Root | None = None,
        *,
        full_every: int | Literal["auto"] = "auto",
        gradients: bool = True,
        keep: int | None = 2,
        extra: Mapping[str, Any] | None = None,
        resume: bool = True,
        flush_every: int = 1,
        log_codec: str = "none",
        log_budget: int = LOG_BUDGET,
        mtbf: float = MTBF,
        hook: bool = False,
        peers: int = 0,
        peer_memory: int | None = None,
        budget: int | None = None,
        io_limit: float | None = None,
        timeout: float | None = None,
        on_divergence: str = "warn",
        codec: str | Mapping[str, str] = "auto",
        load_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._auto = full_every == "auto"
        self.full_every = FIRST_EVERY if self._auto else _counted("full_every", full_every)
        self._keep = None if keep is None else _counted("keep", keep)
        self._flush_every = _counted("flush_every", flush_every)
        self._log_budget = _counted("log_budget", log_budget)
        self._log_codec = checked_codec(log_codec)
        self._mtbf, self._gradients = positive("mtbf", mtbf), gradients
        peers, peer_memory = checked_peers(peers, peer_memory)
        self._engine, self._root, self._extra = engine, default_root(root), checked_extra(extra)
        self._timeout, self._io_limit = timeout, io_limit
        self._ways = Ways(overwrite=True, policy=on_divergence, codec=codec, budget=budget)
        self._ways.check()
        blocks_of(budget)
        self._store = limited(open_store(self._root), io_limit)
        self._comm = communicator()
        self._adapter = adapter_for(engine)
        self._handle: SaveHandle | None = None
        self._retiring: threading.Thread | None = None
        self.last_report: SaveReport | None = None
        self._log: GradientLog | None = None
        self._costs = Costs()
        self._ended = self._not_before = 0
        self._pid = os.getpid()
        said = {"gradients": gradients, "keep": keep, "resume": resume, "mtbf": mtbf, "peers": peers, "hook": hook}
        self._agree(full_every=full_every, **said)
        self._together = Together(self._comm, self._store, timeout)
        if self._comm.rank == 0:
            tell_of_others(self._store)
        self._peers: Peers | None = None
        self._hook = Hook(hook, self._comm, self._adapter, self._step, self.close, timeout)
        self.resumed: LoadReport | None = self._resume(load_options or {}) if resume else None
        self.number = self._adapter.step() if self.resumed is None else self.resumed.step
        """steps taken, of this job and of those that it continues"""
        if gradients and peers:
            with self._comm.joint("peers", timeout):
                self._peers = Peers(self._comm, self._store.url, peers, peer_memory)
        self.last_full = self.number if self.resumed is None else self._base_of(self.resumed)
        if self._peers is not None:
            self._peers.trim(self.last_full)
        self._start()
        self._hook.begin()

    # -- for the loop -------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Log the optimizer step that was just taken (or skipped), and begin a full save if one is due.

        Every rank calls it once behind every optimizer step, also behind one that an overflow made the scaler skip:
        steps are counted here, on from the one that was loaded. It returns in the time that the small state takes;
        what fails of the log ends the log, is told in a warning, and is followed by a full save and a log of its own.

        Raises:
            ConfigError: ``hook=True`` does it; or ranks count different steps in front of a full save.
            RankFailure: ranks do not come to a full save: names them, and what they have done if that is known.
            CkptError: the full save before has failed, and this rank has not heard of it.
        """
        self._hook.refuse_call()
        self._step()

    def _step(self) -> None:
        self.number = number = self.number + 1
        self._costs.step(self._handle is not None and not self._handle.durable.done())
        if self._log is not None:
            self._log.end_step(number, self._extra)
        self.number = number = self._together.counted(number, self._log)
        self._look_at_save()
        if number - self.last_full >= self.full_every or (
            number >= self._not_before and self._together.has_ended(number, self._log)
        ):
            self._full(number)

    def save(self) -> SaveHandle:
        """Begin a full save now. Every rank calls it at the same step."""
        self._full(self.number)
        if self._handle is None:
            raise ConfigError("no save was begun")
        return self._handle

    def flush(self) -> None:
        """Wait until everything logged by this rank is durable.

        Raises:
            ReplayError: it never will be.
        """
        if self._log is not None:
            self._log.flush()

    @property
    def log_payload(self) -> int:
        """Bytes of gradients that this rank has logged, before the codec."""
        return 0 if self._log is None else self._log.payload_bytes

    @property
    def log_written(self) -> int:
        """Bytes of the log that this rank has stored."""
        return 0 if self._log is None else self._log.written

    def close(self) -> None:
        """Make everything durable and end the log. Not collective; the engine may be used and saved afterwards."""
        if os.getpid() != self._pid:  # a forked child has the object, and none of its threads
            return
        self._hook.remove()
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._handle is not None:
            self._handle.durable.settled()
            self._look_at_save()
        if self._peers is not None:
            # At the end of the process an error that nobody caught is over, but the interpreter remembers it.
            failed = sys.exc_info()[0] is not None or getattr(sys, "last_value", None) is not None
            self._peers.close(failed=failed)
            self._peers = None
        if self._retiring is not None:
            self._retiring.join()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- beginning ----------------------------------------------------------------------------------------------------

    def _agree(self, **said: object) -> None:
        """Check that all ranks save and log alike; else they would wait for each other at different steps."""
        mine = ", ".join(f"{name}={value}" for name, value in said.items())
        with self._comm.joint("checkpointer", self._timeout):
            told = [data.decode() for data in self._comm.gather("checkpointer", mine.encode)]
            if len(set(told)) > 1:
                sides = {text: [rank for rank, one in enumerate(told) if one == text] for text in told}
                lines = "; ".join(f"{text} on rank(s) {', '.join(map(str, r[:8]))}" for text, r in sides.items())
                raise ConfigError(f"ranks disagree on the arguments of ckpt.Checkpointer: {lines}")

    def _resume(self, options: Mapping[str, Any]) -> LoadReport | None:
        def work() -> bytes:
            return b"1" if Repository(self._store).newest() is not None else b""

        with self._comm.joint("load", self._timeout):
            found = bool(self._comm.on_root("resume", work))
        if not found:
            return None
        try:
            return load(self._engine, self._root, extra=self._extra, timeout=self._timeout, **options)
        except CkptError as error:
            if isinstance(error, NoSuchCheckpoint) and options.get("step") is None:
                return None
            error.add_note("arguments of ckpt.load, as replay=False, go into ckpt.Checkpointer(load_options={...})")
            raise

    @staticmethod
    def _base_of(report: LoadReport) -> int:
        return report.step if report.base is None else report.base

    def _start(self) -> None:
        """Begin the log that follows what was loaded, or with a full save if nothing was."""
        step = self.number
        report = self.resumed
        if not self._gradients:
            if report is None:
                self._full(step)
            return

        def work() -> bytes:
            if report is None:
                return msgspec.json.encode(new_head(step, self._comm.world))
            if report.base is not None:
                follows = log_behind(self._store, report.base, report.step)
                return msgspec.json.encode(new_head(step, self._comm.world, follows=follows))
            commit = Repository(self._store).read_commit(report.step)
            head = new_head(step, self._comm.world, attempt=commit.attempt, follows=commit.log or None)
            return msgspec.json.encode(head)

        self._begin_log(work)
        if report is None:
            self._full(step, fresh=False)

    def _begin_log(self, head: Any) -> None:
        if not isinstance(self._adapter, ReplayableAdapter):
            raise ConfigError(
                f"the gradients of a {self._adapter.kind} engine cannot be logged yet; gradients=False saves without"
            )
        comm, adapter = self._comm, self._adapter
        with comm.joint("log", self._timeout):
            found = msgspec.json.decode(comm.on_root("log", head), type=LogHead)
            self._log = GradientLog(
                comm,
                self._store,
                adapter,
                self._adapter.describe,
                found,
                flush_every=self._flush_every,
                budget=self._log_budget,
                codec=self._log_codec,
                peers=self._peers,
            )

    # -- full saves ---------------------------------------------------------------------------------------------------

    def _full(self, number: int, *, fresh: bool | None = None) -> None:
        """Begin a full save; ``fresh``: with a log that begins here, because the one before has ended."""
        if fresh is None:
            fresh = self._together.meet(number, self._log) and self._gradients
        if fresh:
            # What ends one log after the other (two optimizer steps a call) must not cost a full save in each step.
            self._not_before = number + LOOK_EVERY * 2 ** min(self._ended, MOST_DOUBLINGS)
            self._ended += 1
            if self._log is not None:
                self._log.close()
            self._begin_log(lambda: msgspec.json.encode(new_head(number, self._comm.world)))
        ways = replace(self._ways, log=NO_LOG if self._log is None else self._log.head.number)
        if self._log is not None:
            self._log.rotate()
        began = time.monotonic()
        self._handle = begin(
            self._engine,
            self._root,
            ways,
            step=number,
            extra=self._extra,
            io_limit=self._io_limit,
            timeout=self._timeout,
        )
        self._costs.full(time.monotonic() - began)
        self.last_full = number
        if self._auto:
            self._choose_interval()

    def _look_at_save(self) -> None:
        handle = self._handle
        if handle is None or not handle.durable.done():
            return
        self._handle = None
        error = handle.durable.peek()
        if error is not None:
            log.warning("the full save of step %s failed; the log goes on from the one before: %s", handle.step, error)
            return
        self.last_report = report = handle.durable.wait()
        if self._peers is not None:
            self._peers.trim(report.step)
        if (
            self._comm.rank == 0
            and self._keep is not None
            and (self._retiring is None or not self._retiring.is_alive())
        ):
            thread = threading.Thread(target=self._retire, name="ckpt retention", daemon=True)
            with suppress(RuntimeError):  # the interpreter ends, and starts none any more: the next job does it
                thread.start()
                self._retiring = thread

    def _retire(self) -> None:
        try:
            retire(self._store, self._keep or 1)
        except CkptError as error:
            log.warning("old checkpoints could not be removed: %s", error)

    def _choose_interval(self) -> None:
        """Agree on the steps to the next full save; what rank 0 has measured counts."""

        def work() -> bytes:
            return str(self._costs.best(self._mtbf, self.full_every)).encode()

        with self._comm.joint("policy", self._timeout):
            self.full_every = int(self._comm.on_root("policy", work))


def _counted(name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name}={value!r}: expected a whole number from 1 on")
    return value
