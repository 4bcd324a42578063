"""Files that are not what a save wrote: mutated bytes, pickles, links, things that are no files."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.repo.repository import Repository
from ckpt.repo.verify import verify
from ckpt.store.local import LocalStore
from tests.attacks.forge import COMMIT, EXTRA, job, survives, valid, with_objects

OBJECTS = valid()
KEYS = sorted(OBJECTS)


@st.composite
def mutations(draw) -> dict[str, bytes]:
    """Some bytes of some files changed, cut out, doubled, or taken from another file."""
    objects = dict(OBJECTS)
    for key in draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=2)):
        data = bytearray(objects[key])
        for _ in range(draw(st.integers(1, 3))):
            at = draw(st.integers(0, max(0, len(data) - 1)))
            kind = draw(st.sampled_from(["set", "cut", "insert", "end", "other", "swap"]))
            if kind == "set" and data:
                data[at] = draw(st.integers(0, 255))
            elif kind == "cut":
                del data[at : at + draw(st.integers(1, 40))]
            elif kind == "insert":
                data[at:at] = draw(st.binary(max_size=12))
            elif kind == "end":
                data = data[:at] if draw(st.booleans()) else data + draw(st.binary(max_size=5))
            elif kind == "other":
                data = bytearray(OBJECTS[draw(st.sampled_from(KEYS))])
            elif kind == "swap":
                other, n = draw(st.integers(0, max(0, len(data) - 1))), draw(st.integers(1, 16))
                data[at : at + n], data[other : other + n] = data[other : other + n], data[at : at + n]
        objects[key] = bytes(data)
    return objects


@settings(max_examples=400, deadline=None)
@given(mutations())
def test_mutated_files_give_the_right_data_or_one_of_our_errors(objects):
    store = with_objects(objects)
    loaded = survives(store)
    harmless = all(objects[k] == OBJECTS[k] for k in KEYS if k.startswith("steps/") and not k.endswith("attempt.json"))
    if harmless and objects["ckpt.json"] == OBJECTS["ckpt.json"]:
        assert loaded
    if not loaded:
        try:
            found = verify(Repository(store))
        except ckpt.CkptError:
            return
        assert found.findings, "what a load refuses, verify names"


@pytest.mark.parametrize(
    "key",
    [k for k in KEYS if k.startswith("steps/") and not k.endswith("attempt.json")],
    ids=lambda key: key.rpartition("/")[2],  # attempts have random names, and parallel workers compare ids
)
def test_every_changed_byte_of_a_step_is_found_by_verify(key):
    """Every byte of every file that a commit promises is under a digest."""
    data = OBJECTS[key]
    step = max(1, len(data) // 300)
    for at in range(0, len(data), step):
        spoiled = bytearray(data)
        spoiled[at] ^= 0x41
        assert verify(Repository(with_objects({**OBJECTS, key: bytes(spoiled)}))).damaged, at


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def root(tmp_path) -> Path:
    store = LocalStore(str(tmp_path / "root"))
    for key, data in OBJECTS.items():
        store.put(key, data)
    return tmp_path / "root"


def on_disk(root: Path) -> bool:
    return survives(LocalStore(str(root)))


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_in_any_file_is_never_run(root, tmp_path, protocol):
    payload = pickle.dumps(Bomb(tmp_path / "executed"), protocol)
    pickle.loads(payload)
    (tmp_path / "executed").rmdir()  # the payload works
    for key in KEYS:
        path = root / key
        whole = path.read_bytes()
        for data in (payload, whole[: len(whole) // 2] + payload, payload + whole[len(payload) :]):
            path.write_bytes(data)
            on_disk(root)
            assert not (tmp_path / "executed").exists(), key
        path.write_bytes(whole)
    assert on_disk(root)


def test_nothing_that_reads_a_checkpoint_unpickles(root, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr("torch.load", refuse)
    assert on_disk(root)


def test_a_link_in_place_of_the_commit(root, tmp_path):
    commit = root / COMMIT
    whole = commit.read_bytes()
    secret = tmp_path / "secret"
    secret.write_bytes(b"root:x:0:0:secret words\n")
    for target in (
        secret,
        tmp_path / "nowhere",
        root / "ckpt.json",
        commit,
        root,
        Path("/dev/null"),
        Path("commit.json"),
    ):
        commit.unlink()
        commit.symlink_to(target)
        assert not on_disk(root)
        with pytest.raises(ckpt.CkptError) as caught:
            ckpt.load(job(filled=False), root, step=1)
        assert "secret words" not in str(caught.value), "no file's content is shown"
    commit.unlink()
    (tmp_path / "elsewhere").write_bytes(whole)
    commit.symlink_to(tmp_path / "elsewhere")
    assert on_disk(root), "the same bytes are the same commit, wherever they lie"


def test_a_link_to_the_commit_of_another_step(root):
    (root / "steps/2").mkdir()
    (root / "steps/2/commit.json").symlink_to(root / COMMIT)
    with pytest.raises(ckpt.FormatError, match=r"steps/2/commit\.json: says step 1, expected 2"):
        ckpt.load(job(filled=False), root)
    assert ckpt.load(job(filled=False), root, fallback=True).step == 1


def test_a_directory_in_place_of_any_file(root):
    for key in KEYS:
        path = root / key
        whole = path.read_bytes()
        path.unlink()
        path.mkdir()
        loaded = on_disk(root)
        assert loaded == key.endswith("attempt.json"), key
        path.rmdir()
        path.write_bytes(whole)
    assert on_disk(root)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


def make_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [Path.mkdir, make_fifo, make_loop, make_endless], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["commit.json", "root.json.zst", "part-00000.json.zst", ".safetensors"])
def test_what_is_no_file_is_damage_of_its_step_and_the_others_are_used(root, make, name):
    """A FIFO hung the reader, a device gave bytes without end, a link to itself hid the good steps as well."""
    ckpt.save(job(filled=True), root, step=2, extra={**EXTRA, "new": "so that there is a pack"})
    (path,) = (p for p in (root / "steps/2").rglob("*") if p.name.endswith(name))
    path.unlink()
    make(path)
    assert ckpt.steps(root) == [1, 2]
    with pytest.raises(ckpt.CkptError, match=name):
        ckpt.load(job(filled=False), root)
    target = job(filled=False)
    report = ckpt.load(target, root, fallback=True)
    assert report.step == 1
    assert len(report.skipped) == 1
    assert report.skipped[0].startswith("step 2: ")
    assert target.differences() == []
    found = verify(Repository(LocalStore(str(root))))
    assert found.steps == [1, 2]
    damage = [f for f in found.findings if f.severity == "damage"]
    assert damage
    assert all((f.step, f.key) == (2, path.relative_to(root).as_posix()) for f in damage)
    assert found.bytes_read > 0, "step 1 was checked"
    assert on_disk(root) is False


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [Path.mkdir, make_fifo, make_loop, make_endless], ids=lambda f: f.__name__)
def test_a_marker_that_is_no_file(root, make):
    (root / "ckpt.json").unlink()
    make(root / "ckpt.json")
    found = verify(Repository(LocalStore(str(root))))
    assert [(f.severity, f.key) for f in found.findings] == [("damage", "ckpt.json")]
    for call in (lambda: ckpt.load(job(filled=False), root), lambda: ckpt.save(job(filled=True), root, step=2)):
        with pytest.raises(ckpt.StoreError, match=r"ckpt\.json"):
            call()


def test_a_step_that_links_to_itself(root):
    (root / "steps/2").symlink_to("2")
    assert ckpt.steps(root) == [1, 2]
    found = verify(Repository(LocalStore(str(root))))
    assert [(f.step, f.key) for f in found.findings if f.severity == "damage"] == [(2, "steps/2/commit.json")]
    assert ckpt.load(job(filled=False), root, fallback=True).step == 1


def test_a_folder_that_links_to_itself_or_out_is_not_walked(root, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine.txt").write_bytes(b"not yours")
    (root / "steps/loop").symlink_to(root)
    (root / "steps/out").symlink_to(outside)
    found = verify(Repository(LocalStore(str(root))))
    assert not found.damaged
    assert not any("mine.txt" in f.key for f in found.findings)
    assert on_disk(root)


def test_other_files_beside_change_nothing(root):
    for name in (
        "steps/1/notes",
        "steps/x",
        "steps/01/commit.json",
        "steps/1/a/packs/rank00000-000.safetensors",
        "README",
        ".hidden",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"?")
    assert ckpt.steps(root) == [1]
    assert on_disk(root)


def test_a_deep_tree_beside_does_not_break_verify(root):
    deep = root / "steps" / "9"
    for _ in range(200):
        deep = deep / "d"
    deep.mkdir(parents=True)
    (deep / "f").write_bytes(b"")
    assert not verify(Repository(LocalStore(str(root)))).damaged
    shutil.rmtree(root / "steps" / "9")


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[" * 99_999, b"null", b'{"format": "1"}', b'{"format": 99}', b"\x80\x04."], ids=repr
)
def test_a_marker_that_is_none(root, data):
    (root / "ckpt.json").write_bytes(data)
    with pytest.raises(ckpt.FormatError, match=r"ckpt\.json|has format"):
        ckpt.load(job(filled=False), root)
    with pytest.raises(ckpt.FormatError):
        ckpt.save(job(filled=True), root, step=2)
    assert ckpt.steps(root) == [1]
