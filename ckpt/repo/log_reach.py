"""How far the gradient logs go behind each checkpoint, by headers alone: quick, and no promise that a byte is sound."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpt.repo.lineage import Span, log_key, read_head, ways
from ckpt.repo.log_files import files_of, places_in, ranks_of

if TYPE_CHECKING:
    from ckpt.store.base import Store


class Reach(NamedTuple):
    """``step``: to which a checkpoint and the logs behind it lead, as far as all ranks have records. ``spans``: those
    logs, in order.
    """

    step: int
    spans: tuple[Span, ...]


def reaches(store: Store) -> dict[int, Reach]:
    """Return checkpoint -> how far it leads, for those that a log passes through.

    Raises:
        MalformedData, UnsupportedVersion: a log says of itself what this release cannot read.
        StoreError: the store is busy or refuses this user.
    """
    found = ways(store)
    if not found:
        return {}
    last = found[-1].spans[-1].number  # the one log that all ways end in
    head = read_head(store, last)
    end = _end(store, last, 1 if head is None else head.world)
    return {way.step: Reach(max(end, way.spans[-1].first - 1), way.spans) for way in found}


def bytes_of(store: Store, reach: Reach) -> int:
    """Return the bytes of the files that hold the records on a way."""
    nbytes = 0
    for number, first, last in reach.spans:
        sizes = {info.key: info.nbytes for info in store.walk(log_key(number))}
        for rank in ranks_of(store, number):
            files = files_of(store, number, rank)
            for i, (begins, key) in enumerate(files):
                behind = i + 1 < len(files) and files[i + 1][0] <= first
                if not behind and begins <= (reach.step if last is None else last):
                    nbytes += sizes.get(key, 0)
    return nbytes


def _end(store: Store, number: int, world: int) -> int:
    """Return the last step of which all ranks have a record in a log; -1 if there is none."""
    there = ranks_of(store, number)
    if len(there) < world:
        return -1
    ends = []
    for rank in range(world):
        files = files_of(store, number, rank)
        steps = [place.step for _, key in files[-1:] for place in places_in(store, key) if not isinstance(place, str)]
        # A file with nothing whole in it was begun where the one before ends.
        ends.append(max(steps) if steps else files[-1][0] - 1 if len(files) > 1 else -1)
    return min(ends)
