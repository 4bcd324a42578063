"""Ranks of one host copy what one of them has read from its memory: any layout, any failure, and no memory at all."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.harness.pool import ranks

if TYPE_CHECKING:
    from pathlib import Path

CASES = "tests.e2e.sharing_cases"


@pytest.mark.parametrize("hosts", ["aaaa", "aabb", "aaab", "abab"])
def test_any_layout_is_filled_through_shared_memory(hosts: str, tmp_path: Path) -> None:
    how = {"root": str(tmp_path), "seeds": list(range(8)), "hosts": list(hosts)}
    found = ranks(4, f"{CASES}:random_layouts", timeout=120, **how).values()
    for one in found:
        assert one["wrong"] == []
        assert one["left"] == []
        assert one["hosts"] == sorted(h for h in set(hosts) if hosts.count(h) > 1)
    assert sum(one["told"] for one in found) > 20


@pytest.mark.parametrize(("hosts", "sharing"), [("aaaa", []), ("abab", ["a"])])
def test_a_host_where_one_rank_gets_no_shared_memory_does_without(
    hosts: str, sharing: list[str], tmp_path: Path
) -> None:
    how = {"root": str(tmp_path), "victim": 1, "hosts": list(hosts)}
    for rank, one in enumerate(ranks(4, f"{CASES}:refused", **how).values()):
        assert one["same"]
        assert one["hosts"] == sharing
        assert hosts[rank] in sharing or not one["told"]
        assert one["left"] == []


@pytest.mark.parametrize(("how", "kind"), [("refuse", "StoreError"), ("flip", "DigestMismatch")])
def test_a_unit_that_its_reader_cannot_read_fails_all_alike(how: str, kind: str, tmp_path: Path) -> None:
    case = {"root": str(tmp_path), "victim": 2, "how": how, "at": 1}
    found = ranks(4, f"{CASES}:fails", **case).values()
    assert len({one["error"] for one in found}) == 1
    assert found[0]["error"].startswith(kind)
    assert all(one["hosts"] and one["again"] and not one["left"] for one in found)


@pytest.mark.parametrize("case", ["fails", "gone_while_lent"])
def test_a_rank_that_is_killed_is_named_and_leaves_nothing_behind(case: str, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    how = {"root": str(tmp_path), "victim": 1} | ({"how": "kill", "at": 1} if case == "fails" else {})
    outcomes = ranks(4, f"{CASES}:{case}", expect_killed=[1], **how)
    errors = {one.value["error"] for one in outcomes if one.rank != 1}
    assert len(errors) == 1
    assert errors.pop().startswith("RankFailure")
    assert [one.value["left"] for one in outcomes if one.rank != 1] == [[], [], []]
    assert {name for name in os.listdir("/dev/shm") if "ckpt" in name} <= before
