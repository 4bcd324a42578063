"""What a copy of several steps shares: threads, progress, marks that say "in the making", and what is done.

A destination is judged object by object: what is there whole stays, what is missing or damaged is copied. An object
that a committed step of the destination needs with *other* bytes is never replaced.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from ckpt.errors import CheckpointExists, CkptError, MissingChunk, ObjectExists, is_damage
from ckpt.format.manifest import MAX_COMMIT
from ckpt.repo.ages import COPIED
from ckpt.repo.transfer import copy_pack, trouble_with

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ckpt.format.manifest import FileRef, PackRef
    from ckpt.repo.copying import CopyReport, Progress
    from ckpt.repo.transfer import Held
    from ckpt.store.base import Store

    Claims = Callable[[str], Iterable[tuple[int, PackRef, list[Held]]]]
    Pins = Callable[[str], Iterable[tuple[int, str]]]

BEAT_SECONDS = 60.0
"""A copy says so again after this time: one pack may take hours, and its attempt was made long ago."""


class Mover:
    """Brings objects from ``src`` to ``dst``. ``checked``: pack -> places whose bytes at ``dst`` this copy has seen."""

    def __init__(
        self,
        src: Store,
        dst: Store,
        report: CopyReport,
        total: int,
        threads: int,
        progress: Progress,
        *,
        verify: bool,
    ) -> None:
        self.src, self.dst, self.report, self.verify = src, dst, report, verify
        self.meter = _Meter(total, progress, self._beat)
        self.checked: dict[str, set[tuple[int, int, str, str]]] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ckpt-copy")
        self._lock = threading.Lock()
        self._marks: dict[str, dict[str, object]] = {}
        self._marked = 0.0

    def __enter__(self) -> Mover:
        return self

    def __exit__(self, *exc: object) -> None:
        self.meter.stop.set()
        self._pool.shutdown(cancel_futures=True)

    # -- marks ---------------------------------------------------------------------------------------------------------

    def begin(self, attempts: Iterable[str]) -> None:
        """Mark the attempts (their folders) whose objects this copy is about to rely on, so that ``gc`` lets them be.

        Before anything is looked at: what is found whole must still be there at the commit.
        """
        self._marks = {f"{prefix}/attempt.json": {} for prefix in attempts}
        for key in self._marks:
            try:
                about = json.loads(self.src.get(key, 0, MAX_COMMIT))
            except CkptError as error:  # no load needs it, so it need not be there
                if not is_damage(error):
                    raise
                continue
            except (ValueError, RecursionError):
                continue
            if isinstance(about, dict):
                self._marks[key] = about
        self._mark()

    def _mark(self) -> None:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        for key, about in sorted(self._marks.items()):
            self.dst.put(key, json.dumps({**about, COPIED: now}).encode(), overwrite=True)
        self._marked = time.monotonic()

    def _beat(self) -> None:
        if time.monotonic() - self._marked > BEAT_SECONDS and self._lock.acquire(blocking=False):
            try:
                self._mark()
            finally:
                self._lock.release()

    # -- packs ---------------------------------------------------------------------------------------------------------

    def packs(self, wanted: Sequence[tuple[PackRef, list[Held]]], claims: Claims) -> None:
        """Bring packs, several at once, and check what is wanted of each. ``claims``: who needs a key at ``dst``.

        Raises:
            As :func:`~ckpt.repo.transfer.copy_pack`. What the other threads were at is stopped.
        """
        futures = [self._pool.submit(self._pack_or_stop, pack, held, claims) for pack, held in wanted]
        try:
            for future in as_completed(futures):
                with suppress(_Stopped):  # whatever stopped it is told by another one
                    future.result()
        finally:
            for future in futures:
                future.cancel()

    def _pack_or_stop(self, pack: PackRef, held: list[Held], claims: Claims) -> None:
        try:
            self._pack(pack, held, claims)
        except BaseException:
            self.meter.stop.set()
            raise

    def _pack(self, pack: PackRef, held: list[Held], claims: Claims) -> None:
        known = self.checked.get(pack.key)
        fresh = [one for one in held if known is None or one.place not in known]
        if known is not None and not fresh:
            return  # another step has brought it
        credit = _Credit(self.meter, pack.nbytes if known is None else 0)
        found = self.dst.size(pack.key)
        trusted = known is None and not self.verify
        if found == pack.nbytes and (trusted or trouble_with(self.dst, pack, fresh, credit.add) is None):
            if known is None:
                self._count(pack.nbytes, copied=False, packs=1)
        else:
            if found is not None:
                fresh += self._others(pack, claims)
            copy_pack(self.src, self.dst, pack, fresh, credit.add)
            self._count(pack.nbytes, copied=True, packs=1)
        credit.settle()
        self.checked.setdefault(pack.key, set()).update(one.place for one in fresh)

    def _others(self, pack: PackRef, claims: Claims) -> list[Held]:
        """Return what committed steps of the destination need of a pack that is about to be replaced."""
        theirs = []
        for step, ref, held in claims(pack.key):
            if ref.nbytes != pack.nbytes or (ref.header and pack.header and ref.header != pack.header):
                raise CheckpointExists(
                    f"pack {pack.key}: step {step} in {self.dst.url} needs another one of this name than the one of "
                    f"{self.src.url}"
                )
            theirs += held
        return theirs

    # -- index files ---------------------------------------------------------------------------------------------------

    def index_file(self, ref: FileRef, data: bytes, pins: Pins) -> None:
        """Bring an index file. ``pins``: which digests committed steps of ``dst`` expect under a key.

        Raises:
            CheckpointExists: one of them expects another.
        """
        found = self.dst.size(ref.key)
        copied = found != ref.nbytes or (self.verify and self.dst.get(ref.key) != data)
        if copied:
            for step, pinned in pins(ref.key) if found is not None else ():
                if pinned != ref.digest:
                    raise CheckpointExists(
                        f"{ref.key}: step {step} in {self.dst.url} needs another one than the one of {self.src.url}"
                    )
            try:
                self.dst.put(ref.key, data, overwrite=found is not None)
            except ObjectExists:  # another copy was quicker, or the answer to our own first try was lost
                if self.dst.get(ref.key) != data:
                    raise
        credit = _Credit(self.meter, 0 if ref.key in self.checked else ref.nbytes)
        credit.add(ref.nbytes)
        self.checked.setdefault(ref.key, set())
        self._count(ref.nbytes, copied=copied, packs=0)

    def check_all_there(self, refs: Iterable[FileRef | PackRef]) -> None:
        """Raise :class:`MissingChunk` unless the destination has all of these: a commit must not point at nothing."""
        for ref in refs:
            found = self.dst.size(ref.key)
            if found != ref.nbytes:
                raise MissingChunk(
                    f"{ref.key} in {self.dst.url}: expected {ref.nbytes} bytes, found {found}: removed or changed by "
                    f"somebody else during the copy; nothing was committed"
                )

    def _count(self, nbytes: int, *, copied: bool, packs: int) -> None:
        with self.meter.lock:
            if copied:
                self.report.packs_copied += packs
                self.report.bytes_copied += nbytes
            else:
                self.report.packs_present += packs
                self.report.bytes_present += nbytes


class _Stopped(Exception):
    """Another thread failed; this one's work is in vain."""


class _Meter:
    """Counts and reports what all threads move; stops them."""

    def __init__(self, total: int, progress: Progress, beat: Callable[[], None]) -> None:
        self.total, self.progress, self.beat = total, progress, beat
        self.done = 0
        self.lock = threading.Lock()
        self.stop = threading.Event()

    def advance(self, nbytes: int) -> None:
        """Note ``nbytes`` of progress."""
        if self.stop.is_set():
            raise _Stopped
        with self.lock:
            self.done += nbytes
            self.progress(self.done, self.total)
        self.beat()


class _Credit:
    """How much progress one object still is: what is read twice (checked, found bad, copied) counts once."""

    def __init__(self, meter: _Meter, left: int) -> None:
        self.meter, self.left = meter, left

    def add(self, nbytes: int) -> None:
        """Note ``nbytes`` moved."""
        counted = min(nbytes, self.left)
        self.left -= counted
        self.meter.advance(counted)

    def settle(self) -> None:
        """Note that the object is done, though not all of it had to be read."""
        if self.left:
            counted, self.left = self.left, 0
            self.meter.advance(counted)
