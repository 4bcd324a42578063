"""Which checkpoints and logs are not needed any more: a base goes with the log behind it, once newer ones stand."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from ckpt.repo.gc import collect
from ckpt.repo.lineage import commits_of, known_heads, log_key, ways
from ckpt.repo.log_files import files_of
from ckpt.repo.repository import attempt_prefix, commit_key

if TYPE_CHECKING:
    from ckpt.store.base import Store


def retire(store: Store, keep: int) -> list[int]:
    """Remove all but the newest ``keep`` full saves of a checkpointer, and what is logged before the oldest of those.

    Checkpoints that were saved by other means stay, and so do those of a past that was given up, until the job has
    passed them. Returns the steps that were removed.

    Raises:
        StoreError: the store refused; whatever stands is whole.
        FormatError: a log that may be of a newer history says of itself what this release cannot read.
    """
    found, commits = ways(store), commits_of(store)
    own = {step: commit for step, commit in commits.items() if commit.log is not None}
    if found:
        # Behind a log that has ended a new one begins, which the checkpoints before it are not on.
        before = sorted(step for step in own if step < found[0].step)
        order = [*before, *(way.step for way in found)]
    else:
        order = sorted(own, key=lambda step: (own[step].created, step))
    old, kept = order[:-keep], order[-keep:]
    # The commits first: from then on nobody begins at one of them, whatever is left of it.
    for step in old:
        store.delete(commit_key(step))
    if old:
        first = [way.spans[0].number for way in found if way.step in kept]
        first += [log for step in kept if step in own and (log := own[step].log)]
        _forget_logs(store, min(first, default=0), min(kept))
        collect(store, ended={attempt_prefix(step, commits[step].attempt) for step in old})
    return old


def _forget_logs(store: Store, first: int, step: int) -> None:
    """Remove the logs before number ``first``, and of the others the files that end at or before ``step``."""
    heads, damaged = known_heads(store)
    for number in sorted(one for one in (*heads, *damaged) if one < first):
        for info in list(store.walk(log_key(number))):
            store.delete(info.key)
    # A damaged head of a later log stands for steps that nobody knows.
    for number, head in sorted(heads.items()):
        if number < max(first, max(damaged, default=0)):
            continue
        for rank in range(head.world):
            files = files_of(store, number, rank)
            for (_, key), (following, _) in pairwise(files):
                if following - 1 <= step:
                    store.delete(key)
