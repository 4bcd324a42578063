from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
import torch

from ckpt.cli import reshard, source
from ckpt.convert import find
from ckpt.convert.find import FORMATS, READABLE, WRITABLE, OneFile, format_of, open_source, open_target, writer_of
from ckpt.convert.options import ReadOptions
from ckpt.convert.torchfile.file import where_of
from ckpt.errors import ConfigError, NoSuchCheckpoint
from ckpt.store.local import LocalStore
from ckpt.store.open import address, check_apart
from ckpt.store.s3 import S3Store
from tests.harness.steps import three_steps

STEP = "global_step10"
NAMES = {
    "ckpt": ["ckpt.json"],
    "deepspeed": ["latest", f"{STEP}/mp_rank_00_model_states.pt", f"{STEP}/zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    "universal": ["latest", f"{STEP}_universal/mp_rank_00_model_states.pt", f"{STEP}_universal/zero/w/fp32.pt"],
    "dcp": [".metadata", "__0_0.distcp"],
    "megatron": [".metadata", "metadata.json", "common.pt", "__0_0.distcp"],
    "safetensors": ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "optimizer.pt"],
    "torch": ["pytorch_model.bin"],
}  # fmt: skip


def folder(root: Path, *names: str) -> LocalStore:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return LocalStore(str(root))


@pytest.mark.parametrize("name", NAMES)
def test_a_format_is_known_by_the_names_of_its_files(tmp_path: Path, name: str) -> None:
    assert format_of(folder(tmp_path, *NAMES[name])) == name


@pytest.mark.parametrize("name", ["deepspeed", "universal"])
def test_the_folder_of_one_step_is_a_checkpoint_too(tmp_path: Path, name: str) -> None:
    folder(tmp_path, *NAMES[name])
    (step,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert format_of(LocalStore(str(step))) == name


def test_nothing_known_says_what_was_looked_for_and_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(NoSuchCheckpoint) as caught:
        format_of(folder(tmp_path, "notes.txt", "run/log.txt"))
    text = str(caught.value)
    assert "found notes.txt, run" in text
    assert all(one.shows in text for one in FORMATS.values())
    for name in ("typo", "typo.pt", "run/typo"):
        with pytest.raises(NoSuchCheckpoint, match=rf"^no such path: {tmp_path}/{name}$"):
            open_source(str(tmp_path / name), options=ReadOptions())
        assert not (tmp_path / name).exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoSuchCheckpoint, match=rf"^nothing is in {tmp_path}/empty$"):
        open_source(str(tmp_path / "empty"), options=ReadOptions())


def test_two_formats_in_one_folder_are_told(tmp_path: Path) -> None:
    store = folder(tmp_path, *NAMES["deepspeed"], *NAMES["safetensors"])
    with pytest.raises(ConfigError, match=r"has the names of deepspeed .* and safetensors"):
        format_of(store)
    store = folder(tmp_path / "ds", *NAMES["deepspeed"], *NAMES["universal"])
    with pytest.raises(ConfigError, match=r"deepspeed .* and universal"):
        format_of(store)


def test_a_single_file_is_all_of_its_source(tmp_path: Path) -> None:
    store = folder(tmp_path, "a.pt", "b.pt", "v1.2/x.pt")
    found = find._store_of(str(tmp_path / "a.pt"))
    assert isinstance(found, OneFile)
    assert (found.children(""), found.url) == (["a.pt"], f"{tmp_path}/a.pt")
    assert [info.key for info in found.walk("")] == ["a.pt"]
    assert format_of(found) == "torch"
    assert find._store_of(f"file://{tmp_path}/a.pt").url == f"{tmp_path}/a.pt"
    assert find._store_of(str(tmp_path / "v1.2")).url == str(tmp_path / "v1.2"), "a folder whose name has a dot"
    assert find._store_of(str(tmp_path / "none.pt")).url == str(tmp_path / "none.pt")
    assert find._store_of(str(tmp_path)).url == store.url


def test_a_single_file_in_a_bucket_has_its_endpoint_behind_its_name() -> None:
    bucket = S3Store.from_url("s3://bucket/run?endpoint=http://host:1")
    one = OneFile(bucket, "model.pt")
    assert one.url == "s3://bucket/run/model.pt?endpoint=http://host:1"
    assert address(one) == bucket.address, "other processes open the folder"
    assert where_of(one, "model.pt") == one.url
    for destination in ("s3://bucket/run/model.pt", "s3://bucket/run/model.pt/inside"):
        with pytest.raises(ConfigError, match=r"the same|inside of SRC"):
            check_apart(one.url, open_target(f"{destination}?endpoint=http://host:1").url)
    check_apart(one.url, open_target("s3://bucket/run/other?endpoint=http://host:1").url)
    check_apart(one.url, open_target("s3://bucket/run/model.pt?endpoint=http://host:2").url)


def test_a_relative_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path, "a.pt")
    monkeypatch.chdir(tmp_path)
    assert find._store_of("a.pt").url == f"{tmp_path}/a.pt"
    assert find._store_of("..").url == str(tmp_path.parent)


def test_one_file_of_a_checkpoint_says_to_give_the_folder(tmp_path: Path) -> None:
    held = {"module": {"w": torch.ones(2, 3)}, "global_steps": 4, "optimizer": None}
    path = tmp_path / STEP / "mp_rank_00_model_states.pt"
    folder(tmp_path, *NAMES["dcp"], *NAMES["deepspeed"])
    torch.save(held, path)
    with pytest.raises(ConfigError, match=r"one file of a checkpoint \(DeepSpeed\): give the folder .*--from torch"):
        open_source(str(path), options=ReadOptions())
    with pytest.raises(ConfigError, match=r"give the folder that it is in$"):
        open_source(str(tmp_path / ".metadata"), options=ReadOptions())
    found = open_source(str(path), options=ReadOptions(), format="torch")
    assert [(spec.fqn, spec.shape) for spec in found.specs] == [("w", (2, 3))]
    assert found.step == 4


def test_what_is_no_folder_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe.pt")
    for url in ("/dev/null", str(tmp_path / "pipe"), str(tmp_path / "pipe.pt")):
        with pytest.raises(ConfigError, match="neither a folder nor a file"):
            open_source(url, options=ReadOptions())
    torch.save({"w": torch.ones(2)}, tmp_path / "model")
    with pytest.raises(NoSuchCheckpoint, match="found model"):
        open_source(str(tmp_path / "model"), options=ReadOptions())
    assert open_source(str(tmp_path / "model"), options=ReadOptions(), format="torch").specs[0].fqn == "w"
    for place in ("model", "model/below", "pipe"):
        with pytest.raises(ConfigError, match="is there, and is no folder"):
            open_target(str(tmp_path / place))
    os.symlink(tmp_path / "nowhere", tmp_path / "link")
    for place in ("link", "link/below"):
        with pytest.raises(ConfigError, match=r"link to .*nowhere, which is not there"):
            open_target(str(tmp_path / place))
    os.symlink(tmp_path, tmp_path / "here")
    assert open_target(str(tmp_path / "here/new")).url == str(tmp_path / "new")
    assert open_target(str(tmp_path / "new/below")).children("") == []
    assert open_target(str(tmp_path)).url == str(tmp_path)


def test_a_named_format_is_not_looked_for(tmp_path: Path) -> None:
    root = three_steps(tmp_path / "root")
    folder(root, "model.safetensors")
    assert open_source(str(root), options=ReadOptions(), format="ckpt").step == 10
    with pytest.raises(ConfigError, match="safetensors"):
        open_source(str(root), options=ReadOptions())
    with pytest.raises(ConfigError, match=r"'tar' is not read, expected one of ckpt, deepspeed"):
        open_source(str(root), options=ReadOptions(), format="tar")


def test_every_format_has_its_functions() -> None:
    for one in FORMATS.values():
        assert callable(find._function(one.reader, "is"))
        assert callable(find._function(one.reader, "open"))
        if one.writer:
            assert callable(writer_of(one.name))
    with pytest.raises(ConfigError, match=r"'torch' is not written, expected one of ckpt"):
        writer_of("torch")


def test_the_command_line_offers_what_there_is() -> None:
    assert source.FORMATS == READABLE
    assert reshard.WRITTEN == WRITABLE


def test_looking_imports_no_reader() -> None:
    tree = ast.parse(Path(find.__file__).read_text())
    imported = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert not any(str(module).startswith("ckpt.convert.read") for module in imported)
