"""Check the gradient logs of a repository: every byte of every record that leads from a checkpoint to a later step.

What makes a log shorter than its steps is *damage*; the torn end that a killed writer leaves is *garbage*, and so are
logs that lead nowhere. Where one log goes on from another, the records up to there must be those of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt.errors import CkptError, StoreError, is_damage
from ckpt.format.frames import HEADER
from ckpt.repo.findings import DAMAGE, GARBAGE, Finding
from ckpt.repo.lineage import HEAD, ROOT, log_key
from ckpt.repo.log_directory import read_directory
from ckpt.repo.log_files import DIRECTORY, RANK_HEAD, TORN, Place, Runs, look, rank_prefix, ranks_of
from ckpt.repo.log_needs import EMPTY, GIVEN_UP, LOG, needs_of, unneeded
from ckpt.repo.log_words import check_rank_head
from ckpt.words import listed

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt.repo.lineage import LogHead
    from ckpt.repo.log_needs import Needs
    from ckpt.store.base import Store

SHOWN = 8
"""Ranks that are named in one finding."""
WHY = {
    LOG: "no checkpoint leads to it",
    EMPTY: "a log that was begun, and has no record",
    GIVEN_UP: "of a past that was given up",
}


@dataclass(slots=True)
class LogsChecked:
    """``logs``: numbers of those that were read. ``records``, ``nbytes``: sound ones. ``garbage``: bytes of it."""

    findings: list[Finding] = field(default_factory=list)
    logs: list[int] = field(default_factory=list)
    records: int = 0
    nbytes: int = 0
    garbage: int = 0


def verify_logs(store: Store, progress: Callable[[int], None] = lambda _nbytes: None) -> LogsChecked:
    """Check all logs.

    Args:
        store: the repository's.
        progress: called with the number of bytes after each record.

    Raises:
        StoreError: the store is busy or refuses this user.
    """
    result = LogsChecked()
    needs = needs_of(store)
    for number, error in needs.damaged.items():
        _damage(result, error, f"{log_key(number)}/{HEAD}", None)
    for number in sorted(needs.records):
        result.logs.append(number)
        head, there = needs.heads[number], ranks_of(store, number)
        sound = {r: _check_rank(store, needs, head, r, result, progress) for r in range(head.world) if r in there}
        _check_joint(needs, head, sound, result)
        _check_directory(store, head, result)
    _garbage(store, needs, result)
    return result


def _damage(result: LogsChecked, error: CkptError, key: str, step: int | None) -> None:
    if not is_damage(error):
        raise error
    found = error.key if isinstance(error, StoreError) and error.key else key
    result.findings.append(Finding(DAMAGE, found, str(error), step))


def _base(needs: Needs, number: int, step: int) -> int | None:
    """Return the checkpoint that a record of this step leads on from."""
    ways = [way.step for way in needs.ways if any(span.number == number for span in way.spans) and way.step < step]
    return max(ways, default=None)


def _check_rank(
    store: Store, needs: Needs, head: LogHead, rank: int, result: LogsChecked, progress: Callable[[int], None]
) -> Runs:
    """Check one rank's part. Returns its sound records."""
    first, sound = min(start for start, _ in needs.records[head.number]), Runs()
    prefix = rank_prefix(log_key(head.number), rank)
    try:
        for one in look(store, head.number, rank, first, run=head.run):
            if isinstance(one, Place):
                result.records += 1
                result.nbytes += one.nbytes
                progress(HEADER + one.nbytes)
                sound.add(one.step)
            elif one.kind == TORN:
                result.findings.append(Finding(GARBAGE, one.key, f"{one.text}: its writer was killed"))
            else:
                step = sound.runs[-1][1] + 1 if sound.runs else first
                if needs.has(head.number, step, step if one.step is None else one.step):
                    result.findings.append(Finding(DAMAGE, one.key, one.text, _base(needs, head.number, step)))
        if sound.runs:
            check_rank_head(store.get(f"{prefix}/{RANK_HEAD}"), head, rank, f"{prefix}/{RANK_HEAD}")
    except CkptError as error:
        _damage(result, error, f"{prefix}/{RANK_HEAD}", _base(needs, head.number, first))
    return sound


def _check_joint(needs: Needs, head: LogHead, sound: dict[int, Runs], result: LogsChecked) -> None:
    """Do all ranks have what leads from the newest checkpoint on this log to where the next log goes on?

    Not where that one begins at a checkpoint.
    """
    pairs = [pair for way in needs.ways for pair in zip(way.spans, way.spans[1:], strict=False)]
    for (_, first, last), after in [pair for pair in pairs if pair[0].number == head.number][-1:]:
        if last is None or last < first or needs.heads[after.number].attempt:
            continue
        ends = {rank: sound[rank].sound_to(first) if rank in sound else first - 1 for rank in range(head.world)}
        short = [rank for rank, end in ends.items() if end < last]
        if short:
            text = (
                f"rank {listed(short, SHOWN)}: sound records to step {min(ends.values())}, and the next log begins "
                f"behind step {last}"
            )
            result.findings.append(Finding(DAMAGE, log_key(head.number), text, _base(needs, head.number, last)))


def _check_directory(store: Store, head: LogHead, result: LogsChecked) -> None:
    """Does what says who logs what say so? Without it a load in another layout reads the heads of all ranks."""
    try:
        read_directory(store, head.number, head.world, head.run)
    except CkptError as error:
        _damage(result, error, f"{log_key(head.number)}/{DIRECTORY}", None)


def _garbage(store: Store, needs: Needs, result: LogsChecked) -> None:
    for one in unneeded(store, needs, store.walk(ROOT)):
        if needs.damaged and needs.unknown(one.number):
            continue
        nbytes = sum(info.nbytes for info in one.infos)
        result.garbage += nbytes
        result.findings.append(Finding(GARBAGE, one.key, f"{WHY[one.kind]} ({nbytes} bytes)"))
