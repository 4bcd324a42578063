from __future__ import annotations

import errno
import os
import random
import socket
import sys
import threading
from datetime import datetime, timezone
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.exceptions import FSTimeoutError

from ckpt.errors import (
    AccessDenied,
    CkptError,
    ConfigError,
    ObjectExists,
    ObjectNotFound,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from ckpt.store.base import ObjectInfo
from ckpt.store.fsspec_errors import class_of
from ckpt.store.fsspec_info import modified_of
from ckpt.store.fsspec_store import FsspecStore
from ckpt.store.fsspec_url import parse
from tests.conformance.bare_fs import BareObjects, BareTree, ObjectFile


class Faulty:
    """Mixed into a bare file system: ``fault`` is raised by the methods of ``fail``."""

    fault: BaseException | None = None
    fail: tuple[str, ...] = ()
    hook: Any = None

    def _meet(self, name: str) -> None:
        if name in type(self).fail and type(self).fault is not None:
            raise type(self).fault
        if type(self).hook:
            type(self).hook(name)


def faulty(base: type) -> Any:
    def method(name: str) -> Any:
        def call(self: Any, *args: Any, **options: Any) -> Any:
            self._meet(name)
            return getattr(base, name)(self, *args, **options)

        return call

    names = ("info", "ls", "_open", "cat_file", "rm_file", "mv", "makedirs", "pipe_file")
    return type(f"Faulty{base.__name__}", (Faulty, base), {name: method(name) for name in names if hasattr(base, name)})


@pytest.fixture(params=[BareObjects, BareTree], ids=["objects", "tree"])
def fs(request) -> Any:
    """A class of file system that can be made to fail, reachable as ``faulty://``."""
    cls = faulty(request.param)
    if request.param is BareObjects:  # its mv is nobody's, which is how an object store is told from a tree
        del cls.mv
    register("faulty", cls)
    return cls


@pytest.fixture
def store(fs) -> FsspecStore:
    return FsspecStore("faulty://host/run")


def register(name: str, cls: Any, **options: Any) -> None:
    """Make ``name://`` a file system of ``cls``, with nothing in it."""
    if isinstance(cls, type):
        cls.protocol, cls.objects, cls.folders = name, {}, set()
    fsspec.register_implementation(name, cls, clobber=True, **options)


@pytest.fixture(autouse=True)
def registry_as_before(monkeypatch) -> None:
    """Some tests stand in for ``gs://``, and fsspec has no call to take a registration back."""
    module = sys.modules["fsspec.registry"]  # as an attribute of fsspec this name is the registry itself
    monkeypatch.setattr(module, "_registry", copied := dict(module._registry))
    monkeypatch.setattr(module, "registry", copied)


def stream(store: FsspecStore, key: str, head: bytes, body: bytes) -> None:
    with store.writer(key, head=len(head)) as out:
        out.write(body)
        out.finish(head)


# -------------------------------------------------------------------------------------------------------------- URLs


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("gs://b/run", "gs://b/run"), ("GS://b/run/", "gs://b/run"), ("memory://", "memory://"),
        ("sftp://u:secret@host/run", "sftp://u:***@host/run"), ("sftp://u:s@c@host:22/x", "sftp://u:***@host:22/x"),
        ("sftp://host:22/x", "sftp://host:22/x"), ("abfs://c@account/x", "abfs://c@account/x"),
        ("memory://a b%20/ü", "memory://a b%20/ü"), ("hdfs://host:8020/a:b@c", "hdfs://host:8020/a:b@c"),
    ],
    ids=str,
)  # fmt: skip
def test_a_place_has_one_name_and_no_password(url, shown):
    assert parse(url)[2] == shown


@pytest.mark.parametrize(
    "url",
    ["", "memory", "/path", "memory:/x", "://x", "simplecache::gs://b/x", "gs://b::memory://x", "gs://b/x?y", "gs://b#1",
     "memory://a\0b", "memory://\ud800", "memory://a/../b", "memory://./a", "nosuch://x", "1a://x", "a b://x"],
    ids=ascii,
)  # fmt: skip
def test_a_url_that_is_none_or_means_different_things_is_refused(url):
    with pytest.raises(ConfigError, match="root"):
        FsspecStore(url)


def test_an_unknown_protocol_is_named():
    with pytest.raises(ConfigError, match=r"root 'nosuch://x': fsspec knows no protocol 'nosuch'"):
        FsspecStore("nosuch://x")


def test_a_package_that_is_missing_is_named():
    register("needs", "no_such_package.FileSystem", errtxt="Please install no-such-package")
    with pytest.raises(ConfigError, match=r"root 'needs://x'.*not installed: Please install no-such-package"):
        FsspecStore("needs://x")


def test_options_reach_the_file_system_and_wrong_ones_are_refused():
    class Picky(BareObjects):
        def __init__(self, token: str, **options: Any) -> None:
            if token != "t":
                raise ValueError("bad token")
            super().__init__(**options)

    register("picky", Picky)
    FsspecStore("picky://b/x", token="t").put("k", b"1")
    for options in ({"token": "no"}, {}):
        with pytest.raises(ConfigError, match=r"root 'picky://b/x': (TypeError|ValueError)"):
            FsspecStore("picky://b/x", **options)
    with pytest.raises(ConfigError, match="asynchronous"):
        FsspecStore("picky://b/x", token="t", asynchronous=True)


def test_a_server_that_cannot_be_reached_is_unavailable():
    class Away(BareTree):
        faults: ClassVar = [socket.gaierror(-2, "Name or service not known"), ConnectionRefusedError(1, "no")]

        def __init__(self, **options: Any) -> None:
            raise self.faults.pop()

    register("away", Away)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="away://u:\\*\\*\\*@host"):
            FsspecStore("away://u:secret@host/x")


def test_an_object_store_needs_a_bucket():
    class Objects(BareObjects): ...

    register("gs", Objects)
    for url in ("gs://", "gs:///x"):
        with pytest.raises(ConfigError, match="names no bucket"):
            FsspecStore(url)


# -------------------------------------------------------------------------------------------------------------- errors


class Status(Exception):
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)
        super().__init__("said the server")


class Response:
    status_code = 403


def named(name: str, base: type = Exception) -> Exception:
    return type(name, (base,), {})("said the client")


ERRORS: list[tuple[Exception, type[StoreError]]] = [
    (FileNotFoundError("x"), ObjectNotFound), (NotADirectoryError("x"), ObjectNotFound),
    (PermissionError("x"), AccessDenied), (OSError("Forbidden: b/x"), AccessDenied),
    (OSError(errno.EROFS, "read-only"), AccessDenied), (OSError(errno.ENOSPC, "full"), StoreFull),
    (OSError(errno.EDQUOT, "quota"), StoreFull), (OSError(errno.EIO, "sector"), StoreError), (OSError("?"), StoreError),
    (TimeoutError(), StoreUnavailable), (FSTimeoutError(), StoreUnavailable), (EOFError(), StoreUnavailable),
    (ConnectionResetError("x"), StoreUnavailable), (BrokenPipeError("x"), StoreUnavailable),
    (socket.gaierror(-3, "try again"), StoreUnavailable), (OSError(errno.EHOSTUNREACH, "x"), StoreUnavailable),
    (named("ClientPayloadError"), StoreUnavailable), (named("ServerDisconnectedError", type("ClientConnectionError",
     (Exception,), {})), StoreUnavailable), (named("ServiceRequestError"), StoreUnavailable),
    (named("RefreshError", type("GoogleAuthError", (Exception,), {})), AccessDenied),
    (Status(code=503), StoreUnavailable), (Status(code="429"), StoreUnavailable),
    (Status(status=500), StoreUnavailable), (Status(status_code=408), StoreUnavailable),
    (Status(status_code=401), AccessDenied),
    (Status(response=Response()), AccessDenied), (Status(code=404), ObjectNotFound), (Status(code=507), StoreFull),
    (Status(code=400), StoreError), (Status(code=7), StoreError), (IsADirectoryError("x"), StoreError),
    (ValueError("x"), StoreError), (NotImplementedError(), StoreError), (RuntimeError("loop is closed"), StoreError),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "kind"), ERRORS, ids=lambda value: repr(value)[:60])
def test_errors_have_a_class(fault, kind):
    assert class_of(fault) is kind


CALLS: dict[str, tuple[tuple[str, ...], Any]] = {
    "put": (("_open", "info", "ls", "pipe_file"), lambda s: s.put("a/k", b"1")),
    "overwrite": (("_open", "pipe_file"), lambda s: s.put("a/k", b"1", overwrite=True)),
    "writer": (("_open",), lambda s: stream(s, "a/k", b"", b"1")),
    "get": (("cat_file",), lambda s: s.get("a/k")),
    "range": (("cat_file",), lambda s: s.get("a/k", 0, 2)),
    "read_into": (("cat_file",), lambda s: s.read_into("a/k", 0, memoryview(bytearray(2)))),
    "size": (("info",), lambda s: s.size("a/k")),
    "walk": (("ls",), lambda s: list(s.walk(""))),
    "walk below": (("ls",), lambda s: list(s.walk("a"))),
    "children": (("ls",), lambda s: s.children("a")),
    "delete": (("rm_file",), lambda s: s.delete("a/k")),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("fault", "kind"),
    [(PermissionError("no"), AccessDenied), (TimeoutError(), StoreUnavailable), (OSError("lost"), StoreError),
     (RuntimeError("odd"), StoreError), (Status(code=503), StoreUnavailable)],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_an_error_is_never_none_or_an_empty_listing(fs, store, name, fault, kind):
    """fsspec's ``exists`` takes any error for "no", and its ``find`` leaves out the folders that it cannot list."""
    store.put("a/k", b"data", overwrite=True)
    fs.fail, call = CALLS[name]
    fs.fault = fault
    with pytest.raises(StoreError) as caught:
        call(store)
    assert type(caught.value) is kind
    assert caught.value.transient == (kind is StoreUnavailable)
    assert "faulty://host/run" in str(caught.value)
    assert caught.value.__cause__ is fault
    fs.fail = ()
    assert {info.key for info in store.walk("")} <= {"a/k"}, "and nothing is left behind"


def test_an_error_in_one_folder_of_many_is_not_left_out(fs, store):
    for key in ("a/k", "b/k", "c/d/k"):
        store.put(key, b"1", overwrite=True)

    def hook(name: str) -> None:
        if name == "ls":
            calls.append(name)
            if len(calls) == 3:
                raise OSError(errno.EIO, "lost")

    calls: list[str] = []
    fs.hook = staticmethod(hook)
    with pytest.raises(StoreError, match="lost"):
        list(store.walk(""))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), ConfigError("ours")], ids=repr)
def test_what_is_not_of_the_backend_passes(fs, store, error):
    fs.fail, fs.fault = ("info",), error
    with pytest.raises(type(error)) as caught:
        store.size("k")
    assert caught.value is error


def test_a_bucket_that_does_not_exist_is_not_an_empty_one():
    class Buckets(BareObjects):
        buckets = frozenset({"full", "empty"})

        def info(self, path: str, **options: Any) -> dict[str, Any]:
            if path == "closed":
                raise PermissionError("buckets.get")
            if "/" not in path and path not in self.buckets:
                raise FileNotFoundError(path)
            return {"name": path, "size": 0, "type": "directory"} if "/" not in path else super().info(path)

    register("gs", Buckets)
    for url in ("gs://empty/run", "gs://empty", "gs://closed/run"):
        assert FsspecStore(url).children("") == []
        assert list(FsspecStore(url).walk("steps")) == []
        assert FsspecStore(url).size("k") is None
    for call in (lambda s: s.children(""), lambda s: list(s.walk("steps")), lambda s: s.size("k")):
        with pytest.raises(StoreError, match="no bucket 'missing'") as caught:
            call(FsspecStore("gs://missing/run"))
        assert not isinstance(caught.value, ObjectNotFound)


# -------------------------------------------------------------------------------------------------------------- reading


def test_what_others_wrote_is_seen_although_listings_are_remembered(store):
    other = FsspecStore("faulty://host/run")
    assert store.children("") == other.children("") == []
    for n in range(3):
        other.put(f"steps/{n}", b"1", overwrite=True)
        assert store.children("steps") == [str(m) for m in range(n + 1)]
        assert store.size(f"steps/{n}") == 1
    other.delete("steps/1")
    assert sorted(info.key for info in store.walk("")) == ["steps/0", "steps/2"]


def test_a_server_that_ignores_ranges_is_found_out(fs, store):
    store.put("k", b"0123456789", overwrite=True)
    fs.cat_file = lambda self, path, start=None, end=None, **_: self.objects["host/run/k"]
    with pytest.raises(StoreError, match=r"read 'k' .*: 10 bytes came, expected 4"):
        store.get("k", 2, 4)


@pytest.mark.parametrize("nbytes", [2**40, 2**62])
def test_no_more_is_asked_for_than_there_is(fs, store, nbytes):
    asked: list[int | None] = []
    real = fs.cat_file

    def cat(self: Any, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        asked.append(end)
        return real(self, path, start=start, end=end, **options)

    fs.cat_file = cat
    store.put("k", b"0123456789", overwrite=True)
    assert store.get("k", 0, nbytes) == b"0123456789"
    assert store.get("k", 8, nbytes) == b"89"
    assert store.get("k", 11, nbytes) == b""
    assert [end for end in asked if end is not None and end > 10] == []


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["directory", "other"])
def test_what_is_no_file_is_named_and_never_waited_for(tmp_path, kind):
    (tmp_path / "k").mkdir() if kind == "directory" else os.mkfifo(tmp_path / "k")
    store = FsspecStore(f"local://{tmp_path}")
    for call in (
        lambda: store.get("k"),
        lambda: store.get("k", 5, 3),
        lambda: store.read_into("k", 0, memoryview(b"")),
    ):
        with pytest.raises(StoreError, match=f"a {kind} is there, expected a file") as caught:
            call()
        assert type(caught.value) is StoreError
    assert store.size("k") == 0, "something has this name"


def test_a_file_where_the_root_should_be_is_an_error(tmp_path):
    (tmp_path / "root").write_bytes(b"")
    store = FsspecStore(f"local://{tmp_path}/root")
    for call in (lambda: store.children(""), lambda: list(store.walk("")), lambda: store.put("k", b"")):
        with pytest.raises(StoreError):
            call()


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"mtime": 5.5, "created": 1.0}, 5.5), ({"created": 7}, 7.0), ({}, None), ({"mtime": None}, None),
        ({"LastModified": datetime(1970, 1, 1, 0, 1, tzinfo=timezone.utc)}, 60.0),
        ({"last_modified": datetime(1970, 1, 1, 0, 1)}, 60.0), ({"updated": "1970-01-01T00:01:00Z"}, 60.0),
        ({"updated": "1970-01-01T01:01:00.500+01:00"}, 60.5), ({"updated": "yesterday"}, None), ({"mtime": b"?"}, None),
    ],
    ids=str,
)  # fmt: skip
def test_the_time_of_a_change(info, expected):
    assert modified_of(info) == expected


def test_a_listing_tells_when_a_file_was_changed(tmp_path):
    store = FsspecStore(f"local://{tmp_path}")
    store.put("k", b"1")
    os.utime(tmp_path / "k", (1000, 2000))
    assert [info.modified for info in store.walk("")] == [2000]


# -------------------------------------------------------------------------------------------------------------- writing


def test_a_broken_upload_of_an_object_is_not_published_by_its_end():
    class Breaking(ObjectFile):
        def _upload_chunk(self, final: bool = False) -> bool:
            if self.parts:
                raise ConnectionResetError("in the second part")
            return super()._upload_chunk(final)

    class Objects(BareObjects):
        def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            return Breaking(self, path, mode, block_size=1 << 20)

    register("breaking", Objects)
    store = FsspecStore("breaking://b/run")
    with pytest.raises(StoreUnavailable):
        stream(store, "k", b"abc", bytes(5 << 20))
    assert Objects.objects == {}


def test_an_upload_that_arrives_in_part_is_an_error(fs, store):
    lost = fs._open

    def open_and_lose(self: Any, path: str, mode: str = "rb", **options: Any) -> Any:
        out = lost(self, path, mode, **options)
        real = out.write
        out.write = lambda data: real(bytes(data)[:-1]) and len(data)
        return out

    fs._open = open_and_lose
    with pytest.raises(StoreError, match=r"upload 'k' in .*: 5 bytes were sent, found 4 bytes"):
        stream(store, "k", b"", b"12345")


def test_in_a_tree_a_name_is_given_only_to_what_is_whole(tmp_path):
    seen: list[tuple[str, int]] = []

    class Watched(BareTree):
        def mv(self, path1: str, path2: str, **options: Any) -> None:
            seen.append((path2, len(self.objects[path1])))
            assert path2 not in self.objects
            super().mv(path1, path2)

    register("watched", Watched)
    stream(FsspecStore("watched://h/run"), "a/k", b"hd", bytes(3 << 20))
    assert seen == [("h/run/a/k", (3 << 20) + 2)]


def test_a_rename_that_fails_leaves_no_temporary_file(fs, store):
    fs.fail, fs.fault = ("mv" if "mv" in vars(fs) else "_open",), OSError(errno.EIO, "lost")
    for call in (lambda: store.put("a/k", b"1", overwrite=True), lambda: stream(store, "a/k", b"", b"1")):
        with pytest.raises(StoreError, match="lost"):
            call()
    assert fs.objects == {}


def test_a_full_disk_under_the_spool_is_told_with_its_place(monkeypatch):
    store = FsspecStore("memory://spool")
    with store.writer("k") as out:
        monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        with pytest.raises(StoreFull, match=r"write 'k' in the spool on the local disk \(TMPDIR=/.*\): No space left"):
            out.write(b"x")


def test_the_spool_is_gone_with_the_writer_and_has_no_name(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = os.listdir("/proc/self/fd")
    state = random.getstate()
    with FsspecStore("memory://spool2").writer("k") as out:
        out.write(bytes(1000))
        assert os.listdir(tmp_path) == []
    assert os.listdir("/proc/self/fd") == before
    assert random.getstate() == state


def test_a_folder_is_removed_only_if_it_is_empty(tmp_path):
    store = FsspecStore(f"local://{tmp_path}")
    store.put("a/b/k", b"1")
    store.remove_folder("a/b")
    assert store.get("a/b/k") == b"1"
    store.delete("a/b/k")
    for folder in ("a/b", "a/b", "a", "no/such"):
        store.remove_folder(folder)
    assert os.listdir(tmp_path) == []


def test_an_object_in_the_place_of_a_folder_is_not_taken_for_the_object():
    store = FsspecStore("memory://places")
    store.put("a", b"1")
    with pytest.raises(StoreError, match="an object has the name of a folder") as caught:
        store.put("a/b", b"2")
    assert not isinstance(caught.value, ObjectExists)


# ------------------------------------------------------------------------------------------------- create if absent


class Conditional(BareObjects):
    """Refuses in the server, like gcsfs: a client that repeats what was answered (``lost``) meets its own object."""

    lost = 0
    calls: ClassVar[list[dict[str, Any]]] = []
    stored: ClassVar[dict[str, Any]] = {}

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        return {**super().info(path), "metadata": self.stored.get(path)}

    def _pipe_file(self, path: str, data: bytes, metadata: Any = None, mode: str = "overwrite") -> None:
        self.calls.append({"mode": mode, "metadata": metadata})
        if mode == "create" and path in self.objects:
            raise FileExistsError(path)
        self.objects[path], self.stored[path] = bytes(data), metadata
        if type(self).lost:
            type(self).lost -= 1
            self._pipe_file(path, data, metadata, mode)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self._pipe_file(path, value, mode=mode, **options)


@pytest.fixture
def conditional() -> Any:
    Conditional.calls.clear()
    Conditional.stored.clear()
    Conditional.lost = 0
    register("gs", Conditional)
    return Conditional


def test_where_the_server_can_create_it_is_asked_to(conditional):
    store = FsspecStore("gs://b/run")
    store.put("k", b"1")
    with pytest.raises(ObjectExists):
        store.put("k", b"2")
    assert [call["mode"] for call in conditional.calls] == ["create", "create"]
    assert conditional.objects == {"b/run/k": b"1"}, "and no claim was put"


def test_a_create_that_its_client_repeats_finds_its_own_object(conditional):
    """gcsfs repeats a request whose answer was lost, also one that must not be repeated."""
    conditional.lost = 1
    FsspecStore("gs://b/run").put("k", b"1")
    assert conditional.objects == {"b/run/k": b"1"}
    conditional.stored["b/run/k"] = {"ckpt-put": "another writer's"}
    with pytest.raises(ObjectExists):
        FsspecStore("gs://b/run").put("k", b"1")


def test_a_backend_too_old_to_create_is_not_trusted(conditional):
    class Old(BareObjects):
        def _pipe_file(self, path: str, data: bytes, **options: Any) -> None:
            raise AssertionError("would replace what is there, and ignore the option")

    register("gs", Old)
    store = FsspecStore("gs://b/run")
    store.put("k", b"1")
    with pytest.raises(ObjectExists):
        store.put("k", b"2")
    assert Old.objects == {"b/run/k": b"1"}


def test_a_claim_is_taken_back_whatever_happens(fs, store):
    store.put("a/k", b"1")
    assert [info.key for info in store.walk("")] == ["a/k"]
    with pytest.raises(ObjectExists):
        store.put("a/k", b"2")
    assert [info.key for info in store.walk("")] == ["a/k"]
    fs.fail, fs.fault = ("ls",), OSError("lost")
    with pytest.raises(StoreError, match="lost"):
        store.put("a/other", b"1")
    fs.fail = ()
    assert list(store.walk("")) == [ObjectInfo("a/k", 1)]


def test_claims_on_other_keys_are_nobodys_business(store):
    claim = f".tmp-claim-{'0' * 16}-"
    for name in ("commit.json-k", "other", "k-k"):
        store.put(f"a/{claim}{name}", b"", overwrite=True)
    store.put("a/k", b"1")
    assert store.get("a/k") == b"1"


# --------------------------------------------------------------------------------------------------- threads and forks


def test_threads_read_different_places_of_one_object():
    """A file of fsspec's memory is one object with one position for all who have it open."""
    store = FsspecStore("memory://threads")
    data = bytes(n % 251 for n in range(251 * 64))
    store.put("k", data, overwrite=True)
    wrong: list[int] = []

    def one(number: int) -> None:
        for n in range(300):
            start = (number * 37 + n * 251) % len(data)
            if store.get("k", start, 251) != data[start : start + 251]:
                wrong.append(start)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def in_child(body: Any) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if body() else 2
        except CkptError:
            code = 3
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_child_makes_connections_of_its_own():
    class Owned(BareTree):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.owner = os.getpid()

        def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
            if self.owner != os.getpid():
                raise RuntimeError("This class is not fork-safe")
            return super().cat_file(path, start, end)

    register("owned", Owned)
    store = FsspecStore("owned://h/run")
    store.put("k", b"1", overwrite=True)
    assert in_child(lambda: store.get("k") == b"1") == 0
    assert store.get("k") == b"1"


def test_memory_of_the_parent_is_there_after_a_fork():
    store = FsspecStore("memory://forked")
    store.put("k", b"1", overwrite=True)
    assert in_child(lambda: store.get("k") == b"1") == 0
