"""Gradient logs written by each released format replay to the state that they were written with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from ckpt.cli.main import cli
from tests.compat.golden_log import FULL, LAST, GoldenJob

HERE = Path(__file__).parent / "logs"
LOGS = sorted(path for path in HERE.glob("*/*") if path.is_dir())


def test_there_are_golden_logs() -> None:
    assert {path.parent.name for path in LOGS} >= {"v1", "v1-with-run"}


@pytest.mark.parametrize("root", LOGS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_golden_log_replays(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "run")
    job = GoldenJob(tmp_path / "run", load_options={"strict": False})  # another processor may differ in last bits
    report = job.keeper.resumed
    assert report is not None
    assert (report.base, report.step) == (FULL, LAST)
    expected = json.loads(root.with_suffix(".json").read_text())
    found = job.state()
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        numbers = [float.fromhex(x) for x in values]
        assert [float.fromhex(x) for x in found[name]] == pytest.approx(numbers, rel=1e-5, abs=1e-7), name
    assert job.scheduler.last_epoch == LAST
    job.train()
    job.keeper.close()


@pytest.mark.parametrize("root", LOGS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_golden_log_is_whole(root: Path) -> None:
    told = CliRunner().invoke(cli, ["log", str(root), "--json"])
    assert told.exit_code == 0, told.output
    steps = json.loads(told.output)["steps"]
    assert [one["step"] for one in steps] == list(range(1, LAST + 1))
    assert [one["step"] for one in steps if one["skipped"]] == [6]
    assert CliRunner().invoke(cli, ["verify", str(root)]).exit_code == 0
