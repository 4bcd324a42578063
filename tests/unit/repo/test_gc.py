from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest

from ckpt.errors import AccessDenied, NoSuchCheckpoint, RepositoryError, StoreUnavailable, UnsupportedVersion
from ckpt.repo.ages import age_of, attempt_of
from ckpt.repo.gc import ATTEMPT, FOREIGN, LEFTOVER, TEMPORARY, UPLOAD, collect
from ckpt.repo.repository import MARKER, Repository, commit_key
from ckpt.repo.verify import verify
from ckpt.store.base import HasFolders, HasOrphans, ObjectInfo, Orphan
from ckpt.store.local import LocalStore
from ckpt.store.memory import MemoryStore
from tests.harness.steps import new_attempt, write_step

HOUR = 3600.0


class Dated(MemoryStore):
    """Tells of each object when it was written. ``dates`` may be changed by a test."""

    def __init__(self) -> None:
        super().__init__()
        self.dates: dict[str, float] = {}

    def walk(self, prefix):
        return (ObjectInfo(info.key, info.nbytes, self.dates.get(info.key)) for info in super().walk(prefix))


class Uploading(MemoryStore):
    """Has uploads that nobody completed."""

    def __init__(self, *orphans: Orphan) -> None:
        super().__init__()
        self.open = list(orphans)

    def orphans(self, prefix: str = "", older_than_s: float = 0.0) -> list[Orphan]:
        return [one for one in self.open if one.key.startswith(prefix) and one.age_s >= older_than_s]

    def abort(self, orphan: Orphan) -> None:
        self.open.remove(orphan)


@pytest.fixture(params=["memory", "local"])
def store(request, tmp_path) -> Any:
    """Step 1, and step 2 that refers to it; both were saved two hours ago."""
    made = MemoryStore() if request.param == "memory" else LocalStore(str(tmp_path / "root"))
    write_step(made, 1, age=2 * HOUR)
    write_step(made, 2, age=2 * HOUR, parent=1)
    return made


def listed(store: Any) -> set[str]:
    return {info.key for info in store.walk("")}


def test_a_repository_without_garbage_stays_as_it_is(store):
    before = listed(store)
    for older_than in (0, HOUR):
        report = collect(store, older_than)
        assert (report.found, report.nbytes, report.steps) == ([], 0, [1, 2])
    assert listed(store) == before


def test_a_killed_save_is_removed_once_it_is_old():
    store = MemoryStore()
    write_step(store, 1, age=2 * HOUR)
    before = listed(store)
    prefix = write_step(store, 3, age=2 * HOUR, commit=False)
    size = sum(info.nbytes for info in store.walk(prefix))
    assert [one.kept for one in collect(store, 3 * HOUR).found] == ["may be at work: younger than asked for"]
    dry = collect(store, HOUR, dry_run=True)
    assert [(one.kind, one.key, one.files, one.nbytes, one.kept) for one in dry.found] == [
        (ATTEMPT, prefix, 6, size, "")
    ]
    assert (dry.nbytes, dry.dry_run) == (size, True)
    assert listed(store) > before
    report = collect(store)
    assert [(one.key, one.nbytes) for one in report.removed] == [(prefix, size)]
    assert listed(store) == before
    assert collect(store).found == []


def test_without_a_limit_of_age_everything_goes(store):
    before = listed(store)
    write_step(store, 3, commit=False)
    write_step(store, 2, attempt="odd-name", commit=False)
    store.put("steps/2/.tmp-00ff-commit.json", b"half")
    store.put(".tmp-00ff-ckpt.json", b"half")
    assert collect(store).removed == []
    report = collect(store, 0)
    assert {(one.kind, one.files) for one in report.removed} == {(ATTEMPT, 6), (TEMPORARY, 1)}
    assert listed(store) == before
    assert verify(Repository(store)).findings == []
    assert Repository(store).started() == [1, 2], "and no empty folder is left of step 3"


def test_all_that_verify_calls_garbage_is_found(store):
    write_step(store, 3, commit=False)
    write_step(store, 1, overwrite=True, attempt=new_attempt(0, "00000002"))
    store.put("steps/1/.tmp-1-x", b"1")
    garbage = {f.key for f in verify(Repository(store)).findings}
    assert garbage
    before = listed(store)
    collect(store, 0)
    assert before - listed(store) == garbage
    assert verify(Repository(store)).findings == []


def test_a_replaced_attempt_is_garbage_but_for_what_a_later_step_needs(store):
    old = f"steps/1/{Repository(store).read_commit(1).attempt}"
    write_step(store, 1, overwrite=True, attempt=new_attempt(0, "00000002"))
    report = collect(store, 0)
    assert [(one.kind, one.key, one.files) for one in report.removed] == [(LEFTOVER, old, 4)]
    left = {key.removeprefix(old) for key in listed(store) if key.startswith(old)}
    assert left == {"/attempt.json", "/packs/rank00000-000.safetensors"}, "the frozen tensor of step 2"
    assert not verify(Repository(store)).damaged
    write_step(store, 2, overwrite=True, attempt=new_attempt(0, "00000003"))
    collect(store, 0)
    assert not [key for key in listed(store) if key.startswith(old)]
    assert verify(Repository(store)).findings == []


def test_what_a_save_at_work_may_refer_to_stays(store):
    """A save began when step 1 was another attempt; that was replaced; only the save knows that it needs the packs."""
    old = f"steps/1/{Repository(store).read_commit(1).attempt}"
    write_step(store, 1, overwrite=True, age=2 * HOUR, attempt=new_attempt(2 * HOUR, "00000002"))
    write_step(store, 2, overwrite=True, age=2 * HOUR, attempt=new_attempt(2 * HOUR, "00000003"))
    if isinstance(store, LocalStore):
        assert collect(store, HOUR).removed == [], "the files themselves are young"
        return
    at_work = write_step(store, 3, age=30, commit=False)
    report = collect(store, HOUR)
    assert report.removed == []
    assert {one.key: one.kept.partition(":")[0] for one in report.kept if one.key in (old, at_work)} == {
        old: "a save that is at work may refer to it",
        at_work: "may be at work",
    }
    assert collect(store, 10).nbytes > 0
    assert not [key for key in store.objects if key.startswith(old)]


def test_a_commit_that_appears_meanwhile_is_seen_in_time(store, monkeypatch):
    """Between the look at all commits and the removal, the save that was taken for dead commits."""
    write_step(store, 3, commit=False)
    slow = write_step(store, 4, attempt="slow")
    data = store.get(commit_key(4))
    store.delete(commit_key(4))
    delete = store.delete

    def commits(key: str) -> None:
        if store.size(commit_key(4)) is None:
            store.put(commit_key(4), data)
        delete(key)

    monkeypatch.setattr(store, "delete", commits)
    report = collect(store, 0)
    assert [one.kept for one in report.found if one.key == slow] == ["was committed meanwhile"]
    found = verify(Repository(store))
    assert (found.steps, found.findings) == ([1, 2, 4], [])


def test_a_sign_of_life_that_appears_meanwhile_is_seen_in_time(monkeypatch):
    store = MemoryStore()
    first = write_step(store, 1, age=3 * HOUR, commit=False)
    second = write_step(store, 2, age=2 * HOUR, commit=False)
    delete = store.delete

    def beats(key: str) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
        store.objects[f"{second}/attempt.json"] = json.dumps({"copied": now}).encode()
        delete(key)

    monkeypatch.setattr(store, "delete", beats)
    report = collect(store, HOUR)
    assert [one.key for one in report.removed] == [first]
    assert len([key for key in store.objects if key.startswith(second)]) == 6


@pytest.mark.parametrize("damage", ["commit", "commit of nothing", "root", "part", "root gone", "part gone"])
def test_nothing_is_removed_while_a_commit_cannot_be_read(store, damage):
    write_step(store, 3, commit=False)
    store.put("steps/2/.tmp-1-commit.json", b"")
    name = {"c": "commit.json", "r": "root.json.zst", "p": "part-00001.json.zst"}[damage[0]]
    key = next(k for k in sorted(listed(store)) if k.startswith("steps/1/") and k.endswith(name))
    good = store.get(key)
    store.delete(key)
    if "gone" not in damage:
        store.put(key, b"" if "nothing" in damage else good[:-2] + b"}}")
    before = listed(store)
    with pytest.raises(RepositoryError, match=r"nothing is deleted .* 1 committed step(.|\n)*step 1: ") as caught:
        collect(store, 0)
    assert "step 2" not in str(caught.value)
    assert listed(store) == before


def test_all_commits_that_cannot_be_read_are_listed(store):
    for step in (1, 2):
        store.put(commit_key(step), b"{", overwrite=True)
    with pytest.raises(RepositoryError, match=r"2 committed step\(s\)(.|\n)*step 1: (.|\n)*step 2: "):
        collect(store, 0)


def test_a_commit_that_is_a_link_to_nowhere_is_not_no_commit(tmp_path):
    store = LocalStore(str(tmp_path))
    write_step(store, 1)
    os.rename(tmp_path / commit_key(1), tmp_path / "elsewhere")
    (tmp_path / commit_key(1)).symlink_to(tmp_path / "not-mounted")
    before = listed(store)
    with pytest.raises(RepositoryError, match=r"step 1: .*commit\.json"):
        collect(store, 0)
    assert listed(store) == before


@pytest.mark.parametrize("error", [StoreUnavailable("503", "k"), AccessDenied("not yours", "k")])
@pytest.mark.parametrize("method", ["get", "size", "children", "walk"])
def test_a_store_that_is_busy_is_that_error_and_nothing_is_removed(error, method, monkeypatch):
    store = MemoryStore()
    write_step(store, 1)
    write_step(store, 2, commit=False)
    before = dict(store.objects)

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(store, method, refuse)
    with pytest.raises(type(error)):
        collect(store, 0)
    assert store.objects == before


def test_no_repository_is_not_an_empty_one(tmp_path):
    with pytest.raises(NoSuchCheckpoint):
        collect(MemoryStore())
    (tmp_path / ".tmp-x").write_bytes(b"somebody's own")
    with pytest.raises(NoSuchCheckpoint):
        collect(LocalStore(str(tmp_path)), 0)
    assert (tmp_path / ".tmp-x").exists()
    newer = MemoryStore()
    newer.put(MARKER, b'{"format": 2}')
    newer.put("steps/1/a/x", b"")
    with pytest.raises(UnsupportedVersion):
        collect(newer, 0)
    assert "steps/1/a/x" in newer.objects
    empty = MemoryStore()
    Repository(empty).initialise()
    assert collect(empty, 0).found == []


def test_names_that_are_not_ours_are_left_alone(store):
    mine = [
        "notes.txt",
        "plots/.tmp-a",
        "log/1/x",
        "steps/readme",
        "steps/1/Notes/x",
        "steps/007/a/x",
        "steps/latest/a/x",
    ]
    for key in mine:
        store.put(key, b"mine")
    report = collect(store, 0)
    assert set(mine) <= listed(store)
    assert {one.key for one in report.kept if one.kind == FOREIGN} == {k for k in mine if k.startswith("steps/")}
    assert report.removed == []


def test_the_index_root_goes_first_and_the_date_last(monkeypatch):
    store, order = MemoryStore(), []
    write_step(store, 1, age=2 * HOUR, commit=False)
    delete = store.delete
    monkeypatch.setattr(store, "delete", lambda key: (order.append(key), delete(key)))
    collect(store)
    names = [key.rpartition("/")[2].partition("-")[0] for key in order]
    assert names == ["root.json.zst", "part", "part", "rank00000", "rank00001", "attempt.json"]


# -- age ---------------------------------------------------------------------------------------------------------------


def test_the_youngest_sign_of_life_counts():
    store = Dated()
    prefix = write_step(store, 1, age=5 * HOUR, commit=False)
    infos = list(store.walk(prefix))
    assert age_of(store, prefix, infos) == pytest.approx(5 * HOUR, abs=60)
    store.dates[infos[0].key] = time.time() - 3 * HOUR
    assert age_of(store, prefix, list(store.walk(prefix))) == pytest.approx(3 * HOUR, abs=60)
    for name, ago in (("created", 2), ("copied", 1)):
        text = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - ago * HOUR))
        store.objects[f"{prefix}/attempt.json"] = json.dumps({name: text}).encode()
        assert age_of(store, prefix, list(store.walk(prefix))) == pytest.approx(ago * HOUR, abs=60)
    assert age_of(store, "steps/1/odd", []) is None


@pytest.mark.parametrize(
    "marker", [b"", b"[]", b"{", b"\xff", b'{"created": 5}', b'{"copied": "soon"}', b'{"created": null}', b"[" * 50_000]
)
def test_a_marker_that_tells_nothing_leaves_the_name(marker):
    store = MemoryStore()
    prefix = write_step(store, 1, age=2 * HOUR, commit=False)
    store.objects[f"{prefix}/attempt.json"] = marker
    assert age_of(store, prefix, []) == pytest.approx(2 * HOUR, abs=60)
    assert [one.key for one in collect(store, HOUR).removed] == [prefix]


def test_what_nobody_knows_the_age_of_stays_unless_everything_is_taken():
    store = MemoryStore()
    write_step(store, 1)
    store.put("steps/2/odd/packs/x.safetensors", b"1")
    store.put("steps/1/.tmp-1-commit.json", b"1")
    report = collect(store, 1)
    assert {one.kept for one in report.found} == {"its age is not known"}
    assert len(collect(store, 0).removed) == 2


def test_files_on_a_disk_have_dates_that_a_copy_cannot_take_along(tmp_path):
    """A copy by another tool keeps the mtime of years ago; that it is at work now is in the ctime."""
    store = LocalStore(str(tmp_path))
    write_step(store, 1)
    prefix = write_step(store, 2, age=1e6, commit=False)
    for info in list(store.walk(prefix)):
        os.utime(tmp_path / info.key, (1e9, 1e9))
    assert collect(store, HOUR).removed == []
    assert [one.kind for one in collect(store, 0).removed] == [ATTEMPT]


def test_a_temporary_file_in_a_committed_attempt_goes_by_its_own_date():
    store = Dated()
    prefix = write_step(store, 1, age=9 * HOUR)
    for name, ago in (("old", 2), ("young", 0.5)):
        key = f"{prefix}/packs/.tmp-{name}-x.safetensors"
        store.put(key, b"12")
        store.dates[key] = time.time() - ago * HOUR
    report = collect(store, HOUR)
    assert [one.key for one in report.removed] == [f"{prefix}/packs/.tmp-old-x.safetensors"]
    assert [one.key for one in report.kept] == [f"{prefix}/packs/.tmp-young-x.safetensors"]
    assert not verify(Repository(store)).damaged


def test_attempts_of_keys():
    assert attempt_of("steps/0/a/packs/x") == "steps/0/a"
    assert attempt_of("steps/1/a/x\ny") == "steps/1/a"
    for key in (
        "steps/1/a",
        "steps/01/a/x",
        "steps/x/a/x",
        "steps/1/A/x",
        "x/steps/1/a/x",
        "steps/" + "9" * 19 + "/a/x",
    ):
        assert attempt_of(key) is None


# -- what only some stores have ----------------------------------------------------------------------------------------


def test_uploads_that_nobody_completed_are_aborted_once_they_are_old():
    old, young = new_attempt(3 * HOUR), new_attempt(60)
    store = Uploading(
        Orphan(f"steps/1/{old}/packs/a.safetensors", "u1", 2 * HOUR, 100),
        Orphan(f"steps/1/{young}/packs/a.safetensors", "u2", 2 * HOUR, 10),
        Orphan(f"steps/1/{old}/packs/b.safetensors", "u3", 30.0, 1),
        Orphan("steps/1/commit.json", "u4", 5 * HOUR, 1000),
    )
    assert isinstance(store, HasOrphans)
    write_step(store, 9)
    assert collect(store, HOUR, dry_run=True).nbytes == 1100
    assert len(store.open) == 4
    report = collect(store, HOUR)
    assert [(one.kind, one.nbytes) for one in report.removed] == [(UPLOAD, 100), (UPLOAD, 1000)]
    assert [one.upload_id for one in store.open] == ["u2", "u3"]
    collect(store, 0)
    assert store.open == []


def test_an_upload_in_an_attempt_that_is_at_work_is_not_aborted():
    """It began two hours ago and is still sending: the copy's mark is younger."""
    store = Uploading()
    prefix = write_step(store, 1, age=9 * HOUR, commit=False)
    store.open.append(Orphan(f"{prefix}/packs/rank00002-000.safetensors", "u", 2 * HOUR, 5))
    now = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    store.objects[f"{prefix}/attempt.json"] = json.dumps({"copied": now}).encode()
    assert collect(store, HOUR).removed == []
    del store.objects[f"{prefix}/attempt.json"]
    assert {one.kind for one in collect(store, HOUR).removed} == {ATTEMPT, UPLOAD}


def test_empty_folders_go_too_those_of_a_save_that_just_begins_do_not(tmp_path):
    store = LocalStore(str(tmp_path))
    assert isinstance(store, HasFolders)
    write_step(store, 1)
    for name in (new_attempt(2 * HOUR), new_attempt(5)):
        (tmp_path / "steps/2" / name / "packs").mkdir(parents=True)
    (tmp_path / "steps/3").mkdir()
    collect(store, HOUR)
    assert [p.name for p in (tmp_path / "steps/2").iterdir()] == [name]
    assert Repository(store).started() == [1, 2]
    collect(store, 0)
    assert Repository(store).started() == [1]
    assert verify(Repository(store)).findings == []


def test_a_save_whose_step_folder_is_removed_at_this_moment_makes_it_again(tmp_path, monkeypatch):
    """An earlier attempt's empty step folder is there when the save looks, and gone when it makes its own below."""
    store = LocalStore(str(tmp_path))
    write_step(store, 1)
    (tmp_path / "steps/2").mkdir()
    real, removed = os.mkdir, []

    def mkdir(path: str, *rest: Any) -> None:
        if not removed:
            removed.append(store.remove_folder("steps/2"))
        real(path, *rest)

    monkeypatch.setattr("ckpt.store.local.os.mkdir", mkdir)
    write_step(store, 2)
    assert removed
    assert verify(Repository(store)).findings == []
