"""A step of a repository of ours, opened for conversion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.convert.opened import Loose, Opened
from ckpt.repo.repository import MARKER, Repository
from ckpt.runtime.revive import decode_entry

if TYPE_CHECKING:
    from ckpt.convert.options import ReadOptions
    from ckpt.store.base import Store


def is_ours(store: Store) -> bool:
    """Is there a repository of ours at the root of ``store``? Looks at names only."""
    return store.size(MARKER) is not None or Repository(store).newest() is not None


def open_ours(store: Store, where: str, *, step: int | None = None, options: ReadOptions | None = None) -> Opened:
    """Return a committed step with its index, verified from the commit down.

    Args:
        store: the repository's root.
        where: what messages call it.
        step: which; default: the newest one that is committed.
        options: of no use here: an index of ours says everything itself.

    Raises:
        NoSuchCheckpoint: no such step; says what there is.
        FormatError, IntegrityError: an index file or an object is not what was written.
    """
    repo = Repository(store)
    index = repo.read_index(repo.pick(step))
    objects = tuple(
        Loose(entry.name, entry.kind, entry.ranks, decode_entry(store, part, entry))
        for part in index.parts
        for entry in part.objects
    )
    return Opened(
        format="ckpt",
        where=where,
        store=store,
        step=index.root.step,
        world=index.root.world,
        engine=index.commit.engine,
        degrees=index.commit.degrees,
        specs=index.specs,
        parts=index.parts,
        derived=index.root.derived,
        aliases=dict(index.root.aliases),
        objects=objects,
    )
