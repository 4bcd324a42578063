"""Stop a collection of garbage at every single operation, then run it again."""

from __future__ import annotations

import shutil

import pytest

from ckpt.repo.gc import collect
from ckpt.repo.repository import Repository
from ckpt.repo.verify import DAMAGE, verify
from ckpt.store.local import LocalStore
from tests.crash.machine import Crash, Machine
from tests.harness.steps import new_attempt, write_step


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Steps 1 to 3, of which 1 and 2 have been saved twice; killed saves of 3 and 4; files in the making.

    Step 3 needs a pack of step 1's first attempt, which no other commit needs.
    """
    root = tmp_path_factory.mktemp("gc") / "root"
    store = LocalStore(str(root))
    write_step(store, 1, attempt=new_attempt(90, "00000001"))
    write_step(store, 2, attempt=new_attempt(80, "00000001"), parent=1)
    write_step(store, 3, attempt=new_attempt(70, "00000001"), parent=1)
    write_step(store, 1, attempt=new_attempt(60, "00000002"), overwrite=True)
    write_step(store, 2, attempt=new_attempt(50, "00000002"), overwrite=True, parent=1)
    write_step(store, 3, attempt=new_attempt(40, "00000002"), commit=False)
    write_step(store, 4, attempt=new_attempt(30, "00000001"), commit=False)
    store.put("steps/4/.tmp-00-commit.json", b"half")
    store.put(".tmp-00-ckpt.json", b"half")
    return root


def test_a_collection_stops_at_every_operation(base, tmp_path):
    shutil.copytree(base, tmp_path / "count")
    whole = Machine()
    with whole.on():
        report = collect(LocalStore(str(tmp_path / "count")), 0)
    left = {info.key for info in LocalStore(str(tmp_path / "count")).walk("")}
    assert len(report.removed) == 6
    assert whole.log.count("unlink") == sum(one.files for one in report.removed)
    assert "rmdir" in whole.log
    for mode in ("before", "after"):
        for at, name in enumerate(whole.log, 1):
            if name not in ("unlink", "rmdir"):  # reads change nothing
                continue
            root = tmp_path / f"at{at}"
            shutil.copytree(base, root)
            store = LocalStore(str(root))
            with Machine(at, after=mode == "after").on(), pytest.raises(Crash):
                collect(store, 0)
            found = verify(Repository(store))
            assert not found.damaged, found.findings
            assert found.steps == [1, 2, 3]
            collect(store, 0)
            assert {info.key for info in store.walk("")} == left
            assert verify(Repository(store)).findings == []
            assert Repository(store).started() == [1, 2, 3]
            folders = [path for path in root.rglob("*") if path.is_dir()]
            assert all(any(folder.iterdir()) for folder in folders), "no empty folder is left"
            shutil.rmtree(root)


def test_an_attempt_that_was_removed_in_part_is_never_taken_for_a_whole_one(base, tmp_path):
    """After the first file is gone there is no index root, so nothing names what is gone with it."""
    shutil.copytree(base, tmp_path / "count")
    whole = Machine()
    with whole.on():
        collect(LocalStore(str(tmp_path / "count")), 0)
    for at in [at for at, name in enumerate(whole.log, 1) if name == "unlink"]:
        root = tmp_path / f"at{at}"
        shutil.copytree(base, root)
        with Machine(at, after=True).on(), pytest.raises(Crash):
            collect(LocalStore(str(root)), 0)
        for folder in (path for path in root.glob("steps/*/*") if path.is_dir()):
            files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
            assert "index/root.json.zst" not in files or len(files) == 6
        shutil.rmtree(root)


def test_a_collection_of_a_damaged_repository_removes_nothing_wherever_the_damage_is(base, tmp_path):
    """Each commit and index file in turn is gone or flipped: a refusal, and what a load can still reach stays."""
    index = [p for p in base.rglob("*") if p.is_file() and ("index/" in p.as_posix() or p.name == "commit.json")]
    committed = {f"steps/{s}/{Repository(LocalStore(str(base))).read_commit(s).attempt}/" for s in (1, 2, 3)}
    needed = [p.relative_to(base).as_posix() for p in index]
    needed = [k for k in needed if (k.endswith("/commit.json") and ".tmp" not in k) or k.startswith(tuple(committed))]
    assert len(needed) == 12
    for number, key in enumerate(needed):
        root = tmp_path / f"n{number}"
        shutil.copytree(base, root)
        (root / key).write_bytes((root / key).read_bytes()[:-3])
        store = LocalStore(str(root))
        before = {info.key for info in store.walk("")}
        damage = [f for f in verify(Repository(store)).findings if f.severity == DAMAGE]
        with pytest.raises(Exception, match="nothing is deleted"):
            collect(store, 0)
        assert {info.key for info in store.walk("")} == before
        assert [f for f in verify(Repository(store)).findings if f.severity == DAMAGE] == damage
        shutil.rmtree(root)
