from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ckpt.cli.main import cli
from ckpt.repo.repository import Repository, commit_key
from ckpt.repo.verify import verify
from ckpt.store.local import LocalStore
from tests.harness.steps import three_steps, write_step
from tests.harness.terminal import terminal

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1, 2 and 10; the later ones refer to step 1's pack."""
    return three_steps(tmp_path / "src")


def run(*arguments: str | Path, code: int = 0) -> str:
    """Run one command and return its standard output."""
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def steps(root: Path) -> list[int]:
    """The steps that are there, all of them whole."""
    found = verify(Repository(LocalStore(str(root))))
    assert found.findings == []
    return found.steps


def test_the_newest_step_is_copied_unless_others_are_named(root: Path, tmp_path: Path) -> None:
    out = run("cp", root, tmp_path / "a")
    assert out.splitlines() == ["copied step 10", f"3 packs, {_copied(out)} copied and checked"]
    assert steps(tmp_path / "a") == [10]
    run("cp", root, tmp_path / "b", "--step", "2", "--step", "1")
    assert steps(tmp_path / "b") == [1, 2]
    assert run("cp", root, tmp_path / "b", "--all").splitlines()[:2] == ["copied step 10", "there already: step 1, 2"]
    assert steps(tmp_path / "b") == [1, 2, 10]
    assert "0 packs, 0 B copied and checked; 6 packs, " in run("cp", root, tmp_path / "b", "--all")


def _copied(out: str) -> str:
    return re.search(r"packs, ([\d.]+ k?B) copied", out)[1]


def test_urls_are_places_too(root: Path, tmp_path: Path) -> None:
    run("cp", f"file://{root}", f"file://{tmp_path}/to", "--all")
    assert steps(tmp_path / "to") == [1, 2, 10]


def test_one_json_document_says_what_was_done(root: Path, tmp_path: Path) -> None:
    first = json.loads(run("cp", root, tmp_path / "to", "--step", "1", "--json"))
    assert first == {
        "source": str(root), "destination": str(tmp_path / "to"), "steps": [1], "present": [],
        "packs_copied": 2, "packs_present": 0, "bytes_copied": first["bytes_copied"], "bytes_present": 0,
        "logs": [], "log_files_copied": 0, "log_files_present": 0, "log_bytes_copied": 0, "log_bytes_present": 0,
    }  # fmt: skip
    again = json.loads(run("cp", root, tmp_path / "to", "--step", "1", "--json"))
    assert (again["steps"], again["present"], again["bytes_copied"]) == ([], [1], 0)
    assert again["bytes_present"] == first["bytes_copied"]


def test_a_damaged_source_is_code_3_and_names_the_tensor(root: Path, tmp_path: Path) -> None:
    pack = next((root / "steps/1").rglob("rank00000*"))
    raw = bytearray(pack.read_bytes())
    raw[-1] ^= 1
    pack.write_bytes(raw)
    problem = json.loads(run("cp", root, tmp_path / "to", "--json", code=3))["error"]
    assert problem["type"] == "DigestMismatch"
    assert "tensor 'emb'" in problem["message"]
    assert pack.relative_to(root).as_posix() in problem["message"]
    assert not (tmp_path / "to" / commit_key(10)).exists()
    pack.unlink()
    problem = json.loads(run("cp", root, tmp_path / "to", "--json", code=3))["error"]
    assert problem["type"] == "MissingChunk"


def test_another_step_of_this_number_is_code_7_and_replaced_if_asked(root: Path, tmp_path: Path) -> None:
    write_step(LocalStore(str(tmp_path / "to")), 10, attempt="other")
    problem = json.loads(run("cp", root, tmp_path / "to", "--json", code=7))["error"]
    assert problem["type"] == "CheckpointExists"
    run("cp", root, tmp_path / "to", "--overwrite")
    assert Repository(LocalStore(str(tmp_path / "to"))).read_commit(10).attempt != "other"
    run("gc", tmp_path / "to", "--older-than", "0")
    assert steps(tmp_path / "to") == [10]


def test_what_there_is_not_is_code_10(root: Path, tmp_path: Path) -> None:
    assert (
        "it has 1, 2, 10"
        in json.loads(run("cp", root, tmp_path / "to", "--step", "7", "--json", code=10))["error"]["message"]
    )
    for options in ([], ["--all"]):
        run("cp", tmp_path / "typo", tmp_path / "to", *options, code=10)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{root}"], "Missing argument 'DST'"),
        (["{root}", "{root}/."], "SRC and DST are the same"),
        (["{root}", "{root}/below"], "lies inside of SRC"),
        (["{root}", "to", "--all", "--step", "1"], "--all and --step"),
        (["{root}", "s3:/bucket/x"], "a URL has '://'"),
        (["{root}", "to", "--threads", "0"], "0 is not in the range"),
        (["{root}", "to", "--step", "-1"], "-1 is not in the range"),
        *[(["{root}", "to", "--io-limit", limit], "is not a number of bytes above 0")
          for limit in ("fast", "0", "-1", "1e9", "10 QB", "MB", "", "1/s/s")],
    ],
    ids=" ".join,
)  # fmt: skip
def test_wrong_usage_is_code_2_and_nothing_is_touched(
    root: Path, tmp_path: Path, arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = ["cp", *(a.format(root=root) for a in arguments), "--json"]
    problem = json.loads(run(*line, code=2))["error"]
    assert problem["type"] == "ConfigError"
    assert text in problem["message"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


def test_sizes_may_be_trusted(root: Path, tmp_path: Path) -> None:
    run("cp", root, tmp_path / "to")
    pack = next((tmp_path / "to/steps/10").rglob("rank00001*"))
    good = pack.read_bytes()
    pack.write_bytes(good[:-1] + b"\0")
    assert "0 packs" in run("cp", root, tmp_path / "to", "--trust-sizes")
    assert pack.read_bytes() != good
    assert "1 pack," in run("cp", root, tmp_path / "to")
    assert pack.read_bytes() == good


@pytest.mark.parametrize("limit", ["100MB", "100 MB/s", "1.5GiB", "123456789", "900k"])
def test_limits_as_people_write_them(root: Path, tmp_path: Path, limit: str) -> None:
    run("cp", root, tmp_path / "to", "--io-limit", limit, "--threads", "1")
    assert steps(tmp_path / "to") == [10]


def test_a_bar_is_drawn_on_a_terminal_and_nowhere_else(root: Path, tmp_path: Path) -> None:
    drawn = terminal("cp", root, tmp_path / "a")
    assert "copying" in drawn
    assert "━" in drawn
    assert re.search(r"[\d.]+/[\d.]+ [kM]?B", drawn), "bytes done and bytes in all"
    assert "copied step 10" in drawn
    document = terminal("cp", root, tmp_path / "b", "--json")
    assert json.loads(document)["steps"] == [10]
    assert "copying" not in run("cp", root, tmp_path / "c")


def test_it_needs_no_torch(root: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch is blocked')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPO)])}
    for arguments in (["cp", root, tmp_path / "to"], ["gc", tmp_path / "to"]):
        line = [sys.executable, "-m", "ckpt", *map(str, arguments)]
        done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60, env=environment)
        assert (done.returncode, done.stderr) == (0, "")
