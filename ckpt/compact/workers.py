"""Who does the bundles: this process, or several that it starts (``python -m ckpt.compact.worker``).

They know the repository by its address, and do what they are told over their standard input, one bundle after the
other, each by whoever is free. One that dies ends the compaction; when this process dies, they end by themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.compact.cuts import Bundle
from ckpt.compact.packs import BundleDone
from ckpt.compact.working import Work, Worker
from ckpt.convert.crew import Crew, Said

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpt.compact.source import Source
    from ckpt.store.base import Store


class Message(Said, kw_only=True, omit_defaults=True):
    """One message between the processes: to a worker ``bundle``, from it one of the others."""

    bundle: Bundle | None = None
    done: BundleDone | None = None


def run_bundles(
    store: Store, source: Source, work: Work, bundles: Sequence[Bundle], count: int, told: Callable[[BundleDone], None]
) -> list[BundleDone]:
    """Do all bundles, ``count`` at once, and return what became of each.

    Args:
        store: the repository's.
        source: what is compacted.
        work: what every process has to know.
        bundles: what is to be done.
        count: processes.
        told: called after each bundle; what it raises ends the work.

    Raises:
        CkptError: the first that failed; all others are stopped.
    """
    if min(count, len(bundles)) > 1:
        return Crew(
            "ckpt.compact.worker",
            work,
            [Message(bundle=bundle) for bundle in bundles],
            min(count, len(bundles)),
            Message,
            lambda message: message.done,
            lambda message: None if message.done is None else told(message.done),
        ).run()
    worker = Worker(store, source, work.prefix, work.memory, lambda _: None)
    found = []
    for bundle in bundles:
        found.append(worker.run(bundle, resume=work.resume))
        told(found[-1])
    return found
