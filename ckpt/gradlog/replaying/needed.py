"""Which ranks of a log a rank needs, without a look at what all of them say: their number may be large."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from ckpt.errors import MalformedData, ReplayError, StoreError
from ckpt.gradlog.replaying.mapping import check_logged
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
        ReplayError: nobody has logged the gradient of something that is stepped here.
    """
    if same and own.peers is not None:
        # Whoever logs what is stepped here is known: what others step is none of this rank's business, and that they
        # step what they stepped in the log is theirs to see.
        found = _if_whole(store, number, own, world, stepped, {own.rank, *own.peers}, "rank's head")
        if found is not None:
            return found
    directory = _directory(store, number, world, own.run)
    if directory is not None:
        found = _if_whole(store, number, own, world, stepped, _named(directory, own.rank, stepped), "directory")
        if found is not None:
            return Heads(found.of, set(directory.rows) | found.logged)
    found = _read(store, number, own, world, set(range(world)))
    check_logged(stepped, found.of)
    return found


def _named(directory: Directory, own: int, stepped: Sequence[Stepped]) -> set[int]:
    """Return the ranks that a directory names, and this one's own."""
    boxes = [(fqn, shape, box) for one in stepped for fqn, shape, box, _ in places_of(one)]
    ranks = directory.ranks(boxes)
    if not ranks:  # all shards are empty here: somebody has to tell whether the tensors were stepped
        ranks = {directory.rows[fqn][0].rank for one in stepped for fqn in one.members[:1] if directory.rows.get(fqn)}
    return {own} | ranks


def _if_whole(
    store: Store, number: int, own: RankHead, world: int, stepped: Sequence[Stepped], ranks: set[int], whose: str
) -> Heads | None:
    """Return the heads of those who are said to have logged what is stepped here; None if others have, too."""
    found = _read(store, number, own, world, ranks)
    try:
        check_logged(stepped, found.of)
    except ReplayError as error:
        log.warning(
            "log %d: the ranks that the %s names have not logged all of it (%s): others are asked too",
            number,
            whose,
            error,
        )
        return None
    return found


def _read(store: Store, number: int, own: RankHead, world: int, ranks: set[int]) -> Heads:
    if not ranks <= set(range(world)):
        raise MalformedData(f"log {number}: ranks {sorted(ranks - set(range(world)))[:4]} of {world}")
    heads = {rank: own if rank == own.rank else read_rank_head(store, number, rank, own.run) for rank in sorted(ranks)}
    if {head.world for head in heads.values()} != {world}:
        raise MalformedData(f"log {number}: its ranks speak of different numbers of ranks")
    names = {part.fqn for head in heads.values() for entry in head.entries for part in entry.parts}
    return Heads(heads, names)


def _directory(store: Store, number: int, world: int, run: str) -> Directory | None:
    """Return the directory if it is there and sound: all that it says stands in the heads too."""
    try:
        return read_directory(store, number, world, run)
    except (MalformedData, StoreError) as error:
        log.warning(
            "what all ranks say of their part of log %d is read, since its directory cannot be: %s", number, error
        )
        return None
