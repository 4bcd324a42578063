"""Which ranks of a log a rank needs, without a look at what all of them say: their number may be large."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from ckpt.errors import MalformedData
from ckpt.gradlog.replaying.reading import read_rank_head
from ckpt.gradlog.share import places_of
from ckpt.repo.log_directory import read_directory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.engine.base import Stepped
    from ckpt.gradlog.record import RankHead
    from ckpt.repo.log_directory import Directory
    from ckpt.store.base import Store

log = logging.getLogger("ckpt")


class Heads(NamedTuple):
    """``of``: rank -> head, of the ranks that may have logged something of what is stepped here, and of this one's own.
    ``logged``: FQNs of all that any rank has logged and that this one may hold.
    """

    of: dict[int, RankHead]
    logged: set[str]


def read_heads(
    store: Store, number: int, own: RankHead, world: int, stepped: Sequence[Stepped], *, same: bool
) -> Heads:
    """Read the heads that a rank needs.

    Args:
        store: the repository's.
        number: of the log.
        own: the head of the log's rank that this rank continues.
        world: number of ranks of the log.
        stepped: what is stepped here.
        same: is that what ``own`` says of the log's rank, in the same places?

    Raises:
        MissingChunk: a head is not there.
        MalformedData: a head that cannot be.
    """
    names = None
    if same and own.peers is not None:
        # Whoever logs what is stepped here is known: what others step is none of this rank's business, and that they
        # step what they stepped in the log is theirs to see.
        ranks = {own.rank, *own.peers}
    else:
        directory = _directory(store, number, world, own.run)
        if directory is None:
            ranks = set(range(world))
        else:
            boxes = [(fqn, shape, box) for one in stepped for fqn, shape, box, _ in places_of(one)]
            ranks, names = {own.rank} | directory.ranks(boxes), set(directory.rows)
    if not ranks <= set(range(world)):
        raise MalformedData(f"log {number}: ranks {sorted(ranks - set(range(world)))[:4]} of {world}")
    heads = {rank: own if rank == own.rank else read_rank_head(store, number, rank, own.run) for rank in sorted(ranks)}
    if {head.world for head in heads.values()} != {world}:
        raise MalformedData(f"log {number}: its ranks speak of different numbers of ranks")
    if names is None:
        names = {part.fqn for head in heads.values() for entry in head.entries for part in entry.parts}
    return Heads(heads, names)


def _directory(store: Store, number: int, world: int, run: str) -> Directory | None:
    """Return the directory if it is there and sound: all that it says stands in the heads too."""
    try:
        return read_directory(store, number, world, run)
    except MalformedData as error:
        log.warning(
            "what all ranks say of their part of log %d is read, since its directory cannot be: %s", number, error
        )
        return None
