"""What of the gradient logs leads from a checkpoint to a later step, and what leads nowhere any more.

A load goes along the newest history only. What earlier histories had logged up to the point at which the newest one
begins is the past of the same training, and counts as needed as long as a checkpoint leads to it; what they had logged
behind that point is of a past that was given up.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from ckpt.repo.lineage import HEAD, ROOT, chain_of, commits_of, known_heads, log_key, log_numbers, ways_along
from ckpt.repo.log_files import SUFFIX, files_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckpt.errors import CkptError
    from ckpt.repo.lineage import LogHead, Way
    from ckpt.store.base import ObjectInfo, Store

LOG, EMPTY, GIVEN_UP = "log", "empty log", "given-up log"
"""Kinds of what is not needed: no checkpoint leads to it; it has no record; its steps were taken anew."""

_KEY = re.compile(
    rf"{ROOT}/(\d{{6,18}})/(?:log\.json|directory\.json\.zst|rank(\d{{5,7}})/(?:head\.json|(\d{{1,18}})\.log))"
)


class Needs(NamedTuple):
    """``heads``: all logs. ``ways``: the newest history's. ``records``: log -> (first, last) of records that are
    needed, None: to the end; a log that is needed for its head alone has none that exist. ``led``: logs that a
    checkpoint leads to. ``headless``: those that have records, and say nothing of themselves. ``damaged``: those that
    say what nobody can read, and why.
    """

    heads: Mapping[int, LogHead]
    ways: list[Way]
    records: dict[int, list[tuple[int, int | None]]]
    led: frozenset[int]
    headless: frozenset[int]
    damaged: Mapping[int, CkptError]

    def has(self, number: int, first: int, last: int | None) -> bool:
        """Is any of these records of a log needed?"""
        for start, stop in self.records.get(number, ()):
            if (last is None or start <= last) and (stop is None or first <= stop):
                return True
        return False

    def unknown(self, number: int) -> str:
        """Return why nobody knows whether a log is needed that nothing needs which can be read; empty: it is known.

        A log whose head is damaged may follow any of those before it; what leads to one that follows it, or one that
        has lost its head, is not known either.
        """
        if number in self.damaged:
            return f"{log_key(number)}/{HEAD} cannot be read, so nobody knows what leads to it"
        after = min((n for n in self.damaged if n > number), default=None)
        if after is not None:
            return f"log {after}, whose {HEAD} cannot be read, may go on from it"
        before = chain_of(self.heads, number)[0].follows if number in self.heads else None
        if before in self.headless:
            return f"it follows a log whose {HEAD} is not there"
        return f"it follows a log whose {HEAD} cannot be read" if before in self.damaged else ""


def needs_of(store: Store) -> Needs:
    """Return which records are needed, as far as can be read what the logs say of themselves.

    Raises:
        StoreError: the store is busy or refuses this user.
    """
    heads, damaged = known_heads(store)
    commits = commits_of(store) if heads else {}
    found = {number: ways for number in heads if (ways := ways_along(heads, number, commits))}
    newest = max(found, default=None)
    chain = chain_of(heads, newest) if newest is not None else []
    records: dict[int, list[tuple[int, int | None]]] = {}
    for number, ways in found.items():
        # Behind the step at which the newest history begins, any other one was given up.
        ends = None if number == newest else chain[0].start
        for span in (span for way in ways if number == newest or heads[number] not in chain for span in way.spans):
            last = span.last if ends is None else ends if span.last is None else min(span.last, ends)
            if ends is None or (last is not None and span.first <= last):
                records.setdefault(span.number, []).append((span.first, last))
    headless = [n for n in log_numbers(store) if n not in heads and n not in damaged and _has_records(store, n)]
    ways = found[newest] if newest is not None else []
    return Needs(heads, ways, records, frozenset(found), frozenset(headless), damaged)


def headless_after(store: Store, number: int) -> list[int]:
    """Return the logs after ``number`` that have records and do not say what they are: a copy that has not come to its
    end, or a head that is lost.
    """
    numbers = [n for n in log_numbers(store) if n > number and store.size(f"{log_key(n)}/{HEAD}") is None]
    return [n for n in numbers if _has_records(store, n)]


def _has_records(store: Store, number: int) -> bool:
    return any(info.key.endswith(SUFFIX) for info in store.walk(log_key(number)))


class Unneeded(NamedTuple):
    """Objects of a log that lead nowhere. ``key``: the object, or the folder of the log. ``number``: of the log."""

    kind: str
    key: str
    number: int
    infos: list[ObjectInfo]


def unneeded(store: Store, needs: Needs, listed: Iterable[ObjectInfo]) -> list[Unneeded]:
    """Return what is not needed of what was listed below ``log/``; names that no release gives are left out."""
    logs: dict[int, list[ObjectInfo]] = {}
    for info in listed:
        name = _KEY.fullmatch(info.key)
        if name is not None and info.key.startswith(f"{log_key(int(name[1]))}/"):
            logs.setdefault(int(name[1]), []).append(info)
    found = []
    for number, infos in sorted(logs.items()):
        if number in needs.records:
            found += _files(store, needs, number, infos)
        else:
            found.append(Unneeded(_kind(needs, number, infos), log_key(number), number, infos))
    return found


def _kind(needs: Needs, number: int, infos: Iterable[ObjectInfo]) -> str:
    if not any(info.key.endswith(".log") for info in infos):
        return EMPTY
    return GIVEN_UP if number in needs.led else LOG


def _files(store: Store, needs: Needs, number: int, infos: Iterable[ObjectInfo]) -> list[Unneeded]:
    """Return files of a needed log of whose records none is needed."""
    found = []
    by_key = {info.key: info for info in infos}
    for rank in sorted({int(name[2]) for info in infos if (name := _KEY.fullmatch(info.key)) and name[3]}):
        files = files_of(store, number, rank)
        for i, (first, key) in enumerate(files):
            last = files[i + 1][0] - 1 if i + 1 < len(files) else None
            if key in by_key and not needs.has(number, first, last):
                kind = GIVEN_UP if any(stop is not None and first > stop for _, stop in needs.records[number]) else LOG
                found.append(Unneeded(kind, key, number, [by_key[key]]))
    return found
