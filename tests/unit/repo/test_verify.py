from __future__ import annotations

from typing import Any

import pytest

from ckpt.errors import AccessDenied, NoSuchCheckpoint, ObjectNotFound, StoreError, StoreUnavailable
from ckpt.repo.repository import Repository
from ckpt.repo.verify import DAMAGE, GARBAGE, Verification, verify
from ckpt.store.memory import MemoryStore
from tests.property.fake import engines, save_all, small_model, zero1


@pytest.fixture
def repo() -> Repository:
    store = MemoryStore()
    for step in (1, 2):
        model = small_model(step)
        save_all(engines(model, zero1(model, 2), 2, filled=True, at_step=step), store)
    return Repository(store)


def of(found: Verification, severity: str) -> dict[str, str]:
    return {f.key: f.message for f in found.findings if f.severity == severity}


def test_a_whole_repository_has_no_findings(repo):
    seen: list[int] = []
    found = verify(repo, progress=seen.append)
    assert found.findings == []
    assert not found.damaged
    assert found.steps == [1, 2]
    assert found.tensors == 18
    assert sum(seen) == found.bytes_read > 0
    assert found.chunks == len(seen)


def test_leftovers_are_garbage_and_counted(repo):
    left = {
        "steps/3/a/packs/rank00000-000.safetensors": b"12345",
        "steps/2/other/index/root.json.zst": b"123",
        "steps/2/.tmp-00ff-commit.json": b"1",
        ".tmp-1-ckpt.json": b"",
    }
    for key, data in left.items():
        repo.store.put(key, data)
    repo.store.put("notes.txt", b"the user's own")
    found = verify(repo)
    assert not found.damaged
    assert set(of(found, GARBAGE)) == set(left)
    assert found.garbage_bytes == 9
    assert all(f.step is None for f in found.findings)


def test_one_step_is_checked_alone(repo):
    repo.store.put("steps/3/a/x", b"")
    repo.store.objects["steps/1/commit.json"] = b""
    assert verify(repo, 2).findings == []
    assert verify(repo, 1).damaged


def test_the_check_goes_on_behind_the_first_finding(repo):
    packs = sorted(k for k in repo.store.objects if k.endswith(".safetensors"))
    for key in packs:
        data = bytearray(repo.store.objects[key])
        data[-1] ^= 1
        repo.store.objects[key] = bytes(data)
    repo.store.objects["steps/1/commit.json"] = b"x"
    found = verify(repo)
    assert {f.key for f in found.findings if f.step == 2} >= {k for k in packs if k.startswith("steps/2/")}
    assert "steps/1/commit.json" in of(found, DAMAGE)
    assert of(found, GARBAGE) == {}, "the files of a step whose index is lost may still be wanted"


def test_a_store_that_cannot_be_read_is_neither_damage_nor_garbage(repo, monkeypatch):
    def busy(*_: object) -> None:
        raise StoreUnavailable("503 SlowDown", "k")

    for name in ("get", "read_into", "size", "children", "walk"):
        with monkeypatch.context() as patch:
            patch.setattr(repo.store, name, busy)
            with pytest.raises(StoreUnavailable):
                verify(repo)


@pytest.mark.parametrize("name", ["commit.json", "root.json.zst", "part-00000.json.zst", ".safetensors"])
@pytest.mark.parametrize(
    ("error", "damage"),
    [
        (StoreError("Is a directory", "k"), True),
        (ObjectNotFound("gone", "k"), True),
        (AccessDenied("not yours", "k"), False),
        (StoreUnavailable("503", "k"), False),
    ],
    ids=lambda e: type(e).__name__ if e else "",
)
def test_a_file_that_the_store_will_never_give_is_damage_and_the_check_goes_on(repo, monkeypatch, name, error, damage):
    def refusing(real: Any) -> Any:
        def call(key: str, *rest: Any) -> Any:
            if key.startswith("steps/1/") and key.endswith(name):
                raise error
            return real(key, *rest)

        return call

    for method in ("get", "read_into"):
        monkeypatch.setattr(repo.store, method, refusing(getattr(repo.store, method)))
    if name == "commit.json" and isinstance(error, ObjectNotFound):
        return  # without a commit there is no step
    if not damage:
        with pytest.raises(type(error)):
            verify(repo)
        return
    found = verify(repo)
    assert found.steps == [1, 2]
    assert {f.step for f in found.findings if f.severity == DAMAGE} >= {1}
    assert all("gone" in f.message or "directory" in f.message or "not there" in f.message for f in found.findings)
    assert of(found, GARBAGE) == {}


def test_a_damaged_marker_is_damage(repo):
    repo.store.objects["ckpt.json"] = b"{"
    assert "ckpt.json" in of(verify(repo), DAMAGE)


def test_nothing_to_verify():
    empty = Repository(MemoryStore())
    with pytest.raises(NoSuchCheckpoint):
        verify(empty)
    with pytest.raises(NoSuchCheckpoint):
        verify(empty, 5)
    empty.store.put("steps/1/a/x", b"")
    assert set(of(verify(empty), GARBAGE)) == {"steps/1/a/x"}


def test_files_of_a_replaced_attempt_that_another_step_uses_are_not_garbage(repo):
    model = small_model(1)
    save_all(engines(model, zero1(model, 2), 2, filled=True, at_step=1), repo.store, overwrite=True)
    found = verify(repo)
    assert not found.damaged
    packs = {k for k in of(found, GARBAGE) if k.endswith(".safetensors")}
    used = {p.key for part in repo.read_index(2).parts for p in part.packs}
    assert not packs & used
