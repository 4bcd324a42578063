"""Ranks that exchange something between two steps, with nothing that would tell them that a peer is gone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ckpt.runtime.keyvalue import StepOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckpt.runtime.comm import Comm


class Watch:
    """One rank's look at the others while they do something together.

    Args:
        comm: all ranks, in an operation.
        name: of what they do.
    """

    def __init__(self, comm: Comm, name: str) -> None:
        self.comm, self.name = comm, name
        self._mark = f"{comm.operation}/note/{comm._step}/{name}"
        self._heard: dict[int, tuple[str, float]] = {}

    def look(self, peers: Iterable[int]) -> None:
        """See that this rank can go on.

        Args:
            peers: ranks that it waits for.

        Raises:
            RankFailure: a rank has left the operation, or a peer is gone or silent; the same on all ranks.
        """
        comm = self.comm
        if comm.kv is None:
            return
        key = comm._key(comm._step + 1)  # this rank has not arrived there, so it can only have failed
        if not comm.kv.check([f"{key}/done"]):
            lost = dict.fromkeys(comm._dead(peers), "its process is gone")
            lost |= dict.fromkeys(self._silent(peers), f"gave no sign for {comm.timeout:g} s")
            if not lost:
                return
            comm._decide(key, StepOutcome(False, self.name, lost))
        comm._raise_failed(comm._outcome(key))

    def _silent(self, peers: Iterable[int]) -> list[int]:
        """Return which peers have not beaten for a whole timeout."""
        now, silent = time.monotonic(), []
        for rank in peers:
            beat = self.comm._text(f"beat/{rank}")
            if self._heard.setdefault(rank, (beat, now))[0] != beat:
                self._heard[rank] = (beat, now)
            elif now - self._heard[rank][1] >= self.comm.timeout:
                silent.append(rank)
        return silent

    def note(self) -> None:
        """Leave a mark that other ranks can see while the operation lasts. Safe to call from several threads."""
        self.comm._put(self._mark, b"1")

    def noted(self) -> bool:
        """Has any rank left the mark?"""
        return self.comm.kv is not None and self.comm.kv.check([self._mark])
