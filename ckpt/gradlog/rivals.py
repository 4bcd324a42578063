"""Other jobs in the same root: two that save and log there undo each other's work, and only one of them is loaded."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ckpt.errors import CkptError, ObjectNotFound
from ckpt.repo.lineage import HEAD, log_key, log_numbers
from ckpt.repo.log_files import files_of, ranks_of

if TYPE_CHECKING:
    from ckpt.repo.lineage import LogHead
    from ckpt.store.base import Store

log = logging.getLogger("ckpt")

NEWEST, RANKS = 4, 8
"""Logs, and ranks of each, whose last file is asked for its writer."""
PATIENCE = 2.0
"""Seconds that a job which is being killed has to let go of its files."""


@runtime_checkable
class _HasLocks(Protocol):
    """A store that knows who writes, as long as the writers are on hosts that share its locks."""

    def in_use(self, key: str) -> bool:
        """Does somebody append to this?"""


def tell_of_others(store: Store, patience: float = PATIENCE) -> str | None:
    """Warn of a log that somebody writes to at this moment. Returns the key of the file; None: nobody is known to.

    No error: the last process of a job that was killed may be slow to die, and a job that cannot start again because of
    it does more harm. Stores without locks (S3, some network file systems) do not say; see :func:`taken_over`.
    """
    key = None
    with suppress(CkptError):  # what cannot be read here is told by who needs it
        key = _written(store)
        deadline = time.monotonic() + patience
        while key is not None and time.monotonic() < deadline:
            time.sleep(0.05)
            key = _written(store)
    if key is not None:
        log.warning(
            "%s in %s is being written to: another job (or one that was not closed) logs to this root. The job that "
            "began last counts, and what the other one saves and logs from now on is lost; give each a root of its own",
            key,
            store.url,
        )
    return key


def _written(store: Store) -> str | None:
    if not isinstance(store, _HasLocks):
        return None
    for number in reversed(log_numbers(store)[-NEWEST:]):
        for rank in sorted(ranks_of(store, number))[:RANKS]:
            for _, key in files_of(store, number, rank)[-1:]:
                with suppress(ObjectNotFound):
                    if store.in_use(key):
                        return key
    return None


def taken_over(store: Store, head: LogHead) -> str:
    """Return why a log that is being written does not count any more: another was begun in this root. Empty: it does.

    Raises:
        StoreError: the store does not answer.
    """
    for number in reversed(log_numbers(store)):
        if number <= head.number:
            break
        if store.size(f"{log_key(number)}/{HEAD}") is not None:
            return (
                f"another job has begun log {number} in {store.url} since this one began log {head.number}, and of two "
                f"jobs the one that began its log last is loaded. This one begins a new log now, so that it is loaded "
                f"again; give each job a root of its own"
            )
    return ""
