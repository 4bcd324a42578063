"""Several processes that share the tasks: the same result, and an end to all of them when one of them ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import pytest

from ckpt.convert.options import WriteOptions
from ckpt.convert.ours.tasks import tasks_of
from ckpt.errors import CkptError, ConfigError, DigestMismatch
from ckpt.repo.repository import Repository
from ckpt.repo.verify import verify
from ckpt.store.local import LocalStore
from ckpt.store.memory import MemoryStore
from ckpt.store.open import open_store
from tests.harness.conversions import again, convert, described, differences, held_by, one_file, specs_of, values_of
from tests.harness.conversions import written as write
from tests.harness.descriptions import NET
from tests.harness.descriptions import described as job

if TYPE_CHECKING:
    from pathlib import Path

TARGET = described(job(NET, zero=3, dp=5))


@pytest.fixture
def src(tmp_path: Path, monkeypatch) -> LocalStore:
    monkeypatch.setitem(tasks_of.__kwdefaults__, "band_bytes", 16 << 10)
    one = described(job(NET, zero=1, dp=2))
    store = LocalStore(str(tmp_path / "src"))
    derived = {fqn for layout in one.layouts for fqn in layout.derived}
    convert(one_file(specs_of(one.layouts), values(), world=2, derived=derived), one, store)
    return store


def values():
    one = described(job(NET, zero=1, dp=2))
    return values_of(specs_of(one.layouts), {fqn for layout in one.layouts for fqn in layout.derived})


def children() -> list[psutil.Process]:
    """Worker processes of this one that run."""
    found = []
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # or a zombie, which is its subclass
            found += [process] if "ckpt.convert.ours.worker" in process.cmdline() else []
    return found


@pytest.mark.usefixtures("s3_environment")
def test_two_workers_write_what_one_writes_wherever_it_is(src, tmp_path, moto):
    alone = LocalStore(str(tmp_path / "alone"))
    write(again(src), TARGET, alone)
    name, prefix = moto.place()
    together = open_store(f"s3://{name}/{prefix}?endpoint={moto.url}&concurrency=2")
    seen: list[tuple[int, int]] = []
    done = write(again(src), TARGET, together, WriteOptions(workers=2, progress=lambda *now: seen.append(now)))
    assert differences(held_by(together), values()) == []
    assert verify(Repository(together)).findings == []
    packs = [{i.key: s.get(i.key) for i in s.walk("") if "/packs/" in i.key} for s in (alone, together)]
    assert packs[0] == packs[1]
    assert len(packs[0]) > 10
    assert seen[-1][0] == seen[-1][1]
    assert done.bytes_read > 0
    assert done.files == tuple(sorted(info.key for info in together.walk("")))
    assert children() == []


def test_a_worker_that_is_killed_ends_the_conversion_and_the_next_one_goes_on(src, tmp_path):
    store = LocalStore(str(tmp_path / "dst"))

    def kill(done: int, _total: int) -> None:
        if done:
            for process in children():
                process.send_signal(signal.SIGKILL)

    with pytest.raises(CkptError, match=r"worker \d has ended \(killed by signal 9\)"):
        write(again(src), TARGET, store, WriteOptions(workers=2, progress=kill))
    assert children() == []
    assert Repository(store).steps() == []
    write(again(src), TARGET, store)
    assert differences(held_by(store), values()) == []


def test_an_interruption_leaves_no_file_that_is_not_whole(src, tmp_path):
    def stop(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(again(src), TARGET, LocalStore(str(tmp_path / "dst")), WriteOptions(workers=2, progress=stop))
    assert children() == []
    assert [*(tmp_path / "dst").rglob(".tmp-*")] == []


def test_another_number_of_workers_goes_on_where_a_run_was_stopped(src, tmp_path):
    store = LocalStore(str(tmp_path / "dst"))

    def stop(_done: int, _total: int) -> None:
        if any("/index/pack-" in info.key for info in store.walk("")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(again(src), TARGET, store, WriteOptions(progress=stop))
    done = write(again(src), TARGET, store, WriteOptions(workers=2))
    assert done.bytes_present > 0
    assert differences(held_by(store), values()) == []
    assert verify(Repository(store)).findings == []


def test_what_fails_in_a_worker_is_raised_here(src, tmp_path):
    (key,) = (info.key for info in src.walk("") if info.key.endswith("rank00001-000.safetensors"))
    path = tmp_path / "src" / key
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DigestMismatch, match="rank00001-000"):
        write(again(src), TARGET, LocalStore(str(tmp_path / "dst")), WriteOptions(workers=2))
    assert children() == []


def test_what_only_one_process_has_is_refused(src):
    store = MemoryStore()
    with pytest.raises(ConfigError, match="no other process can open memory"):
        write(again(src), TARGET, store, WriteOptions(workers=2))


PROGRAM = """
import sys
from ckpt.convert.options import WriteOptions
from ckpt.store.local import LocalStore
from ckpt.store.memory import MemoryStore
from ckpt.store.open import open_store
from tests.unit.convert.test_workers import TARGET, again, tasks_of, write

def tell(done, total):
    print(done, flush=True)
    sys.stdin.readline()

tasks_of.__kwdefaults__["band_bytes"] = 16 << 10
write(again(LocalStore(sys.argv[1])), TARGET, LocalStore(sys.argv[2]), WriteOptions(workers=2, progress=tell))
"""


def test_a_conversion_that_is_killed_from_outside_takes_its_workers_along(src, tmp_path):
    store = LocalStore(str(tmp_path / "dst"))
    program = [sys.executable, "-c", PROGRAM, src.root, store.root]
    here = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=here) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it waits for an answer now, and will not get one
        started = psutil.Process(process.pid).children()
        assert len(started) == 2
        process.kill()
    gone, alive = psutil.wait_procs(started, 60)
    assert (len(gone), alive) == (2, [])
    assert Repository(store).steps() == []
    write(again(src), TARGET, store)
    assert differences(held_by(store), values()) == []
