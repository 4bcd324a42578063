"""Which logs a repository has, and how one continues another: from a checkpoint to the last step, without guessing.

Each run of a job keeps a log of its own, ``log/<number>/``, that begins at the state of a checkpoint, or behind a step
of an earlier log to which a run was brought back. Of several histories the one that was begun last counts, up to the
point where it left the one before; what an earlier run had logged behind that point is of a past that was given up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ckpt.errors import (
    CheckpointExists,
    CkptError,
    MalformedData,
    NoSuchCheckpoint,
    ObjectExists,
    UnsupportedVersion,
    is_damage,
)
from ckpt.format.frames import MAX_STEP, MAX_WORLD, VERSION
from ckpt.format.manifest import parse
from ckpt.repo.repository import Repository

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt.format.manifest import CommitBody
    from ckpt.store.base import Store

ROOT = "log"
HEAD = "log.json"
MAX_HEAD = 1 << 20
_TRIES = 64


class LogHead(msgspec.Struct, frozen=True, kw_only=True):
    """What ``log.json`` says.

    ``start``: the step behind which the first record comes. The state at ``start`` is that of the checkpoint
    ``attempt``, if that is not empty, and that of log number ``follows`` behind its record of ``start``, if not None.
    With both, the checkpoint was loaded, and that log passes through it: its records up to there are no condition.
    """

    format: int
    number: int
    start: int
    world: int
    attempt: str = ""
    follows: int | None = None
    created: str = ""


class Span(NamedTuple):
    """Records ``first`` … ``last`` of a log; ``last`` None: as far as they go."""

    number: int
    first: int
    last: int | None


class Way(NamedTuple):
    """A checkpoint and what brings it forward, in order. ``step``: of the checkpoint."""

    step: int
    spans: tuple[Span, ...]


def log_key(number: int) -> str:
    """Return the folder of a log."""
    return f"{ROOT}/{number:06d}"


def log_numbers(store: Store) -> list[int]:
    """Return the numbers of all logs, ascending."""
    names = [name for name in store.children(ROOT) if name.isascii() and name.isdigit() and len(name) <= 18]
    return sorted(int(name) for name in names if log_key(int(name)) == f"{ROOT}/{name}")


def read_head(store: Store, number: int) -> LogHead | None:
    """Return what a log says of itself; None if it was begun and says nothing yet.

    Raises:
        MalformedData, UnsupportedVersion: it says what this release cannot read.
    """
    key = f"{log_key(number)}/{HEAD}"
    if store.size(key) is None:
        return None
    head = parse(store.get(key, 0, MAX_HEAD), LogHead, key)
    if head.format != VERSION:
        raise UnsupportedVersion(f"{key} has format {head.format}, this release reads {VERSION}")
    if head.number != number:
        raise MalformedData(f"{key}: is of log {head.number}, expected {number}")
    if not (0 <= head.start < MAX_STEP and 1 <= head.world <= MAX_WORLD):
        raise MalformedData(f"{key}: begins behind step {head.start} with {head.world} ranks")
    # Numbers ascend in time, so this also keeps logs from following each other in a circle.
    if head.follows is not None and not 0 < head.follows < number:
        raise MalformedData(f"{key}: follows log {head.follows}, expected one before log {number}")
    return head


def begin_log(store: Store, head: LogHead) -> LogHead:
    """Begin a log under the next free number; called by one rank. Returns the head with its number.

    Raises:
        CheckpointExists: others begin one log after the other.
    """
    number = max([*log_numbers(store), *_named(store)], default=0)
    for _ in range(_TRIES):
        number += 1
        found = msgspec.structs.replace(head, number=number)
        try:
            store.put(f"{log_key(number)}/{HEAD}", msgspec.json.format(msgspec.json.encode(found), indent=1))
        except ObjectExists:
            continue
        return found
    raise CheckpointExists(f"no free number for a log in {store.url}: others take them")


def _named(store: Store) -> list[int]:
    """Return the numbers that commits name: one whose log was not copied with it must not be taken for another's."""
    return [commit.log for commit in commits_of(store).values() if commit.log is not None]


def commits_of(store: Store) -> dict[int, CommitBody]:
    """Return step -> commit of all steps. One that is damaged is left out: no way begins at it.

    Raises:
        StoreError: the store is busy or refuses this user.
    """
    repo, found = Repository(store), {}
    for step in repo.steps():
        try:
            found[step] = repo.read_commit(step)
        except CkptError as error:
            if not is_damage(error):
                raise
    return found


def heads_of(store: Store) -> dict[int, LogHead]:
    """Return number -> head of all logs that say what they are.

    Raises:
        MalformedData, UnsupportedVersion: one of them says what this release cannot read.
    """
    found = {n: head for n in log_numbers(store) if (head := read_head(store, n)) is not None}
    for n, head in found.items():
        before = found.get(head.follows) if head.follows is not None else None
        if before is not None and before.start > head.start:
            raise MalformedData(
                f"{log_key(n)}/{HEAD}: begins behind step {head.start}, but follows log {before.number}, which begins "
                f"behind step {before.start}"
            )
    return found


def ways(store: Store) -> list[Way]:
    """Return, for each checkpoint that a log passes through, the way forward from it along the newest history.

    The last of them begins at the newest such checkpoint.
    """
    heads = heads_of(store)
    commits = commits_of(store) if heads else {}
    for newest in sorted(heads, reverse=True):  # one that was just begun may have no checkpoint yet
        found = ways_along(heads, newest, commits)
        if found:
            return found
    return []


def chain_of(heads: Mapping[int, LogHead], newest: int) -> list[LogHead]:
    """Return the logs that follow one another up to ``newest``, in order, as far back as they are there."""
    chain = [heads[newest]]
    while (before := chain[-1].follows) is not None and before in heads:
        chain.append(heads[before])
    return chain[::-1]


def ways_along(heads: Mapping[int, LogHead], newest: int, commits: Mapping[int, CommitBody]) -> list[Way]:
    """Return, for each of these checkpoints that the history up to log ``newest`` passes through, the way forward."""
    chain = chain_of(heads, newest)
    stops: list[int | None] = [*(after.start for after in chain[1:]), None]
    spans = [Span(head.number, head.start + 1, stop) for head, stop in zip(chain, stops, strict=True)]
    found: dict[int, Way] = {}
    for i, (head, span) in enumerate(zip(chain, spans, strict=True)):
        for step, commit in commits.items():
            if step >= head.start and (span.last is None or step <= span.last) and _is_on(commit, head):
                found[step] = Way(step, (span._replace(first=step + 1), *spans[i + 1 :]))
    return [found[step] for step in sorted(found)]


def _is_on(commit: CommitBody, head: LogHead) -> bool:
    """Is a checkpoint's state one that this log passes through?"""
    return commit.log == head.number or (commit.step == head.start and commit.attempt == head.attempt)


def ways_to(store: Store, step: int | None) -> list[Way]:
    """Return how to come to a step, or (None) as far as possible: then each way is to be asked how far it goes.

    The first one needs no log: it is the newest checkpoint, or the one of ``step``.

    Raises:
        NoSuchCheckpoint: the root is empty, or nothing leads to ``step``.
    """
    repo = Repository(store)
    repo.check_marker()
    if step is None:
        newest = repo.pick(None)
        return [Way(newest, ()), *reversed(ways(store))]
    if repo.has(step):
        return [Way(step, ())]
    found = [_cut(one, step) for one in ways(store) if one.step < step]
    if not found:
        repo.pick(step)  # raises, and says what there is
        raise NoSuchCheckpoint(f"no checkpoint of step {step} in {store.url}")
    return found[::-1]


def log_behind(store: Store, base: int, step: int) -> int | None:
    """Return the log whose record of ``step`` is the last on the way from the checkpoint ``base``; None: none is.

    A job that was brought back to ``step`` continues that one, whatever logs others have begun since.
    """
    for way in ways(store):
        numbers = [span.number for span in way.spans if span.first <= step] if way.step == base else []
        if numbers:
            return numbers[-1]
    return None


def _cut(way: Way, step: int) -> Way:
    spans = [
        Span(span.number, span.first, step if span.last is None else min(span.last, step))
        for span in way.spans
        if span.first <= step
    ]
    return Way(way.step, tuple(spans))
