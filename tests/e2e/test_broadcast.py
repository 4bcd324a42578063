"""Each chunk read by one rank and handed on: the same bits as when every rank reads, and one error on all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ckpt.format.manifest import DERIVED
from ckpt.repo.repository import Repository
from ckpt.store.local import LocalStore
from tests.harness.pool import ranks

if TYPE_CHECKING:
    from pathlib import Path

CASES = "tests.e2e.broadcast_cases"


def stored(root: Path, step: int) -> tuple[int, int]:
    """Bytes of the step's chunks, each place once, and of what else there is to read: objects and index."""
    repo = Repository(LocalStore(str(root)))
    index = repo.read_index(step)
    chunks, blobs = set(), set()
    for part in index.parts:
        keys = [pack.key for pack in part.packs]
        chunks |= {(keys[c.pack], c.start, c.length) for c in part.chunks if c.pack != DERIVED}
        for entry in part.objects:
            found = [entry.document, *(b for t in entry.tensors for b in t.blobs)]
            blobs |= {(keys[b.pack], b.start, b.nbytes) for b in found}
    commit = repo.store.size(f"steps/{step}/commit.json") or 0
    metadata = commit + index.commit.index.nbytes + sum(ref.nbytes for ref in index.root.parts)
    return sum(n for *_, n in chunks), metadata + sum(n for *_, n in blobs)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("ddp", "ddp"), ("zero1", "fsdp2"), ("fsdp2", "hsdp"), ("hsdp", "zero1"), ("fsdp2", "ddp"), ("hsdp", "hsdp")],
)
def test_once_reads_the_unique_bytes_and_gives_what_each_gives(saved: str, loaded: str, tmp_path: Path) -> None:
    wanted = ranks(4, f"{CASES}:save", root=str(tmp_path), layout=saved).values()[0]["3"]
    chunks, rest = stored(tmp_path, 3)
    found = ranks(4, f"{CASES}:load", root=str(tmp_path), layout=loaded, reads=["once", "each"]).values()
    for once, each in found:
        assert once["digests"] == each["digests"] == wanted
        assert (once["read"], each["read"], each["received"]) == ("once", "each", 0)
        assert once["strays"] == each["strays"] == []
    assert sum(once["chunks"] for once, _ in found) == chunks
    assert sum(found[0][0]["by rank"]) == found[0][0]["from store"] == chunks + rest
    assert found[0][0]["metered"] >= found[0][0]["by rank"][0]
    assert [once["metered"] for once, _ in found[1:]] == found[0][0]["by rank"][1:]
    read = sorted(once["chunks"] for once, _ in found)
    assert read[-1] - read[0] < 0.15 * chunks  # evenly, as far as few small chunks allow
    if loaded == "ddp":
        assert all(once["chunks"] + once["received"] == chunks for once, _ in found)


def test_hosts_with_disks_of_their_own_read_once_each(tmp_path: Path) -> None:
    wanted = ranks(4, f"{CASES}:save", root=str(tmp_path), layout="ddp").values()[0]["3"]
    chunks, _ = stored(tmp_path, 3)
    how = {"root": str(tmp_path), "layout": "ddp", "reads": ["auto"], "hosts": ["a", "b", "a", "b"]}
    found = [one for (one,) in ranks(4, f"{CASES}:load", **how).values()]
    assert {one["read"] for one in found} == {"once per host"}
    assert all(one["digests"] == wanted for one in found)
    for host in (0, 1):
        assert found[host]["chunks"] + found[host + 2]["chunks"] == chunks
        assert found[host]["chunks"] == found[host + 2]["received"] > 0


@pytest.mark.parametrize("layout", ["fsdp2", "hsdp"])
def test_training_goes_on_bit_for_bit(layout: str, tmp_path: Path) -> None:
    for result in ranks(4, f"{CASES}:resume", root=str(tmp_path), layout=layout).values():
        assert result["state"] == []
        assert result["losses"][0] == result["losses"][1]


@pytest.fixture
def two_steps(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A root with steps 2 and 4, and what they hold."""
    return tmp_path, ranks(4, f"{CASES}:save", root=str(tmp_path), layout="ddp", steps=[2, 4]).values()[0]


def pack_of(root: Path, rank: int) -> Path:
    return next((root / "steps/4").glob(f"*/packs/rank{rank:05}-*"))


def fail(root: Path, **how: Any) -> list[dict[str, Any]]:
    return ranks(4, f"{CASES}:load_in_vain", root=str(root), layout="ddp", **how).values()


@pytest.mark.parametrize(("how", "kind"), [("refuse", "StoreError"), ("flip", "DigestMismatch")])
def test_a_reader_that_fails_is_one_error_on_all(how: str, kind: str, two_steps: Any) -> None:
    root, prints = two_steps
    found = fail(root, victim=2, how=how)
    assert {one["error"] for one in found} == {kind}
    assert len({one["text"] for one in found}) == 1
    assert "packs/rank00002" in found[0]["text"]
    for one in found:
        assert "failed midway" in one["forward"]
        assert (one["after"], one["digests"]) == (4, prints["4"])


@pytest.mark.parametrize("damage", ["missing", "shorter", "flipped"])
def test_damage_is_one_error_on_all_and_the_step_before_is_taken(damage: str, two_steps: Any) -> None:
    root, prints = two_steps
    pack = pack_of(root, 1)
    data = bytearray(pack.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 4  # in the middle of the data
    pack.unlink()
    if damage != "missing":
        pack.write_bytes(data[:-8] if damage == "shorter" else data)
    found = fail(root)
    kind = "DigestMismatch" if damage == "flipped" else "MissingChunk"
    assert {one["error"] for one in found} == {kind}
    assert len({one["text"] for one in found}) == 1
    assert "packs/rank00001" in found[0]["text"]
    for one in found:
        assert ("forward" in one) is (damage == "flipped")  # before a byte is placed the engine is what it was
        assert (one["after"], one["digests"]) == (2, prints["2"])
    for one in fail(root, fallback=True):
        assert (one["error"], one["step"]) == (None, 2)
        assert "step 4: " in one["skipped"][0]


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_killed_while_bytes_are_handed_on_is_named_by_the_others(victim: int, two_steps: Any) -> None:
    root, _ = two_steps
    how = {"root": str(root), "layout": "ddp", "victim": victim, "how": "kill"}
    outcomes = ranks(4, f"{CASES}:load_in_vain", expect_killed=[victim], **how)
    texts = set()
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.value["error"] == "RankFailure", outcome
            texts.add(outcome.value["text"])
    assert len(texts) == 1
    assert f"rank {victim}: its process is gone" in texts.pop()


def test_an_index_that_only_rank_0_reads_fails_all_alike(two_steps: Any) -> None:
    root, prints = two_steps
    part = next((root / "steps/4").glob("*/index/part-*2.json.zst"))
    part.write_bytes(part.read_bytes()[:-1])
    found = fail(root)
    assert {one["error"] for one in found} == {"DigestMismatch"}
    assert {(one["after"], str(one["digests"])) for one in found} == {(2, str(prints["2"]))}


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    budgets = [256 << 20, 16 << 20]
    for found in ranks(4, f"{CASES}:memory", root=str(tmp_path), budgets=budgets, timeout=120).values():
        assert found["wrong"] == 0
        assert found["state"] > 380
        for budget in budgets:
            assert found[str(budget)] < (budget >> 20) + 64, found
