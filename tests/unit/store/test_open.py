from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt.errors import ConfigError
from ckpt.store.memory import MemoryStore
from ckpt.store.open import default_root, open_store


@pytest.mark.parametrize(
    ("root", "path"),
    [
        ("/data/run", "/data/run"), ("/data/run/", "/data/run"), (Path("/data/run"), "/data/run"),
        ("file:///data/run", "/data/run"), ("file://localhost/data/run", "/data/run"), ("file:///a%20b%23c", "/a b#c"),
        ("FILE:///data/run", "/data/run"), ("File://LocalHost/data/run", "/data/run"), ("file:///", "/"),
        ("./file:/x", os.path.realpath("file:/x")), ("file:///a%FF", "/a\\udcff"), ("file:///a\nb", "/a\nb"),
        ("/odd?name#x", "/odd?name#x"), ("/a:b", "/a:b"),
    ],
    ids=str,
)  # fmt: skip
def test_paths_and_file_urls(root, path):
    assert open_store(root).url == path


def test_relative_and_home_paths(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/x")
    assert open_store("run").url == str(tmp_path / "run")
    assert open_store("~/run").url == "/home/x/run"


def test_a_store_is_returned_as_it_is():
    store = MemoryStore()
    assert open_store(store) is store


@pytest.mark.parametrize(
    "root",
    [
        "", "a\0b", "s3://bucket/x", "gs://b", "file://host/x", "file://", "file:///a?b", "file:///a#b", "file:///run#",
        "://x", "file:/data", "FILE:/data", "file:data", "file:", "s3:/bucket/x", "FILE://host/x",
        "file:///a%00b", "file:///\ud800", "/a\ud800",
    ],
    ids=ascii,
)  # fmt: skip
def test_what_would_be_another_place_than_was_meant_is_refused(root):
    """``file:///run#3`` must not become ``/run``, nor ``file://`` the working directory."""
    with pytest.raises(ConfigError, match="root"):
        open_store(root)


class Odd:
    def __fspath__(self) -> bytes:
        return b"/data"


@pytest.mark.parametrize(
    "root", [b"/data", 5, 1.5, object(), ["/data"], Odd(), bytearray(b"x"), True, MemoryStore], ids=repr
)
def test_what_is_no_path_is_refused(root):
    with pytest.raises(ConfigError, match=r"root .* is not a path or URL"):
        open_store(root)


def test_a_relative_path_without_a_working_directory_is_refused(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match="root 'run': No such file or directory"):
        open_store("run")


def test_the_default_is_the_environments_else_checkpoints(monkeypatch):
    monkeypatch.delenv("CKPT_ROOT", raising=False)
    assert default_root(None) == "checkpoints"
    monkeypatch.setenv("CKPT_ROOT", "")
    assert default_root(None) == "checkpoints"
    monkeypatch.setenv("CKPT_ROOT", "/env")
    assert default_root(None) == "/env"
    assert default_root("/mine") == "/mine"
    assert os.environ["CKPT_ROOT"] == "/env"
