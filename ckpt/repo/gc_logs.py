"""Gradient logs that lead nowhere, for a collection: found, judged by age, removed with what leads to them last.

What a log needs to lead from a checkpoint to a later step is never in question: records, and the heads of every log on
the way. Where a log has lost its head, nobody knows what leads to it and to those that follow it: they stay. Where a
head cannot be read, so do all logs before it, because it may go on from any of them.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from ckpt.repo.lineage import HEAD, log_key
from ckpt.repo.log_needs import EMPTY, needs_of, unneeded
from ckpt.store.base import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.repo.log_needs import Needs, Unneeded
    from ckpt.store.base import Store


@dataclass(slots=True)
class UnneededLog:
    """``age_s``: seconds since the last sign of life; None if nobody knows. ``kept``: why it stays whatever its age."""

    kind: str
    key: str
    number: int
    infos: list[ObjectInfo]
    age_s: float | None
    kept: str


class UnneededLogs:
    """What was listed below ``log/`` and is not needed."""

    def __init__(self, store: Store, listed: Sequence[ObjectInfo]) -> None:
        self._store = store
        self.found: list[UnneededLog] = []
        if listed:
            needs = needs_of(self._store)
            found = unneeded(store, needs, listed)
            self.found = [
                UnneededLog(
                    one.kind, one.key, one.number, one.infos, _age(needs, one.number, one.infos), _kept(needs, one)
                )
                for one in found
            ]

    def remove(self, one: UnneededLog) -> str:
        """Remove it unless a checkpoint leads to it by now. Returns why it stays; empty if it is gone."""
        needs = needs_of(self._store)
        again = unneeded(self._store, needs, one.infos)
        if again and (why := _kept(needs, again[0])):
            return why
        if {info.key for found in again for info in found.infos} != {info.key for info in one.infos}:
            return "a checkpoint leads to it meanwhile"
        for info in sorted(one.infos, key=_order):
            self._store.delete(info.key)
        return ""


def _order(info: ObjectInfo) -> tuple[int, str]:
    """Heads go last: records without one would be taken for what has lost its head, and stay."""
    name = info.key.rpartition("/")[2]
    return (2 if name == HEAD else 1 if name.endswith(".json") else 0, info.key)


def _kept(needs: Needs, one: Unneeded) -> str:
    if one.kind != EMPTY and one.number in needs.headless:
        return f"{log_key(one.number)}/{HEAD} is not there, so nobody knows what leads to it"
    return needs.unknown(one.number)


def _age(needs: Needs, number: int, infos: Sequence[ObjectInfo]) -> float | None:
    signs = [info.modified for info in infos if info.modified is not None]
    if number in needs.heads:
        with suppress(ValueError, OverflowError):
            signs.append(datetime.fromisoformat(needs.heads[number].created).timestamp())
    return time.time() - max(signs) if signs else None
