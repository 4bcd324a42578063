"""What the ranks of a job tell each other between full saves and in front of one: whose log has ended, and who counts
other steps than the others.

A full save is begun by all ranks at the same step, which each counts for itself. A rank that has called once too often
or not often enough would wait for the others at another step, while they wait for it in a collective of the training.
What the hooks see of the optimizers tells such a call, and what the others see tells whether they have done the same.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ckpt.errors import CkptError, ConfigError
from ckpt.gradlog.rivals import taken_over

if TYPE_CHECKING:
    from ckpt.gradlog.writing.log import GradientLog
    from ckpt.runtime.comm import Comm
    from ckpt.store.base import Store

log = logging.getLogger("ckpt")

LOOK_EVERY = 8
"""Steps between two looks at whether the log of any rank has ended."""
SETTLED = 2
"""Calls after which all ranks have made theirs of a step: none ends a training step before all have begun it."""
ONCE = "ckpt.Checkpointer.step() must be called once behind each optimizer step, skipped ones too, on every rank"


class _Odd(msgspec.Struct, frozen=True):
    """A call behind not exactly one step of the optimizers. ``steps``: since the call before."""

    rank: int
    number: int
    steps: int

    @property
    def text(self) -> str:
        """What is odd about it."""
        if self.steps:
            what = f"has taken {self.steps} optimizer steps between two calls of ckpt.Checkpointer.step()"
        else:
            what = "has called ckpt.Checkpointer.step() with no optimizer step taken or skipped since the last call"
        return f"rank {self.rank} {what} (as step {self.number})"


class Together:
    """One for each checkpointer; made on all ranks behind the same operation.

    Args:
        comm: all ranks.
        store: the repository's.
        timeout: of operations.
    """

    def __init__(self, comm: Comm, store: Store, timeout: float | None) -> None:
        self._comm, self._store, self._timeout = comm, store, timeout
        self._prefix = f"calls/{comm.operation}"
        self._open: list[_Odd] = []
        self._mine: set[tuple[int, int]] = set()
        self._told = False

    # -- counting -----------------------------------------------------------------------------------------------------

    def counted(self, number: int, one: GradientLog | None) -> int:
        """Return the number of the step that was just logged, put right if this rank alone has miscounted.

        Args:
            number: by this rank's calls.
            one: its log, which has seen what the optimizers did.
        """
        kv = self._comm.kv
        odd = None
        if one is not None and one.taken is not None and (one.taken > 1 or one.idle):
            odd = _Odd(self._comm.rank, number, one.taken)
        if kv is None:
            if odd is not None:
                self._tell(odd)
            return number
        for old in [old for old in self._open if number >= old.number + SETTLED]:
            self._open.remove(old)
            if kv.add(self._key(old), 0) == self._comm.world:
                self._tell(old)
            else:
                number += self._put_right(old, one)
                kv.set(f"{self._prefix}/odd", b"")
        if odd is not None:
            self._open.append(odd)
            self._mine.add((odd.number, odd.steps))
            kv.add(self._key(odd), 1)
            kv.set(f"{self._prefix}/odd", msgspec.json.encode(odd))
        return number

    def _tell(self, odd: _Odd) -> None:
        """Tell once of calls without a step, which all ranks have made alike: they count as steps that were skipped."""
        if not odd.steps and not self._told and not self._comm.rank:
            self._told = True
            log.warning("%s: that counts as a step that was skipped. %s", odd.text, ONCE)

    def _key(self, odd: _Odd) -> str:
        return f"{self._prefix}/{odd.number}/{odd.steps}"

    def _put_right(self, odd: _Odd, one: GradientLog | None) -> int:
        log.warning("%s, and other ranks have not: its count of steps is put right. %s", odd.text, ONCE)
        if one is not None:  # its records have other numbers than those of the same steps on other ranks
            one.give_up("steps were counted wrongly")
        return odd.steps - 1

    def _doubt(self, number: int) -> str:
        """Return why ranks that wait at step ``number`` wait in vain, if that is known."""
        kv, key = self._comm.store, f"{self._prefix}/odd"
        if not kv.check([key]):
            return ""
        said = kv.get(key)
        if not said:
            return ""
        odd = msgspec.json.decode(said, type=_Odd)
        is_mine = odd in self._open and not odd.steps  # it is this rank that came too early
        is_theirs = odd.number <= number and (odd.number, odd.steps) not in self._mine
        if not (is_mine or is_theirs) or kv.add(self._key(odd), 0) == self._comm.world:
            return ""
        return f"does not come to step {number}: {odd.text}. {ONCE}"

    # -- logs that have ended -----------------------------------------------------------------------------------------

    def has_ended(self, number: int, one: GradientLog | None) -> bool:
        """Has the log of any rank ended, and is this the step at which all know of it?

        A rank whose log has ended says so, and when all are to act on it: late enough that all will have heard, because
        ranks of one job do not run a step ahead of each other.
        """
        if one is None:
            return False
        kv, key = self._comm.kv, _ended(one)
        if kv is None:
            return one.broken is not None
        if one.broken is not None:
            when = (number // LOOK_EVERY + 2) * LOOK_EVERY
            kv.compare_set(key, "", str(when))
        if number % LOOK_EVERY or not kv.check([key]):
            return False
        return number >= int(kv.get(key))

    def meet(self, number: int, one: GradientLog | None) -> bool:
        """Meet all ranks in front of a full save. Returns whether the log of any has ended. Collective.

        Args:
            number: of the step, by this rank's calls.
            one: its log.

        Raises:
            ConfigError: ranks count different steps.
            RankFailure: some do not come.
        """
        kv, comm = self._comm.kv, self._comm

        def said() -> bytes:
            if comm.rank == 0 and one is not None:
                with suppress(CkptError):  # whether anything can be saved is told by the save
                    if why := taken_over(self._store, one.head):
                        one.give_up(why)
            return msgspec.json.encode((number, one is None or one.broken is not None))

        if kv is None:
            return bool(msgspec.json.decode(said())[1])
        comm.doubt = partial(self._doubt, number)
        try:
            with comm.joint(f"Checkpointer.step (full save of step {number})", self._timeout):
                told = [msgspec.json.decode(data, type=tuple[int, bool]) for data in comm.gather("full save", said)]
                _check_numbers([at for at, _ in told])
                return any(ended for _, ended in told) or (one is not None and kv.check([_ended(one)]))
        finally:
            comm.doubt = str


def _ended(one: GradientLog) -> str:
    """Return the key under which a log's end is told. Not by its number: where a root was removed, that comes again."""
    return f"log/{one.head.run}/ended"


def _check_numbers(numbers: list[int]) -> None:
    if len(set(numbers)) > 1:
        sides = {number: [rank for rank, at in enumerate(numbers) if at == number] for number in sorted(set(numbers))}
        lines = "; ".join(f"step {number} on rank(s) {', '.join(map(str, r[:8]))}" for number, r in sides.items())
        raise ConfigError(f"ranks count different steps in front of a full save: {lines}. {ONCE}")
