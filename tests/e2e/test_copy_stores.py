"""Checkpoints between a disk, an S3 server and fsspec, by ``ckpt cp`` and by tools that know nothing of checkpoints."""

from __future__ import annotations

import itertools
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

import ckpt
from ckpt.cli.main import cli
from ckpt.repo.gc import UPLOAD, collect
from ckpt.repo.repository import Repository
from ckpt.repo.verify import verify
from ckpt.store.open import open_store
from tests.harness.steps import three_steps, write_step
from tests.property.fake import engines, load_all, save_all, small_model, zero1

if TYPE_CHECKING:
    from pathlib import Path

    from tests.harness.servers import S3Server

pytestmark = pytest.mark.usefixtures("s3_environment")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1, 2 and 10; the later ones refer to step 1's pack."""
    return three_steps(tmp_path / "src")


@pytest.fixture(params=["weed", "moto"])
def server(request: pytest.FixtureRequest) -> S3Server:
    return request.getfixturevalue(request.param)


@pytest.fixture
def bucket(server: S3Server) -> str:
    """A root in a bucket that nobody else has."""
    name, prefix = server.place()
    return f"s3://{name}/{prefix}?endpoint={server.url}"


def run(*arguments: str | Path, code: int = 0) -> Any:
    """Run one command and return its document."""
    result = CliRunner().invoke(cli, [*map(str, arguments), "--json"])
    assert result.exit_code == code, (result.output, result.exception)
    return json.loads(result.stdout)


def contents(root: str | Path) -> dict[str, bytes]:
    """All that is there but for the markers of attempts, which carry the copy's date."""
    store = open_store(str(root))
    return {info.key: store.get(info.key) for info in store.walk("") if not info.key.endswith("attempt.json")}


def test_from_a_disk_to_s3_to_memory_and_back(root: Path, bucket: str, tmp_path: Path) -> None:
    places = [root, bucket, f"memory://copies/{tmp_path.name}", tmp_path / "back"]
    for src, dst in itertools.pairwise(places):
        assert run("cp", src, dst, "--all")["steps"] == [1, 2, 10]
        again = run("cp", src, dst, "--all")
        assert (again["steps"], again["present"], again["bytes_copied"]) == ([], [1, 2, 10], 0)
        assert verify(Repository(open_store(str(dst)))).findings == []
    assert contents(tmp_path / "back") == contents(root)


def test_what_is_damaged_in_a_bucket_is_copied_again(root: Path, bucket: str) -> None:
    run("cp", root, bucket)
    store = open_store(bucket)
    for key in [info.key for info in store.walk("") if info.key.endswith((".safetensors", ".zst"))]:
        good = store.get(key)
        store.put(key, good[:-1] + bytes([good[-1] ^ 1]), overwrite=True)
        assert run("cp", root, bucket)["bytes_copied"] == len(good)
        assert store.get(key) == good


def test_files_uploaded_by_another_tool_are_a_checkpoint(root: Path, server: S3Server) -> None:
    """As ``aws s3 sync`` does it: every file by itself, in the order of names, so a commit comes before its packs."""
    name, prefix = server.place()
    client = server.client
    url = f"s3://{name}/{prefix}?endpoint={server.url}"
    files = sorted(path for path in root.rglob("*") if path.is_file())
    files.sort(key=lambda path: path.name != "commit.json")
    for number, path in enumerate(files, 1):
        client.upload_file(str(path), name, f"{prefix}/{path.relative_to(root).as_posix()}")
        if number == len(files) // 2:
            assert verify(Repository(open_store(url))).damaged
            assert run("verify", url, code=3)["damaged"]
    assert run("verify", url)["findings"] == []
    assert run("cp", url, f"memory://synced/{name}/{prefix}", "--all")["steps"] == [1, 2, 10]


def test_uploads_that_a_killed_copy_leaves_are_found_and_aborted(root: Path, server: S3Server) -> None:
    name, prefix = server.place()
    client = server.client
    url = f"s3://{name}/{prefix}?endpoint={server.url}"
    run("cp", root, url)
    attempt = write_step(open_store(url), 11, commit=False)
    mine = f"{prefix}/{attempt}/packs/rank00002-000.safetensors"
    upload = client.create_multipart_upload(Bucket=name, Key=mine)["UploadId"]
    client.upload_part(Bucket=name, Key=mine, UploadId=upload, PartNumber=1, Body=b"x" * 100)
    assert collect(open_store(url)).removed == [], "it may be a save at work"
    report = run("gc", url, "--older-than", "0")
    assert {row["kind"] for row in report["removed"]} == {UPLOAD, "attempt"}
    assert [row["nbytes"] for row in report["removed"] if row["kind"] == UPLOAD] == [100]
    left = client.list_multipart_uploads(Bucket=name, Prefix=prefix).get("Uploads", [])
    assert left == []
    found = run("verify", url)
    assert (found["findings"], found["steps"]) == ([], [10])


# -- with ranks that save and load -------------------------------------------------------------------------------------


def loads(root: Path | str, step: int) -> None:
    """Two ranks load ``step``, bit for bit."""
    model = small_model(step)
    made = engines(model, zero1(model, 2), 2, filled=False, at_step=step)
    load_all(made, root, step=step)
    assert [line for one in made for line in one.differences()] == []


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Steps 1 and 2 of two ranks; step 2 refers to step 1's pack for the frozen tensor."""
    for step in (1, 2):
        model = small_model(step)
        save_all(engines(model, zero1(model, 2), 2, filled=True, at_step=step), tmp_path / "saved")
    return tmp_path / "saved"


def test_a_copy_of_either_kind_loads_and_can_be_saved_upon(saved: Path, bucket: str, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "plain")
    run("cp", saved, tmp_path / "newest")
    run("cp", saved, bucket, "--all")
    run("cp", bucket, tmp_path / "back", "--all")
    shutil.rmtree(saved)
    for root, steps in (
        (tmp_path / "plain", [1, 2]),
        (tmp_path / "newest", [2]),
        (bucket, [1, 2]),
        (tmp_path / "back", [1, 2]),
    ):
        assert ckpt.steps(root) == steps
        for step in steps:
            loads(root, step)
        model = small_model(3)
        save_all(engines(model, zero1(model, 2), 2, filled=True, at_step=3), root)
        run("gc", root, "--older-than", "0")
        for step in (*steps, 3):
            loads(root, step)
        assert run("verify", root)["findings"] == []


def test_a_load_of_a_plain_copy_at_work_says_what_is_missing(saved: Path, tmp_path: Path) -> None:
    files = sorted(path.relative_to(saved) for path in saved.rglob("*") if path.is_file())
    files.sort(key=lambda path: path.name != "commit.json")
    model = small_model(2)
    for number, path in enumerate(files, 1):
        (tmp_path / "to" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(saved / path, tmp_path / "to" / path)
        needed = [p for p in files[number:] if p.parts[:2] != ("steps", "1") or "rank00000" in p.name]
        if number > 2 and any(p.suffix in (".safetensors", ".zst") for p in needed):
            with pytest.raises(ckpt.CkptError) as caught:
                load_all(engines(model, zero1(model, 2), 2, filled=False, at_step=2), tmp_path / "to", step=2)
            assert ckpt.errors.is_damage(caught.value), caught.value
    loads(tmp_path / "to", 2)
