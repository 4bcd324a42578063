from __future__ import annotations

import errno

import pytest

from ckpt.errors import (
    CheckpointExists,
    ConfigError,
    DigestMismatch,
    FormatError,
    MalformedData,
    MissingChunk,
    NoSuchCheckpoint,
    StoreError,
    StoreUnavailable,
    UnsupportedVersion,
)
from ckpt.format.digest import digest
from ckpt.format.manifest import CommitBody, FileRef, IndexPart, IndexRoot
from ckpt.repo.repository import MARKER, Repository, checked_step, commit_key
from ckpt.store.local import LocalStore
from ckpt.store.memory import MemoryStore

D = digest(b"")


def commit(
    repo: Repository, step: int, attempt: str = "a", *, overwrite: bool = False, index_step: int | None = None
) -> int:
    """An empty checkpoint of one rank."""
    prefix = f"steps/{step}/{attempt}/index"
    part = repo.write_index(f"{prefix}/part-0.json.zst", IndexPart(rank=0, packs=(), chunks=()))
    root = IndexRoot(
        format=1,
        step=step if index_step is None else index_step,
        attempt=attempt,
        world=1,
        layout=D,
        specs=(),
        derived=(),
        aliases={},
        parts=(part,),
    )
    body = CommitBody(
        format=1,
        features=(),
        step=step,
        attempt=attempt,
        world=1,
        engine="x",
        created="",
        software={},
        totals={},
        index=repo.write_index(f"{prefix}/root.json.zst", root),
    )
    return repo.commit(body, overwrite=overwrite)


@pytest.fixture
def repo() -> Repository:
    return Repository(MemoryStore())


def test_steps_are_ordered_as_numbers(repo):
    """As text, 100 comes before 9, and the newest checkpoint would be an old one."""
    for step in (9, 100, 10, 0, 99):
        commit(repo, step)
    assert repo.steps() == [0, 9, 10, 99, 100]
    assert repo.pick(None) == 100


def test_only_a_commit_makes_a_step(repo):
    commit(repo, 5)
    repo.store.put("steps/7/a/packs/x.safetensors", b"")
    assert repo.steps() == [5]
    assert repo.started() == [5, 7]
    assert repo.pick(None) == 5


def test_foreign_names_are_no_steps(repo):
    for name in ("007", "+1", "-1", "1e3", "٣", "1.0", " 1", "latest", "9" * 19, ".tmp-1"):
        repo.store.put(f"steps/{name}/commit.json", b"")
    assert repo.steps() == []


def test_nothing_there_and_what_is_there_are_said(repo):
    with pytest.raises(NoSuchCheckpoint, match="no checkpoint in memory"):
        repo.pick(None)
    repo.store.put("steps/7/a/x", b"")
    with pytest.raises(NoSuchCheckpoint, match=r"1 step\(s\) were begun and never committed"):
        repo.pick(None)
    commit(repo, 5)
    with pytest.raises(NoSuchCheckpoint, match="no checkpoint of step 7 in memory; it has 5"):
        repo.pick(7)


def test_a_root_that_cannot_be_read_is_an_error_not_an_empty_one(repo, monkeypatch, tmp_path):
    def refuse(*_: object) -> None:
        raise StoreUnavailable("503", "steps")

    monkeypatch.setattr(repo.store, "children", refuse)
    for call in (repo.steps, repo.started, lambda: repo.pick(None), lambda: repo.pick(1)):
        with pytest.raises(StoreUnavailable):
            call()
    (tmp_path / "steps").write_bytes(b"not a directory")
    with pytest.raises(StoreError):
        Repository(LocalStore(str(tmp_path))).steps()
    assert Repository(LocalStore(str(tmp_path / "missing"))).steps() == []


def test_an_error_of_the_disk_while_looking_for_commits_is_not_no_commit(tmp_path, monkeypatch):
    repo = Repository(LocalStore(str(tmp_path)))
    commit(repo, 1)

    def stat(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("ckpt.store.local.os.stat", stat)
    with pytest.raises(StoreError):
        repo.steps()


def test_a_step_is_committed_once(repo):
    commit(repo, 1, "a")
    with pytest.raises(CheckpointExists, match="step 1 is committed already"):
        commit(repo, 1, "b")
    assert repo.read_commit(1).attempt == "a"
    commit(repo, 1, "c", overwrite=True)
    assert repo.read_commit(1).attempt == "c"


def test_a_retried_commit_recognises_its_own_first_try(repo):
    """A put whose answer was lost and whose retry meets the object that it made itself has succeeded."""
    body = repo.read_commit(commit(repo, 1) and 1)
    assert repo.commit(body) == repo.store.size(commit_key(1))


def test_a_commit_under_the_wrong_number_is_refused(repo):
    commit(repo, 1)
    repo.store.put(commit_key(2), repo.store.get(commit_key(1)))
    with pytest.raises(MalformedData, match=r"steps/2/commit\.json: says step 1, expected 2"):
        repo.read_commit(2)


def test_an_index_of_another_attempt_or_step_is_refused(repo):
    commit(repo, 2, index_step=1)
    with pytest.raises(MalformedData, match="belongs to step 1 attempt a, the commit is step 2 attempt a"):
        repo.read_index(2)


def test_a_pinned_file_must_be_the_one_that_was_written(repo):
    repo.store.put("k", b"content")
    assert repo.read_pinned(FileRef(key="k", digest=digest(b"content"), nbytes=7), "o") == b"content"
    for ref, kind in (
        (FileRef(key="k", digest=digest(b"content"), nbytes=8), DigestMismatch),
        (FileRef(key="k", digest=digest(b"other"), nbytes=7), DigestMismatch),
        (FileRef(key="gone", digest=D, nbytes=0), MissingChunk),
    ):
        with pytest.raises(kind, match=rf"^{ref.key}: .*\bo\b"):
            repo.read_pinned(ref, "o")


def test_one_rank_can_read_its_own_part_only(repo):
    commit(repo, 1)
    assert [p.rank for p in repo.read_index(1, [0]).parts] == [0]
    assert repo.read_index(1, [5]).parts == ()


def test_the_marker_is_made_once_and_checked(repo):
    repo.initialise()
    first = repo.store.get(MARKER)
    repo.initialise()
    assert repo.store.get(MARKER) == first
    repo.check_marker()


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"5", b"\xff", b"[" * 100_000, b'{"fmt":1}', b"null"], ids=lambda d: repr(d[:9])
)
def test_a_marker_that_is_none_is_refused(repo, data):
    repo.store.put(MARKER, data)
    for call in (repo.initialise, repo.check_marker, lambda: repo.pick(None)):
        with pytest.raises(FormatError, match=r"ckpt\.json"):
            call()


@pytest.mark.parametrize("version", [b"2", b"0", b'"1"', b"null", b"[1]"])
def test_a_root_of_another_version_is_refused(repo, version):
    repo.store.put(MARKER, b'{"format": ' + version + b"}")
    with pytest.raises(UnsupportedVersion, match="this release reads 1"):
        repo.initialise()


@pytest.mark.parametrize("step", [-1, 10**18, 1.0, True, "1", None])
def test_a_step_must_be_a_whole_number(step):
    with pytest.raises(ConfigError, match="step"):
        checked_step(step)


def test_the_largest_step():
    assert checked_step(10**18 - 1) == 10**18 - 1
    assert checked_step(0) == 0
