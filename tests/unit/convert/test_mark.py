"""What a conversion that was killed leaves is told as that, by whatever reads the place or writes there next."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

from ckpt.convert.find import open_source, open_target, writer_of
from ckpt.convert.mark import MARK
from ckpt.convert.options import ReadOptions, WriteOptions
from ckpt.convert.target import target_of
from ckpt.errors import ConfigError, MalformedData, MissingChunk, NoSuchCheckpoint
from tests.unit.convert.sources import ADAM, Source

if TYPE_CHECKING:
    from pathlib import Path

LAST = {
    "deepspeed": "latest", "universal": "latest_universal", "dcp": ".metadata", "safetensors": "model.safetensors",
}  # fmt: skip


def write(folder: Path, to: str, source: str = "") -> None:
    if source:
        opened = open_source(source, options=ReadOptions())
    else:
        opened = Source().weights({"a.weight": (4, 3), "b": (5,)}, ADAM).groups(["a.weight", "b"]).open()
    engine = "deepspeed" if to in ("deepspeed", "universal") else None
    target = target_of(opened, zero=1, engine=engine)
    writer_of(to)(opened, open_target(str(folder)), target, WriteOptions())


@pytest.mark.parametrize("to", LAST)
def test_a_kill_before_the_first_file_is_an_unfinished_conversion(to, tmp_path) -> None:
    write(tmp_path / "dst", to)
    kept = {MARK}
    for path in sorted((tmp_path / "dst").rglob("*"), reverse=True):
        if path.is_file() and path.name not in kept:
            path.unlink()
    text = rf"holds a conversion that was not finished \({LAST[to]} missing\): give the same command again"
    for format in (None, to):
        with pytest.raises(MissingChunk, match=text):
            open_source(str(tmp_path / "dst"), options=ReadOptions(), format=format)
    write(tmp_path / "dst", to)
    assert open_source(str(tmp_path / "dst"), options=ReadOptions()).specs


def test_a_step_that_a_finished_one_does_not_have_is_just_not_there(tmp_path) -> None:
    write(tmp_path / "dst", "deepspeed")
    with pytest.raises(NoSuchCheckpoint, match="no step 9"):
        open_source(str(tmp_path / "dst"), options=ReadOptions(), step=9)


def test_what_differs_from_the_conversion_before_is_told(tmp_path) -> None:
    for name in ("a.pt", "b.pt"):
        torch.save({"w": torch.ones(3)}, tmp_path / name)
    write(tmp_path / "dst", "dcp", str(tmp_path / "a.pt"))
    with pytest.raises(ConfigError, match=rf"another conversion, begun or done \({MARK}, of {tmp_path}/a\.pt\)"):
        write(tmp_path / "dst", "dcp", str(tmp_path / "b.pt"))
    with pytest.raises(ConfigError, match="with another layout or other options"):
        write(tmp_path / "dst", "deepspeed", str(tmp_path / "a.pt"))
    os.utime(tmp_path / "a.pt", (1, 1))
    with pytest.raises(ConfigError, match="SRC has changed since"):
        write(tmp_path / "dst", "dcp", str(tmp_path / "a.pt"))


def test_a_mark_that_is_none_is_told(tmp_path) -> None:
    (tmp_path / MARK).write_text("[]")
    with pytest.raises(MalformedData, match="expected the name of a conversion"):
        open_source(str(tmp_path), options=ReadOptions())


@pytest.mark.parametrize(("to", "file"), [("dcp", "__0_0.distcp"), ("safetensors", "model-00002-of-00002.safetensors")])
def test_a_file_that_is_gone_is_damage_in_every_format(to, file, tmp_path) -> None:
    from ckpt.convert.safetensors.write import write_safetensors

    opened = Source().weights({"a": (4, 3), "b": (5,)}).open()
    if to == "dcp":
        write(tmp_path, to)
    else:
        write_safetensors(opened, open_target(str(tmp_path)), None, WriteOptions(), shard_bytes=40)
    (tmp_path / file).unlink()
    with pytest.raises(MissingChunk, match=file):
        open_source(str(tmp_path), options=ReadOptions())
