"""Stop a conversion at every single operation on the target's disk, then give the same command again."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from ckpt.convert.opened import Loose
from ckpt.convert.ours.tasks import tasks_of
from ckpt.repo.gc import collect
from ckpt.repo.repository import Repository
from ckpt.repo.verify import GARBAGE, verify
from ckpt.store.local import LocalStore
from ckpt.store.memory import MemoryStore
from tests.crash.machine import Crash, Machine
from tests.crash.test_copy import points
from tests.harness.conversions import again, convert, described, held_by, one_file, specs_of, values_of, written
from tests.harness.descriptions import described as job

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt.convert.opened import Opened
    from tests.harness.conversions import Arrays, LaidOut

MODEL = """
name: Two
tensors:
  up: {shape: [7, 6]}
  down: {shape: [5]}
  calls: {shape: [], kind: buffer, dtype: int64}
"""


@pytest.fixture(scope="module")
def values() -> Arrays:
    layouts = described(job(MODEL, zero=1, dp=3)).layouts
    return values_of(specs_of(layouts), {"up", "down"})


@pytest.fixture(scope="module")
def src(values: Arrays) -> MemoryStore:
    """A step of three ranks, in memory: only the target's disk stops."""
    layouts = described(job(MODEL, zero=1, dp=3))
    opened = one_file(specs_of(layouts.layouts), values, world=3, derived={"up", "down"})
    objects = (Loose("scheduler", "engine", (0, 1, 2), {"last": 7}),)
    store = MemoryStore()
    convert(_with(opened, objects), layouts, store)
    return store


def _with(opened: Opened, objects: tuple[Loose, ...]) -> Opened:
    from dataclasses import replace

    return replace(opened, objects=objects)


def target() -> LaidOut:
    return described(job(MODEL, zero=3, dp=2))


def files(root: Path) -> dict[str, bytes]:
    """All files, those left out that say when they were made."""
    store = LocalStore(str(root))
    return {
        info.key: store.get(info.key)
        for info in store.walk("")
        if not info.key.endswith(("attempt.json", "commit.json"))
    }


@pytest.mark.parametrize("mode", ["before", "after", "torn"])
def test_a_conversion_stops_at_every_operation(src, values, tmp_path, monkeypatch, mode):
    if mode == "torn":  # in several tasks, of which one is filled while another becomes durable
        monkeypatch.setitem(tasks_of.__kwdefaults__, "band_bytes", 60)
    before = dict(src.objects)
    whole = Machine()
    with whole.on():
        written(again(src), target(), LocalStore(str(tmp_path / "count")))
    wanted = files(tmp_path / "count")
    committed, kept = [], 0
    for at in points(whole.log, mode)[:: 1 if mode == "before" else 2]:
        root = tmp_path / f"at{at}"
        machine = Machine(at, after=mode == "after", torn=mode == "torn")
        with machine.on(), pytest.raises(Crash):
            written(again(src), target(), LocalStore(str(root)))
        store = LocalStore(str(root))
        committed.append(Repository(store).has(7))
        if committed[-1]:
            assert not verify(Repository(store)).damaged
        done = written(again(src), target(), store)
        kept += bool(done.bytes_present)
        assert (
            done.bytes_written + done.bytes_present
            == sum(info.nbytes for info in store.walk("steps/7") if not info.key.endswith("attempt.json"))
            or committed[-1]
        )
        assert files(root) == wanted
        assert verify(Repository(store)).findings == []
        assert held_by(store).keys() == values.keys()
        shutil.rmtree(root)
    assert committed == sorted(committed), "once committed, always committed"
    assert committed[0] is False
    assert kept, "what was finished is not written again"
    assert src.objects == before


def test_what_a_killed_conversion_leaves_is_garbage_that_gc_removes(src, tmp_path):
    whole = Machine()
    with whole.on():
        written(again(src), target(), LocalStore(str(tmp_path / "count")))
    at = [n for n, name in enumerate(whole.log, 1) if name == "rename"][1]
    with Machine(at).on(), pytest.raises(Crash):
        written(again(src), target(), LocalStore(str(tmp_path / "root")))
    store = LocalStore(str(tmp_path / "root"))
    assert {f.severity for f in verify(Repository(store)).findings} == {GARBAGE}
    assert collect(store).removed == [], "it may be at work"
    collect(store, 0)
    assert [info.key for info in store.walk("")] == ["ckpt.json"]
