"""The pool's own tests: a harness that hides a hang or a dead rank would make every other test worthless."""

from __future__ import annotations

import time

import pytest

from tests.harness import RanksFailed, RanksTimedOut, ranks

CASES = "tests.harness.pool_cases:"


@pytest.mark.parametrize("world", [1, 3])
def test_ranks_talk_to_each_other(world: int) -> None:
    got = ranks(world, CASES + "add_up", base=10).values()
    assert [v["rank"] for v in got] == list(range(world))
    assert {v["total"] for v in got} == {sum(10 + r for r in range(world))}
    assert {v["threads"] for v in got} == {1}


def test_a_hang_is_cut_short_and_shows_all_stacks() -> None:
    started = time.monotonic()
    with pytest.raises(RanksTimedOut) as caught:
        ranks(2, CASES + "wait_for_nobody", timeout=3)
    assert time.monotonic() - started < 20
    text = str(caught.value)
    assert "wait_for_nobody" in text
    assert "in barrier" in text
    assert "_sleep_in_a_thread" in text  # all threads, not only the main one
    assert ranks(2, CASES + "add_up", base=0).values()  # and the pool lives on


def test_an_exception_on_one_rank_is_reported_with_traceback_and_log() -> None:
    got = ranks(3, CASES + "fail_on_one")
    assert got.errors() == [None, "ValueError", None]
    assert got[0].value == "fine"
    with pytest.raises(RanksFailed, match="no such luck") as caught:
        got.values()
    assert "fail_on_one" in str(caught.value)
    assert "about to fail" in str(caught.value)


def test_a_killed_rank_is_reported() -> None:
    got = ranks(2, CASES + "kill_one", expect_killed=[1])
    assert (got[0].value, got[1].signal) == ("survived", "SIGKILL")
    with pytest.raises(RanksFailed, match="killed by SIGKILL"):
        ranks(2, CASES + "kill_one")
    with pytest.raises(RanksFailed, match=r"expected exactly ranks \[0\]"):
        ranks(2, CASES + "kill_one", expect_killed=[0])


def test_an_unknown_target_is_an_error_of_every_rank() -> None:
    assert ranks(2, CASES + "nothing").errors() == ["AttributeError"] * 2


def test_environment_reaches_the_ranks() -> None:
    assert ranks(1, CASES + "environment", env={"CKPT_X": "7"}, name="CKPT_X").values() == ["7"]
    assert ranks(1, CASES + "environment", name="CKPT_X").values() == [None]


def test_a_module_is_imported_before_the_fork_for_those_who_ask() -> None:
    target = CASES + "is_loaded"
    assert ranks(1, target, name="this").values() == [False]
    assert ranks(1, target, name="this", preload=("this",)).values() == [True]
    with pytest.raises(RuntimeError, match="No module named 'nosuchmodule'"):
        ranks(1, target, name="this", preload=("nosuchmodule",))
    assert ranks(1, target, name="this").values() == [True]  # and the pool lives on
