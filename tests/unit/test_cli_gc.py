from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from ckpt.cli.main import cli
from ckpt.repo.repository import Repository
from ckpt.repo.verify import verify
from ckpt.store.local import LocalStore
from tests.harness.steps import write_step

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Step 1, a killed save of step 2, and a file in the making."""
    store = LocalStore(str(tmp_path / "root"))
    write_step(store, 1)
    write_step(store, 2, attempt="killed", commit=False)
    store.put("steps/1/.tmp-00ff-commit.json", b"half a commit")
    return tmp_path / "root"


def run(*arguments: str | Path, code: int = 0) -> str:
    """Run one command and return its standard output."""
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def files(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def test_what_may_be_at_work_is_kept_and_the_output_says_so(root: Path) -> None:
    before = files(root)
    out = run("gc", root)
    assert files(root) == before
    assert "kept: may be at work: younger than asked for" in out
    assert "nothing removed" in out
    for line in out.splitlines()[1:3]:
        assert line.split()[0] in ("attempt", "temporary")


def test_a_dry_run_says_the_same_and_removes_nothing(root: Path) -> None:
    before = files(root)
    out = run("gc", root, "--dry-run", "--older-than", "0")
    assert files(root) == before
    assert "steps/2/killed" in out
    assert "would be removed" in out.splitlines()[-1]
    done = run("gc", root, "--older-than", "0s")
    assert done.replace("removed", "would be removed").splitlines()[-1] == out.splitlines()[-1]
    assert files(root) == {key for key in before if "killed" not in key and ".tmp-" not in key}
    assert verify(Repository(LocalStore(str(root)))).findings == []
    assert run("gc", root, "--older-than", "0").splitlines() == ["nothing removed"]


def test_one_json_document_says_what_was_removed_and_what_was_kept(root: Path) -> None:
    kept = json.loads(run("gc", root, "--json"))
    assert (kept["root"], kept["dry_run"], kept["steps"], kept["removed"], kept["nbytes"]) == (
        str(root),
        False,
        [1],
        [],
        0,
    )
    assert {(row["kind"], row["key"], row["files"]) for row in kept["kept"]} == {
        ("attempt", "steps/2/killed", 6), ("temporary", "steps/1/.tmp-00ff-commit.json", 1),
    }  # fmt: skip
    assert all(0 <= row["age_s"] < 600 and row["kept"] for row in kept["kept"])
    dry = json.loads(run("gc", root, "--json", "--dry-run", "--older-than", "0"))
    gone = json.loads(run("gc", root, "--json", "--older-than", "0"))
    assert dry["dry_run"] is True
    assert [set(row) for row in gone["removed"]] == 2 * [{"kind", "key", "files", "nbytes", "age_s"}]
    assert [row["key"] for row in dry["removed"]] == [row["key"] for row in gone["removed"]]
    assert gone["nbytes"] == sum(row["nbytes"] for row in gone["removed"]) == dry["nbytes"] > 13


def test_a_damaged_step_is_code_7_and_nothing_is_removed(root: Path) -> None:
    (root / "steps/1/commit.json").write_bytes(b"{")
    before = files(root)
    problem = json.loads(run("gc", root, "--older-than", "0", "--json", code=7))["error"]
    assert problem["type"] == "RepositoryError"
    assert "step 1: steps/1/commit.json" in problem["message"]
    assert files(root) == before


def test_no_repository_is_code_10(tmp_path: Path) -> None:
    run("gc", tmp_path / "typo", code=10)
    assert list(tmp_path.iterdir()) == []
    Repository(LocalStore(str(tmp_path / "empty"))).initialise()
    assert run("gc", tmp_path / "empty") == "nothing removed\n"


@pytest.mark.parametrize("span", ["1", "soon", "-1h", "1y", "", "1h 2", "h", "1e3s"])
def test_spans_that_are_none_are_code_2(root: Path, span: str) -> None:
    problem = json.loads(run("gc", root, "--older-than", span, "--json", code=2))["error"]
    assert problem["type"] == "ConfigError"
    assert "is not a time span" in problem["message"]


@pytest.mark.parametrize("span", ["90s", "30m", "1h", "1h30m", "2d", "1w", "0.5h", "1H"])
def test_spans_as_people_write_them(root: Path, span: str) -> None:
    assert "nothing removed" in run("gc", root, "--older-than", span)


def test_names_cannot_speak_to_the_terminal(root: Path) -> None:
    (root / "steps/1/a\x1b[31m\nb").write_bytes(b"mine")
    out = run("gc", root, "--older-than", "0")
    assert r"steps/1/a\x1b[31m\nb" in out
    assert all(c.isprintable() or c == "\n" for c in out)
    assert (root / "steps/1/a\x1b[31m\nb").exists()
