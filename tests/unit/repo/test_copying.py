from __future__ import annotations

import json
import re
import shutil
import threading
import time
from datetime import datetime, timezone
from typing import Any

import pytest

from ckpt.errors import (
    CheckpointExists,
    ConfigError,
    DigestMismatch,
    FormatError,
    IntegrityError,
    MalformedData,
    MissingChunk,
    NoSuchCheckpoint,
    ObjectExists,
    StoreFull,
    UnsupportedVersion,
)
from ckpt.repo import moving
from ckpt.repo.copying import CopyReport, copy_steps
from ckpt.repo.gc import collect
from ckpt.repo.repository import MARKER, Repository, commit_key
from ckpt.repo.verify import DAMAGE, verify
from ckpt.store import limited
from ckpt.store.local import LocalStore
from ckpt.store.memory import MemoryStore
from tests.harness.steps import write_step


class Logged(MemoryStore):
    """Notes what is changed, in order, and what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.changed: list[str] = []
        self.read: list[str] = []

    def put(self, key, data, *, overwrite=False):
        super().put(key, data, overwrite=overwrite)
        self.changed.append(key)

    def writer(self, key, **options):
        self.changed.append(key)
        return super().writer(key, **options)

    def read_into(self, key, start, buffer):
        self.read.append(key)
        return super().read_into(key, start, buffer)


@pytest.fixture
def src() -> Logged:
    """Steps 1, 2 and 10; 2 and 10 refer to step 1's pack for the frozen tensor."""
    store = Logged()
    write_step(store, 1, age=7000)
    write_step(store, 2, parent=1)
    write_step(store, 10, parent=2)
    store.changed.clear()
    return store


def keys(store: MemoryStore, *, packs: bool = False) -> set[str]:
    return {k for k in store.objects if not packs or k.endswith(".safetensors")}


def whole(store: Any, steps: list[int]) -> None:
    """Exactly these steps are there, to the byte, and nothing beside them."""
    found = verify(Repository(store))
    assert found.findings == []
    assert found.steps == steps


def same(src: MemoryStore, dst: MemoryStore) -> None:
    """What is at ``dst`` is what is at ``src``, but for the markers of attempts, which carry the copy's date."""
    for key, data in dst.objects.items():
        if key.endswith("/attempt.json"):
            assert json.loads(data).items() >= json.loads(src.objects[key]).items()
        else:
            assert src.objects[key] == data


def test_the_newest_step_is_copied_with_the_packs_that_it_refers_to(src):
    dst, seen = MemoryStore(), []
    report = copy_steps(src, dst, progress=lambda *at: seen.append(at))
    whole(dst, [10])
    same(src, dst)
    assert report == CopyReport([10], [], 3, 0, report.bytes_copied, 0)
    assert sorted(k.split("/")[1] for k in keys(dst, packs=True)) == ["1", "10", "10"]
    index = [len(v) for k, v in dst.objects.items() if "/index/" in k or k.endswith(".safetensors")]
    assert report.bytes_copied == sum(index) == seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert src.changed == [], "the source is only read"


def test_chosen_steps_and_all_steps(src):
    dst = MemoryStore()
    assert copy_steps(src, dst, [2, 1, 2]).steps == [1, 2]
    whole(dst, [1, 2])
    everything = MemoryStore()
    report = copy_steps(src, everything, Repository(src).steps(), threads=1)
    whole(everything, [1, 2, 10])
    assert keys(everything) == keys(src)
    assert (report.packs_copied, report.packs_present) == (6, 0)


def test_a_pack_that_several_steps_refer_to_is_read_and_written_once(src):
    dst = Logged()
    copy_steps(src, dst, [1, 2, 10])
    packs = [key for key in dst.changed if key.endswith(".safetensors")]
    assert len(packs) == len(set(packs)) == 6
    assert sorted(src.read) == sorted(packs), "each in one piece, once"
    assert dst.read == [], "what was just written from checked bytes is not read again"


def test_the_order_at_the_destination_is_that_of_a_save(src):
    dst = Logged()
    copy_steps(src, dst, [10])
    kinds = [re.match(r"[a-z]+", key.rpartition("/")[2])[0] for key in dst.changed]
    assert kinds == ["ckpt", "attempt", "attempt", "rank", "rank", "rank", "part", "part", "root", "commit"]
    assert dst.changed[-1] == commit_key(10)


def test_what_is_there_whole_is_not_copied_again(src):
    dst = Logged()
    copy_steps(src, dst, [1])
    first = list(dst.changed)
    report = copy_steps(src, dst, [10])
    assert (report.packs_copied, report.packs_present) == (2, 1)
    again = [k for k in dst.changed[len(first) :] if k in first]
    assert all(k.endswith("attempt.json") for k in again)
    dst.changed.clear()
    report = copy_steps(src, dst, [1, 10])
    assert (report.steps, report.present, report.packs_copied) == ([], [1, 10], 0)
    assert dst.changed == []
    assert report.bytes_present > 0


@pytest.mark.parametrize("part", ["packs/", "index/"])
@pytest.mark.parametrize("how", ["gone", "cut", "flipped", "empty"])
def test_what_is_damaged_at_the_destination_is_copied_again(src, part, how):
    dst = Logged()
    copy_steps(src, dst, [1, 2])
    for key in sorted(k for k in dst.objects if part in k):
        good = dst.objects[key]
        bad = {"cut": good[:-1], "flipped": good[:-1] + bytes([good[-1] ^ 1]), "empty": b""}
        if how == "gone":
            del dst.objects[key]
        else:
            dst.objects[key] = bad[how]
        dst.changed.clear()
        report = copy_steps(src, dst, [1, 2])
        assert dst.changed == [key], "only that"
        assert report.present == [1, 2]
        whole(dst, [1, 2])
        same(src, dst)


def test_sizes_are_trusted_where_asked_for(src):
    dst = Logged()
    copy_steps(src, dst, [1])
    key = sorted(keys(dst, packs=True))[0]
    dst.objects[key] = dst.objects[key][:-1] + b"\0"
    dst.changed.clear()
    copy_steps(src, dst, [1], verify=False)
    assert (dst.changed, dst.read) == ([], [])
    dst.objects[key] = dst.objects[key][:-1]
    copy_steps(src, dst, [1], verify=False)
    assert dst.changed == [key]
    whole(dst, [1])


@pytest.mark.parametrize("threads", [1, 3])
def test_a_damaged_source_is_named_and_nothing_is_committed(src, threads):
    for key, name in (("rank00000", "tensor 'emb'"), ("rank00001", "object 'loader'")):
        good = dict(src.objects)
        pack = next(k for k in src.objects if k.startswith("steps/1/") and key in k)
        data = bytearray(src.objects[pack])
        data[-1] ^= 4
        src.objects[pack] = bytes(data)
        dst = MemoryStore()
        with pytest.raises(DigestMismatch) as caught:
            copy_steps(src, dst, [1], threads=threads)
        assert name in str(caught.value)
        assert pack in str(caught.value)
        assert Repository(dst).steps() == []
        assert pack not in dst.objects
        src.objects = good


def test_an_encoded_chunk_is_checked_too(src):
    pack = next(k for k in src.objects if k.startswith("steps/1/") and "rank00001" in k)
    data = bytearray(src.objects[pack])
    data[8 + int.from_bytes(data[:8], "little") + 20] ^= 1  # inside the first entry, which is the encoded half of w
    src.objects[pack] = bytes(data)
    dst = MemoryStore()
    with pytest.raises((IntegrityError, FormatError), match=r"tensor 'w' \(param\).*rank00001"):
        copy_steps(src, dst, [1])
    assert Repository(dst).steps() == []


def test_a_damaged_header_of_the_source_is_refused(src):
    pack = next(k for k in src.objects if k.startswith("steps/1/") and "rank00001" in k)
    data = bytearray(src.objects[pack])
    data[12] ^= 1
    src.objects[pack] = bytes(data)
    with pytest.raises(DigestMismatch, match=rf"header in pack {pack}"):
        copy_steps(src, MemoryStore(), [1])


def test_what_the_source_lacks_is_found_before_anything_is_written(src):
    dst = MemoryStore()
    pack = next(k for k in src.objects if k.startswith("steps/1/") and "rank00000" in k)
    data = src.objects.pop(pack)
    with pytest.raises(MissingChunk, match=rf"step 10 .*{pack} is not there; lost with it: tensor 'emb'"):
        copy_steps(src, dst, [10])
    src.objects[pack] = data + b"1"
    with pytest.raises(MissingChunk, match=rf"{pack} has {len(data) + 1} bytes, expected {len(data)}"):
        copy_steps(src, dst, [10])
    src.objects[pack] = data
    index = next(k for k in src.objects if k.startswith("steps/10/") and "part-00001" in k)
    src.objects[index] += b"x"
    with pytest.raises(DigestMismatch, match=index):
        copy_steps(src, dst, [10])
    src.objects[commit_key(2)] = src.objects[commit_key(1)]
    with pytest.raises(MalformedData, match="says step 1, expected 2"):
        copy_steps(src, dst, [2])
    with pytest.raises(NoSuchCheckpoint, match="no checkpoint of step 7"):
        copy_steps(src, dst, [1, 7])
    with pytest.raises(NoSuchCheckpoint):
        copy_steps(MemoryStore(), dst)
    assert dst.objects == {}


def test_another_step_of_this_number_is_replaced_only_if_asked(src):
    dst = Logged()
    old = write_step(dst, 2, age=9000, attempt="old")
    write_step(dst, 3, parent=2)
    before = dict(dst.objects)
    with pytest.raises(CheckpointExists, match=r"step 2 is committed already .* --overwrite"):
        copy_steps(src, dst, [1, 2])
    assert dst.objects == before, "step 1 neither: what is asked for is copied, or nothing"
    report = copy_steps(src, dst, [1, 2], overwrite=True)
    assert report.steps == [1, 2]
    found = verify(Repository(dst))
    assert not found.damaged
    assert found.steps == [1, 2, 3]
    assert {f.key.rpartition("/")[0] for f in found.findings} == {f"{old}/packs", f"{old}/index"}, (
        "step 3 needs the rest"
    )
    collect(dst, 0)
    whole(dst, [1, 2, 3])


def test_a_name_that_another_step_of_the_destination_uses_is_never_taken_from_it():
    """Attempts have unique names. If two have not, the one that is committed there is not overwritten."""
    src, dst = MemoryStore(), MemoryStore()
    write_step(src, 1, attempt="a", seed=5)
    write_step(dst, 1, attempt="a", seed=6)
    before = dict(dst.objects)
    for _ in range(2):
        with pytest.raises((CheckpointExists, DigestMismatch)):
            copy_steps(src, dst, overwrite=True)
        for key, data in before.items():
            assert key.endswith("attempt.json") or dst.objects[key] == data
    whole(dst, [1])


def test_a_pack_is_not_mended_with_bytes_that_harm_another_step(src):
    """The destination's pack is damaged where the copied step needs it; the source's where another step does."""
    dst = MemoryStore()
    copy_steps(src, dst, [1])
    pack = next(k for k in src.objects if k.startswith("steps/1/") and "rank00000" in k)
    good = src.objects[pack]
    flipped = bytearray(good)
    flipped[-1] ^= 1  # the frozen tensor, which step 10 needs
    dst.objects[pack] = bytes(flipped)
    start = 8 + int.from_bytes(good[:8], "little")
    flipped = bytearray(good)
    flipped[start] ^= 1  # w, which step 1 needs
    src.objects[pack] = bytes(flipped)
    with pytest.raises(DigestMismatch, match="tensor 'w'"):
        copy_steps(src, dst, [10])
    assert dst.objects[pack][start:-1] == good[start:-1]


def test_a_rival_that_commits_first_wins_unless_it_is_the_same(src, monkeypatch):
    for rival, outcome in ((src.objects[commit_key(1)], None), (b"another", CheckpointExists)):
        dst = MemoryStore()
        put = dst.put

        def raced(key, data, *, overwrite=False, put=put, rival=rival):
            if key == commit_key(1):
                put(key, rival)
            put(key, data, overwrite=overwrite)

        monkeypatch.setattr(dst, "put", raced)
        if outcome is None:
            assert copy_steps(src, dst, [1]).steps == [1]
        else:
            with pytest.raises(outcome, match=r"committed .* by somebody else"):
                copy_steps(src, dst, [1])


def test_an_index_file_whose_first_put_was_answered_too_late_is_ours(src, monkeypatch):
    dst = MemoryStore()
    put = dst.put

    def twice(key, data, *, overwrite=False):
        put(key, data, overwrite=overwrite)
        if "/index/" in key:
            raise ObjectExists("412", key)

    monkeypatch.setattr(dst, "put", twice)
    assert copy_steps(src, dst, [1]).steps == [1]
    whole(dst, [1])


def test_what_vanishes_during_the_copy_is_not_committed(src, monkeypatch):
    dst = MemoryStore()
    put = dst.put

    def losing(key, data, *, overwrite=False):
        put(key, data, overwrite=overwrite)
        if "/index/root" in key:
            del dst.objects[next(k for k in dst.objects if k.endswith(".safetensors"))]

    monkeypatch.setattr(dst, "put", losing)
    with pytest.raises(MissingChunk, match=r"found None: removed or changed by somebody else"):
        copy_steps(src, dst, [1])
    assert Repository(dst).steps() == []


def test_a_full_destination_is_that_error_and_the_next_copy_goes_on(src, monkeypatch):
    dst = Logged()
    with monkeypatch.context() as patch:
        writer = dst.writer

        def full(key, **options):
            if "rank00001" in key:
                raise StoreFull("disk full", key)
            return writer(key, **options)

        patch.setattr(dst, "writer", full)
        with pytest.raises(StoreFull):
            copy_steps(src, dst, [1])
    assert Repository(dst).steps() == []
    report = copy_steps(src, dst, [1])
    assert (report.packs_copied, report.packs_present) in ((1, 1), (2, 0))
    whole(dst, [1])


def test_a_failure_stops_what_is_not_done_yet(src, monkeypatch):
    """One pack waits until another has failed; it is not finished, and none is begun after it."""
    packs = sorted(k for k in src.objects if k.endswith("safetensors"))[:2]
    failing, dst = threading.Event(), Logged()
    real, stop = src.read_into, moving._Meter.__init__
    meters: list[Any] = []

    def remember(meter: Any, *rest: Any) -> None:
        stop(meter, *rest)
        meters.append(meter)

    def read(key, start, buffer):
        if key == packs[1]:
            assert failing.wait(30)
            raise StoreFull("no", key)
        failing.set()
        assert meters[0].stop.wait(30)
        return real(key, start, buffer)

    monkeypatch.setattr(moving._Meter, "__init__", remember)
    monkeypatch.setattr(src, "read_into", read)
    with pytest.raises(StoreFull):
        copy_steps(src, dst, [1, 2, 10], threads=2)
    assert keys(dst, packs=True) == set()
    assert {key for key in dst.changed if key.endswith(".safetensors")} <= set(packs)


def test_a_limit_holds_for_each_side(src, monkeypatch):
    """All that is read at the source and written at the destination asks first: twice the bytes, on two rates."""
    asked: list[int] = []
    take, give_back = limited.Rate.take, limited.Rate.give_back
    monkeypatch.setattr(limited.Rate, "take", lambda rate, n: (asked.append(n), take(rate, n)))
    monkeypatch.setattr(limited.Rate, "give_back", lambda rate, n: (asked.append(-n), give_back(rate, n)))
    dst = MemoryStore()
    report = copy_steps(src, dst, [1], io_limit=1e9)
    assert 2 * report.bytes_copied <= sum(asked) < 3 * report.bytes_copied + 5_000, "indexes are read twice"
    whole(dst, [1])


def test_attempts_at_work_are_marked_so_that_gc_lets_them_be(src, monkeypatch):
    """The attempt was made long ago, its copy is at work now; the mark is renewed while it lasts."""
    dst = MemoryStore()
    monkeypatch.setattr(moving, "BEAT_SECONDS", -1.0)
    marks: list[str] = []
    put = dst.put

    def noted(key, data, *, overwrite=False):
        if key.endswith("/attempt.json"):
            marks.append(key)
        put(key, data, overwrite=overwrite)

    monkeypatch.setattr(dst, "put", noted)

    def look(done: int, total: int) -> None:
        report = collect(dst, 3600.0)
        assert report.removed == [], (done, total)
        assert report.kept or done == 0

    copy_steps(src, dst, [10], progress=look, threads=1)
    whole(dst, [10])
    assert {key.split("/")[1] for key in marks} == {"1", "10"}
    assert len(marks) > 4
    about = json.loads(dst.objects[next(k for k in marks if k.startswith("steps/1/"))])
    assert about["world"] == 2
    copied = datetime.fromisoformat(about["copied"])
    assert abs(datetime.now(timezone.utc).timestamp() - copied.timestamp()) < 600
    assert time.time() - datetime.fromisoformat(about["created"]).timestamp() > 6000


@pytest.mark.parametrize("marker", [None, b"", b"[1]", b"\xff", b"[" * 50_000])
def test_an_attempt_without_a_readable_marker_is_copied_too(src, marker):
    key = next(k for k in src.objects if k.startswith("steps/1/") and k.endswith("attempt.json"))
    if marker is None:
        del src.objects[key]
    else:
        src.objects[key] = marker
    dst = MemoryStore()
    copy_steps(src, dst, [1])
    whole(dst, [1])


def test_a_copy_of_a_copy(src, tmp_path):
    first, second = LocalStore(str(tmp_path / "a")), LocalStore(str(tmp_path / "b"))
    copy_steps(src, first, [1, 2, 10])
    copy_steps(first, second, [1, 2, 10])
    whole(second, [1, 2, 10])
    last = MemoryStore()
    copy_steps(second, last, [1, 2, 10])
    same(src, last)


def test_arguments(src):
    with pytest.raises(ConfigError, match="same store"):
        copy_steps(src, src)
    for options in ({"threads": 0}, {"io_limit": 0.0}, {"io_limit": float("nan")}):
        with pytest.raises(ConfigError, match="positive"):
            copy_steps(src, MemoryStore(), **options)
    newer = MemoryStore()
    newer.put(MARKER, b'{"format": 2}')
    with pytest.raises(UnsupportedVersion):
        copy_steps(src, newer)
    with pytest.raises(UnsupportedVersion):
        copy_steps(newer, MemoryStore())


# -- copies by other tools ---------------------------------------------------------------------------------------------


@pytest.fixture
def saved(src, tmp_path) -> LocalStore:
    """The same on a disk, with the leftovers of a killed save."""
    store = LocalStore(str(tmp_path / "saved"))
    copy_steps(src, store, [1, 2, 10])
    (tmp_path / "saved/steps/10/.tmp-00ff-commit.json").write_bytes(b"half")
    return store


def test_a_plain_copy_of_the_folder_is_the_same_repository(saved, tmp_path):
    shutil.copytree(saved.root, tmp_path / "moved", ignore=shutil.ignore_patterns(".tmp-*"))
    shutil.rmtree(saved.root)
    whole(LocalStore(str(tmp_path / "moved")), [1, 2, 10])


def test_a_plain_copy_of_some_steps_lacks_what_they_refer_to_and_a_copy_mends_it(saved, tmp_path):
    shutil.copytree(f"{saved.root}/steps/10", tmp_path / "part/steps/10")
    part = LocalStore(str(tmp_path / "part"))
    found = verify(Repository(part))
    assert found.damaged
    assert all("steps/1/" in f.key for f in found.findings if f.severity == DAMAGE)
    copy_steps(saved, part, [10])
    assert not verify(Repository(part)).damaged
    assert part.size(MARKER) is not None, "it is a repository now"


def test_a_plain_copy_at_work_is_damage_and_no_other_error(saved, tmp_path):
    """Other tools know no order: the commit may come first. Whatever is there so far, verify tells what is missing."""
    files = sorted(info.key for info in saved.walk("") if ".tmp-" not in info.key)
    order = sorted(files, key=lambda key: (not key.endswith("commit.json"), key))
    partial = LocalStore(str(tmp_path / "partial"))
    for number, key in enumerate(order, 1):
        partial.put(key, saved.get(key))
        if number >= 3:
            found = verify(Repository(partial))
            assert found.damaged is (number < len(order)) or key.endswith(("attempt.json", MARKER)), (number, key)
    whole(partial, [1, 2, 10])
