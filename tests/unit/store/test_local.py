from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt.errors import AccessDenied, ObjectExists, ObjectNotFound, StoreError, StoreFull, StoreUnavailable
from ckpt.store.local import LocalStore


class Recorder:
    """``os`` with a log: which calls, on which paths (file descriptors resolved), in which order."""

    def __init__(self, monkeypatch) -> None:
        self.log: list[tuple[str, str]] = []
        self.paths: dict[int, str] = {}
        self.fail: dict[str, OSError] = {}
        self.write_limit: int | None = None
        fake = SimpleNamespace(**{n: getattr(os, n) for n in dir(os) if not n.startswith("__")})
        for name in (
            "open",
            "pwritev",
            "fsync",
            "close",
            "link",
            "rename",
            "replace",
            "unlink",
            "mkdir",
            "preadv",
            "listdir",
            "stat",
        ):
            setattr(fake, name, self._wrap(name, getattr(os, name)))
        monkeypatch.setattr("ckpt.store.local.os", fake)
        monkeypatch.setattr("ckpt.store.local_writer.os", fake)

    def _wrap(self, name: str, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            what = self.paths.get(args[0], "?") if isinstance(args[0], int) else os.fspath(args[0])
            self.log.append((name, what))
            if name in self.fail:
                raise self.fail[name]
            if name == "pwritev" and self.write_limit:
                args = (args[0], [args[1][0][: self.write_limit]], args[2])
            result = real(*args, **options)
            if name == "open":
                self.paths[result] = what
            return result

        return call

    def index(self, name: str, ends: str, start: int = 0) -> int:
        for i, (call, what) in enumerate(self.log[start:], start):
            if call == name and what.endswith(ends):
                return i
        raise AssertionError(f"no {name} of …{ends} after {start} in {self.log}")


@pytest.fixture
def os_log(monkeypatch) -> Recorder:
    return Recorder(monkeypatch)


def publish(store: LocalStore, how: str, key: str, data: bytes) -> str:
    """Store by one of the three ways; return the call that makes the name visible."""
    if how == "put":
        store.put(key, data)
        return "link"
    if how == "overwrite":
        store.put(key, data, overwrite=True)
        return "replace"
    with store.writer(key) as out:
        out.write(data)
        out.finish()
    return "rename"


WAYS = ["put", "overwrite", "writer"]


@pytest.mark.parametrize("how", WAYS)
def test_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_call_returns(tmp_path, os_log, how):
    """A rename that is not synced can leave an empty file under the final name after a power loss."""
    root = tmp_path / "new" / "root"
    call = publish(LocalStore(str(root)), how, "steps/1/a/x.bin", b"data")
    temp = next(what for name, what in os_log.log if name == "open" and ".tmp-" in what)
    written = os_log.index("pwritev", temp)
    synced = os_log.index("fsync", temp, written)
    closed = os_log.index("close", temp, synced)
    shown = os_log.index(call, temp, closed)
    os_log.index("fsync", "/steps/1/a", shown)
    assert ("pwritev", temp) not in os_log.log[synced:]


@pytest.mark.parametrize("how", WAYS)
def test_every_directory_that_is_made_is_synced_into_its_parent_before_the_file_is_shown(tmp_path, os_log, how):
    root = tmp_path / "new" / "root"
    call = publish(LocalStore(str(root)), how, "steps/1/a/x.bin", b"data")
    shown = next(i for i, (name, _) in enumerate(os_log.log) if name == call)
    for directory in (root.parent, root, root / "steps", root / "steps/1", root / "steps/1/a"):
        made = os_log.index("mkdir", str(directory))
        synced = os_log.index("fsync", str(directory.parent), made)
        assert synced < shown


def test_a_put_syncs_the_whole_way_up_to_the_root(tmp_path, os_log):
    """The commit must not depend on directories that a process made which died before it could sync them."""
    (tmp_path / "root/steps/1").mkdir(parents=True)
    LocalStore(str(tmp_path / "root")).put("steps/1/commit.json", b"{}")
    shown = os_log.index("link", "")
    for directory in ("root/steps/1", "root/steps", "root"):
        os_log.index("fsync", directory, shown)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_a_short_write_is_continued(tmp_path, os_log, how, limit):
    os_log.write_limit = limit
    data = bytes(range(256)) * 2
    publish(LocalStore(str(tmp_path)), how, "k", data)
    assert (tmp_path / "k").read_bytes() == data


CODES = [
    (errno.ENOSPC, StoreFull),
    (errno.EDQUOT, StoreFull),
    (errno.EFBIG, StoreFull),
    (errno.EROFS, AccessDenied),
    (errno.EACCES, AccessDenied),
    (errno.EPERM, AccessDenied),
    (errno.EIO, StoreError),
    (errno.ELOOP, StoreError),
    (errno.EMFILE, StoreUnavailable),
    (errno.ENOTCONN, StoreUnavailable),
    (errno.ENAMETOOLONG, StoreError),
    (errno.ESTALE, StoreUnavailable),
    (errno.ETIMEDOUT, StoreUnavailable),
    (errno.ENOENT, ObjectNotFound),
]


@pytest.mark.parametrize(
    ("code", "kind"), CODES, ids=lambda c: errno.errorcode.get(c, "") if isinstance(c, int) else ""
)
@pytest.mark.parametrize("call", ["open", "pwritev", "fsync", "close", "rename", "mkdir"])
def test_an_error_of_the_system_becomes_ours_names_the_key_and_leaves_nothing(tmp_path, os_log, code, kind, call):
    os_log.fail[call] = OSError(code, os.strerror(code))
    with pytest.raises(kind) as caught:
        publish(LocalStore(str(tmp_path / "root")), "writer", "steps/1/x", b"data")
    assert type(caught.value) is kind
    assert caught.value.key == "steps/1/x"
    assert "'steps/1/x'" in str(caught.value)
    assert str(tmp_path / "root") in str(caught.value)
    assert os.strerror(code) in str(caught.value)
    assert caught.value.transient == (kind is StoreUnavailable)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize("call", ["preadv", "open"])
def test_an_error_while_reading_is_not_taken_for_an_end(tmp_path, os_log, call):
    store = LocalStore(str(tmp_path))
    store.put("k", b"data")
    os_log.fail[call] = OSError(errno.EIO, "Input/output error")
    with pytest.raises(StoreError, match="read 'k'"):
        store.read_into("k", 0, memoryview(bytearray(4)))


def reads(store: LocalStore, key: str) -> list[Any]:
    return [lambda: store.get(key), lambda: store.get(key, 5, 3), lambda: store.read_into(key, 0, memoryview(b""))]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["directory", "FIFO", "character device", "socket"])
def test_what_is_no_file_is_named_and_never_waited_for(tmp_path, kind):
    path = tmp_path / "k"
    server = socket.socket(socket.AF_UNIX)
    if kind == "directory":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        server.bind(str(path))
    else:
        path.symlink_to("/dev/zero")
    before = os.listdir("/proc/self/fd")
    for call in reads(LocalStore(str(tmp_path)), "k"):
        with pytest.raises(StoreError) as caught:
            call()
        assert type(caught.value) is StoreError
        assert str(caught.value) == f"read 'k' in {tmp_path}: a {kind} is there, expected a file"
        assert caught.value.key == "k"
        assert not caught.value.transient
    assert os.listdir("/proc/self/fd") == before, "nothing stays open"
    server.close()


def test_a_link_to_itself_is_there_and_cannot_be_read(tmp_path):
    (tmp_path / "k").symlink_to("k")
    (tmp_path / "folder").symlink_to("folder")
    store = LocalStore(str(tmp_path))
    for key in ("k", "folder/k"):
        assert store.size(key) == 0
        for call in reads(store, key):
            with pytest.raises(StoreError, match=r"Too many levels of symbolic links") as caught:
                call()
            assert type(caught.value) is StoreError
    assert list(store.walk("folder")) == []
    with pytest.raises(ObjectExists):
        store.put("k", b"")


@pytest.mark.parametrize("nbytes", [2**40, 2**62])
def test_no_more_is_allocated_than_the_file_has(tmp_path, nbytes):
    (tmp_path / "k").write_bytes(b"0123456789")
    store = LocalStore(str(tmp_path))
    assert store.get("k", 0, nbytes) == b"0123456789"
    assert store.get("k", 8, nbytes) == b"89"
    assert store.get("k", 11, nbytes) == b""


def test_one_folder_has_one_name_whatever_link_leads_to_it(tmp_path):
    (tmp_path / "real/run").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    for root in ("real/run", "link/run", "link/run/../run", "link/../real/run/"):
        store = LocalStore(f"{tmp_path}/{root}")
        assert (store.url, store.root) == (f"{tmp_path}/real/run", f"{tmp_path}/real/run")
    store.put("k", b"x")
    assert (tmp_path / "real/run/k").read_bytes() == b"x"


def test_a_root_that_is_not_utf8_is_used_as_it_is_and_shown_escaped(tmp_path):
    root = os.fsdecode(os.fsencode(tmp_path) + b"/r\xff")
    store = LocalStore(root)
    assert (store.root, store.url) == (root, f"{tmp_path}/r\\udcff")
    store.put("k", b"x")
    assert os.listdir(os.fsencode(tmp_path)) == [b"r\xff"]
    with pytest.raises(ObjectNotFound) as caught:
        store.get("no")
    assert str(caught.value).encode() == f"read 'no' in {tmp_path}/r\\udcff: No such file or directory".encode()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_an_error_is_never_none(tmp_path, os_log, code):
    """Throttling or a lost mount read as 'no checkpoints' makes a job start from scratch."""
    store = LocalStore(str(tmp_path))
    store.put("steps/1/k", b"data")
    os_log.fail["stat"] = os_log.fail["listdir"] = OSError(code, "lost")
    with pytest.raises(StoreError):
        store.size("steps/1/k")
    with pytest.raises(StoreError):
        store.children("steps")


def test_a_file_where_the_root_should_be_is_an_error_in_a_listing(tmp_path):
    (tmp_path / "root").write_bytes(b"")
    with pytest.raises(StoreError):
        LocalStore(str(tmp_path / "root")).children("steps")
    with pytest.raises(StoreError):
        LocalStore(str(tmp_path / "root")).put("k", b"")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_without_directory_sync_can_be_used_and_other_errors_count(tmp_path, monkeypatch, code):
    real = os.fsync

    def fsync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(fail, "directories cannot be synced")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    fail = code
    LocalStore(str(tmp_path)).put("k", b"data")
    fail = errno.EIO
    with pytest.raises(StoreError):
        LocalStore(str(tmp_path)).put("k2", b"data")


def test_without_hard_links_put_still_refuses_what_is_there(tmp_path, os_log):
    os_log.fail["link"] = OSError(errno.EPERM, "no links on FAT")
    store = LocalStore(str(tmp_path))
    store.put("k", b"one")
    with pytest.raises(StoreError, match="exists already"):
        store.put("k", b"two")
    assert [p.name for p in tmp_path.iterdir()] == ["k"]
    assert store.get("k") == b"one"


def test_a_directory_that_another_rank_made_meanwhile_is_no_error(tmp_path, monkeypatch):
    real = os.mkdir

    def mkdir(path: str, *rest: Any) -> None:
        real(path, *rest)
        raise FileExistsError(errno.EEXIST, "another was quicker", path)

    monkeypatch.setattr(os, "mkdir", mkdir)
    LocalStore(str(tmp_path / "a")).put("b/c/k", b"x")
    assert (tmp_path / "a/b/c/k").read_bytes() == b"x"


def test_of_many_processes_that_put_one_key_exactly_one_wins(tmp_path):
    code = (
        "import sys\nfrom ckpt.store.local import LocalStore\nfrom ckpt.errors import ObjectExists\n"
        "sys.stdin.readline()\n"
        "won = 0\n"
        "for n in range(40):\n"
        "    try:\n        LocalStore(sys.argv[1]).put(f'steps/{n}/commit.json', sys.argv[2].encode() * 999)\n"
        "        won += 1\n"
        "    except ObjectExists:\n        pass\n"
        "print(won)\n"
    )
    root = str(tmp_path / "root")
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([sys.executable, "-c", code, root, str(n)], **pipes) for n in range(4)]
    for process in ranks:
        process.stdin.write("go\n")
        process.stdin.flush()
    won = [int(process.communicate()[0]) for process in ranks]
    assert sum(won) == 40
    for n in range(40):
        data = (tmp_path / f"root/steps/{n}/commit.json").read_bytes()
        assert len(data) == 999
        assert len(set(data)) == 1
    assert len([p for p in tmp_path.rglob("*") if p.is_file()]) == 40, "no temporary file is left"


def test_a_writer_does_not_move_the_random_generators_of_the_user(tmp_path):
    import random

    before = random.getstate()
    publish(LocalStore(str(tmp_path)), "writer", "k", b"")
    assert random.getstate() == before


def test_a_long_name_still_gets_a_temporary_file(tmp_path):
    key = "n" * 255
    LocalStore(str(tmp_path)).put(key, b"x")
    assert [p.name for p in tmp_path.iterdir()] == [key]
