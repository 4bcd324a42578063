"""The benchmark runs: every item, ckpt against DCP, on tiny engines; and its arithmetic is what its page says.

It has a launcher of its own (it must work outside of pytest), so it is started as a command; its engines are looked at
through the pool.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest

from tests.harness.environment import REPO
from tests.harness.pool import ranks

TOOLS = REPO / "tools"
LAYOUT = "fsdp2"
HELD = {"ddp": 4 * 6, "fsdp2": 6, "hsdp": 2 * 6, "zero0": 4 * 14, "zero1": 4 * 2 + 12, "zero2": 4 * 2 + 12, "zero3": 14}
"""Bytes a parameter that four ranks hold together, with bf16 parameters."""


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Return the result of one tiny run, and what it printed."""
    folder = tmp_path_factory.mktemp("bench")
    environment = {**os.environ, "PYTHONPATH": f"{REPO}{os.pathsep}{TOOLS}", "PYTHONWARNINGS": "ignore"}
    environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "benchmarks", "--smoke", "--params", "1e5", "--layouts", LAYOUT]
    command += ["--peers", "ckpt,dcp", "--dir", str(folder / "disk"), "--tmpfs", str(folder), "--md"]
    command += ["--json", str(folder / "result.json")]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads((folder / "result.json").read_text()), done.stdout


@pytest.mark.parametrize("layout", list(HELD))
def test_peers_are_given_all_of_the_live_state(layout: str) -> None:
    found = ranks(4, "tests.e2e.bench_cases:state", timeout=120, layout=layout, dtype="bf16").values()
    assert all(one["moves"] and one["wiped"] for one in found)
    # Step counters and padding come on top.
    assert 1 <= sum(one["bytes"] for one in found) / (HELD[layout] * found[0]["params"]) < 1.02


def test_everything_is_measured_for_both_systems(smoke: tuple[dict[str, Any], str]) -> None:
    result = smoke[0]
    (layout,) = result["layouts"]
    assert layout["layout"] == LAYOUT
    assert layout["not_run"] == []
    seen = {(r["item"], r["peer"]) for r in layout["records"]}
    both = {(item, peer) for item in ("save", "load", "stall", "async") for peer in ("ckpt", "DCP")}
    beside = {("save", "raw"), ("load", "raw"), ("stall", "no saves"), ("slope", "ckpt"), ("digest", "ckpt")}
    assert seen == both | beside
    for record in layout["records"]:
        if record["item"] == "save" and record["peer"] == "raw":
            assert record["bytes"] == layout["information"]
        if record["item"] == "save" and record["peer"] == "ckpt":
            assert layout["information"] <= record["bytes"] < 1.5 * layout["information"]
        if record["item"] == "load" and record["peer"] != "raw":
            assert record["same"] is True
        if record["item"] == "stall":
            assert len(record["steps"]) == 4
            assert len(record["calls"]) == (0 if record["peer"] == "no saves" else 2)
        if record["item"] == "slope":
            assert len(record["resident"]) == 4
        if record["item"] == "digest":
            assert record["digested"] * result["options"]["world"] >= layout["information"]


def test_the_tables_show_every_system_and_every_target(smoke: tuple[dict[str, Any], str]) -> None:
    text = smoke[1]
    assert f"{LAYOUT} × 4, bf16" in text
    rows = [line.split("|") for line in text.splitlines() if line.startswith(f"| {LAYOUT} |")]
    assert {row[2].split(".")[0].strip() for row in rows} == {"1", "2", "3", "4", "5", "7"}
    assert "megatron-core" in text  # what was not run is said


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))


def layout_of(records: list[dict[str, Any]], information: int = 1000) -> Any:
    result = {"layout": "ddp", "information": information, "records": records, "first": []}
    return import_module("benchmarks.figures").Layout(result)


@pytest.mark.usefixtures("tools")
def test_a_save_costs_what_its_loop_takes_longer_than_the_nearest_loops_of_the_same_run() -> None:
    def loop(peer: str, run: int, seconds: float, saves: int) -> dict[str, Any]:
        return {"item": "stall", "peer": peer, "store": "disk", "run": run, "loop": seconds, "calls": [0.1] * saves}

    layout = layout_of([
        loop("no saves", 1, 10.0, 0), loop("ckpt", 1, 12.0, 4), loop("no saves", 1, 11.0, 0),
        loop("no saves", 2, 20.0, 0), loop("ckpt", 2, 24.0, 4), loop("no saves", 2, 20.0, 0), loop("DCP", 2, 60.0, 4),
        loop("no saves", 2, 40.0, 0),
    ])  # fmt: skip
    lost = layout.lost("ckpt", "disk")
    assert (lost.low, lost.median, lost.high) == pytest.approx((0.375, 0.6875, 1.0))
    assert layout.lost("DCP", "disk").median == pytest.approx(7.5)
    noise = layout.noise("disk")
    assert (noise.low, noise.median, noise.high) == pytest.approx((0.0, 0.25, 5.0))


@pytest.mark.usefixtures("tools")
def test_rates_are_compared_within_a_run() -> None:
    def save(peer: str, run: int, seconds: float) -> dict[str, Any]:
        return {"item": "save", "peer": peer, "store": "disk", "run": run, "durable": seconds}

    layout = layout_of([save("raw", 1, 1.0), save("ckpt", 1, 2.0), save("ckpt", 2, 2.0), save("raw", 2, 1.8)])
    found = layout.against("save", "ckpt", "raw", "disk", "durable")
    assert (found.low, found.high) == pytest.approx((0.5, 0.9))


@pytest.mark.usefixtures("tools")
def test_a_slope_is_told_without_the_first_saves() -> None:
    resident = [50.0, 80.0, *(100.0 + 3 * i for i in range(8))]
    layout = layout_of([{"item": "slope", "peer": "ckpt", "store": "tmpfs", "run": 1, "resident": resident}])
    assert layout.slope("ckpt") == pytest.approx(3.0)


@pytest.mark.usefixtures("tools")
def test_memory_that_only_the_first_run_takes_counts() -> None:
    layout = layout_of([{"item": "save", "peer": "ckpt", "store": "disk", "run": 1, "rss": 5.0}])
    layout.first.append({"item": "save", "peer": "ckpt", "store": "disk", "run": 0, "rss": 300.0})
    assert layout.peak("save", "ckpt", None, 1.0) == 300.0


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize(("seconds", "reached"), [(1.05, True), (1.2, False)])
def test_a_target_says_whether_it_is_reached(seconds: float, reached: bool) -> None:
    def save(peer: str, durable: float) -> dict[str, Any]:
        return {
            "item": "save", "peer": peer, "store": "disk", "run": 1, "durable": durable, "bytes": 1001.0, "rss": 0.0,
        }  # fmt: skip

    layout = layout_of([save("raw", 1.0), save("ckpt", seconds), save("DCP", 1.1)])
    lines = {line.target.split(":")[0]: line for line in import_module("benchmarks.targets").lines(layout)}
    assert lines["2. durable save on disk, of a raw write's rate"].reached is reached
    assert lines["2. durable save on disk, times the fastest peer's"].reached is (seconds < 1.1)
    assert lines["3. bytes on disk, of the information"].reached is True
