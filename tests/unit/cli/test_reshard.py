from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ckpt.cli.main import cli
from ckpt.cli.reshard import reshard
from ckpt.convert.options import WriteOptions
from ckpt.convert.ours.write import write_ours
from ckpt.convert.target import target_of
from ckpt.repo.repository import Repository
from ckpt.repo.verify import verify
from ckpt.store.local import LocalStore
from tests.harness.deepspeed_files import Model, numbered, write_zero3
from tests.harness.terminal import terminal
from tests.unit.convert.sources import ADAM, Source

RULES = """
tensors:
  - {match: '.*qkv.weight', dim: 0, fused: [{size: 8, heads: 4}, {size: 4, heads: 2}, {size: 4, heads: 2}]}
  - {match: 'embed.weight', dim: 0, size: 65}
  - {match: '.*norm.*|seen'}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with step 7: four layers, a tied head, Adam, a buffer, of one rank."""
    root = tmp_path_factory.mktemp("reshard") / "src"
    shapes = {f"layers.{n}.{name}": size for n in range(4) for name, size in (("qkv.weight", (16, 8)), ("norm", (8,)))}
    source = Source().weights({"embed.weight": (65, 8), **shapes}, ADAM).add("seen", "buffer", (), "int64")
    source.builder.aliases["head.weight"] = "embed.weight"
    source.builder.step = 7
    opened = source.groups(["embed.weight", *shapes]).open()
    write_ours(opened, LocalStore(str(root)), target_of(opened), WriteOptions())
    return root


def run(*arguments: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def document(*arguments: str | Path) -> dict[str, Any]:
    return json.loads(run(*arguments, "--json"))


def error(*arguments: str | Path, code: int) -> dict[str, Any]:
    found = json.loads(run(*arguments, "--json", code=code))["error"]
    assert found["exit_code"] == code
    return found


def listing(root: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(root.rglob("*")) if p.is_file()}


def test_another_number_of_ranks_holds_the_same_and_the_source_is_untouched(root: Path, tmp_path: Path) -> None:
    before = listing(root)
    text = run("reshard", root, tmp_path / "dst", "--dp", "3", "--zero", "1", "--verify").splitlines()
    assert text[0] == f"from {root}: ckpt, step 7, 1 rank (ZeRO-0)"
    assert text[1] == f"to {tmp_path / 'dst'}: ckpt, step 7, dp 3, tp 1, pp 1, ep 1, ZeRO-1"
    assert text[-1] == "verified: 46 tensors of DST equal those of SRC"
    assert text[-2].startswith("46 tensors: ")
    assert run("diff", root, tmp_path / "dst").splitlines()[-1] == "46 tensors: 46 equal"
    assert listing(root) == before
    repository = Repository(LocalStore(str(tmp_path / "dst")))
    assert repository.read_commit(7).world == 3
    assert verify(repository).findings == []


def test_all_axes_at_once_and_back(root: Path, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(RULES)
    there = document(
        "reshard", root, tmp_path / "a", *("--dp", "2", "--tp", "2", "--pp", "2", "--stages", "1,3", "--zero", "1"),
        "--rules", tmp_path / "rules.yaml", "--verify",
    )  # fmt: skip
    layout = {"dp": 2, "tp": 2, "pp": 2, "ep": 1, "zero": 1, "stages": [1, 3]}
    assert there["destination"] == {"where": str(tmp_path / "a"), "format": "ckpt", "step": 7, **layout}
    assert there["source"]["format"] == "ckpt"
    assert there["verified"] == {"equal": True, "tensors": 46, "overflowed": 0, "unequal": []}
    assert (there["lost"], there["tensors"], there["bytes_present"]) == ([], 46, 0)
    assert there["bytes_read"] > 0
    document("reshard", tmp_path / "a", tmp_path / "b", *("--dp", "5", "--tp", "1", "--pp", "1", "--zero", "3"))
    assert document("diff", root, tmp_path / "b")["equal"]


def test_a_dry_run_writes_nothing_and_says_what_would_be(root: Path, tmp_path: Path) -> None:
    flags = ("--dp", "3", "--zero", "1", "--roles", "weights", "--dtype", "fp16")
    planned = document("reshard", root, tmp_path / "dst", *flags, "--dry-run")
    assert not (tmp_path / "dst").exists()
    assert planned["dry_run"]
    assert planned["memory"] > 0
    assert any("exp_avg" in line for line in planned["lost"])
    text = run("reshard", root, tmp_path / "dst", *flags, "--dry-run")
    assert "would be read" in text
    assert "lost: " in text
    done = document("reshard", root, tmp_path / "dst", *flags)
    assert not done["dry_run"]
    assert all(done[name] == planned[name] for name in ("lost", "made", "memory"))
    tensors = json.loads(run("show", tmp_path / "dst", "--json"))["tensors"]
    assert {(t["role"], t["dtype"]) for t in tensors} == {("param", "float16"), ("buffer", "int64")}


def test_weights_in_another_dtype_are_verified_as_that(root: Path, tmp_path: Path) -> None:
    done = document("reshard", root, tmp_path / "dst", "--roles", "weights", "--dtype", "float32", "--verify")
    assert done["verified"]["equal"]
    assert run("diff", root, tmp_path / "dst", "--roles", "weights", code=11)


def test_import_takes_a_file_of_somebody_else(tmp_path: Path) -> None:
    torch.save({"layers.0.weight": torch.arange(6.0).reshape(2, 3)}, tmp_path / "model.pt")
    done = document("import", tmp_path / "model.pt", tmp_path / "dst", "--verify")
    assert done["source"]["format"] == "torch"
    assert done["verified"]["equal"]
    assert run("diff", tmp_path / "model.pt", tmp_path / "dst").splitlines()[-1] == "1 tensor: 1 equal"


def test_what_a_dtype_makes_infinite_is_told(tmp_path: Path) -> None:
    torch.save({"layers.0.weight": torch.tensor([1.0, 1e6, float("inf")])}, tmp_path / "model.pt")
    done = document("import", tmp_path / "model.pt", tmp_path / "dst", "--dtype", "fp16", "--verify")
    told = "layers.0.weight (param): 1 finite element of SRC too large for float16, infinite in DST"
    assert told in done["lost"]
    assert done["verified"] == {"equal": True, "tensors": 1, "overflowed": 1, "unequal": []}


def test_an_optimizer_that_was_started_anew_comes_along_with_its_own_count(tmp_path: Path) -> None:
    write_zero3(tmp_path / "src", Model([{"layers.0.w": numbered((6, 2), 1)}], step=4.0), 2, global_steps=9)
    assert "--optimizer-step 4" in error("reshard", tmp_path / "src", tmp_path / "dst", code=12)["message"]
    flags = ("--to", "deepspeed", "--dp", "3", "--optimizer-step", "4")
    assert document("reshard", tmp_path / "src", tmp_path / "dst", *flags, "--verify")["verified"]["equal"]
    same = ("diff", tmp_path / "src", tmp_path / "dst", "--optimizer-step", "4")
    assert document(*same)["equal"]
    assert document(*same, "--optimizer-step-b", "4")["equal"]
    assert "counts 4" in error("reshard", tmp_path / "src", tmp_path / "to", "--optimizer-step", "5", code=2)["message"]
    run("import", tmp_path / "src", tmp_path / "ours", "--optimizer-step", "4")
    found = error("reshard", tmp_path / "ours", tmp_path / "to", "--optimizer-step", "4", code=2)["message"]
    assert found == f"an optimizer step is only said of files of DeepSpeed, {tmp_path / 'ours'} is ckpt"


def test_slices_of_the_source_do_not_matter_where_tensors_are_whole(root: Path, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(RULES)
    run("reshard", root, tmp_path / "cut", "--tp", "2", "--rules", tmp_path / "rules.yaml")
    done = document("export", tmp_path / "cut", tmp_path / "model", "--to", "safetensors")
    assert (done["source"]["tp"], done["destination"]["tp"]) == (2, 1)
    assert document("export", tmp_path / "cut", tmp_path / "dcp", "--to", "dcp")["destination"]["tp"] == 1
    refused = error("reshard", tmp_path / "cut", tmp_path / "to", "--dp", "4", code=2)
    assert "tp 2 is SRC's: give --rules, or --tp 1" in refused["message"]


def test_urls_are_places_too(root: Path, tmp_path: Path) -> None:
    assert document("reshard", f"file://{root}", f"file://{tmp_path}/dst", "--dp", "2")["destination"]["dp"] == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{root}"], "Missing argument 'DST'"),
        (["{root}", "{root}"], "SRC and DST are the same"),
        (["{root}", "{root}/inside"], "lies inside of SRC"),
        (["{root}", "to", "--dp", "0"], "0 is not in the range"),
        (["{root}", "to", "--zero", "4"], "4 is not in the range"),
        (["{root}", "to", "--to", "tar"], "'tar' is not one of"),
        (["{root}", "to", "--tp", "2"], "give --rules"),
        (["{root}", "to", "--tp", "2", "--rules", "none.yaml"], "none.yaml"),
        (["{root}", "to", "--tp", "3", "--rules", "rules.yaml"], "tp 3 does not divide 4 heads"),
        (["{root}", "to", "--tp", "2", "--rules", "short.yaml"], "'seen': no rule says"),
        (["{root}", "to", "--pp", "5"], "more stages than the 4 layers"),
        (["{root}", "to", "--pp", "2", "--stages", "1,x"], "expected numbers of layers"),
        (["{root}", "to", "--dp", "2", "--ep", "2"], "no name shows an expert"),
        (["{root}", "to", "--memory", "none"], "is not a number of bytes"),
        (["{root}", "to", "--dtype", "int7"], "'int7' is not one of"),
        (["{root}", "s3:/bucket/x"], "a URL has '://'"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_code_2_and_nothing_is_touched(
    root: Path, tmp_path: Path, arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rules.yaml").write_text(RULES)
    Path("short.yaml").write_text(RULES.replace("|seen", ""))
    before = listing(root)
    problem = error("reshard", *(a.format(root=root) for a in arguments), code=2)
    assert problem["type"] == "ConfigError"
    assert text in problem["message"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rules.yaml", "short.yaml"]
    assert listing(root) == before


def test_other_failures_have_the_codes_of_their_kind(root: Path, tmp_path: Path) -> None:
    assert error("reshard", tmp_path / "typo", tmp_path / "to", code=10)["type"] == "NoSuchCheckpoint"
    assert error("reshard", root, tmp_path / "to", "--step", "8", code=10)["type"] == "NoSuchCheckpoint"
    run("reshard", root, tmp_path / "taken", "--dp", "2")
    assert error("reshard", root, tmp_path / "taken", "--dp", "3", code=7)["type"] == "CheckpointExists"
    again = document("reshard", root, tmp_path / "taken", "--dp", "2")
    assert again["bytes_present"] > 0, "the same conversion once more: it is there already"
    assert error("reshard", root, tmp_path / "to", "--memory", "1kB", code=5)["type"] == "BudgetTooSmall"
    assert not (tmp_path / "to").exists()


def test_export_needs_a_format_and_takes_a_layout() -> None:
    assert "Missing option '--to'" in CliRunner().invoke(cli, ["export", "a", "b"]).output
    text = CliRunner().invoke(cli, ["export", "-h"]).output
    assert all(flag in text for flag in ("--dp", "--zero", "--rules", "--dry-run", "--trust-pickle"))
    assert "--to" not in CliRunner().invoke(cli, ["import", "-h"]).output


def test_it_is_a_program_of_its_own(root: Path, tmp_path: Path) -> None:
    frozen = gc.get_freeze_count()
    result = CliRunner().invoke(reshard, [str(root), str(tmp_path / "dst"), "--dp", "2", "--json"])
    assert result.exit_code == 0
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, frozen), "in somebody else's process it changes nothing"
    assert json.loads(result.stdout)["destination"]["dp"] == 2
    result = CliRunner().invoke(reshard, [str(root), "--json"])
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["type"] == "ConfigError"


def test_a_bar_is_drawn_on_a_terminal(root: Path, tmp_path: Path) -> None:
    drawn = terminal("reshard", root, tmp_path / "dst", "--dp", "2", "--verify")
    assert drawn.startswith("planning")
    assert "writing" in drawn
    assert "verifying" in drawn
    assert "B/s" in drawn
