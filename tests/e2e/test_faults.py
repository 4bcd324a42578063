"""Saves that are killed, refused or starved: nothing is lost, nobody hangs, everybody is told."""

from __future__ import annotations

import socket
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from ckpt.repo.repository import Repository
from ckpt.repo.verify import verify
from ckpt.store.open import open_store
from tests.harness.pool import ranks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CASES = "tests.e2e.fault_cases"
SLACK = 5.0


def test_a_rank_killed_anywhere_in_a_save_costs_nothing_but_that_save(tmp_path: Path) -> None:
    points = []
    for victim in (0, 1):
        root = tmp_path / f"count{victim}"
        root.mkdir()
        counted = ranks(2, f"{CASES}:good_then_killed", root=str(root), victim=victim, at=None).values()[victim]
        assert counted["count"] > 20, counted["trace"]
        points += [(victim, 1 + k * (counted["count"] - 1) // 9) for k in range(10)]
    roots = []
    for victim, at in points:
        root = tmp_path / f"kill{victim}-{at}"
        root.mkdir()
        kwargs: dict[str, Any] = {"root": str(root), "victim": victim, "at": at}
        outcomes = ranks(2, f"{CASES}:good_then_killed", **kwargs, timeout=90, expect_killed=[victim])
        survivor = outcomes[1 - victim].value
        # A rank killed after the commit may leave a peer that is content.
        if survivor["error"]:
            assert survivor["error"] == "RankFailure", survivor
            assert f"rank {victim}" in survivor["text"]
            assert survivor["seconds"] < 20 + SLACK
        found = verify(Repository(open_store(root)))
        assert not found.damaged, [f.message for f in found.findings]
        roots.append(str(root))
    for rank in ranks(2, f"{CASES}:recover", roots=roots, timeout=120).values():
        for root, result in zip(roots, rank, strict=True):
            assert result["step"] in (1, 2), root
            assert result["same"] is (result["step"] == 1), root
            assert result["steps"] == [1, 2], root
    for root in roots:
        assert not verify(Repository(open_store(root))).damaged


REFUSALS = {
    "rank 0 alone": ("RankFailure", "rank 1: did not call ckpt.save within 2 s", [0]),
    "another step": ("ConfigError", "ranks disagree on the step: 0 on rank(s) 0; 1 on rank(s) 1", [0, 1]),
    "another root": ("ConfigError", "ranks disagree on the root", [0, 1]),
    "save against load": ("ConfigError", "ranks disagree on the call", [0, 1]),
    "lambda in extra": ("RankFailure", "rank 1: ConfigError: extra['hook']['f']: a value of type", [0, 1]),
    "split root": ("RankFailure", "rank 1: SplitRoot: rank 1 does not see", [0, 1]),
    "mid-accumulation": ("ConfigError", "micro", [0, 1]),
}


@pytest.mark.parametrize("how", REFUSALS)
def test_a_wrong_call_is_refused_on_every_rank_and_training_goes_on(how: str, tmp_path: Path) -> None:
    kind, text, where = REFUSALS[how]
    for rank, result in enumerate(ranks(2, f"{CASES}:refused", root=str(tmp_path), how=how).values()):
        if rank in where:
            assert result["error"] == kind, result
            assert text in result["text"]
            assert result["seconds"] < 10
        assert result["untouched"]
        assert result["after"] == [2]


@pytest.fixture
def small_disks(tmp_path: Path) -> Iterator[Path]:
    """``small``: a tmpfs of 64 KiB; ``readonly``: a read-only one."""
    for name, options in (("small", "size=64k"), ("readonly", "ro")):
        (tmp_path / name).mkdir()
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", tmp_path / name], check=False)
        if made.returncode:
            pytest.fail("these tests mount a tmpfs: run them as root")
    yield tmp_path
    for name in ("small", "readonly"):
        subprocess.run(["umount", tmp_path / name], check=True)


@pytest.mark.parametrize(
    ("how", "cause"), [("full disk", "StoreFull"), ("read-only disk", "AccessDenied")], ids=["full", "read-only"]
)
def test_a_disk_that_refuses_is_named_on_every_rank(how: str, cause: str, small_disks: Path) -> None:
    results = ranks(2, f"{CASES}:refused", root=str(small_disks), how=how).values()
    for result in results:
        assert result["error"] in (cause, "RankFailure"), result
        assert cause in result["error"] + result["text"]
        assert result["untouched"]
        assert result["after"] == [2]
    left = [p for p in (small_disks / "small").rglob("*") if p.is_file() and p.name != "ckpt.json"]
    assert left == []  # a full disk does not stay full of our leftovers


def test_diverging_replicas_are_named_and_the_majority_is_kept(tmp_path: Path) -> None:
    refused = ranks(3, f"{CASES}:diverge", root=str(tmp_path / "error"), policy="error").values()
    for result in refused:
        assert result["error"] == "ReplicaDivergence"
        assert "'embed.weight' (param)" in result["text"]
        assert "on rank(s) 0, 1" in result["text"]
    healed = ranks(3, f"{CASES}:diverge", root=str(tmp_path / "warn"), policy="warn").values()
    assert [r["same"] for r in healed] == [True, True, False]
    kept = ranks(3, f"{CASES}:diverge", root=str(tmp_path / "keep"), policy="keep-all").values()
    assert [r["same"] for r in kept] == [True, True, True]


def test_a_slow_rank_that_makes_progress_is_waited_for(tmp_path: Path) -> None:
    results = ranks(2, f"{CASES}:slow_peer", root=str(tmp_path)).values()
    assert [r["error"] for r in results] == [None, None]
    assert results[0]["seconds"] > 2  # longer than the timeout: otherwise this proves nothing


def test_damage_is_refused_on_all_ranks_and_a_half_loaded_engine_does_not_train(tmp_path: Path) -> None:
    root = str(tmp_path)
    ranks(2, f"{CASES}:save_two", root=root).values()
    pack = sorted((tmp_path / "steps" / "2").glob("*/packs/rank00001-*.safetensors"))[0]
    data = bytearray(pack.read_bytes())
    data[-len(data) // 2] ^= 4
    pack.write_bytes(data)
    for result in ranks(2, f"{CASES}:load_damaged", root=root).values():
        assert result["refused"]["error"] in ("DigestMismatch", "RankFailure")
        for text in ("DigestMismatch" if result["refused"]["error"] == "RankFailure" else "", "tensor '", pack.name):
            assert text in result["refused"]["text"]
        assert result["forward"]["error"] == result["saved"]["error"] == "ConfigError"
        assert "mixture" in result["forward"]["text"]
        assert result["step"] == 1
        assert "step 2: " in result["skipped"][0]
        assert result["same"]


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("another model", "MissingState", "missing: tensor 'blocks.2."),
        ("missing extra", "MissingState", "missing: extra 'loader'"),
        ("fresh engine", "MissingState", "missing: extra 'nobody'"),
        ("no such step", "NoSuchCheckpoint", "no checkpoint of step 77"),
        ("empty root", "NoSuchCheckpoint", "no checkpoint in"),
    ],
)
def test_a_refused_load_leaves_the_engine_as_it_was(how: str, kind: str, text: str, tmp_path: Path) -> None:
    ranks(2, f"{CASES}:save_two", root=str(tmp_path)).values()
    for result in ranks(2, f"{CASES}:load_refused", root=str(tmp_path), how=how).values():
        assert result["error"] == kind
        assert text in result["text"]
        assert result["untouched"]
        assert result["trains"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_death_of_the_rank_that_hosts_the_store_is_an_error_of_ours(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"root": str(tmp_path), "port": _free_port(), "kill": True}
    outcomes = ranks(3, f"{CASES}:tcp_store", **kwargs, expect_killed=[0])
    for outcome in outcomes[1:]:
        assert outcome.value["error"] == "RankFailure", outcome
        assert "rank 0" in outcome.value["text"]
        assert outcome.value["seconds"] < 20 + SLACK


def test_the_host_of_the_store_does_not_go_before_the_others_know(tmp_path: Path) -> None:
    outcomes = ranks(3, f"{CASES}:tcp_store", root=str(tmp_path), port=_free_port(), kill=False)
    assert [o.value["error"] for o in outcomes[1:]] == [None, None]


def test_ranks_that_disagree_on_the_layout_are_told_of_every_tensor_at_once(tmp_path: Path) -> None:
    for result in ranks(2, f"{CASES}:other_layout", root=str(tmp_path)).values():
        assert result["error"] == "LayoutError"
        assert "'running' (buffer): ranks disagree on dtype or shape" in result["text"]
        assert "float32[3, 24] on rank(s) 0, float32[4, 24] on rank(s) 1" in result["text"]
        assert "'tokens_seen' (buffer)" in result["text"]
