"""Stop a copy at every single operation on the destination's disk, then run it again."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from ckpt.repo.copying import copy_steps
from ckpt.repo.gc import collect
from ckpt.repo.repository import Repository
from ckpt.repo.verify import verify
from ckpt.store.local import LocalStore
from ckpt.store.memory import MemoryStore
from tests.crash.machine import Crash, Machine
from tests.harness.steps import write_step

if TYPE_CHECKING:
    from pathlib import Path


def points(log: list[str], mode: str) -> list[int]:
    """The operations to stop at. A sync or close changes no name and no byte: it leaves what the next one leaves."""
    return [
        at
        for at, name in enumerate(log, 1)
        if (name == "write" if mode == "torn" else name not in ("fsync", "close") or at == len(log))
    ]


@pytest.fixture(scope="module")
def src() -> MemoryStore:
    """Steps 1, 2 and 3; the later ones refer to step 1's pack. In memory: only the destination's disk stops."""
    store = MemoryStore()
    write_step(store, 1, age=7000)
    for step in (2, 3):
        write_step(store, step, parent=1)
    return store


def check(src: MemoryStore, root: Path) -> None:
    """Whatever has happened: committed steps are whole, and the copy can go on where it was."""
    dst = LocalStore(str(root))
    if Repository(dst).started():
        found = verify(Repository(dst))
        assert not found.damaged, found.findings
        assert set(found.steps) <= {2, 3}
    packs = {
        info.key: info.nbytes for info in dst.walk("") if info.key.endswith(".safetensors") and ".tmp-" not in info.key
    }
    assert all(src.size(key) == nbytes for key, nbytes in packs.items()), "a pack has its name only when it is whole"
    report = copy_steps(src, dst, [2, 3])
    assert sorted([*report.steps, *report.present]) == [2, 3]
    needed = {
        key for key in src.objects if key.endswith(".safetensors") and (key.split("/")[1] != "1" or "rank00000" in key)
    }
    assert report.packs_copied == len(needed - set(packs)), "what was there whole is not copied again"
    collect(dst, 0)
    after = verify(Repository(dst))
    assert (after.findings, after.steps) == ([], [2, 3])
    for info in dst.walk(""):
        if info.key.endswith("/attempt.json"):
            assert json.loads(dst.get(info.key)).items() >= json.loads(src.objects[info.key]).items()
        else:
            assert dst.get(info.key) == src.objects[info.key]


@pytest.mark.parametrize("mode", ["before", "after", "torn"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_copy_stops_at_every_operation(src, tmp_path, mode, threads):
    whole = Machine()
    with whole.on():
        copy_steps(src, LocalStore(str(tmp_path / "count")), [2, 3], threads=threads)
    steps = []
    for at in points(whole.log, mode)[:: 1 if threads == 1 else 4]:
        root = tmp_path / f"at{at}"
        machine = Machine(at, after=mode == "after", torn=mode == "torn")
        # Several threads need some operations more or fewer from run to run: the last stops may not be reached.
        with machine.on(), pytest.raises(Crash) if threads == 1 else suppress(Crash):
            copy_steps(src, LocalStore(str(root)), [2, 3], threads=threads)
        steps.append(Repository(LocalStore(str(root))).steps())
        check(src, root)
        shutil.rmtree(root)
    assert steps[0] == []
    assert steps == sorted(steps, key=len), "once committed, always committed"
    if threads == 1:
        assert [2] in steps, "the sweep must have passed both commit points"
        assert mode != "after" or steps[-1] == [2, 3]


@pytest.mark.parametrize("mode", ["before", "after", "torn"])
def test_a_copy_into_a_repository_with_a_step_of_the_same_number_stops_at_every_operation(src, tmp_path, mode):
    """The old step 2 is whole, or the new one; and step 3 of the destination, which needs the old one's pack, stays."""
    base = tmp_path / "base"
    dst = LocalStore(str(base))
    write_step(dst, 2, age=9000, attempt="old")
    write_step(dst, 4, parent=2)
    whole = Machine()
    shutil.copytree(base, tmp_path / "count")
    with whole.on():
        copy_steps(src, LocalStore(str(tmp_path / "count")), [2], overwrite=True, threads=1)
    seen = []
    for at in points(whole.log, mode):
        root = tmp_path / f"at{at}"
        shutil.copytree(base, root)
        machine = Machine(at, after=mode == "after", torn=mode == "torn")
        with machine.on(), pytest.raises(Crash):
            copy_steps(src, LocalStore(str(root)), [2], overwrite=True, threads=1)
        copied = LocalStore(str(root))
        seen.append(Repository(copied).read_commit(2).attempt)
        assert not verify(Repository(copied)).damaged
        copy_steps(src, copied, [2], overwrite=True)
        collect(copied, 0)
        after = verify(Repository(copied))
        assert (after.findings, after.steps) == ([], [2, 4])
        assert copied.get("steps/2/commit.json") == src.objects["steps/2/commit.json"]
        shutil.rmtree(root)
    assert seen[0] == "old"
    assert mode == "torn" or seen[-1] != "old"


@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_copy_that_mends_a_committed_step_stops_at_every_operation(src, tmp_path, mode):
    """A pack is gone and another damaged under a standing commit: it gets better or stays as it is, never worse."""
    base = tmp_path / "base"
    copy_steps(src, LocalStore(str(base)), [2, 3])
    packs = sorted((base / "steps/2").rglob("*.safetensors"))
    packs[0].unlink()
    packs[1].write_bytes(packs[1].read_bytes()[:-1] + b"\0")
    whole = Machine()
    shutil.copytree(base, tmp_path / "count")
    with whole.on():
        copy_steps(src, LocalStore(str(tmp_path / "count")), [2], threads=1)
    for at in points(whole.log, mode):
        root = tmp_path / f"at{at}"
        shutil.copytree(base, root)
        with Machine(at, after=mode == "after").on(), pytest.raises(Crash):
            copy_steps(src, LocalStore(str(root)), [2], threads=1)
        found = verify(Repository(LocalStore(str(root))))
        assert {f.key.rpartition("/")[2] for f in found.findings if f.step is not None} <= {p.name for p in packs}
        assert {f.step for f in found.findings if f.step is not None} <= {2}
        copy_steps(src, LocalStore(str(root)), [2])
        assert not verify(Repository(LocalStore(str(root)))).damaged
        shutil.rmtree(root)


def test_what_a_killed_copy_leaves_is_kept_while_young_and_goes_when_asked(src, tmp_path):
    whole = Machine()
    with whole.on():
        copy_steps(src, LocalStore(str(tmp_path / "count")), [2], threads=1)
    second = [at for at, name in enumerate(whole.log, 1) if name == "rename"][1]
    with Machine(second).on(), pytest.raises(Crash):
        copy_steps(src, LocalStore(str(tmp_path / "root")), [2], threads=1)
    dst = LocalStore(str(tmp_path / "root"))
    assert collect(dst).removed == []
    removed = collect(dst, 0).removed
    assert sum(one.files for one in removed) == 4, "two markers, a whole pack, and one in the making"
    assert [info.key for info in dst.walk("")] == ["ckpt.json"]
    assert Repository(dst).started() == []
