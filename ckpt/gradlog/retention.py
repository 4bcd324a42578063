"""Which checkpoints and logs are not needed any more: a base goes with the log behind it, once newer ones stand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.repo.gc import collect
from ckpt.repo.lineage import heads_of, log_key, ways
from ckpt.repo.log_files import files_of
from ckpt.repo.repository import Repository, commit_key

if TYPE_CHECKING:
    from ckpt.store.base import Store


def retire(store: Store, keep: int) -> list[int]:
    """Remove all but the newest ``keep`` checkpoints of the newest history, and the logs before the oldest of those.

    Checkpoints that no log passes through are somebody else's, and stay. Returns the steps that were removed.

    Raises:
        StoreError: the store refused; whatever stands is whole.
    """
    found = ways(store)
    if len(found) <= keep:
        return []
    old, oldest = [one.step for one in found[:-keep]], found[-keep]
    # The commits first: from then on nobody begins at one of them, whatever is left of it.
    for step in old:
        store.delete(commit_key(step))
    needed = {span.number for span in oldest.spans}
    for number, head in sorted(heads_of(store).items()):
        for rank in range(head.world):
            files = files_of(store, number, rank)
            for i, (_, key) in enumerate(files):
                ends = files[i + 1][0] - 1 if i + 1 < len(files) else None
                if number < min(needed) or (number in needed and ends is not None and ends <= oldest.step):
                    store.delete(key)
        if number < min(needed):
            for info in list(store.walk(log_key(number))):
                store.delete(info.key)
    collect(store)
    return [step for step in old if not Repository(store).has(step)]
