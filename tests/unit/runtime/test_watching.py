from __future__ import annotations

import time

from ckpt.errors import ConfigError, RankFailure
from ckpt.runtime.watching import Watch
from tests.property.fake import comms, run_ranks


def look_until_it_raises(watch: Watch, peers: list[int]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        watch.look(peers)
        time.sleep(0.01)


def test_a_silent_peer_is_lost_and_learns_of_it():
    jobs = comms(2)

    def work(rank: int) -> None:
        with jobs[rank].joint("load", 0.3):
            look_until_it_raises(Watch(jobs[rank], "read"), [1] if rank == 0 else [])

    ended = run_ranks(jobs, work)
    assert [type(one) for one in ended] == [RankFailure, RankFailure]
    assert str(ended[0]) == str(ended[1])
    assert "step 'read'" in str(ended[0])
    assert "rank 1: gave no sign for 0.3 s" in str(ended[0])


def test_a_peer_that_leaves_by_an_error_is_noticed():
    jobs = comms(2)

    def work(rank: int) -> None:
        with jobs[rank].joint("load", 60):
            if rank == 1:
                raise ConfigError("no more")
            look_until_it_raises(Watch(jobs[0], "read"), [1])

    ended = run_ranks(jobs, work)
    assert [type(one) for one in ended] == [RankFailure, ConfigError]
    assert "rank 1: ConfigError: no more" in str(ended[0])


def test_a_mark_is_seen_by_all_and_belongs_to_what_it_was_left_for():
    jobs = comms(2)

    def work(rank: int) -> list[bool]:
        with jobs[rank].joint("load"):
            first = Watch(jobs[rank], "read")
            if rank == 1:
                first.note()
            jobs[rank].run("meet", lambda: None)
            second = Watch(jobs[rank], "read")
            seen = [first.noted(), second.noted()]
            jobs[rank].run("part", lambda: None)
        return seen

    assert run_ranks(jobs, work) == [[True, False], [True, False]]


def test_one_rank_has_nobody_to_look_at():
    (alone,) = comms(1)
    watch = Watch(alone, "read")
    watch.look([])
    assert not watch.noted()
