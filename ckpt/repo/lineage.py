"""Which logs a repository has, and how one continues another: from a checkpoint to the last step, without guessing.

Each run of a job keeps a log of its own, ``log/<number>/``, that begins at the state of a checkpoint, or behind a step
of an earlier log to which a run was brought back. Of several histories the one that was begun last counts, up to the
point where it left the one before; what an earlier run had logged behind that point is of a past that was given up.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ckpt.errors import (
    CheckpointExists,
    CkptError,
    FormatError,
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
    from collections.abc import Mapping, Sequence

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
    ``run``: 32 hexadecimal digits that no other log has; its records carry them too (empty: written before they did).
    """

    format: int
    number: int
    start: int
    world: int
    attempt: str = ""
    follows: int | None = None
    created: str = ""
    run: str = ""


class Heads(NamedTuple):
    """Number -> head of all logs that say what they are, and number -> why not of those that say what nobody can read.

    Where one of the latter belongs is not known. It does not matter to a history that was begun later and has
    checkpoints of its own; one with a higher number may be the history that counts.
    """

    sound: dict[int, LogHead]
    damaged: dict[int, CkptError]


class Span(NamedTuple):
    """Records ``first`` … ``last`` of a log; ``last`` None: as far as they go."""

    number: int
    first: int
    last: int | None


class Way(NamedTuple):
    """A checkpoint and what brings it forward, in order. ``step``: of the checkpoint."""

    step: int
    spans: tuple[Span, ...]


class To(NamedTuple):
    """How to come to a step. ``ways``: the first one needs no log. ``doubt``: why there may be a newer history, if
    there may. ``given_up``: later checkpoints of a past that the newest history has replaced.
    """

    ways: list[Way]
    doubt: FormatError | None
    given_up: list[int]


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
    if head.run and re.fullmatch(r"[0-9a-f]{32}", head.run) is None:
        raise MalformedData(f"{key}: run {head.run[:40]!r}, expected 32 hexadecimal digits")
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
    found = known_heads(store)
    for error in found.damaged.values():
        raise error
    return found.sound


def known_heads(store: Store) -> Heads:
    """Return the heads of all logs, as far as they can be read.

    Raises:
        StoreError: the store is busy or refuses this user.
    """
    found = Heads({}, {})
    for number in log_numbers(store):
        try:
            head = read_head(store, number)
        except CkptError as error:
            if not is_damage(error):
                raise
            found.damaged[number] = error
            continue
        if head is not None:
            found.sound[number] = head
    for n, head in list(found.sound.items()):
        before = found.sound.get(head.follows) if head.follows is not None else None
        if before is not None and before.start > head.start:  # nobody knows which of the two is wrong
            text = (
                f"{log_key(n)}/{HEAD}: begins behind step {head.start}, but follows log {before.number}, which begins "
                f"behind step {before.start}"
            )
            found.damaged.update(dict.fromkeys((n, before.number), MalformedData(text)))
    for n in found.damaged:
        found.sound.pop(n, None)
    return found


def ways(store: Store) -> list[Way]:
    """Return, for each checkpoint that a log passes through, the way forward from it along the newest history.

    The last of them begins at the newest such checkpoint.

    Raises:
        FormatError: a log that may be of a newer history says what this release cannot read.
    """
    found, doubt = known_ways(store)
    if doubt is not None:
        raise doubt
    return found


def known_ways(store: Store) -> tuple[list[Way], FormatError | None]:
    """Return what :func:`ways` does of what can be read, and why there may be a newer history; None: there is none."""
    heads = known_heads(store)
    commits = commits_of(store) if heads.sound else {}
    doubt: FormatError | None = None
    for newest in sorted((*heads.sound, *heads.damaged), reverse=True):
        if newest in heads.damaged:
            doubt = doubt or _doubt(newest, heads.damaged[newest])
            continue
        found = ways_along(heads.sound, newest, commits)
        if found:
            return found, doubt
        # One that was just begun may have no checkpoint yet; one of which the beginning is damaged may have some.
        before = chain_of(heads.sound, newest)[0].follows
        if before in heads.damaged:
            doubt = doubt or _doubt(before, heads.damaged[before])
    return [], doubt


def _doubt(number: int, error: CkptError) -> FormatError:
    kind = type(error) if isinstance(error, FormatError) else MalformedData
    return kind(f"{error}; where log {number} belongs is not known, and it may lead to a later step than what is known")


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


def ways_to(store: Store, step: int | None) -> To:
    """Return how to come to a step, or (None) as far as possible: then each way is to be asked how far it goes.

    The first way needs no log: it is the newest checkpoint, or the one of ``step``. A checkpoint behind the point where
    the newest history left an earlier one is not the newest: a job was brought back to before it, and has gone on.

    Raises:
        NoSuchCheckpoint: the root is empty, or nothing leads to ``step``.
        FormatError: nothing that can be read leads to ``step``, and a log says what this release cannot read.
    """
    repo = Repository(store)
    repo.check_marker()
    if step is None:
        newest = repo.pick(None)
        found, doubt = known_ways(store)
        past = _given_up(commits_of(store), found) if found and newest > found[-1].step else []
        if past:
            newest = max(one for one in repo.steps() if one not in past)
        return To([Way(newest, ()), *reversed(found)], doubt, [one for one in past if one > newest])
    if repo.has(step):
        return To([Way(step, ())], None, [])
    known, doubt = known_ways(store)
    found = [_cut(one, step) for one in known if one.step < step]
    if not found:
        if doubt is not None:
            raise doubt
        _raise_damaged(store)
        repo.pick(step)  # raises, and says what there is
        raise NoSuchCheckpoint(f"no checkpoint of step {step} in {store.url}")
    return To(found[::-1], doubt, [])


def _given_up(commits: Mapping[int, CommitBody], found: Sequence[Way]) -> list[int]:
    """Return the checkpoints that lie on logs before the newest one, and not on its history ``found``.

    Of one that no log passes through (``ckpt.save``) nobody knows whose past it is: it counts by its number.
    """
    newest, on = found[-1].spans[-1].number, {way.step for way in found}
    return [step for step, commit in commits.items() if step not in on and commit.log and commit.log < newest]


def _raise_damaged(store: Store) -> None:
    """Raise if a log that says what nobody can read may be why nothing leads to a step."""
    for number, error in sorted(known_heads(store).damaged.items(), reverse=True):
        raise _doubt(number, error)


def log_behind(store: Store, base: int, step: int) -> int | None:
    """Return the log whose record of ``step`` is the last on the way from the checkpoint ``base``; None: none is.

    A job that was brought back to ``step`` continues that one, whatever logs others have begun since.
    """
    for way in known_ways(store)[0]:  # what was loaded is along what can be read
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
