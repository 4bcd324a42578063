"""``ckpt compact``: what it prints, and what it answers to scripts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from ckpt.cli.main import cli
from tests.harness.logged_jobs import logged

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["compact", *arguments])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A job that had a base at step 0 and logged four steps."""
    logged(tmp_path, 4)
    return tmp_path


def test_what_it_says(root: Path) -> None:
    done = run(str(root), "--dry-run")
    assert done.exit_code == 0, done.output
    assert "4 steps would be replayed: from step 0 to step 4" in done.output
    assert "1 file of the log would be removed" in done.output
    done = run(str(root))
    assert done.exit_code == 0, done.output
    assert "torch.optim.adamw.AdamW: the same bits here" in done.output
    assert "step 4 committed: 4 steps replayed on step 0" in done.output
    assert "bit for bit what the job had" in done.output
    assert "1 file of the log removed" in done.output
    done = run(str(root))
    assert done.exit_code == 0
    assert "no log leads on from step 4: nothing to compact" in done.output


def test_one_document(root: Path) -> None:
    done = run(str(root), "--json", "--step", "3", "--keep-log", "--memory", "256MiB")
    assert done.exit_code == 0, done.output
    said = json.loads(done.output)
    names = ("base", "step", "steps", "world", "exact", "dry_run", "notes", "removed")
    assert [said[name] for name in names] == [0, 3, 3, 1, True, False, [], []]
    assert said["dropped"] == {"files": 0, "nbytes": 0, "in_use": 0}
    assert said["values"] == {"compared": 216, "differ": 0, "worst": 0.0, "first": None}
    assert said["kernels"][0]["why"] == []
    assert said["bytes_written"] > 0
    said = json.loads(run(str(root), "--json", "--keep", "1").output)
    assert (said["base"], said["step"], said["removed"], said["dropped"]["files"]) == (3, 4, [0, 3], 1)


def test_errors_have_exit_codes(root: Path) -> None:
    done = run(str(root), "--step", "9", "--json")
    assert done.exit_code == 8
    assert json.loads(done.stdout)["error"]["type"] == "ReplayError"
    assert run(str(root / "nothing")).exit_code == 10
    assert run(str(root), "--memory", "1").exit_code == 5
    assert run(str(root), "--workers", "0").exit_code == 2
