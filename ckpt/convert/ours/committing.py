"""The place where a converted step comes to stand: who may write there, what an earlier run left, how it is committed.

The attempt has a name that follows from what is converted and how, so that the next run of the same conversion finds
what the one before has finished, and another conversion never does. Order as in a save: marker, packs, index parts,
root, commit (docs/format.md); journals of packs, which only a run that goes on needs, go before the root comes.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ckpt.errors import CheckpointExists, CkptError, ConfigError
from ckpt.format.digest import raw_digest
from ckpt.repo.ages import ALIVE, CREATED
from ckpt.repo.repository import MARKER, Repository, attempt_marker, attempt_prefix, step_prefix
from ckpt.runtime.attempt import said_alive
from ckpt.runtime.publish import now
from ckpt.store.base import HasOrphans
from ckpt.store.open import check_apart
from ckpt.words import listed

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ckpt.convert.opened import Opened
    from ckpt.plan.save_plan import SavePlan
    from ckpt.store.base import Store

PREFIX = "reshard-"
"""Of the names of attempts that convert."""
TEMP = ".tmp-"
JOURNAL = "pack-"
"""Of the names of journals, which lie among the index parts."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a step is to be. ``complete``: this very conversion is committed there already."""

    step: int
    attempt: str
    complete: bool

    @property
    def prefix(self) -> str:
        """Folder of the attempt."""
        return attempt_prefix(self.step, self.attempt)


def name_of(opened: Opened, plan: SavePlan, layout: bytes, said: tuple[object, ...]) -> str:
    """Return the name of the attempt of one conversion: the same again if source, target and ways are the same.

    A source whose index has digests is known by them; others by the sizes of their files and the times of their change.

    Args:
        opened: the source.
        plan: of the target job.
        layout: digest of the target's layout.
        said: what else decides which bytes are written.
    """
    return named_after(opened, (layout, len(plan.chunks), raw_digest(_plain(plan.owners)), said))


def named_after(opened: Opened, target: object) -> str:
    """Return a name that is the same again if the source and what is said of the target are the same."""
    return name_from(source_digest(opened), target)


def name_from(source: bytes, target: object) -> str:
    """Return :func:`named_after` of a source whose digest is known."""
    return PREFIX + raw_digest(_plain((source, target))).hex()


def source_digest(opened: Opened) -> bytes:
    """Return what is the same again if the source is; it is not read for that."""
    packs = sorted({(pack.key, pack.nbytes, pack.header) for part in opened.parts for pack in part.packs})
    known = all(chunk.digest for part in opened.parts for chunk in part.chunks)
    times = [] if known else _times(opened.store, {key for key, _, _ in packs})
    chunks = [(c.spec, c.offsets, c.sizes, c.digest, c.start) for part in opened.parts for c in part.chunks]
    source = (opened.format, opened.store.url, opened.step, opened.world, packs, times, raw_digest(_plain(chunks)))
    return raw_digest(_plain((source, [(s.fqn, s.role, s.dtype, s.shape) for s in opened.specs])))


def _plain(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def _times(store: Store, keys: set[str]) -> list[tuple[str, float | None]]:
    folders = {key.rpartition("/")[0] for key in keys}
    infos = {info.key: info.modified for folder in sorted(folders) for info in store.walk(folder) if info.key in keys}
    return sorted(infos.items())


def look(store: Store, opened: Opened, step: int, attempt: str, *, resume: bool) -> Place:
    """See that a step may be written here. Writes nothing.

    Raises:
        ConfigError: there is something else at the place, or it is the source.
        CheckpointExists: the step is committed there, and is not this conversion.
    """
    _refuse_source(store, opened)
    repo = Repository(store)
    names = set(store.children(""))
    others = sorted(name for name in names if not name.startswith(TEMP))
    if others and not resume:
        raise ConfigError(f"{store.url} is not empty ({listed(others, 3)}): choose a place that is")
    if others and MARKER not in names:
        raise ConfigError(
            f"{store.url} is not empty and no repository of ckpt ({listed(others, 3)}): choose a place that is empty"
        )
    repo.check_marker()
    if repo.has(step):
        if resume and repo.read_commit(step).attempt == attempt:
            return Place(step, attempt, complete=True)
        raise CheckpointExists(f"step {step} is committed already in {store.url}: choose another place or another step")
    there = sorted(n for n in store.children(step_prefix(step)) if n != attempt and not n.startswith(TEMP))
    if there:
        who = listed(there, 3)
        raise ConfigError(
            f"{store.url}: step {step} was begun by somebody else ({who}); `ckpt gc` removes it if it is dead"
        )
    return Place(step, attempt, complete=False)


def claim(store: Store, place: Place) -> None:
    """Mark the place as one at which somebody works, and remove what a killed run left half written."""
    Repository(store).initialise()
    _mark(store, place, CREATED)
    _sweep(store, place)


def _refuse_source(store: Store, opened: Opened) -> None:
    if all("/" in one.url for one in (store, opened.store)):  # those in memory all have one name
        check_apart(opened.store.url.rstrip("/"), store.url.rstrip("/"))


def _sweep(store: Store, place: Place) -> None:
    """Remove the temporary files and open uploads of a run that was killed: the disk need not hold them too."""
    keys = [info.key for info in store.walk(place.prefix)]
    keys += [f"{step_prefix(place.step)}/{name}" for name in store.children(step_prefix(place.step))]
    if set(Repository(store).started()) <= {place.step}:  # nobody else has a marker in the making
        keys += store.children("")
    for key in keys:
        if key.rpartition("/")[2].startswith(TEMP):
            store.delete(key)
    if isinstance(store, HasOrphans):
        for orphan in store.orphans(place.prefix):
            store.abort(orphan)


def _mark(store: Store, place: Place, said: str) -> None:
    about = json.dumps({"what": "ckpt-reshard", said: now()}).encode()
    store.put(attempt_marker(place.step, place.attempt), about, overwrite=True)


def kept_alive(store: Store, place: Place) -> AbstractContextManager[None]:
    """Return a block while which it is said every ten minutes that the attempt is alive: ``ckpt gc`` lets it be."""
    return said_alive(lambda: _mark(store, place, ALIVE), place.step, "converted")


def tidy(store: Store, place: Place) -> None:
    """Remove what only an interrupted run needs, when the step is committed; what is left, ``ckpt gc`` takes."""
    with suppress(CkptError):
        _sweep(store, place)
        for info in list(store.walk(f"{place.prefix}/index")):
            if info.key.rpartition("/")[2].startswith(JOURNAL):
                store.delete(info.key)
