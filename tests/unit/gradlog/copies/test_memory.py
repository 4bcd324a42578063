"""Copies of records in a host's memory: the newest that fit, and never taken for what they are not."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckpt.errors import ConfigError
from ckpt.format.frames import HEADER, frame_of, parse_frame
from ckpt.gradlog.copies.memory import STALE_SECONDS, VARIABLE, HostMemory, Keeper, folder_for
from ckpt.repo.log_files import Place

if TYPE_CHECKING:
    from ckpt.format.digest import Buffer

RUN = "0123456789abcdef" * 2
URL = "s3://bucket/run"


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "memory"))
    return tmp_path / "memory" / f"ckpt-{os.getuid()}"


def frame(step: int, nbytes: int = 1000) -> list[Buffer]:
    return frame_of(step, [bytes([step % 251]) * nbytes])


def in_store(parts: list[Buffer]) -> Place:
    """Where the store has the same record."""
    found = parse_frame(b"".join(parts)[:HEADER], 0, "there")
    return Place(found.step, "log/1/rank00000/1.log", found.start, found.nbytes, found.digest)


def test_a_copy_is_the_twin_of_the_record_that_it_was_made_of(base: Path) -> None:
    memory = HostMemory.make(URL)
    keeper = Keeper(memory, 1 << 20)
    assert keeper.keep(RUN, 3, 7, frame(7))
    twin = memory.twin(RUN, 3, in_store(frame(7)))
    assert twin is not None
    assert memory.store.get(twin.key, twin.start, twin.nbytes) == bytes([7]) * 1000
    assert memory.held() == {(RUN, 3): [7]}
    assert memory.twin(RUN, 3, in_store(frame(7, 999))) is None
    assert memory.twin(RUN, 2, in_store(frame(7))) is None
    assert memory.twin("", 3, in_store(frame(7))) is None
    assert HostMemory.there("s3://bucket/other") is None
    assert oct(os.stat(base).st_mode & 0o777) == "0o700"


@pytest.mark.parametrize("at", [0, 10, 20, 39, HEADER, HEADER + 500, HEADER + 999])
@pytest.mark.parametrize("cut", [False, True])
def test_a_copy_that_is_not_what_was_written_is_none(base: Path, at: int, cut: bool) -> None:
    memory = HostMemory.make(URL)
    Keeper(memory, 1 << 20).keep(RUN, 0, 7, frame(7))
    place = memory.place(RUN, 0, 7)
    assert place is not None
    path = base / os.path.basename(memory.folder) / place.key
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data[:at] if cut else data)
    assert memory.twin(RUN, 0, in_store(frame(7))) is None


def test_the_newest_copies_that_fit_are_kept(base: Path) -> None:
    memory = HostMemory.make(URL)
    keeper = Keeper(memory, 3 * (HEADER + 1000))
    for step in range(1, 8):
        assert keeper.keep(RUN, step % 2, step, frame(step))
    assert memory.held() == {(RUN, 1): [5, 7], (RUN, 0): [6]}
    assert keeper.dropped == 4
    assert not keeper.keep(RUN, 0, 8, frame(8, 10_000))
    keeper.keep(RUN, 0, 9, frame(9))
    keeper.trim(8)
    assert memory.held() in ({(RUN, 0): [9]}, {(RUN, 0): [9], (RUN, 1): []})
    keeper.remove()
    assert not os.path.exists(memory.folder)


def test_what_a_full_save_makes_needless_is_removed_whoever_left_it(base: Path) -> None:
    memory, other = HostMemory.make(URL), HostMemory.make("s3://bucket/other")
    for one in (memory, other):
        for step in (1, 2, 3):
            Keeper(one, 1 << 20).keep(RUN, 5, step, frame(step))
    memory.remove_left(2)
    assert memory.held() == {(RUN, 5): [3]}
    assert other.held() == {(RUN, 5): [1, 2, 3]}, "it may be of a job that lives"
    before = time.time() - STALE_SECONDS - 10
    for folder, _, _ in os.walk(other.folder, topdown=False):
        os.utime(folder, (before, before))
    memory.remove_left(2)
    assert not os.path.exists(other.folder)
    assert memory.held() == {(RUN, 5): [3]}


def test_a_folder_that_others_may_write_to_is_not_used(base: Path) -> None:
    base.mkdir(mode=0o777, parents=True)
    base.chmod(0o777)
    with pytest.raises(ConfigError, match="this user alone"):
        HostMemory.make(URL)
    os.mkdir(folder_for(URL), 0o700)
    assert HostMemory.there(URL) is None


def test_no_memory_at_all_says_how_to_name_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "not" / "there"))
    with pytest.raises(ConfigError, match=f"{VARIABLE} names another"):
        HostMemory.make(URL)


def test_nothing_but_copies_is_ever_removed(base: Path) -> None:
    """``CKPT_PEER_MEMORY`` may name a folder in which other things are."""
    memory = HostMemory.make(URL)
    strangers = [base.parent / "thesis", base / "thesis", base / ("f" * 31), base / ("f" * 33)]
    before = time.time() - STALE_SECONDS - 10
    for folder in strangers:
        folder.mkdir()
        (folder / "chapter1").write_text("words")
        for path in (folder / "chapter1", folder):
            os.utime(path, (before, before))
    Keeper(memory, 1 << 20).keep(RUN, 0, 1, frame(1))
    memory.remove_left(9)
    assert all((folder / "chapter1").exists() for folder in strangers)


def test_what_is_no_copy_is_not_looked_at(base: Path) -> None:
    memory = HostMemory.make(URL)
    Keeper(memory, 1 << 20).keep(RUN, 0, 1, frame(1))
    folder = Path(memory.folder)
    (folder / "core.123").write_text("a file in the place of a run")
    (folder / ("a" * 32)).write_text("one with the name of a run")
    (folder / RUN / "rank00001").write_text("a file in the place of a rank")
    (folder / ("b" * 32)).symlink_to(folder / ("b" * 32))
    os.mkdir(os.fsencode(memory.folder) + b"/\xff\xfe")
    os.mkdir(folder / RUN / "rank00000" / "000000000002.log")
    os.mkdir(folder / RUN / "rank9")
    assert memory.held() == {(RUN, 0): [1]}
    memory.remove_left(0)
    assert memory.place(RUN, 0, 2) is None


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a file system in memory")
def test_copies_that_an_earlier_job_left_give_way_when_memory_is_full(base: Path) -> None:
    base.mkdir(mode=0o700, parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs", str(base)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount here")
    try:
        memory = HostMemory.make(URL)
        for step in range(1, 5):  # of a process that is gone
            assert Keeper(memory, 1 << 20).keep(RUN, 0, step, frame(step, 50_000))
        keeper = Keeper(memory, 1 << 20)
        assert [keeper.keep(RUN, 0, step, frame(step, 50_000)) for step in range(5, 12)] == [True] * 7
        assert memory.held()[RUN, 0][-1] == 11
        assert not keeper.keep(RUN, 0, 12, frame(12, 500_000))
        assert keeper.keep(RUN, 0, 13, frame(13, 50_000))
        assert not [path for path in base.rglob("*") if ".tmp-" in path.name]
    finally:
        subprocess.run(["umount", str(base)], check=True)
