"""One attempt at saving a step, from the outside: how it begins, how long it counts as alive, how it is undone."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from ckpt.errors import CheckpointExists, CkptError, SplitRoot
from ckpt.repo.ages import ALIVE, CREATED
from ckpt.repo.repository import Repository, attempt_marker, attempt_prefix, step_prefix
from ckpt.runtime.publish import now
from ckpt.runtime.writing import Attempt
from ckpt.store.base import HasFolders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpt.runtime.comm import Comm
    from ckpt.store.base import Store

log = logging.getLogger("ckpt")

VISIBLE_SECONDS = 10.0
"""How long another rank's file may take to become visible (attribute caches of network file systems)."""
ALIVE_SECONDS = 600.0
"""How often a save says that it is still alive: ``ckpt gc`` takes attempts for dead that have not for an hour."""


def begin(comm: Comm, store: Store, step: int, *, overwrite: bool) -> Attempt:
    """Begin an attempt. Collective: rank 0 looks at the root and puts the marker.

    Raises:
        CheckpointExists: the step is committed, and is not to be replaced.
    """

    def work() -> bytes:
        repo = Repository(store)
        repo.initialise()
        if not overwrite and repo.has(step):
            raise CheckpointExists(
                f"step {step} is committed already in {store.url}; pass overwrite=True to replace it"
            )
        name = f"{int(time.time()):x}-{os.urandom(4).hex()}"  # os.urandom: a save must not move the user's RNG streams
        store.put(attempt_marker(step, name), _marker(comm.world, CREATED))
        return msgspec.msgpack.encode((name, repo.newest(but=step)))

    name, parent = msgspec.msgpack.decode(comm.on_root("begin", work), type=tuple[str, int | None])
    made = [attempt_marker(step, name)] if comm.rank == 0 else []
    return Attempt(store, step, name, parent, step if overwrite else None, made)


def _marker(world: int, *said: str) -> bytes:
    return msgspec.json.encode({"world": world, **dict.fromkeys(said, now())})


def see(comm: Comm, attempt: Attempt) -> None:
    """Check that this rank sees what rank 0 has written: otherwise the root is not one directory.

    Raises:
        SplitRoot: it does not, within :data:`VISIBLE_SECONDS`.
    """
    key = attempt_marker(attempt.step, attempt.name)
    deadline = time.monotonic() + min(VISIBLE_SECONDS, comm.timeout / 2)
    while attempt.store.size(key) is None:
        if time.monotonic() > deadline:
            raise SplitRoot(
                f"rank {comm.rank} does not see {key!r}, which rank 0 has just written to {attempt.store.url}; "
                f"the root must be one directory that all ranks share"
            )
        comm.beat()
        time.sleep(0.05)


@contextmanager
def kept_alive(comm: Comm, attempt: Attempt) -> Iterator[None]:
    """While the block runs, rank 0 says every ten minutes that the attempt is alive."""
    if comm.rank:
        yield
        return
    key = attempt_marker(attempt.step, attempt.name)
    with said_alive(lambda: attempt.store.put(key, _marker(comm.world, ALIVE), overwrite=True), attempt.step, "saved"):
        yield


@contextmanager
def said_alive(say: Callable[[], None], step: int, doing: str) -> Iterator[None]:
    """While the block runs, call ``say`` every ten minutes. ``doing``: what goes on with the step, for messages."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(ALIVE_SECONDS):
            try:
                say()
            except CkptError as error:
                log.warning("step %d: cannot say that it is still being %s: %s", step, doing, error)

    thread = threading.Thread(target=work, name=f"ckpt marker of step {step}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def remove(attempt: Attempt) -> None:
    """Remove what this rank has written, best effort: a full disk should not stay full. ``verify`` names the rest.

    The last rank to come removes the folders too: a step that has only those would be listed as begun.
    """
    for key in attempt.made:
        with suppress(Exception):
            attempt.store.delete(key)
    top = attempt_prefix(attempt.step, attempt.name)
    for folder in (f"{top}/packs", f"{top}/index", top, step_prefix(attempt.step)):
        with suppress(Exception):
            if isinstance(attempt.store, HasFolders):
                attempt.store.remove_folder(folder)
