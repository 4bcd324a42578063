"""Which logs a repository has, and how one continues another: from a checkpoint to the last step, without guessing.

Each run of a job keeps a log of its own, ``log/<number>/``, that begins at the state of a checkpoint, or behind a step
of an earlier log to which a run was brought back. Of several histories the one that was begun last counts, up to the
point where it left the one before; what an earlier run had logged behind that point is of a past that was given up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ckpt.errors import CheckpointExists, MalformedData, NoSuchCheckpoint, ObjectExists, UnsupportedVersion
from ckpt.gradlog.record import VERSION, decode
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
    names = store.children(ROOT)
    return sorted(
        int(name) for name in names if name.isascii() and name.isdigit() and log_key(int(name)).endswith(name)
    )


def read_head(store: Store, number: int) -> LogHead | None:
    """Return what a log says of itself; None if it was begun and says nothing yet.

    Raises:
        MalformedData, UnsupportedVersion: it says what this release cannot read.
    """
    key = f"{log_key(number)}/{HEAD}"
    if store.size(key) is None:
        return None
    head = decode(store.get(key, 0, MAX_HEAD), LogHead, key)
    if head.format != VERSION:
        raise UnsupportedVersion(f"{key} has format {head.format}, this release reads {VERSION}")
    if head.number != number:
        raise MalformedData(f"{key}: is of log {head.number}, expected {number}")
    return head


def begin_log(store: Store, head: LogHead) -> LogHead:
    """Begin a log under the next free number; called by one rank. Returns the head with its number.

    Raises:
        CheckpointExists: others begin one log after the other.
    """
    number = max(log_numbers(store), default=0)
    for _ in range(_TRIES):
        number += 1
        found = msgspec.structs.replace(head, number=number)
        try:
            store.put(f"{log_key(number)}/{HEAD}", msgspec.json.format(msgspec.json.encode(found), indent=1))
        except ObjectExists:
            continue
        return found
    raise CheckpointExists(f"no free number for a log in {store.url}: others take them")


def heads_of(store: Store) -> dict[int, LogHead]:
    """Return number -> head of all logs that say what they are."""
    return {n: head for n in log_numbers(store) if (head := read_head(store, n)) is not None}


def ways(store: Store) -> list[Way]:
    """Return, for each checkpoint that a log passes through, the way forward from it along the newest history.

    The last of them begins at the newest such checkpoint.
    """
    repo = Repository(store)
    heads = heads_of(store)
    if not heads:
        return []
    commits = {step: repo.read_commit(step) for step in repo.steps()}
    for newest in sorted(heads, reverse=True):  # one that was just begun may have no checkpoint yet
        found = _ways_along(heads, newest, commits)
        if found:
            return found
    return []


def _ways_along(heads: Mapping[int, LogHead], newest: int, commits: Mapping[int, CommitBody]) -> list[Way]:
    chain = [heads[newest]]
    while chain[0].follows is not None and chain[0].follows in heads and len(chain) <= len(heads):
        chain.insert(0, heads[chain[0].follows])
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


def _cut(way: Way, step: int) -> Way:
    spans = [
        Span(span.number, span.first, step if span.last is None else min(span.last, step))
        for span in way.spans
        if span.first <= step
    ]
    return Way(way.step, tuple(spans))
