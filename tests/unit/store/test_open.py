from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt.errors import ConfigError
from ckpt.store.memory import MemoryStore
from ckpt.store.open import address, check_apart, default_root, open_store
from ckpt.store.wrappers import Limited, Rate


@pytest.mark.parametrize(
    ("root", "path"),
    [
        ("/data/run", "/data/run"), ("/data/run/", "/data/run"), (Path("/data/run"), "/data/run"),
        ("file:///data/run", "/data/run"), ("file://localhost/data/run", "/data/run"), ("file:///a%20b%23c", "/a b#c"),
        ("FILE:///data/run", "/data/run"), ("File://LocalHost/data/run", "/data/run"), ("file:///", "/"),
        ("./file:/x", os.path.realpath("file:/x")), ("file:///a%FF", "/a\\udcff"), ("file:///a\nb", "/a\nb"),
        ("/odd?name#x", "/odd?name#x"), ("/a:b", "/a:b"), ("local:///data/run", "/data/run"),
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
        "", "a\0b", "nosuch://b", "file://host/x", "file://", "file:///a?b", "file:///a#b", "file:///run#",
        "://x", "file:/data", "FILE:/data", "file:data", "file:", "s3:/bucket/x", "FILE://host/x",
        "file:///a%00b", "file:///\ud800", "/a\ud800", "local://host/x", "local://", "local:/x", "memory:/x", "s3://",
        "simplecache::memory://x", "memory://a?b", "memory://a#b", "memory://a/../b", "memory://a\0b", "./a://b",
    ],
    ids=ascii,
)  # fmt: skip
def test_what_would_be_another_place_than_was_meant_is_refused(root):
    """``file:///run#3`` must not become ``/run``, nor ``file://`` the working directory."""
    with pytest.raises(ConfigError, match="root"):
        open_store(root)


@pytest.mark.parametrize("root", ["memory://opened/run", "memory://opened/run/", "MEMORY://opened/run"])
def test_memory_is_shared_in_a_process_under_one_name(root):
    one, other = open_store(root), open_store("memory://opened/run")
    assert one.url == other.url == "memory://opened/run"
    one.put("k", root.encode(), overwrite=True)
    assert other.get("k") == root.encode()


def test_an_s3_url_needs_nothing_but_its_name():
    """Nothing is asked of the network before the first call."""
    from ckpt.store.s3 import S3Store

    for root in ("s3://bucket/run", "S3://bucket/run"):
        assert isinstance(open_store(root), S3Store)


def test_a_wrapped_store_is_returned_as_it_is():
    store = Limited(MemoryStore(), 1e9)
    assert open_store(store) is store


@pytest.mark.parametrize("package", ["boto3", "fsspec"])
def test_a_path_needs_neither_boto3_nor_fsspec(package, tmp_path):
    code = (
        "import sys\nsys.modules[sys.argv[1]] = None\nfrom ckpt.store.open import open_store\n"
        "import ckpt.store.wrappers\nopen_store(sys.argv[2]).put('k', b'1')\nopen_store('file://' + sys.argv[2])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, package, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "k").read_bytes() == b"1"


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


@pytest.mark.parametrize(
    "root",
    [
        "/data/a b#c?d", "./file:/x", os.fsdecode(b"/data/\xff"), "s3://bucket/a%20b", "s3://bucket",
        "s3://bucket/p?endpoint=http://[::1]:9000&region=x&concurrency=3&retry_s=0.5&sign=no",
    ],
    ids=ascii,
)  # fmt: skip
def test_a_store_is_opened_again_by_its_address(root):
    store = Limited(open_store(root), Rate(1e9))
    again = open_store(address(store))
    assert again.url == store.url
    assert getattr(again, "root", None) == getattr(store, "root", None)
    assert getattr(again, "options", None) == getattr(store, "options", None)


def test_what_only_this_process_has_has_no_address():
    for store in (MemoryStore(), open_store("memory://address/run")):
        with pytest.raises(ConfigError, match="no other process"):
            address(store)


@pytest.mark.parametrize(
    ("source", "destination", "apart"),
    [
        ("/a/run", "/a/run", False),
        ("/a/run", "/a/run/x", False),
        ("/a/run", "/a/running", True),
        ("/", "/a", False),
        ("s3://b/run?endpoint=http://h:1", "s3://b/run/x?endpoint=http://h:1", False),
        ("s3://b/run?endpoint=http://h:1", "s3://b/run/x?endpoint=http://h:2", True),
        ("s3://b/run", "s3://b/other", True),
        ("/a/run?1", "/a/run?1/x", False),
        ("/a/run?1", "/a/run/x?1", True),
    ],
)
def test_nothing_is_written_into_what_is_read(source: str, destination: str, apart: bool) -> None:
    if apart:
        check_apart(source, destination)
        return
    with pytest.raises(ConfigError, match=r"the same|inside of SRC"):
        check_apart(source, destination)
