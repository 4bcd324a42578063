"""A checkpoint of any format as a step of our own, arranged for the ranks of the target.

plan (who owns what, as a save of the target job would) → claim the place → packs, each by some worker → index parts →
root → commit. Each rank's packs hold what it owns, ascending, so that it will read few long ranges.
"""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

from ckpt.convert.options import WriteOptions, Written
from ckpt.convert.ours.committing import claim, kept_alive, look, tidy
from ckpt.convert.ours.finish import all_present, finish, written
from ckpt.convert.ours.plan import Conversion, assembler_of, plan_ours
from ckpt.convert.ours.tasks import WIDE
from ckpt.convert.ours.workers import run_tasks
from ckpt.runtime.publish import check_written, publish, totals_of
from ckpt.runtime.writing import Attempt

if TYPE_CHECKING:
    from ckpt.convert.opened import Opened
    from ckpt.convert.target import Target
    from ckpt.store.base import Store


def write_ours(opened: Opened, store: Store, target: Target, options: WriteOptions | None = None) -> Written:
    """Write a checkpoint as a step of our own, arranged for the ranks of the target.

    Args:
        opened: the source; only read.
        store: the root to be; empty, or a repository without this step.
        target: what each rank of the target holds.
        options: how.

    Raises:
        ConfigError, CheckpointExists: the place is not free, or it is the source.
        IntegrityError, FormatError: the source is damaged; names tensor and file.
        StoreError: the source cannot be read or the target not be written. What is finished stays, and the next run of
            the same conversion goes on there.
        CkptError: as :func:`plan_ours`.
    """
    made = plan_ours(opened, target, options, wide=_open_at_once(store))
    place = look(store, opened, made.step, made.attempt, resume=made.options.resume)
    if made.options.dry_run:
        return _estimate(made, store)
    if place.complete:
        tidy(store, place)
        return all_present(made, store, place)
    claim(store, place)
    with kept_alive(store, place):
        wrote = run_tasks(made, store, place.prefix)
        done, overflowed = finish(made, store, place, wrote)
        attempt = Attempt(store, place.step, place.attempt, None, None, [])
        check_written(attempt, done, lambda: None)
        engine = opened.engine or opened.format
        totals = totals_of(made.job, done, ())
        degrees = {axis: getattr(target.parallel, axis) for axis in ("dp", "tp", "pp", "ep", "zero")}
        size = publish(attempt, made.job, engine, (), done, (), totals, again=True, degrees=degrees)
    tidy(store, place)
    return written(made, store, place, done, wrote, size, overflowed)


def _estimate(made: Conversion, store: Store) -> Written:
    """Return what would be done; what is read is planned as it would be, and not read."""
    assembler = assembler_of(made.opened, made.options)
    read = sum(assembler.estimate(task.shards(made.job.graph.specs)) for task in made.tasks)
    return Written("ckpt", store.url, made.step, read, made.nbytes, lost=made.lost, made=made.made, memory=made.memory)


def _open_at_once(store: Store) -> int:
    """Return how many packs may be open where they take no memory, as files: those of two tasks are at a time."""
    files = hasattr(store, "root") and resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return WIDE if files == resource.RLIM_INFINITY or files >= 4 * WIDE else 0
