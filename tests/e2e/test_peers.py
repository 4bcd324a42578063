"""Copies of log records in the memory of other hosts: a job that loses one comes back without reading the log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.test_deepspeed_parallel import tp
from tests.harness.pool import ranks

if TYPE_CHECKING:
    from pathlib import Path

CASES = "tests.e2e.peers_cases"

JOBS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "zero-3": (["a", "b", "c"], {"kind": "deepspeed", "stage": 3, "dtype": "bf16"}),
    "zero-1 fp16": (["a", "b"], {"kind": "deepspeed", "stage": 1, "dtype": "fp16"}),
    "ddp": (["a", "b"], {"kind": "ddp"}),
    "fsdp2": (["a", "a", "b", "b"], {"kind": "fsdp2"}),
    "hsdp": (["a", "a", "b", "b"], {"kind": "hsdp"}),
    "tp x zero-2": (["a", "b", "a", "b"], {"kind": "parallel", "layout": tp(2)}),
}


@pytest.mark.parametrize("lost", ["a", "b"])
@pytest.mark.parametrize("name", JOBS)
def test_a_job_that_lost_a_host_replays_from_memory(name: str, lost: str, tmp_path: Path) -> None:
    hosts, options = JOBS[name]
    root, memory = str(tmp_path / "run"), str(tmp_path / "memory")
    common = {"timeout": 150, "memory": memory, "root": root}
    ranks(
        len(hosts),
        f"{CASES}:on_host",
        case="train_and_die",
        hosts=hosts,
        expect_killed=range(len(hosts)),
        steps=7,
        full_every=4,
        log={"peers": 1},
        **common,
        **options,
    )
    held = ranks(1, f"{CASES}:copies", hosts=hosts, lose=lost, **common).values()[0]
    others = {host: {rank for rank, steps in held[host] if steps[-3:] == [5, 6, 7]} for host in held}
    for rank, host in enumerate(hosts):
        assert sum(rank in ranks for ranks in others.values()) == 2, held
        assert rank in others[host], held
    again = ["new" if host == lost else host for host in hosts]
    found = ranks(
        len(hosts), f"{CASES}:on_host", case="come_back", hosts=again, steps=7, tell_reads=True, **common, **options
    ).values()
    for rank, one in enumerate(found):
        from_store, from_memory = one.pop("reads")
        assert from_store == 0, "nothing of the log is read from the store"
        assert from_memory > 0
        assert one == {
            "step": 7,
            "replayed": 3,
            "exact": True,
            "notes": [],
            "mark": rank,
            "state": [],
            "objects": True,
            "losses": True,
            "end": [],
        }


def test_copies_that_are_damaged_or_gone_are_read_from_the_store(tmp_path: Path) -> None:
    hosts, options = JOBS["zero-3"]
    root, memory = str(tmp_path / "run"), tmp_path / "memory"
    common = {"timeout": 150, "memory": str(memory), "root": root}
    ranks(
        3, f"{CASES}:on_host", case="train_and_die", hosts=hosts, expect_killed=range(3), steps=7, full_every=4,
        log={"peers": 1}, **common, **options,
    )  # fmt: skip
    for number, path in enumerate(sorted(memory.rglob("*.log"))):
        if number % 3 == 0:
            path.unlink()
        elif number % 3 == 1:
            data = bytearray(path.read_bytes())
            data[-40] ^= 1
            path.write_bytes(data)
    found = ranks(
        3, f"{CASES}:on_host", case="come_back", hosts=hosts, steps=7, tell_reads=True, **common, **options
    ).values()
    assert sum(one["reads"][0] for one in found) > 0
    assert all((one["step"], one["exact"], one["state"], one["losses"]) == (7, True, [], True) for one in found)


def test_a_job_that_ends_well_leaves_nothing_in_memory(tmp_path: Path) -> None:
    for found in ranks(
        3, f"{CASES}:train_and_end", hosts=["a", "b", "b"], memory=str(tmp_path / "memory"), root=str(tmp_path / "run"),
        kind="fsdp2", steps=8, peers=1, timeout=120,
    ).values():  # fmt: skip
        assert found == {"sent": True, "left": []}


def test_a_job_that_ends_by_an_error_leaves_its_copies(tmp_path: Path) -> None:
    for found in ranks(
        2, f"{CASES}:train_and_fail", hosts=["a", "b"], memory=str(tmp_path / "memory"), root=str(tmp_path / "run"),
        kind="ddp", steps=3, timeout=120,
    ).values():  # fmt: skip
        assert found == {"left": 2 * 2 * 3}


@pytest.mark.parametrize(
    ("hosts", "options"),
    [
        (["b", "c"], {"kind": "deepspeed", "stage": 1, "dtype": "bf16"}),
        (["new", "c", "c", "b"], {"kind": "deepspeed", "stage": 3, "dtype": "bf16"}),
    ],
)
def test_another_layout_on_other_hosts_replays_from_memory(
    hosts: list[str], options: dict[str, Any], tmp_path: Path
) -> None:
    before, saved = JOBS["zero-3"]
    common = {"timeout": 150, "memory": str(tmp_path / "memory"), "root": str(tmp_path / "run")}
    ranks(
        3, f"{CASES}:on_host", case="train_and_die", hosts=before, expect_killed=range(3), steps=6, full_every=4,
        log={"peers": 1}, **common, **saved,
    )  # fmt: skip
    ranks(1, f"{CASES}:copies", hosts=before, lose="a", **common).values()
    for one in ranks(len(hosts), f"{CASES}:elsewhere", hosts=hosts, **common, **options).values():
        assert one == {"step": 6, "same": [], "reads": [0, 0], "all": True}
