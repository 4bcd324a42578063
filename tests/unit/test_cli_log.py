from __future__ import annotations

import json
import math
import sys
import xml.etree.ElementTree as ElementTree
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from click.testing import CliRunner

from ckpt.cli.log import _stored, ranges
from ckpt.cli.main import cli
from ckpt.store.local import LocalStore
from tests.harness.logged_jobs import PARAMETERS, LoggedJob, changed_record, loaded, logged, on_two_ranks, two_logs

if TYPE_CHECKING:
    from pathlib import Path

    from tests.harness.servers import Moto


def run(*arguments: str | Path, code: int = 0) -> str:
    """Run one command and return its standard output."""
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def document(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("log", *arguments, "--json", code=code))
    return found


def placed(objects: dict[str, bytes], root: Path) -> Path:
    for key, data in objects.items():
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(data)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return placed(two_logs(), tmp_path / "root")


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """The same logs on two ranks."""
    return placed(on_two_ranks(two_logs()), tmp_path / "both")


def test_each_step_is_a_row_and_the_end_says_how_far_it_leads(root: Path) -> None:
    lines = run("log", root).splitlines()
    assert [line.split()[:2] for line in lines[1:16]] == [[str(n), "1" if n <= 12 else "2"] for n in range(1, 16)]
    rest = "\n".join(lines[16:])
    assert "log 1 of 1 rank, begins at checkpoint 0, by torch.optim.adamw.AdamW (torch " in rest
    assert "log 2 of 1 rank, goes on from log 1 behind step 12, by " in rest
    assert f"of {PARAMETERS}): gradients 4.000 B, and beside them " in rest
    assert "the full save of step 10 has " in rest
    assert lines[-1] == "checkpoint 10 and the logs lead to step 15"


def test_one_json_document_says_it_all(root: Path) -> None:
    found = document(root)
    assert (found["root"], found["reaches"], found["checkpoints"], found["others"]) == (str(root), 15, [0, 5, 10], [])
    assert (found["damaged"], found["checked"], found["groups"]) == (False, True, [[0, 0], [0, 1]])
    assert [one["step"] for one in found["steps"]] == list(range(1, 16))
    files = {key: len(data) for key, data in two_logs().items() if key.endswith(".log")}
    one = found["steps"][6]
    assert one["nbytes"] == files["log/000001/rank00000/000000000007.log"]
    assert one["bytes_per_parameter"] == one["nbytes"] / PARAMETERS
    assert one["gradient_bytes"] == {"stored": 4 * PARAMETERS, "raw": 4 * PARAMETERS}
    assert (one["lr"], one["dtypes"], one["skipped"], one["reached"]) == ([0.01, 0.01], ["float32"], False, True)
    assert (one["ranks"], one["world"], one["loss_scale"], one["changed"]) == (1, 1, None, [])
    summary = found["summary"]
    assert (summary["steps"], summary["skipped"], summary["nbytes"]) == (15, 0, sum(files.values()))
    assert summary["ratio"] == summary["full"]["stored"] / (sum(files.values()) / 15)
    assert [(one["number"], one["first"], one["last"], one["end"]) for one in found["logs"]] == [
        (1, 1, 12, 12),
        (2, 13, None, 15),
    ]
    assert [one["step"] for one in document(root, "--step", "3:5")["steps"]] == [3, 4, 5]
    assert document(root, "--step", "3:5")["summary"] == summary


def test_the_norm_is_that_of_the_gradient_over_all_ranks(root: Path, both: Path) -> None:
    one, two = document(root)["steps"], document(both)["steps"]
    for alone, together in zip(one, two, strict=True):
        assert together["norm"] == pytest.approx(alone["norm"] * math.sqrt(2))
        assert together["nbytes"] > 1.9 * alone["nbytes"]
        assert together["ranks"] == 2


def test_the_norm_is_what_autograd_says(tmp_path: Path) -> None:
    job = LoggedJob(tmp_path / "root", scale=4096.0)
    norms = []
    for _ in range(3):
        job.train(1)
        norms.append(math.sqrt(sum(float(p.grad.pow(2).sum()) for p in job.model.parameters())))
    job.close()
    assert [one["norm"] for one in document(tmp_path / "root")["steps"]] == pytest.approx(norms, rel=1e-5)


def test_skipped_steps_and_the_loss_scale_are_told(tmp_path: Path) -> None:
    logged(tmp_path / "root", 5, scale=1024.0, overflows=frozenset({3}))
    found = document(tmp_path / "root")
    assert [one["skipped"] for one in found["steps"]] == [False, False, True, False, False]
    assert [one["loss_scale"] for one in found["steps"]] == [1024.0, 1024.0, 512.0, 512.0, 512.0]
    assert found["steps"][2]["norm"] is None
    assert found["summary"]["skipped"] == 1
    row = run("log", tmp_path / "root").splitlines()[3]
    assert (row.split()[0], row.split()[-1]) == ("3", "skipped")


def test_what_is_set_by_hand_between_two_steps_is_marked(tmp_path: Path) -> None:
    job = LoggedJob(tmp_path / "root").train(2)
    job.optimizer.param_groups[1]["lr"] = 0.5
    job.train(2).close()
    job = LoggedJob(tmp_path / "root")  # in front of a log's first record too
    job.optimizer.param_groups[0]["weight_decay"] = 0.25
    job.train(1).close()
    found = document(tmp_path / "root")
    assert [one["changed"] for one in found["steps"]] == [[], [], ["lr"], [], ["weight_decay"]]
    assert [one["lr"] for one in found["steps"]][1:3] == [[0.01, 0.01], [0.01, 0.5]]
    assert found["summary"]["changed"] == [3, 5]
    out = run("log", tmp_path / "root")
    assert "lr set by hand" in out.splitlines()[3]
    assert "before step 3, 5: by hand" in out


def test_a_schedule_is_no_change_by_hand(tmp_path: Path) -> None:
    job = LoggedJob(tmp_path / "root")
    for rate in (0.1, 0.2, 0.3):
        job.optimizer.register_step_post_hook(lambda o, *_, rate=rate: o.param_groups[0].update(lr=rate))
        job.train(1)
    job.close()
    assert document(tmp_path / "root")["summary"]["changed"] == []


def test_a_torn_end_shortens_the_log_and_is_no_error(both: Path) -> None:
    path = both / "log/000002/rank00001/000000000015.log"
    path.write_bytes(path.read_bytes()[:-20])
    found = document(both)
    assert (found["reaches"], found["damaged"]) == (14, False)
    assert [part["end"] for part in found["logs"][1]["ranks"]] == [15, 14]
    assert "is cut off" in found["logs"][1]["ranks"][1]["torn"]
    assert (found["steps"][-1]["reached"], found["steps"][-1]["ranks"], found["steps"][-1]["norm"]) == (False, 1, None)
    out = run("log", both)
    assert "rank 1 to step 14, rank 0 to step 15: all of them to step 14" in out
    assert "on 1 of 2 ranks; out of reach" in out.splitlines()[15]
    assert "torn: log/000002/rank00001/000000000015.log" in out


def test_a_step_that_some_ranks_took_and_some_skipped_is_named(both: Path) -> None:
    path = both / "log/000002/rank00001/000000000014.log"
    skipped = changed_record(path.read_bytes(), lambda record: msgspec.structs.replace(record, calls=()))
    path.write_bytes(skipped)
    said = " ".join(run("log", both).split())
    assert "log 2: step 14 was taken on rank 0 and skipped on rank 1: some rank has called" in said
    found = document(both)
    last = found["logs"][1]
    assert (last["parted"]["step"], last["end"], found["reaches"], found["damaged"]) == (14, 12, 12, False)


def test_a_rank_without_its_part_leads_nowhere(both: Path) -> None:
    for path in sorted((both / "log/000002/rank00001").iterdir()):
        path.unlink()
    (both / "log/000002/rank00001").rmdir()
    found = document(both)
    assert (found["reaches"], found["logs"][1]["absent"], found["logs"][1]["end"]) == (12, 1, 12)
    assert "rank 0 to step 15, 1 rank no part: all of them no record" in run("log", both)


@pytest.mark.parametrize("step", [7, 14])
def test_damage_is_named_and_what_lies_behind_it_is_out_of_reach(root: Path, step: int) -> None:
    path = root / f"log/{1 if step <= 12 else 2:06d}/rank00000/{step:012d}.log"
    data = bytearray(path.read_bytes())
    data[64 + 8 + int.from_bytes(data[64:72], "little") + 5] ^= 1  # of the gradient
    path.write_bytes(data)
    found = document(root, code=3)
    assert found["damaged"]
    assert [one["step"] for one in found["steps"] if not one["reached"]] == ([8, 9, 10] if step == 7 else [15])
    assert found["reaches"] == (15 if step == 7 else 13)
    assert f"the record of step {step} is not what was written" in run("log", root, code=3)
    quick = document(root, "--quick")
    assert (quick["checked"], quick["damaged"], quick["reaches"]) == (False, False, 15)


def test_a_gap_is_named(root: Path) -> None:
    (root / "log/000002/rank00000/000000000014.log").unlink()
    found = document(root, code=3)
    (trouble,) = found["logs"][1]["ranks"][0]["troubles"]
    assert "behind step 13 comes step 15: a gap" in trouble
    assert found["reaches"] == 13


def test_many_steps_are_shown_as_ranges_unless_they_are_named(tmp_path: Path) -> None:
    logged(LocalStore(str(tmp_path / "root")), 90, flush_every=10)
    rows = [line.split()[0] for line in run("log", tmp_path / "root").splitlines() if line[0].isdigit()]
    assert rows[:3] == ["1-5", "6-10", "11-15"]
    assert len(rows) - 1 == 18
    rows = [line.split()[0] for line in run("log", tmp_path / "root", "--step", ":").splitlines() if line[0].isdigit()]
    assert rows[:-1] == [str(n) for n in range(1, 91)]


def test_a_range_ends_where_steps_are_missing_and_where_another_log_begins() -> None:
    steps = [{"step": n, "log": 1 if n < 50 else 2} for n in [*range(1, 48), *range(49, 100)]]
    found = [(several[0]["step"], several[-1]["step"]) for several in ranges(steps, 10)]
    assert found == [(1, 10), (11, 20), (21, 30), (31, 40), (41, 47), (49, 49), (50, 50), *(
        (n, min(n + 9, 99)) for n in range(51, 100, 10))]  # fmt: skip
    assert list(ranges([], 10)) == []


@pytest.mark.parametrize("name", ["picture.svg", "picture.PNG"])
def test_a_picture_is_drawn(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    logged(tmp_path / "root", 4, scale=1024.0, overflows=frozenset({2}))
    run("log", tmp_path / "root", "--plot", tmp_path / name)
    data = (tmp_path / name).read_bytes()
    if name.endswith("svg"):
        text = "".join(ElementTree.fromstring(data).itertext())
        for word in ("gradient norm", "learning rate", "loss scale", "step"):
            assert word in text
    else:
        assert data.startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_drawn_is_told_before_anything_is_read(tmp_path: Path, monkeypatch) -> None:
    for name in ("picture.pdf", "nowhere/picture.svg"):
        assert json.loads(run("log", tmp_path, "--plot", tmp_path / name, "--json", code=2))["error"]["exit_code"] == 2
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = json.loads(run("log", tmp_path, "--plot", tmp_path / "picture.svg", "--json", code=2))["error"]["message"]
    assert said == "--plot needs matplotlib, which is not installed: pip install 'ckpt[plot]'"


def test_a_root_without_logs_is_no_root_of_logs(tmp_path: Path) -> None:
    logged(tmp_path / "root", 1, gradients=False)
    said = json.loads(run("log", tmp_path / "root", "--json", code=10))["error"]
    assert said["message"] == f"no gradient log in {tmp_path / 'root'}"
    run("log", tmp_path / "nothing", code=10)


def test_logs_that_no_checkpoint_leads_to_are_shown_and_said_to_be(root: Path) -> None:
    for step in (0, 5, 10):
        (root / f"steps/{step}/commit.json").unlink()
    assert run("log", root).splitlines()[-1] == "no checkpoint leads to these logs"
    found = document(root)
    assert (found["reaches"], found["checkpoints"], len(found["steps"])) == (None, [], 15)


@pytest.mark.parametrize("text", ["7:3", "a", "1:2:3", "-1", ""])
def test_what_is_no_range_of_steps_is_wrong_usage(root: Path, text: str) -> None:
    run("log", root, f"--step={text}", code=2)


# ------------------------------------------------------------------------------------------------- the other commands


def test_ls_and_show_say_how_far_each_checkpoint_leads(root: Path, both: Path) -> None:
    rows = json.loads(run("ls", root, "--json"))["checkpoints"]
    assert [(row["step"], row["log"], row["leads_to"]) for row in rows] == [(0, 1, 15), (5, 1, 15), (10, 1, 15)]
    assert all(line.endswith("to step 15") for line in run("ls", root).splitlines()[1:])
    assert json.loads(run("show", root, "--json"))["log"] == {
        "leads_to": 15,
        "logs": [1, 2],
        "nbytes": sum(len(d) for k, d in two_logs().items() if k.endswith(".log") and int(k[-16:-4]) > 10),
    }
    assert "leads on to step 15" in run("show", root)
    (both / "log/000002/rank00001/000000000015.log").unlink()
    assert [row["leads_to"] for row in json.loads(run("ls", both, "--json"))["checkpoints"]] == [14, 14, 14]


def test_checkpoints_are_listed_though_a_log_cannot_be_read(root: Path) -> None:
    (root / "log/000001/log.json").write_bytes(b"[")
    found = json.loads(run("ls", root, "--json", code=12))
    assert [row["step"] for row in found["checkpoints"]] == [0, 5, 10]
    assert "log/000001/log.json" in found["log_error"]
    assert "gradient logs: MalformedData: log/000001/log.json" in run("ls", root, code=12)
    assert "log/000001/log.json" in json.loads(run("show", root, "--json"))["log"]["error"]


def test_a_root_without_logs_is_listed_as_before(tmp_path: Path) -> None:
    logged(tmp_path / "root", 1, gradients=False)
    assert "log" not in run("ls", tmp_path / "root").split()
    (row,) = json.loads(run("ls", tmp_path / "root", "--json"))["checkpoints"]
    assert (row["log"], row["leads_to"]) == (None, None)
    assert json.loads(run("show", tmp_path / "root", "--json"))["log"] is None


def test_verify_reads_logs_and_its_exit_code_tells_damage(root: Path) -> None:
    assert "2 gradient logs: 15 records" in run("verify", root)
    path = root / "log/000001/rank00000/000000000003.log"
    path.write_bytes(path.read_bytes()[:-10])
    assert "log/000001/rank00000/000000000003.log" in run("verify", root, code=3)


def test_cp_says_which_logs_it_copied(root: Path, tmp_path: Path) -> None:
    out = run("cp", root, tmp_path / "a")
    assert "gradient log 1, 2: 5 files, " in out
    assert run("log", tmp_path / "a").splitlines()[-1] == "checkpoint 10 and the logs lead to step 15"
    assert "0 files, 0 B copied and checked; 5 files, " in run("cp", root, tmp_path / "a")
    found = json.loads(run("cp", root, tmp_path / "b", "--no-log", "--json"))
    assert (found["logs"], found["log_files_copied"]) == ([], 0)
    assert not (tmp_path / "b/log").exists()


def test_all_commands_look_at_logs_in_an_object_store(moto: Moto, s3_environment: None, tmp_path: Path) -> None:
    bucket, prefix = moto.place()
    url = f"s3://{bucket}/{prefix}?endpoint={moto.url}"
    weights = logged(url, 4)
    assert document(url)["reaches"] == 4
    assert [row["leads_to"] for row in json.loads(run("ls", url, "--json"))["checkpoints"]] == [4]
    run("verify", url)
    run("cp", url, tmp_path / "copy")
    assert loaded(tmp_path / "copy") == (4, weights)
    run("cp", tmp_path / "copy", f"s3://{bucket}/{prefix}-again?endpoint={moto.url}")
    assert document(f"s3://{bucket}/{prefix}-again?endpoint={moto.url}")["reaches"] == 4
    logged(url, 1, resume=False)
    run("gc", url, "--older-than", "0")
    assert [one["number"] for one in document(url)["logs"]] == [2]
    assert document(url)["others"] == []


def test_gc_names_the_kind_of_log_that_goes(tmp_path: Path) -> None:
    logged(tmp_path / "root", 4, full_every=3)
    logged(tmp_path / "root", 1, resume=False)
    found = json.loads(run("gc", tmp_path / "root", "--dry-run", "--older-than", "0", "--json"))["removed"]
    assert ("given-up log", "log/000001") in {(row["kind"], row["key"]) for row in found}


@pytest.mark.parametrize(
    ("multipliers", "shown"),
    [([], "bfloat16"), ([1.0], "bfloat16"), ([2.0**-100], "bfloat16"), ([0.75 * 2.0**-110], "bfloat16 × 0.75"),
     ([2.0**-16, 0.625], "bfloat16 × 0.625 … 1")],
)  # fmt: skip
def test_a_multiplier_is_shown_up_to_a_power_of_two(multipliers: list[float], shown: str) -> None:
    assert _stored([{"dtypes": ["bfloat16"], "multipliers": multipliers}]) == shown
