"""``ckpt analyze`` on the command line: what it looks at, what it says, and how it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from ckpt.analysis.domains import Domains
from ckpt.analysis.holdings import pieces_of
from ckpt.analysis.refuting import Redundancy
from ckpt.analysis.report import analyze
from ckpt.cli import render_analysis
from ckpt.cli.main import cli
from ckpt.describe.closed import holdings
from ckpt.describe.exact import exact_graph
from ckpt.describe.load import describe
from ckpt.describe.presets import PRESETS
from ckpt.layout.spec import PARAM
from ckpt.repo.holders import holdings_of_index
from ckpt.repo.repository import Repository
from ckpt.store.local import LocalStore
from tests.compat.test_golden import HERE as GOLDEN
from tests.property.fake import cut, engines, save_all, small_model

REPO = Path(__file__).resolve().parents[2]
SHAPES = """
name: tiny
layers: 2
tensors:
  embed.weight: {shape: [16, 8], kind: embedding, tp: {dim: 0, size: 16}}
  'blocks.{layer}.w': {shape: [8, 8], tp: {dim: 1}}
  norm.weight: {shape: [8], stage: last}
parallel: {engine: deepspeed, zero: 1, dp: 4}
"""


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(SHAPES)
    return path


def invoke(*arguments: str | Path, code: int = 0) -> Any:
    result = CliRunner().invoke(cli, ["analyze", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def run(*arguments: str | Path, code: int = 0) -> str:
    """Run the command and return its standard output, in which each run of blanks is one blank."""
    return "\n".join(" ".join(line.split()) for line in invoke(*arguments, code=code).stdout.splitlines())


def document(*arguments: str | Path, code: int = 0) -> Any:
    return json.loads(invoke(*arguments, "--json", code=code).stdout)


def problems(*arguments: str | Path) -> list[str]:
    """What is wrong with a command line, one by one."""
    found = document(*arguments, code=2)["error"]
    assert (found["type"], found["exit_code"]) == ("ConfigError", 2)
    return found["message"].split("\n  - ")[1:]


# ----------------------------------------------------------------------------------------------- what it looks at


def test_a_described_layout_gives_the_report_of_the_library(shapes: Path) -> None:
    found = document("--model", shapes, "--tp", "2", "--zero", "1", "--lose", "rank:1", "--k", "2")
    described = describe(shapes, tp=2)
    pieces = pieces_of(exact_graph(described))
    report = analyze(holdings(described), Domains.by_rank(8), lost="rank:1", k=2, pieces=pieces)
    assert any(source.boxes for tensor in report.loss.tensors for source in tensor.rebuild_from)
    assert json.dumps(found["report"]) == json.dumps(msgspec.to_builtins(report))
    assert found["source"] == {
        "kind": "description",
        "name": "tiny",
        "layout": "deepspeed, ZeRO-1, dp 4 × tp 2, bfloat16, fp32 masters, adamw",
        "notes": [],
    }


def test_a_checkpoint_gives_the_report_of_the_job_that_wrote_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CKPT_HOST", "node-7")
    model = small_model()
    layout = {key: cut("flat", array.shape, 4) for key, array in model.tensors.items()}
    save_all(engines(model, layout, 4, filled=True), LocalStore(str(tmp_path / "root")))
    index = Repository(LocalStore(str(tmp_path / "root"))).read_index(1)
    by_host = analyze(holdings_of_index(index), Domains.by_host(4, ["node-7"] * 4))
    claimed = by_host.total.bytes_held - by_host.total.bytes_unique
    by_host = msgspec.structs.replace(by_host, redundancy=Redundancy(claimed=claimed, refuted=0))
    found = document(tmp_path / "root")
    assert json.dumps(found["report"]) == json.dumps(msgspec.to_builtins(by_host))
    assert found["source"]["kind"] == "checkpoint"
    assert found["source"]["layout"].startswith("saved by 4 ranks of fake at ")
    assert found["paper"] is None  # a checkpoint does not tell where gradients are
    assert document(tmp_path / "root", "--step", "1", "--domains", "rank")["report"]["domain_count"] == 4
    assert "4 ranks on 1 host;" in run(tmp_path / "root")
    assert document(tmp_path / "root", "--step", "2", code=10)["error"]["type"] == "NoSuchCheckpoint"


def test_what_differed_when_a_checkpoint_was_saved_is_not_redundant(tmp_path: Path) -> None:
    model = small_model()
    made = engines(model, {key: cut("replicated", t.shape, 3) for key, t in model.tensors.items()}, 3, filled=True)
    next(s.tensor for s in made[1].shards if s.spec.key == ("emb", PARAM))[2, 1] = 9.0
    save_all(made, LocalStore(str(tmp_path / "root")))
    found = document(tmp_path / "root", "--domains", "rank", "--lose", "rank:0,2")
    plain = analyze(
        holdings_of_index(Repository(LocalStore(str(tmp_path / "root"))).read_index(1)), Domains.by_rank(3)
    ).total
    emb = 6 * 4 * 2
    assert found["report"]["redundancy"] == {
        "claimed": plain.bytes_held - plain.bytes_unique,
        "refuted": emb,
        "proved": None,
        "unproved": None,
    }
    (lost,) = [one for one in found["report"]["loss"]["tensors"] if one["bytes"]]
    assert (lost["fqn"], lost["bytes"], lost["boxes"]) == ("emb", emb, [[[0, 0], [6, 4]]])
    (note,) = found["source"]["notes"]
    assert f" of copies: {emb} B differed and are not counted as redundant" in note
    assert "which proves nothing, was not recorded" in note
    assert f"note: {note[:40]}" in run(tmp_path / "root")


def test_a_large_described_job_is_not_laid_out_rank_by_rank(shapes: Path) -> None:
    sizes = {}
    for dp in (64, 65):
        loss = document("--model", shapes, "--dp", dp, "--lose", "rank:1", "--domains", "rank")["report"]["loss"]
        sizes[dp] = sum(len(source["boxes"]) for one in loss["tensors"] for source in one["rebuild_from"])
    assert sizes[64] > 0
    assert sizes[65] == 0
    assert exact_graph(describe(shapes, dp=64)) is not None


def test_a_checkpoint_of_an_earlier_release_says_that_it_cannot_tell() -> None:
    error = document(GOLDEN / "v1", code=4)["error"]
    assert error["type"] == "LayoutError"
    assert "layout not recorded" in error["message"]


def test_presets_are_listed_with_what_is_published_of_them() -> None:
    rows = {row["name"]: row for row in document("--list-presets")["presets"]}
    assert list(rows) == list(PRESETS)
    for name, row in rows.items():
        assert row["ranks"] == prod(PRESETS[name].parallel.get(degree, 1) for degree in ("dp", "tp", "pp"))
        assert (row["published"], row["open"]) == (PRESETS[name].paper, PRESETS[name].open)
    out = run("--list-presets")
    assert "llama3-405b 406 G 16,384 megatron, ZeRO-1, dp 128 × tp 8 × pp 16," in out
    assert all(name in out for name in PRESETS)


def test_options_replace_parts_of_a_preset() -> None:
    out = run("--preset", "yi-34b", "--dp", "2", "--tp", "2", "--pp", "1")
    assert "megatron, ZeRO-1, dp 2 × tp 2, bfloat16, fp32 masters, adamw" in out
    assert "the paper's number 25 %, for another layout: --dp, --tp, --pp replaced" in out
    # What a preset says beside a replaced part falls with it: stages with pp, ranks of a host with the number of hosts.
    assert "pp 9," in run("--preset", "llama3-405b", "--dp", "1", "--tp", "1", "--pp", "9")
    assert "on 2 hosts;" in run("--preset", "yi-34b", "--dp", "2", "--hosts", "2")
    assert "fsdp2, ZeRO-3" in run("--preset", "yi-34b", "--dp", "4", "--tp", "1", "--pp", "1", "--engine", "fsdp2")


def test_it_runs_without_torch(tmp_path: Path, shapes: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch is blocked')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPO)])}
    command = [sys.executable, "-m", "ckpt", "analyze", "--model", str(shapes), "--html", str(tmp_path / "page.html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert "What is held" in done.stdout


def test_stages_of_a_pipeline_may_differ(shapes: Path) -> None:
    found = document("--model", shapes, "--pp", "2", "--stages", "2,0", "--dp", "1")["report"]
    per_rank = [{cell[0] for cell in column["cells"]} for column in found["heat"]["columns"]]
    layers = found["heat"]["layers"]
    assert [{layers[n] for n in held} for held in per_rank] == [{"blocks.0", "blocks.1", "embed"}, {"norm"}]


# ---------------------------------------------------------------------------------------------------- who fails


def test_hosts_are_the_default_where_they_are_known(shapes: Path) -> None:
    assert document("--model", shapes)["report"]["domain_kind"] == "rank"  # four ranks: nobody says how many hosts
    assert document("--model", shapes, "--hosts", "2")["report"]["domain_count"] == 2
    assert document("--model", shapes, "--ranks-per-host", "1", "--domains", "rank")["report"]["domain_kind"] == "rank"
    assumed = document("--model", shapes, "--dp", "16")
    assert (assumed["report"]["domain_kind"], assumed["report"]["domain_count"]) == ("host", 2)
    assert assumed["source"]["notes"] == ["hosts of 8 ranks are assumed (--ranks-per-host, --hosts)"]
    assert "note: hosts of 8 ranks are assumed" in run("--model", shapes, "--dp", "16")
    error = document("--model", shapes, "--domains", "host", code=2)["error"]
    assert "the hosts of tiny are not known" in error["message"]


def test_what_is_assumed_of_hosts_is_said_only_where_they_matter(shapes: Path) -> None:
    for more, said in (((), True), (("--domains", "rank"), False), (("--domains", "rank", "--lose", "host:1"), True)):
        assert ("hosts of 8 ranks are assumed" in run("--model", shapes, "--dp", "16", *more)) == said


def test_a_lost_host_may_be_named_whatever_fails(shapes: Path) -> None:
    found = document("--model", shapes, "--dp", "16", "--domains", "rank", "--lose", "host:1,rank:0")["report"]
    assert (found["domain_kind"], found["loss"]["ranks"]) == ("rank", "0,8-15")
    error = document("--model", shapes, "--lose", "host:0", code=2)["error"]["message"]
    assert error == "--lose host:0: hosts are not known: give --ranks-per-host"
    error = document("--model", shapes, "--domains", "host", code=2)["error"]["message"]
    assert error == "--domains host: the hosts of tiny are not known: give --ranks-per-host"
    (problem,) = problems("--model", shapes, "--lose", "rank:9")
    assert problem == "'rank:9' names no rank of this job: ranks are 0 to 3"


def test_more_losses_than_there_are_hosts_are_refused(shapes: Path) -> None:
    arguments = ("--model", shapes, "--ranks-per-host", "2")
    error = document(*arguments, "--k", "5", code=2)["error"]["message"]
    assert error == "--k 5: expected at most 2 hosts, the job has no more"
    assert document(*arguments, "--k", "2")["report"]["k"] == 2


def test_errors_speak_of_options(shapes: Path) -> None:
    assert "give --ranks-per-host instead" in problems("--model", shapes, "--hosts", "3")[0]
    assert "(--stages, in a file stages)" in problems("--model", shapes, "--pp", "3")[0]


def test_domains_come_from_a_file(shapes: Path, tmp_path: Path) -> None:
    racks = tmp_path / "racks.yaml"
    racks.write_text("kind: rack\ndomains: {a: 'host:0-1', b: '4-6', c: [7]}")
    arguments = ("--model", shapes, "--dp", "8", "--ranks-per-host", "2", "--domains", racks)
    found = document(*arguments, "--lose", "rack:b")["report"]
    assert (found["domain_kind"], found["domain_count"]) == ("rack", 3)
    assert (found["loss"]["domains"], found["loss"]["ranks"]) == (["b"], "4-6")
    assert "for 1 rack lost" in run(*arguments)
    racks.write_text("{a: 0-3, b: 4-7}")  # without a kind
    assert document(*arguments)["report"]["domain_kind"] == "domain"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{a: 0-3, b: 3-9}", ["b: 'rank:3-9' names no rank"]),
        ("{a: 0-5}", ["no domain is given for ranks 6-7"]),
        ("{a: 0-7, b: 7}", ["rank 7: in several domains: a, b"]),
        ("{kind: rack, domains: [1]}", ["expected names and their ranks, found list"]),
        ("{kind: rack, domains: {a: 0-7}, colour: red}", ["unknown key beside kind and domains: colour"]),
        ("{a: {x: 1}, b: 1.5}", ["a: expected ranks", "b: expected ranks"]),
        ("[1, 2]", ["expected a mapping"]),
    ],
)
def test_bad_domains_are_refused_with_everything_that_is_wrong(
    shapes: Path, tmp_path: Path, text: str, said: list[str]
) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    error = document("--model", shapes, "--dp", "8", "--domains", tmp_path / "bad.yaml", code=2)["error"]
    for one in said:
        assert one in error["message"]


def test_a_file_of_domains_that_is_not_there(shapes: Path) -> None:
    error = document("--model", shapes, "--domains", "racks.yaml", code=2)["error"]
    assert "'racks.yaml': expected rank, host, or a file, which cannot be read: No such file" in error["message"]


def test_a_file_of_shapes_is_no_file_of_domains(shapes: Path) -> None:
    error = document("--model", shapes, "--domains", shapes, code=2)["error"]
    assert error["message"] == f"{shapes}: expected domains and their ranks, found a file of shapes (for --model)"


def test_problems_of_domains_are_one_list(shapes: Path, tmp_path: Path) -> None:
    file = tmp_path / "racks.yaml"
    file.write_text("a: zzz,900-901\nb: {much: [" + "1, " * 100 + "1]}\n")
    first, *listed = document("--model", shapes, "--domains", file, code=2)["error"]["message"].splitlines()
    assert first == f"{file}: 2 problems"
    assert [line[:7] for line in listed] == ["  - a: ", "  - b: "]
    assert "'rank:zzz' names no rank" in listed[0]
    assert "; '900-901' names no rank" in listed[0]
    assert len(listed[1]) < 160


# ------------------------------------------------------------------------------------------------ what it says


def test_a_layer_that_is_left_out_is_said(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(PRESETS["deepseek-v3"].config | {"num_hidden_layers": 2, "num_nextn_predict_layers": 1})
    )
    (note,) = document("--model", config)["source"]["notes"]
    assert note.startswith("num_nextn_predict_layers is 1: ")
    assert "num_nextn_predict_layers is 1" in run("--model", config)


def test_the_tables_say_what_zero_1_means() -> None:
    out = run("--preset", "yi-34b")
    for text in (
        "megatron, ZeRO-1, dp 16 × tp 4 × pp 2, bfloat16, fp32 masters, adamw",
        "128 ranks on 16 hosts; 34.4 G parameters in 543 tensors",
        "param 1.10 TB - 68.78 GB 93.75 %",  # none of it unique: it is the cast of the masters
        "param: 16 on 16 hosts none 412.66 GB parameter 16 times, optimizer slice once: must be written",
        "1 412.67 GB 34.4 G 100 %",
        "1 93.75 % 93.75 % 0 % exact",
        "this layout 25 % of parameters, gradients and optimizer states",
        "the paper's number 25 %",
        "Degrees are not: tp 4 x pp 2 fills a host of 8",
    ):
        assert text in out, text


def test_scalars_are_one_line_and_no_line_ends_in_blanks() -> None:
    out = invoke("--preset", "llama3-405b").stdout
    assert [line for line in out.splitlines() if line != line.rstrip()] == []
    (line,) = [line for line in out.splitlines() if line.startswith("step, ")]
    assert " ".join(line.split()) == (
        "step, one value a tensor: 8 to 96 at worst none 4.55 kB the rarest: step 8 times on 1 host: must be written"
    )


def test_the_title_of_a_loss_names_ranks_and_hosts() -> None:
    titles = {
        "rank:7": "rank 7",
        "host:3": "ranks 24-31 (host 3)",
        "host:3,host:7": "ranks 24-31, 56-63 (hosts 3, 7)",
    }
    for lost, title in titles.items():
        assert f"Loss of {title}\n" in run("--preset", "yi-34b", "--lose", lost)


def test_the_tables_say_what_plain_data_parallelism_means(shapes: Path) -> None:
    out = run("--model", shapes, "--engine", "ddp", "--zero", "0")
    assert "every copy elsewhere: survives any 3 ranks" in out
    assert "3 0 B 0 0 %" in out
    assert "this layout 100 % of parameters" in out
    assert "the paper's number" not in out  # it says nothing of this model


def test_a_loss_says_what_is_gone_and_what_rebuilds_the_rest(shapes: Path) -> None:
    out = run("--model", shapes, "--tp", "2", "--lose", "rank:1")
    assert "Loss of rank 1" in out
    assert "cannot be rebuilt, and must be read back" in out
    assert "exp_avg, exp_avg_sq, master of" in out
    safe = run("--model", shapes, "--engine", "ddp", "--zero", "0", "--lose", "rank:0-2")
    assert "everything can be rebuilt from the ranks that are left" in safe
    assert "blocks.*.w (2) 128: exp_avg, exp_avg_sq, param, step of rank 3" in safe


def test_a_loss_of_what_does_not_exist_is_refused(shapes: Path) -> None:
    assert any("'rank:9' names no rank of this job" in one for one in problems("--model", shapes, "--lose", "rank:9"))


@pytest.mark.parametrize("name", ["yi-34b", "megascale-530b"])
def test_nothing_is_wider_than_a_terminal_of_80_columns(name: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(render_analysis, "console", lambda: Console(highlight=False, width=80, force_terminal=True))
    out = CliRunner().invoke(cli, ["analyze", "--preset", name, "--lose", "host:3"]).stdout
    styles = set(re.findall(r"\x1b\[([0-9;]*)m", out))
    assert styles <= {"0", "1"}  # no colour
    lines = re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()
    assert 70 < max(map(len, lines)) <= 80
    assert not any(line.rstrip().endswith("…") for line in lines)  # nothing cut


def test_names_cannot_speak_to_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text('{name: "a\\nb\\e]0;x\\a", tensors: {"w\\e[2J": {shape: [4]}}}')
    result = invoke("--model", tmp_path / "bad.yaml", "--dp", "2", "--zero", "1", "--lose", "0")
    assert r"a\nb\x1b]0;x\x07" in result.stdout
    assert all(c.isprintable() or c == "\n" for c in result.output)


# ------------------------------------------------------------------------------------------------- how it refuses


def test_arguments_that_do_not_go_together_are_told_at_once() -> None:
    found = problems("root", "--model", "m.yaml", "--preset", "nonesuch", "--dp", "2", "--stages", "1,x", "--k", "0")
    assert len(found) == 6
    for text in (
        "ROOT 'root' and --model and --preset",
        "--model and --preset: expected one",
        "--stages '1,x'",
        "--k 0",
        "--dp, --stages: only with --model or --preset",
        "--preset 'nonesuch': expected one of yi-34b",
    ):
        assert any(text in one for one in found), text
    assert problems() == [
        "nothing to analyze: expected ROOT, --model FILE or --preset NAME (--list-presets lists them)"
    ]
    assert problems("--preset", "yi-34b", "--step", "1") == ["--step: only with ROOT"]


def test_a_layout_that_cannot_be_is_refused_with_all_its_problems(shapes: Path) -> None:
    found = problems("--model", shapes, "--dp", "3", "--ep", "2", "--dtype", "float7", "--optimizer", "magic")
    assert len(found) == 3
    assert {one.split()[0] for one in found} == {"ep", "dtype", "optimizer"}


def test_list_presets_stands_alone() -> None:
    invoke("--list-presets", "--preset", "yi-34b", code=2)
    invoke("--list-presets", "--dp", "2", code=2)


def test_an_error_of_yaml_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("tensors:\n  a: [1\n  - b\n")
    said = invoke("--model", tmp_path / "bad.yaml", code=2).stderr
    assert said.count("\n") == 1
    assert "\\n" not in said
    assert "bad.yaml: neither JSON nor YAML: while parsing a flow sequence in line 2, column 6, expected" in said
    assert said.endswith(" in line 4, column 1\n")


def test_errors_list_their_problems_on_lines_of_their_own(shapes: Path) -> None:
    result = invoke("--model", shapes, "--step", "1", "--k", "0", code=2)
    assert result.stderr == (
        "ConfigError: ckpt analyze: 2 problems\n  - --k 0: expected at least 1\n  - --step: only with ROOT\n"
    )
    assert result.stdout == ""


def test_wrong_usage_stays_json() -> None:
    assert document("--dp", "many", code=2)["error"]["type"] == "ConfigError"


# -------------------------------------------------------------------------------------------------------- the page


def test_the_page_is_written_and_json_stays_alone(shapes: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = invoke("--model", shapes, "--json", "--html", page)
    assert json.loads(result.stdout)["source"]["name"] == "tiny"
    assert result.stderr == f"the page is in {page}\n"
    assert page.read_text().startswith("<!doctype html>")


def test_a_page_that_cannot_be_written(shapes: Path, tmp_path: Path) -> None:
    error = document("--model", shapes, "--html", tmp_path / "no" / "page.html", code=2)["error"]
    assert "cannot be written: No such file or directory" in error["message"]
