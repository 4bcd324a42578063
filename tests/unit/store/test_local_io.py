"""Large files: direct, through the page cache, and in turns. What arrives is the same."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from contextlib import suppress

import numpy as np
import pytest

from ckpt.errors import StoreError, StoreFull
from ckpt.store.blocks import Blocks
from ckpt.store.local import LocalStore
from ckpt.store.local_system import DIRECT_BYTES, Device, mostly_cached
from ckpt.store.local_writer import BEHIND, WINDOW

SIZE = 3 * DIRECT_BYTES + 1234


@pytest.fixture(scope="module")
def memory() -> np.ndarray:
    """Random bytes from the start of a page."""
    block = Blocks(2 * (64 << 20), 64 << 20).take()
    assert block is not None
    block[:] = np.random.default_rng(0).integers(0, 256, len(block), dtype=np.uint8)
    return block


class Spy:
    """Counts the bytes that pass directly, and can refuse them."""

    def __init__(self, monkeypatch, module: str, call: str, refuse: int = 0) -> None:
        self.direct = self.through = 0
        real = getattr(os, call)

        def spied(fd, buffers, at, *flags):
            direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
            if direct and refuse:
                raise OSError(refuse, os.strerror(refuse))
            done = real(fd, buffers, at, *flags)
            if direct:
                self.direct += done
            else:
                self.through += done
            return done

        monkeypatch.setattr(f"ckpt.store.{module}.os.{call}", spied)


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(str(tmp_path / "root"))


def needs_direct(store: LocalStore) -> None:
    store.put("probe", b"")
    with open(f"{store.root}/probe", "rb") as file:
        if not Device(file.fileno()).alignment:
            pytest.skip("the file system of the test's directory has no direct transfers")
    store.delete("probe")


def forget(store: LocalStore, key: str) -> None:
    with open(f"{store.root}/{key}", "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("head", [0, 1, 4096, 5000, SIZE])
@pytest.mark.parametrize("parts", [(SIZE,), (SIZE, 0, 7, SIZE), (7, SIZE, SIZE)])
@pytest.mark.parametrize("in_place", [True, False], ids=["as in the file", "elsewhere"])
def test_what_was_written_in_any_parts_is_what_is_read(store, memory, head, parts, in_place):
    """``in_place``: each part lies in its page as it will lie in the file, so that it can go directly."""
    expected = [memory[:head].tobytes()]
    position = head
    with store.writer("k", head=head, size=head + sum(parts)) as out:
        for nbytes in parts:
            start = position % 4096 + (0 if in_place else 64)
            out.write(memoryview(memory)[start : start + nbytes])
            expected.append(memory[start : start + nbytes].tobytes())
            position += nbytes
            assert out.position == position
        out.finish(memory[:head].tobytes())
    whole = b"".join(expected)
    assert store.get("k") == whole
    forget(store, "k")
    for begin, at in ((0, 0), (5, 5), (4096, 0), (position - 9, 64)):
        buffer = np.zeros(len(whole) + 8192, np.uint8)
        start = -buffer.ctypes.data % 4096 + at
        view = memoryview(buffer)[start : start + len(whole)]
        got = store.read_into("k", begin, view)
        assert got == len(whole) - begin
        assert view[:got] == whole[begin:]
        assert not any(view[got : got + 100]), "nothing is written behind the end"


def test_aligned_memory_goes_directly_and_other_memory_through_the_cache(store, memory, monkeypatch):
    needs_direct(store)
    spy = Spy(monkeypatch, "local_writer", "pwritev")
    with store.writer("k", head=100) as out:
        out.write(memoryview(memory)[100 : 100 + SIZE])
        out.finish(bytes(100))
    assert spy.direct == (100 + SIZE) // 4096 * 4096 - 4096
    assert spy.direct + spy.through == SIZE + 100
    with store.writer("other", head=100) as out:
        out.write(memoryview(memory)[101 : 101 + SIZE])
        out.finish(bytes(100))
    assert spy.direct == (100 + SIZE) // 4096 * 4096 - 4096, "not one byte more"


def test_a_cold_file_is_read_directly_and_a_warm_one_from_the_cache(store, memory, monkeypatch):
    needs_direct(store)
    with store.writer("k") as out:
        out.write(memoryview(memory)[:SIZE])
        out.finish()
    forget(store, "k")
    target = Blocks(8 << 20).take()
    assert target is not None
    spy = Spy(monkeypatch, "local", "preadv")
    assert store.read_into("k", 0, memoryview(target)[:SIZE]) == SIZE
    assert (spy.direct, spy.through) == (SIZE // 4096 * 4096, SIZE % 4096)
    assert bytes(target[:SIZE]) == bytes(memory[:SIZE])
    with open(f"{store.root}/k", "rb") as file:
        file.read()
        if not mostly_cached(file.fileno(), 0, SIZE):
            pytest.skip("this kernel does not say what is cached, or the cache is under pressure")
    target[:] = 0
    assert store.read_into("k", 0, memoryview(target)[:SIZE]) == SIZE
    assert (spy.direct, spy.through) == (SIZE // 4096 * 4096, SIZE % 4096 + SIZE)
    assert bytes(target[:SIZE]) == bytes(memory[:SIZE])


def test_a_long_file_written_through_the_cache_does_not_stay_there(store, memory):
    nbytes = BEHIND + 2 * WINDOW
    with store.writer("k") as out:
        for at in range(0, nbytes, 1 << 20):
            out.write(memoryview(memory)[at + 1 : at + 1 + (1 << 20)])
        out.finish()
    with open(f"{store.root}/k", "rb") as file:
        if Device(file.fileno()).cached:
            assert not mostly_cached(file.fileno(), 0, nbytes)
        assert file.read() == memory[1 : nbytes + 1].tobytes()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_refuses_direct_transfers_is_used_without(store, memory, monkeypatch, code):
    written = Spy(monkeypatch, "local_writer", "pwritev", refuse=code)
    with store.writer("k") as out:
        out.write(memoryview(memory)[:SIZE])
        out.finish()
    assert (written.direct, written.through) == (0, SIZE)
    forget(store, "k")
    fresh = LocalStore(store.root)
    read = Spy(monkeypatch, "local", "preadv", refuse=code)
    target = Blocks(8 << 20).take()
    assert target is not None
    assert fresh.read_into("k", 0, memoryview(target)[:SIZE]) == SIZE
    assert (read.direct, read.through) == (0, SIZE)
    assert bytes(target[:SIZE]) == bytes(memory[:SIZE])


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, StoreFull), (errno.EIO, StoreError)])
def test_an_error_of_a_direct_write_is_ours_and_leaves_nothing(store, memory, monkeypatch, code, kind):
    needs_direct(store)
    Spy(monkeypatch, "local_writer", "pwritev", refuse=code)
    with pytest.raises(kind) as caught, store.writer("a/k") as out:
        out.write(memoryview(memory)[:SIZE])
    assert type(caught.value) is kind
    assert list(store.walk("")) == []


def test_several_threads_read_one_file(store, memory):
    with store.writer("k") as out:
        out.write(memoryview(memory))
        out.finish()
    forget(store, "k")
    span = 8 << 20
    target = Blocks(2 * len(memory), len(memory)).take()
    assert target is not None

    def read(at: int) -> None:
        store.read_into("k", at, memoryview(target)[at : at + span])

    threads = [threading.Thread(target=read, args=(at,)) for at in range(0, len(memory), span)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(target, memory)


def open_below(folder: str) -> list[str]:
    """Return the files in a folder that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [path for path in found if path.startswith(f"{folder}/")]


def test_a_file_that_was_replaced_is_read_anew_and_none_stays_open(store):
    target = bytearray(3)
    for data in (b"one", b"two"):
        store.put("k", data, overwrite=True)
        store.read_into("k", 0, memoryview(target))
        assert target == data
    store.delete("k")
    store.put("k", b"six")
    store.read_into("k", 0, memoryview(target))
    assert target == b"six"
    assert not open_below(store.root)  # not all that is open: other tests may have left what is closed meanwhile


def test_in_memory_no_byte_goes_directly(memory, monkeypatch):
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no tmpfs here")
    root = f"/dev/shm/ckpt-test-{os.getpid()}"
    store = LocalStore(root)
    spy = Spy(monkeypatch, "local_writer", "pwritev")
    try:
        with store.writer("k") as out:
            out.write(memoryview(memory)[:SIZE])
            out.finish()
        assert (spy.direct, spy.through) == (0, SIZE)
        target = Blocks(8 << 20).take()
        assert target is not None
        assert store.read_into("k", 0, memoryview(target)[:SIZE]) == SIZE
        assert bytes(target[:SIZE]) == bytes(memory[:SIZE])
    finally:
        store.delete("k")
        os.rmdir(root)
