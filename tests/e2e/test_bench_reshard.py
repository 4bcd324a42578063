"""The benchmark of ``ckpt-reshard`` runs, on a checkpoint that DeepSpeed's own converter takes for one of DeepSpeed's.

It starts commands and looks at them from outside, so it is started as one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any

import pytest

from tests.harness.environment import REPO

if TYPE_CHECKING:
    from pathlib import Path

TOOLS = REPO / "tools"
HOLD = """
import subprocess, sys
held = bytearray(int(sys.argv[1]))
for i in range(0, len(held), 4096):
    held[i] = 1
if len(sys.argv) > 2:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]], stdin=subprocess.PIPE, stdout=-1)
    child.stdout.readline()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, list[str]]:
    """Return the result of one tiny run, what it printed, and what it left behind."""
    folder = tmp_path_factory.mktemp("bench")
    command = [sys.executable, str(TOOLS / "bench_reshard.py"), "--smoke", "--formats", "deepspeed"]
    command += ["--dir", str(folder / "disk"), "--json", str(folder / "result.json")]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    left = [path.name for path in (folder / "disk").iterdir()]
    return json.loads((folder / "result.json").read_text()), done.stdout, left


def test_every_way_is_measured_on_the_same_checkpoint(smoke: tuple[dict[str, Any], str, list[str]]) -> None:
    (result,) = smoke[0]["checkpoints"]
    assert list(result["ways"].values()) == ["copy", "deepspeed", "ds_to_universal"]
    turns = {result["ways"][one["way"]]: one for one in result["turns"]}
    assert not [one["failed"] for one in turns.values() if "failed" in one]
    assert turns["deepspeed"]["same"] is True
    assert turns["copy"]["written"] == result["nbytes"]
    for one in turns.values():
        assert 12 * result["params"] <= one["written"] < 2 * result["nbytes"]
        assert one["seconds"] <= one["durable"]
        assert 0 < one["peak"] <= one["marks"]
    assert turns["ds_to_universal"]["processes"] > turns["deepspeed"]["processes"] == turns["copy"]["processes"] == 1


def test_it_tells_every_target_and_leaves_nothing(smoke: tuple[dict[str, Any], str, list[str]]) -> None:
    _, text, left = smoke
    words = " ".join(text.split())
    assert "peak RSS ≤ 1.2 GiB: yes" in words
    assert "≥ 0.5 × copy:" in words
    assert "time / ds_to_universal:" in words
    assert left == []


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    return import_module("bench_reshard")


def turn(way: str, run: int, seconds: float, gib: float = 1.0) -> dict[str, Any]:
    return {"way": way, "run": run, "rate": 1 / seconds, "durable": seconds, "peak": gib * (1 << 30)}


def test_ways_are_compared_within_a_run(bench: Any) -> None:
    turns = [turn("copy", 0, 1.0), turn("to ckpt", 0, 2.0), turn("to ckpt", 1, 8.0, 1.3), turn("copy", 1, 2.0)]
    turns += [turn("to ckpt", 2, 1.0), turn("copy", 2, 1.0) | {"failed": "exit code 1"}]
    result = {"turns": turns, "ways": {"copy": "copy", "to ckpt": "ckpt"}}
    assert bench.against(result, "to ckpt", "copy", "rate") == pytest.approx([0.25, 0.5])
    assert list(bench.targets(result, "to ckpt").values()) == [False, False]
    result["turns"] = turns[:2]
    assert list(bench.targets(result, "to ckpt").values()) == [True, True]
    result["turns"] = []
    assert list(bench.targets(result, "to ckpt").values()) == [None, None]


def test_another_way_begins_in_every_run(bench: Any) -> None:
    assert [bench.rotated("abc", run) for run in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


def test_a_disk_that_is_too_small_is_seen_before(bench: Any, tmp_path: Path) -> None:
    options = Namespace(dir=tmp_path, params=1e17, smaller=None, skip=["ds_to_universal"], world=8)
    with pytest.raises(SystemExit, match="needed"):
        bench.room(options)


@pytest.mark.usefixtures("bench")
def test_memory_is_that_of_all_processes_together() -> None:
    tree_memory, size = import_module("tree_memory"), 64 << 20
    command = [sys.executable, "-c", HOLD, str(size), HOLD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        with tree_memory.Tree(process.pid) as tree:
            process.stdout.readline()
        process.stdin.close()
    assert tree.processes == 2
    assert 2 * size <= tree.peak <= tree.marks < 3 * size


@pytest.mark.usefixtures("bench")
@pytest.mark.parametrize("params", [1e5, 1e6, 1e9])
def test_the_model_is_about_as_large_as_asked(params: float) -> None:
    zero3_files = import_module("zero3_files")
    found = sum(prod(shape) for shape in zero3_files.model(params).values())
    assert 0.8 * params <= found <= 1.2 * params
