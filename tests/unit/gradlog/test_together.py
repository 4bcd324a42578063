"""What ranks tell each other of their logs, as threads over one key-value store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from ckpt.errors import ConfigError
from ckpt.gradlog.together import LOOK_EVERY, Together
from ckpt.gradlog.writing.log import new_head
from ckpt.store.memory import MemoryStore
from tests.unit.runtime.test_comm import Job

if TYPE_CHECKING:
    from ckpt.runtime.comm import Comm


@dataclass
class Seen:
    """As much of a log as is asked: what its hooks have seen."""

    taken: int | None = 1
    idle: bool = False
    broken: str | None = None
    head: Any = field(default_factory=lambda: new_head(0, 2))

    def give_up(self, why: str) -> None:
        self.broken = why


def counts(world: int, seen: dict[int, list[Seen]]) -> dict[int, list[int]]:
    """What each rank counts, call by call: all make theirs of one step before any makes that of the next."""
    job = Job(world)
    together = {rank: Together(job.comms[rank], MemoryStore(), 5.0) for rank in range(world)}
    numbers = dict.fromkeys(range(world), 0)
    found: dict[int, list[int]] = {rank: [] for rank in range(world)}
    for call in range(max(map(len, seen.values()))):
        for rank in range(world):
            numbers[rank] = together[rank].counted(numbers[rank] + 1, seen[rank][call])
            found[rank].append(numbers[rank])
    return found


def test_what_all_ranks_do_alike_is_counted_by_calls() -> None:
    same = [Seen(), Seen(2), Seen(0, idle=True), Seen(), Seen(3), Seen(), Seen(), Seen()]
    assert counts(3, dict.fromkeys(range(3), same)) == {rank: [1, 2, 3, 4, 5, 6, 7, 8] for rank in range(3)}


def test_a_rank_that_alone_has_left_out_calls_is_put_right_two_calls_later() -> None:
    late = [Seen(), Seen(3), Seen(None), Seen(None), Seen()]
    assert counts(2, {0: [Seen() for _ in range(5)], 1: late}) == {0: [1, 2, 3, 4, 5], 1: [1, 2, 3, 6, 7]}
    assert late[3].broken == "steps were counted wrongly"


def test_a_skipped_step_is_no_call_too_many() -> None:
    assert counts(2, {0: [Seen()] * 4, 1: [Seen(), Seen(0), Seen(), Seen()]})[1] == [1, 2, 3, 4]


def test_calls_without_a_step_that_all_make_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    idle = [Seen(0, idle=True), Seen(0, idle=True), Seen(), Seen(), Seen()]
    for world in (1, 3):
        caplog.clear()
        assert set(map(tuple, counts(world, dict.fromkeys(range(world), idle)).values())) == {(1, 2, 3, 4, 5)}
        (one,) = caplog.messages
        assert one.startswith(
            "rank 0 has called ckpt.Checkpointer.step() with no optimizer step taken or skipped since"
        )
        assert "(as step 1): that counts as a step that was skipped" in one


def test_who_waits_long_is_told_of_a_rank_that_miscounts_until_that_is_put_right() -> None:
    job = Job(2)
    first, second = (Together(comm, MemoryStore(), 5.0) for comm in job.comms)
    log: Any = Seen(2)
    assert (first._doubt(4), second.counted(4, log)) == ("", 4)
    assert first._doubt(3) == ""  # it may do the same at step 4
    assert first._doubt(4).startswith("does not come to step 4: rank 1 has taken 2 optimizer steps between two calls")
    assert second._doubt(5) == ""
    assert [second.counted(number, None) for number in (5, 6)] == [5, 7]
    assert first._doubt(8) == ""


def test_a_call_too_many_is_taken_back() -> None:
    twice = [Seen(), Seen(0, idle=True), Seen(), Seen()]
    assert counts(2, {0: [Seen()] * 4, 1: twice})[1] == [1, 2, 3, 3]


def meet(numbers: dict[int, int], logs: dict[int, Seen | None]) -> dict[int, Any]:
    job = Job(len(numbers))

    def work(comm: Comm) -> bool:
        return Together(comm, MemoryStore(), 5.0).meet(numbers[comm.rank], logs[comm.rank])

    return job.run(work)


def test_ranks_that_meet_at_different_steps_are_told_which() -> None:
    for error in meet({0: 10, 1: 9, 2: 10}, {0: Seen(), 1: Seen(), 2: Seen()}).values():
        assert isinstance(error, ConfigError)
        assert "step 9 on rank(s) 1; step 10 on rank(s) 0, 2. ckpt.Checkpointer.step() must be called" in str(error)


def test_one_log_that_has_ended_is_known_to_all() -> None:
    assert meet({0: 8, 1: 8}, {0: Seen(), 1: Seen(broken="full disk")}) == {0: True, 1: True}
    assert meet({0: 8, 1: 8}, {0: Seen(), 1: Seen()}) == {0: False, 1: False}
    assert meet({0: 8, 1: 8}, {0: None, 1: None}) == {0: True, 1: True}
    assert meet({0: 8}, {0: Seen()}) == {0: False}


@pytest.mark.parametrize("at", [1, LOOK_EVERY - 1, LOOK_EVERY])
def test_all_act_on_a_log_that_has_ended_at_the_same_step(at: int) -> None:
    job = Job(2)
    both = [Together(comm, MemoryStore(), 5.0) for comm in job.comms]
    logs = [Seen(), Seen()]
    logs[1].head = logs[0].head
    acted: list[list[int]] = [[], []]
    for number in range(1, 4 * LOOK_EVERY):
        if number == at:
            logs[1].broken = "why"
        for rank, one in enumerate(both):
            if one.has_ended(number, logs[rank]):  # type: ignore[arg-type]
                acted[rank].append(number)
    assert acted[0] == acted[1]
    assert acted[0][0] == (at // LOOK_EVERY + 2) * LOOK_EVERY
