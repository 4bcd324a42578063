"""What a conversion says while it runs and of what it cannot know: each line is one that somebody can use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ckpt.cli.main import cli
from tests.harness.deepspeed_files import Model, numbered, write_zero3

REPO = Path(__file__).resolve().parents[3]


def run(*arguments: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


@pytest.fixture(scope="module")
def zero3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("zero3")
    write_zero3(root / "global_step5", Model([{"0.w": numbered((4, 3), 1), "0.b": numbered((5,), 2)}]), 2)
    (root / "latest").write_text("global_step5")
    return root


def test_from_and_to_are_printed_before_bytes_move(tmp_path: Path) -> None:
    """In a log, not only on a terminal: another process sees both lines while the writer runs."""
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    log = tmp_path / "log"
    script = (
        "import os; from ckpt.convert import job; from ckpt.cli.reshard import main\n"
        "def stop(*_, **__): os._exit(7)\n"
        "job.writer_of = lambda to: stop\n"
        "main()"
    )
    arguments = [sys.executable, "-c", script, str(tmp_path / "a.pt"), str(tmp_path / "dst")]
    with log.open("wb") as out:
        done = subprocess.run(arguments, cwd=REPO, stdout=out, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 7, done.stderr
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["from", "to"]


def test_the_target_is_called_what_its_format_has(zero3: Path, tmp_path: Path) -> None:
    lines = {}
    for to in ("safetensors", "dcp", "deepspeed", "ckpt"):
        text = run("reshard", zero3, tmp_path / to, "--to", to, "--dp", "2", "--zero", "1")
        lines[to] = text.splitlines()[1].partition(f"{tmp_path / to}: ")[2]
    assert lines == {
        "safetensors": "safetensors, step 5",
        "dcp": "dcp, step 5, dp 2",
        "deepspeed": "deepspeed, step 5, dp 2, tp 1, pp 1, ep 1, ZeRO-1",
        "ckpt": "ckpt, step 5, dp 2, tp 1, pp 1, ep 1, ZeRO-1",
    }


def test_what_deepspeed_never_saves_is_told_only_where_it_matters(zero3: Path, tmp_path: Path) -> None:
    always = ("random generators", "class of the optimizer")
    whole = run("import", zero3, tmp_path / "whole", "--dry-run")
    assert [whole.count(words) for words in always] == [1, 1]
    for text in (
        run("import", zero3, tmp_path / "weights", "--dry-run", "--roles", "weights"),
        run("export", zero3, tmp_path / "hf", "--dry-run", "--to", "safetensors"),
        run("diff", zero3, zero3),
    ):
        assert not any(words in text for words in always), text


def test_what_is_lost_of_objects_is_one_line(zero3: Path, tmp_path: Path) -> None:
    for to in ("safetensors", "ckpt"):
        text = run("reshard", zero3, tmp_path / "dst", "--dry-run", "--roles", "weights", "--to", to)
        assert text.count("engine state") == 1, text


def test_degrees_end_where_worlds_do(zero3: Path, tmp_path: Path) -> None:
    assert "1<=x<=65536" in run("reshard", zero3, tmp_path / "dst", "--dp", "65537", code=2)
    assert "or fsdp2" not in run("reshard", zero3, tmp_path / "dst", "--to", "deepspeed", "--pp", "2", code=2)
    assert "no such path" in run("diff", zero3, tmp_path / "typo", code=10)
