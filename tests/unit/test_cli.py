"""The command line on a small repository that is written by hand, so that no engine, torch or rank is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from ckpt.cli.main import cli
from ckpt.cli.render import size, spans
from ckpt.format.digest import digest
from ckpt.format.manifest import (
    DERIVED,
    VERSION,
    BlobEntry,
    ChunkEntry,
    CommitBody,
    Divergence,
    DivergingElements,
    IndexPart,
    IndexRoot,
    ObjectEntry,
    PackRef,
)
from ckpt.format.pack import PackItem, lay_out
from ckpt.repo.repository import Repository, attempt_prefix
from ckpt.store.local import LocalStore

REPO = Path(__file__).resolve().parents[2]
LONG = "transformer.decoder.layers.11.mixture_of_experts.experts.63.feed_forward.up_projection.weight"
SPECS = (
    (LONG, "master", "float32", (4, 8)),
    (LONG, "param", "bfloat16", (4, 8)),
    ("scale", "buffer", "float64", ()),
)


def write_step(root: Path, step: int, reuse: PackRef | None = None) -> PackRef:
    """Save one master (its parameter derived), one scalar buffer and one object, as rank 0 of two."""
    store = LocalStore(str(root))
    repository = Repository(store)
    repository.initialise()
    prefix = attempt_prefix(step, "a1")
    master, scale, document = np.arange(32, dtype="f4").tobytes(), np.float64(3).tobytes(), b'{"position": 7}'
    items = [("master", "float32", (4, 8), master), ("scale", "float64", (), scale), ("doc", "uint8", (15,), document)]
    layout = lay_out([PackItem(name, dtype, shape, len(raw)) for name, dtype, shape, raw in items])
    pack = PackRef(key=f"{prefix}/packs/0.safetensors", nbytes=layout.nbytes)
    store.put(pack.key, layout.header + master + scale + document)
    first, second, third = layout.starts
    part = IndexPart(
        rank=0,
        packs=(pack, *([reuse] if reuse else [])),
        chunks=(
            ChunkEntry(0, (0, 0), (4, 8), digest(master), 1 if reuse else 0, first, 128),
            ChunkEntry(1, (0, 0), (4, 8), digest(b"cast"), DERIVED, 0, 64),
            ChunkEntry(2, (), (), digest(scale), 0, second, 8),
        ),
        objects=(
            ObjectEntry(name="loader", kind="extra", ranks=(0, 1), document=BlobEntry(digest(document), 0, third, 15)),
        ),
    )
    one = repository.write_index(f"{prefix}/index/part-0.json.zst", part)
    copies = {digest(b"a"): (0,), digest(b"b"): (1,)}
    exact = DivergingElements(offsets=(), sizes=(), elements=1, unordered=0, max_abs=0.25)
    diverged = Divergence(
        fqn="scale", role="buffer", offsets=(), sizes=(), copies=copies, kept=digest(b"a"), differing=exact
    )
    index = IndexRoot(
        format=VERSION, step=step, attempt="a1", world=2, layout=digest(b"layout"), specs=SPECS, derived=(LONG,),
        aliases={"head.weight": LONG}, parts=(one,), divergences=(diverged,),
    )  # fmt: skip
    totals = {"bytes_held": 400, "bytes_unique": 136, "bytes_written": 136, "bytes_reused": 0, "divergences": 1}
    repository.commit(
        CommitBody(
            format=VERSION, features=(), step=step, attempt="a1", world=2, engine="deepspeed",
            created="2026-01-02T03:04:05Z", software={"ckpt": "0.1.0"}, totals=totals,
            index=repository.write_index(f"{prefix}/index/root.json.zst", index),
        )
    )  # fmt: skip
    return pack


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a repository of steps 9 and 10; 10 shares the master of 9; 11 was begun and never committed."""
    first = write_step(tmp_path / "root", 9)
    write_step(tmp_path / "root", 10, reuse=first)
    (tmp_path / "root/steps/11/a1/packs").mkdir(parents=True)
    return tmp_path / "root"


def run(*arguments: str | Path, code: int = 0) -> str:
    """Run one command and return its standard output."""
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def test_ls_lists_steps_in_numeric_order_and_what_is_unfinished(root: Path) -> None:
    lines = run("ls", root).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["9", "10"]
    assert "1 diverging replica" in lines[1]
    assert "files of step 11, which are no checkpoints" in lines[-1]
    document = json.loads(run("ls", root, "--json"))
    assert [row["step"] for row in document["checkpoints"]] == [9, 10]
    assert document["uncommitted"] == [11]
    assert document["checkpoints"][0]["bytes_unique"] == 136


def test_ls_shows_good_steps_beside_a_bad_commit(root: Path) -> None:
    (root / "steps/10/commit.json").write_text("")
    out = run("ls", root, code=12)
    assert "9 " in out
    assert "MalformedData: steps/10/commit.json" in out


def test_ls_tells_an_empty_repository_from_none(tmp_path: Path) -> None:
    run("ls", tmp_path / "typo", code=10)
    Repository(LocalStore(str(tmp_path / "new"))).initialise()
    assert "no committed checkpoint" in run("ls", tmp_path / "new")


def test_show_tells_where_every_tensor_is(root: Path) -> None:
    out = run("show", root)
    assert LONG in out  # nothing is cut when nobody looks on
    for text in (
        "step 10",
        "in step 9",
        "as cast(master)",
        "4×8",
        "scalar",
        "head.weight",
        "loader",
        "replicas differ: scale (buffer) at ()+(), 1 element in ()+(), by at most 0.25: ",
    ):
        assert text in out, text
    document = json.loads(run("show", root, "--step", "9", "--json"))
    assert document["commit"]["step"] == 9
    assert document["tensors"][0]["stored"] == {"written": 128, "reused": 0, "derived": 0}
    assert document["objects"] == [{"name": "loader", "kind": "extra", "ranks": [0, 1], "nbytes": 15}]


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_errors_have_their_exit_code_and_stay_json(tmp_path: Path, command: str) -> None:
    problem = json.loads(run(command, tmp_path, "--json", code=10))["error"]
    assert (problem["type"], problem["exit_code"]) == ("NoSuchCheckpoint", 10)
    assert run(command, "nosuch://host/path", code=2) == ""
    assert CliRunner().invoke(cli, [command]).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["ls"], "Missing argument 'ROOT'"),
        (["show", "r", "--step", "x"], "'x' is not a valid integer range"),
        (["verify", "r", "--step", "-1"], "-1 is not in the range"),
        (["verify", "r", "--step"], "requires an argument"),
        (["ls", "r", "--bogus"], "No such option"),
        (["ls", "r", "more"], "unexpected extra argument"),
        (["remove", "r"], "No such command 'remove'"),
        (["ls", "r", "--step", "1"], "No such option"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_json_document_too(arguments: list[str], text: str) -> None:
    for line in ([*arguments[:1], "--json", *arguments[1:]], ["--json", *arguments]):
        problem = json.loads(run(*line, code=2))["error"]
        assert (problem["type"], problem["exit_code"]) == ("ConfigError", 2)
        assert text in problem["message"] or line[0] == "--json"
    result = CliRunner().invoke(cli, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert text in result.stderr


def test_help_and_version_still_succeed() -> None:
    assert "verify" in run("--help")
    assert "--json" in run("ls", "--help")
    assert ", version 0." in run("--version")


def test_json_after_two_dashes_is_a_root() -> None:
    result = CliRunner().invoke(cli, ["ls", "--", "--json", "more"])
    assert (result.exit_code, result.stdout) == (2, "")


def rewrite(root: Path, step: int, **fields: Any) -> None:
    """Replace fields of a step's index root, and all digests above."""
    repository = Repository(LocalStore(str(root)))
    commit = repository.read_commit(step)
    changed = msgspec.structs.replace(repository.read_root(commit), **fields)
    (root / commit.index.key).unlink()
    reference = repository.write_index(commit.index.key, changed)
    repository.commit(msgspec.structs.replace(commit, index=reference, engine="e\x1b]0;x\x07"), overwrite=True)


HOSTILE = "a\nb\x1b[31m\x9b2J\r\x85\u2028\u202e[bold]"
ESCAPED = r"a\nb\x1b[31m\x9b2J\r\x85\u2028\u202e[bold]"


def test_names_cannot_break_a_row_or_speak_to_the_terminal(root: Path) -> None:
    rewrite(root, 10, specs=((HOSTILE, "master", "float32", (4, 8)), (HOSTILE, "param", "bfloat16", (4, 8)), SPECS[2]),
            aliases={HOSTILE: HOSTILE})  # fmt: skip
    plain = run("show", root, "--step", "9").count("\n")
    out = run("show", root)
    assert out.count(ESCAPED) == 4
    assert out.count("\n") == plain == len(out.splitlines())
    assert all(c.isprintable() or c == "\n" for c in out)
    assert json.loads(run("show", root, "--json"))["tensors"][0]["fqn"] == HOSTILE
    listed = run("ls", root)
    assert r"e\x1b]0;x\x07" in listed
    assert all(c.isprintable() or c == "\n" for c in listed)


def test_findings_and_errors_show_names_escaped_too(root: Path, tmp_path: Path) -> None:
    (root / "steps/11/a1/packs" / HOSTILE).write_bytes(b"12")
    out = run("verify", root)
    assert ESCAPED in out
    assert all(c.isprintable() or c == "\n" for c in out)
    result = CliRunner().invoke(cli, ["ls", str(tmp_path / HOSTILE)])
    assert result.exit_code == 10
    assert result.stderr == f"NoSuchCheckpoint: no repository in {tmp_path}/{ESCAPED}\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("json_too", [False, True], ids=["text", "json"])
def test_no_name_fails_to_print(root: Path, tmp_path: Path, encoding: str, json_too: bool) -> None:
    """A root that is not UTF-8, a tensor name that the terminal has no letters for."""
    odd = os.fsencode(tmp_path) + b"/r\xff"
    rewrite(root, 10, specs=(("名", "master", "float32", (4, 8)), ("名", "param", "bfloat16", (4, 8)), SPECS[2]))
    os.rename(root, odd)
    (tmp_path / os.fsdecode(odd) / "steps/11/a1/packs" / "x\udcfe").write_bytes(b"12")
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    for command in ("ls", "show", "verify"):
        line = [sys.executable, "-m", "ckpt", command, odd, *(["--json"] if json_too else [])]
        done = subprocess.run(line, capture_output=True, check=False, timeout=60, env=environment, cwd=REPO)
        assert (done.returncode, done.stderr) == (0, b"")
        text = done.stdout.decode(encoding)
        if json_too:
            document = json.loads(done.stdout.decode("ascii"))
            assert document.get("root", "r\\udcff").endswith("r\\udcff")
            assert document.get("tensors", 0) == 6 or command != "verify"
            assert command != "show" or document["tensors"][0]["fqn"] == "名"
        elif command == "show":
            assert ("名" if encoding == "utf-8" else r"\u540d") in text
        elif command == "verify":
            assert r"x\udcfe" in text


@pytest.mark.parametrize("kind", ["directory", "loop", "fifo"])
def test_a_commit_that_is_no_file_hides_no_other_step(root: Path, kind: str) -> None:
    path = root / "steps/9/commit.json"
    path.unlink()
    {"directory": path.mkdir, "loop": lambda: path.symlink_to(path.name), "fifo": lambda: os.mkfifo(path)}[kind]()
    rows = json.loads(run("ls", root, "--json", code=6))["checkpoints"]
    assert [row["step"] for row in rows] == [9, 10]
    assert rows[0]["error"].startswith("StoreError: read 'steps/9/commit.json'")
    assert rows[1]["bytes_unique"] == 136
    found = json.loads(run("verify", root, "--json", code=3))
    assert found["steps"] == [9, 10]
    assert [(f["step"], f["key"]) for f in found["findings"] if f["severity"] == "damage"] == [
        (9, "steps/9/commit.json")
    ]
    assert json.loads(run("verify", root, "--json", "--step", "10"))["damaged"] is False
    assert "StoreError" in run("ls", root, code=6)


def test_show_of_an_absent_step_says_what_is_there(root: Path) -> None:
    assert "it has 9, 10" in json.loads(run("show", root, "--step", "7", "--json", code=10))["error"]["message"]


def test_verify_passes_what_is_whole(root: Path) -> None:
    assert run("verify", root).splitlines() == ["checked step 9, 10: 6 tensors, 6 chunks, 302 B read", "no damage"]
    document = json.loads(run("verify", root, "--step", "9", "--json"))
    assert (document["damaged"], document["steps"], document["findings"]) == (False, [9], [])


def test_verify_tells_damage_from_garbage(root: Path) -> None:
    (root / "steps/11/a1/packs/0.safetensors").write_bytes(b"left behind")
    assert "garbage" in run("verify", root)
    pack = root / "steps/9/a1/packs/0.safetensors"
    raw = bytearray(pack.read_bytes())
    raw[-30] ^= 1  # the last byte but 15 of text and 8 of the scalar: inside the master
    pack.write_bytes(raw)
    out = run("verify", root, code=3)
    assert "DAMAGED" in out
    assert out.count(LONG) == 2  # both steps need this chunk
    found = json.loads(run("verify", root, "--json", code=3))
    assert found["garbage_bytes"] == 11
    assert [(f["severity"], f["step"]) for f in found["findings"]] == [("damage", 9), ("damage", 10), ("garbage", None)]
    run("verify", root, "--step", "7", code=10)


def test_it_runs_without_torch_and_prints_whole_names_into_a_pipe(root: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch is blocked')")
    path = os.pathsep.join([str(tmp_path), str(REPO)])
    command = [sys.executable, "-m", "ckpt", "show", str(root)]
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "40"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert LONG in done.stdout


def test_sizes_and_runs_of_ranks() -> None:
    assert size(999_999) == "1.00 MB"
    assert size(5 * 10**18) == "5000.00 PB"
    assert spans([]) == ""
    assert spans([5]) == "5"
