"""One object for a training loop: when to save, how full, what to keep, and the gradient log between full saves."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ckpt.engine.base import ReplayableAdapter
from ckpt.engine.find import adapter_for
from ckpt.errors import CkptError, ConfigError, NoSuchCheckpoint
from ckpt.gradlog.costs import Costs
from ckpt.gradlog.log import GradientLog, checked_codec, new_head
from ckpt.gradlog.retention import retire
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
LOOK_EVERY = 8
"""Steps between two looks at whether the log of any rank has ended."""
MOST_DOUBLINGS = 10
FIRST_EVERY = 100
"""Steps to the second full save where nothing is measured yet."""
MTBF = 24 * 3600.0


class Checkpointer:
    """Keeps a job's checkpoints: full ones behind the training, and between them a log of gradients, step by step.

    Making one is collective, and resumes: if ``root`` holds anything, the newest state there is loaded into ``engine``,
    the logged steps are replayed, and ``resumed`` is the load's report. Then call :meth:`step` behind each optimizer
    step, on every rank, and :meth:`close` at the end (or use it as a context manager).

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
        budget, io_limit, timeout, on_divergence, codec: as in :func:`ckpt.save`.
        load_options: more arguments of :func:`ckpt.load`.

    Raises:
        ConfigError: an argument is wrong, or (with ``gradients``) an optimizer's steps cannot be replayed.
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
        self._agree(full_every=full_every, gradients=gradients, keep=keep, resume=resume, mtbf=mtbf)
        self.resumed: LoadReport | None = self._resume(load_options or {}) if resume else None
        self.number = self._adapter.step() if self.resumed is None else self.resumed.step
        """steps taken, of this job and of those that it continues"""
        self.last_full = self.number if self.resumed is None else self._base_of(self.resumed)
        self._start()

    # -- for the loop -------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Log the optimizer step that was just taken (or skipped), and begin a full save if one is due.

        Every rank calls it once behind every optimizer step, also behind one that an overflow made the scaler skip:
        steps are counted here, on from the one that was loaded. It returns in the time that the small state takes;
        what fails of the log ends the log, is told in a warning, and is followed by a full save and a log of its own.

        Raises:
            CkptError: the full save before has failed, and this rank has not heard of it.
        """
        self.number = number = self.number + 1
        self._costs.step(self._handle is not None and not self._handle.durable.done())
        if self._log is not None:
            self._log.end_step(number, self._extra)
        self._look_at_save()
        if number - self.last_full >= self.full_every or (number >= self._not_before and self._log_ended(number)):
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
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._handle is not None:
            self._handle.durable.settled()
            self._look_at_save()
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
        except NoSuchCheckpoint:
            return None

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
            )

    # -- full saves ---------------------------------------------------------------------------------------------------

    def _full(self, number: int, *, fresh: bool | None = None) -> None:
        """Begin a full save; ``fresh``: with a log that begins here, because the one before has ended."""
        if fresh is None:
            fresh = self._gradients and self._any_broken()
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
        self.last_report = handle.durable.wait()
        if (
            self._comm.rank == 0
            and self._keep is not None
            and (self._retiring is None or not self._retiring.is_alive())
        ):
            self._retiring = threading.Thread(target=self._retire, name="ckpt retention", daemon=True)
            self._retiring.start()

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

    # -- a log that has ended -----------------------------------------------------------------------------------------

    def _log_ended(self, number: int) -> bool:
        """Has the log of any rank ended, and is this the step at which all know of it?

        A rank whose log has ended says so, and when all are to act on it: late enough that all will have heard, because
        ranks of one job do not run a step ahead of each other.
        """
        if self._log is None:
            return False
        kv, key = self._comm.kv, f"log/{self._log.head.number}/ended"
        if kv is None:
            return self._log.broken is not None
        if self._log.broken is not None:
            when = (number // LOOK_EVERY + 2) * LOOK_EVERY
            kv.compare_set(key, "", str(when))
        if number % LOOK_EVERY or not kv.check([key]):
            return False
        return number >= int(kv.get(key))

    def _any_broken(self) -> bool:
        if self._log is None:
            return True
        kv = self._comm.kv
        if kv is None:
            return self._log.broken is not None
        key = f"log/{self._log.head.number}/ended"
        with self._comm.joint("log", self._timeout):
            broken = self._log.broken is not None
            return any(self._comm.gather("ended", lambda: b"1" if broken else b"")) or kv.check([key])


def _counted(name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name}={value!r}: expected a whole number from 1 on")
    return value
