"""What a log holds up to a step at which a base stands now, removed: file by file, and none that somebody writes to."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpt.repo.lineage import chain_of, known_heads
from ckpt.repo.log_files import files_of, places_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt.store.base import Store


class Dropped(NamedTuple):
    """Files of records that were removed, or would be. ``in_use``: those that stay because a job appends to them."""

    files: int = 0
    nbytes: int = 0
    in_use: int = 0


def drop_log(store: Store, number: int, step: int, *, dry_run: bool = False) -> Dropped:
    """Remove the records that lead to ``step`` along the history of log ``number``.

    What each log says of itself stays: jobs begin their logs under other numbers, and one that is alive goes on. Where
    what a later log says cannot be read, nothing is removed: it may go on from here.

    Raises:
        StoreError: the store refused; whatever stands is whole.
    """
    heads, damaged = known_heads(store)
    if any(later > number for later in damaged):
        return Dropped()
    files = nbytes = in_use = 0
    for head in chain_of(heads, number) if number in heads else ():
        for rank in range(head.world):
            for key, is_last in _covered(store, head.number, rank, None if head.number < number else step):
                if is_last and hasattr(store, "in_use") and store.in_use(key):
                    in_use += 1
                    continue
                files, nbytes = files + 1, nbytes + (store.size(key) or 0)
                if not dry_run:
                    store.delete(key)
    return Dropped(files, nbytes, in_use)


def _covered(store: Store, number: int, rank: int, step: int | None) -> Iterator[tuple[str, bool]]:
    """Yield the files of a rank of which no record is behind ``step``, and whether it is the last one."""
    files = files_of(store, number, rank)
    for i, (_, key) in enumerate(files):
        is_last = i + 1 == len(files)
        if step is None:
            yield key, is_last
        elif not is_last:
            if files[i + 1][0] - 1 <= step:
                yield key, is_last
        elif all(isinstance(place, str) or place.step <= step for place in places_in(store, key)):
            yield key, is_last
