"""Units by collective broadcasts of buffers: the same bits as by messages, one error on all, and no endless wait.

Over gloo and host memory (``CKPT_FABRIC=collective-gloo``): of the way over NCCL all but the backend and the copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.test_broadcast import pack_of, stored
from tests.harness.pool import ranks

if TYPE_CHECKING:
    from pathlib import Path

CASES = "tests.e2e.collective_cases"
SAVE = "tests.e2e.broadcast_cases:save"
COLLECTIVE = {"CKPT_FABRIC": "collective-gloo"}


@pytest.mark.parametrize(
    ("saved", "loaded", "most_groups"),
    [("ddp", "ddp", 1), ("zero1", "zero1", 1), ("hsdp", "hsdp", 3), ("fsdp2", "hsdp", 11), ("zero1", "ddp", 1)],
)
def test_broadcasts_give_what_messages_give(saved: str, loaded: str, most_groups: int, tmp_path: Path) -> None:
    wanted = ranks(4, SAVE, root=str(tmp_path), layout=saved).values()[0]["3"]
    chunks, rest = stored(tmp_path, 3)
    how = {"root": str(tmp_path), "layout": loaded, "reads": ["once", "each", "once"]}
    found = ranks(4, f"{CASES}:watched", case="load", how=how, env=COLLECTIVE).values()
    for one in found:
        first, each, again = one["result"]
        assert first["digests"] == each["digests"] == again["digests"] == wanted
        assert (first["read"], first["strays"]) == ("once", [])
        assert one["broadcasts"] > 0
        assert 1 <= one["groups"] <= most_groups
    assert sum(one["result"][0]["chunks"] for one in found) == chunks
    assert sum(found[0]["result"][0]["by rank"]) == chunks + rest


def test_hosts_with_disks_of_their_own_make_groups_together(tmp_path: Path) -> None:
    wanted = ranks(4, SAVE, root=str(tmp_path), layout="ddp").values()[0]["3"]
    chunks, _ = stored(tmp_path, 3)
    how = {"root": str(tmp_path), "layout": "ddp", "reads": ["auto"], "hosts": ["a", "b", "a", "b"]}
    found = ranks(4, f"{CASES}:watched", case="load", how=how, env=COLLECTIVE).values()
    for one in found:
        (load,) = one["result"]
        assert (load["read"], load["digests"], one["groups"]) == ("once per host", wanted, 1)
        assert load["chunks"] + load["received"] == chunks


def test_a_wrong_word_and_a_device_that_is_not_there_are_refused(tmp_path: Path) -> None:
    ranks(2, SAVE, root=str(tmp_path), layout="ddp").values()
    how = {"root": str(tmp_path), "layout": "ddp", "reads": ["once"]}
    for wish, text in (("tcp", "expected 'auto', 'gloo' or 'nccl'"), ("nccl", "rank 0 cannot: its tensors are not on")):
        outcomes = ranks(2, f"{CASES}:watched", case="load", how=how, env={"CKPT_FABRIC": wish})
        assert outcomes.errors() == ["ConfigError"] * 2
        assert all(text in one.message for one in outcomes)
    for wish in ("auto", "gloo"):
        found = ranks(2, f"{CASES}:watched", case="load", how=how, env={"CKPT_FABRIC": wish}).values()
        assert [one["broadcasts"] for one in found] == [0, 0]


@pytest.mark.parametrize(("how", "kind"), [("refuse", "StoreError"), ("flip", "DigestMismatch")])
def test_a_reader_that_fails_is_one_error_on_all(how: str, kind: str, tmp_path: Path) -> None:
    prints = ranks(4, SAVE, root=str(tmp_path), layout="ddp", steps=[2, 4]).values()[0]
    options = {"root": str(tmp_path), "layout": "ddp", "victim": 2, "how": how}
    found = ranks(4, f"{CASES}:watched", case="load_in_vain", how=options, env=COLLECTIVE).values()
    assert {one["result"]["error"] for one in found} == {kind}
    assert len({one["result"]["text"] for one in found}) == 1
    assert "packs/rank00002" in found[0]["result"]["text"]
    for one in found:
        assert "failed midway" in one["result"]["forward"]
        assert (one["result"]["after"], one["result"]["digests"]) == (4, prints["4"])
        assert one["broadcasts"] > 0


def test_damage_is_one_error_on_all_and_the_step_before_is_taken(tmp_path: Path) -> None:
    prints = ranks(4, SAVE, root=str(tmp_path), layout="ddp", steps=[2, 4]).values()[0]
    pack = pack_of(tmp_path, 1)
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 4
    pack.write_bytes(data)
    options = {"root": str(tmp_path), "layout": "ddp"}
    found = ranks(4, f"{CASES}:watched", case="load_in_vain", how=options, env=COLLECTIVE).values()
    for one in found:
        assert one["result"]["error"] == "DigestMismatch"
        assert (one["result"]["after"], one["result"]["digests"]) == (2, prints["2"])


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_killed_on_the_way_is_named_by_the_others(victim: int) -> None:
    outcomes = ranks(4, f"{CASES}:killed", victim=victim, number=20, expect_killed=[victim])
    left = [outcome.value for outcome in outcomes if outcome.rank != victim]
    assert {one["error"] for one in left} == {"RankFailure"}, left
    assert {f"rank {victim}: its process is gone" in one["text"] for one in left} == {True}, left
    assert {one["usable"] for one in left} == {""}


def test_a_rank_killed_in_a_load_is_named_by_the_others(tmp_path: Path) -> None:
    ranks(4, SAVE, root=str(tmp_path), layout="ddp").values()
    options = {"root": str(tmp_path), "layout": "ddp", "victim": 1, "how": "kill"}
    outcomes = ranks(4, f"{CASES}:watched", case="load_in_vain", how=options, env=COLLECTIVE, expect_killed=[1])
    left = [outcome.value["result"] for outcome in outcomes if outcome.rank != 1]
    assert {(one["error"], one["text"]) for one in left} == {("RankFailure", left[0]["text"])}
    assert "rank 1: its process is gone" in left[0]["text"]


def test_groups_that_one_rank_gave_up_are_made_anew_and_others_are_kept() -> None:
    found = ranks(4, f"{CASES}:lost_groups").values()
    assert {str(one[:3]) for one in found} == {str(["[]"] * 3)}
    (count,) = {int(one[3]) for one in found}
    assert count == 2 + 2 * 2  # the job's and the communicator's; two sets, made twice for three loads


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    budgets = [256 << 20, 16 << 20]
    how: dict[str, Any] = {"root": str(tmp_path), "budgets": budgets}
    for one in ranks(4, f"{CASES}:watched", case="memory", how=how, env=COLLECTIVE, timeout=120).values():
        found = one["result"]
        assert found["wrong"] == 0
        assert one["broadcasts"] > 0
        for budget in budgets:
            assert found[str(budget)] < (budget >> 20) + 64, found


def test_a_group_that_cannot_be_made_fails_all_and_leaves_no_rank_behind() -> None:
    found = ranks(4, f"{CASES}:half_made", victim=1).values()
    assert {one["first"][0] for one in found} == {"RankFailure"}
    # To the others the connections that rank 1 closed look like a rank that is gone; who tells first is heard.
    assert all("lost a peer" in one["first"][1] for one in found), found
    assert {str(one["again"]) for one in found} == {"['', []]"}
    assert {one["sum"] for one in found} == {6}
