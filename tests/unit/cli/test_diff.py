from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ckpt import errors
from ckpt.cli.diff import DIFFERENT
from ckpt.cli.main import cli
from ckpt.cli.start import INTERRUPTED
from tests.harness.steps import three_steps


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return three_steps(tmp_path_factory.mktemp("diff") / "src")


def run(*arguments: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(cli, ["diff", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def test_the_table_of_exit_codes_has_every_class_and_this_one() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs/cli.md").read_text()
    table = dict(re.findall(r"^\| (\d+) \| (.*?) \|", text.partition("## Exit codes")[2], re.MULTILINE))
    classes = {cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.CkptError)}
    assert {int(code) for code in table} == {0, DIFFERENT, INTERRUPTED, *(cls.exit_code for cls in classes)}
    assert DIFFERENT not in {cls.exit_code for cls in classes}
    for cls in classes:
        if cls.__base__ is errors.CkptError and cls.exit_code != 1:
            assert f"`{cls.__name__}`" in table[str(cls.exit_code)]


def test_the_same_state_is_code_0(root: Path) -> None:
    assert run(root, root).splitlines()[-1] == "3 tensors: 3 equal"


def test_other_state_is_a_code_of_its_own_and_names_each_tensor(root: Path) -> None:
    lines = run(root, root, "--step", "1", "--step-b", "2", code=DIFFERENT).splitlines()
    assert [line.split() for line in lines[2:-2]] == [
        ["tensor", "role", "elements", "max", "abs"],
        ["small", "buffer", "different", "3", "1"],
        ["w", "param", "different", "128", "1000"],
    ]
    assert lines[-2].startswith("not compared, objects beside the tensors: ")
    assert lines[-1] == "3 tensors: 1 equal, 2 different"


def test_one_json_document(root: Path) -> None:
    found = json.loads(run(root, root, "--step", "1", "--step-b", "10", "--json", code=DIFFERENT))
    assert (found["equal"], found["a"]["step"], found["b"]["step"]) == (False, 1, 10)
    assert found["a"]["format"] == "ckpt"
    assert {row["fqn"]: row["status"] for row in found["tensors"]} == {
        "emb": "equal", "small": "different", "w": "different",
    }  # fmt: skip
    assert next(row for row in found["tensors"] if row["fqn"] == "small") == {
        "fqn": "small", "role": "buffer", "status": "different", "elements": 3, "unordered": 0, "max_abs": 9.0,
        "note": "",
    }  # fmt: skip


def test_what_is_not_compared_is_told(tmp_path: Path) -> None:
    for name, ema in (("a", torch.ones(3)), ("b", torch.zeros(3))):
        torch.save({"model": {"w": torch.ones(3)}, "ema": {"w": ema}, name: 1}, tmp_path / f"{name}.pt")
    lines = run(tmp_path / "a.pt", tmp_path / "b.pt").splitlines()
    assert "not compared, objects beside the tensors: a (A), b (B), ema (A and B)" in lines
    assert "   the model is what stands under 'model'; objects beside it: ema" in lines
    found = json.loads(run(tmp_path / "a.pt", tmp_path / "b.pt", "--json"))
    assert found["not_compared"] == {"a": ["A"], "b": ["B"], "ema": ["A", "B"]}


def test_what_is_not_there_is_code_10_and_says_what_was_looked_for(root: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    problem = json.loads(run(root, tmp_path, "--json", code=10))["error"]
    assert problem["type"] == "NoSuchCheckpoint"
    assert "safetensors" in problem["message"]
    assert "7" in json.loads(run(root, root, "--step", "7", "--json", code=10))["error"]["message"]


def test_damage_is_code_3(root: Path, tmp_path: Path) -> None:
    other = three_steps(tmp_path / "other")
    pack = next((other / "steps/10").rglob("rank00000*"))
    pack.write_bytes(pack.read_bytes()[:-1])
    assert json.loads(run(root, other, "--json", code=3))["error"]["type"] == "MissingChunk"
