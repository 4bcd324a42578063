"""Standard output that is closed, gone or full, and Ctrl-C: what commands say then, and with which code they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt.cli import start
from tests.harness.steps import three_steps

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return three_steps(tmp_path_factory.mktemp("streams") / "src")


def line(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "ckpt", *map(str, arguments)]


def shell(*arguments: str | Path, redirected: str) -> subprocess.CompletedProcess[str]:
    text = f'"$@" {redirected}'
    return subprocess.run(
        ["bash", "-c", text, "bash", *line(*arguments)], cwd=REPO, capture_output=True, text=True, check=False
    )


def test_with_no_output_the_work_is_done_all_the_same(root: Path, tmp_path: Path) -> None:
    done = shell("cp", root, tmp_path / "dst", redirected=">&-")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "dst/ckpt.json").exists()
    assert shell("ls", root / "typo", redirected=">&- 2>&-").returncode == 10


def test_a_full_disk_is_one_line_and_a_failure(root: Path) -> None:
    for options in ([], ["--json"]):
        done = shell("ls", root, *options, redirected=">/dev/full")
        assert (done.returncode, done.stderr) == (1, "standard output: No space left on device\n")


def test_a_reader_that_has_gone_does_not_change_the_code(root: Path, tmp_path: Path) -> None:
    other = three_steps(tmp_path / "other")
    next((other / "steps/10").rglob("rank00000*")).write_bytes(b"")
    for place, code in ((root, 0), (other, 3)):
        mine, its = os.pipe()
        os.close(mine)
        done = subprocess.run(line("verify", place), cwd=REPO, stdout=its, stderr=subprocess.PIPE, check=False)
        os.close(its)
        assert (done.returncode, done.stderr) == (code, b"")


def test_nor_does_one_of_standard_error(tmp_path: Path) -> None:
    for options in ([], ["--json"]):
        mine, its = os.pipe()
        os.close(mine)
        done = subprocess.run(line("ls", tmp_path / "typo", *options), cwd=REPO, stdout=its, stderr=its, check=False)
        os.close(its)
        assert done.returncode == 10


@pytest.mark.parametrize("options", [[], ["--json"]], ids=str)
def test_ctrl_c_is_said_and_has_a_code_of_its_own(root: Path, tmp_path: Path, options: list[str]) -> None:
    os.mkfifo(tmp_path / "rules.yaml")
    # A shell that starts tests in the background makes them, and all that they start, ignore the signal.
    heeding = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = line("reshard", root, tmp_path / "dst", "--rules", tmp_path / "rules.yaml", *options)
    command = [sys.executable, "-c", heeding, *command]
    with (
        subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
        (tmp_path / "rules.yaml").open("w"),  # opens when the other side does, which then waits for a text
    ):
        process.send_signal(signal.SIGINT)
        told, said = process.communicate()
    words = "interrupted; the same command goes on where this one stopped"
    assert (process.returncode, said) == (start.INTERRUPTED, f"{words}\n")
    if options:
        assert json.loads(told) == {"error": {"type": "KeyboardInterrupt", "message": words, "exit_code": 130}}


def test_ctrl_c_while_the_commands_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow_commands.py").write_text("raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ckpt", "ls", "--json"])
    with pytest.raises(SystemExit) as left:
        start._run("slow_commands")
    assert left.value.code == start.INTERRUPTED
    told = capsys.readouterr()
    assert json.loads(told.out)["error"]["exit_code"] == start.INTERRUPTED
    assert told.err == "interrupted\n"
