"""Stop a save at every single operation on the disk; then damage what a whole save has left."""

from __future__ import annotations

import itertools
import shutil
import threading
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

import ckpt
from ckpt.repo.repository import Repository
from ckpt.repo.verify import DAMAGE, verify
from ckpt.store.local import LocalStore
from tests.crash.machine import Crash, DyingKeyValue, Machine
from tests.property.fake import comms, each, engines, load_all, run_ranks, save_all, small_model, zero1

if TYPE_CHECKING:
    from pathlib import Path

    from tests.property.fake import FakeEngine


def job(step: int, world: int, *, filled: bool) -> list[FakeEngine]:
    model = small_model(step)
    return engines(model, zero1(model, world), world, filled=filled, at_step=step)


def loads(root: Path, step: int, world: int) -> None:
    """``step`` loads, bit for bit."""
    made = job(step, world, filled=False)
    load_all(made, root, step=step)
    assert [line for one in made for line in one.differences()] == []
    assert all(one.finished == {"scheduler": {"last": step, "lr": [0.1]}} for one in made)


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> dict[int, Path]:
    """A repository with step 1, for one rank and for two."""
    roots = {}
    for world in (1, 2):
        roots[world] = tmp_path_factory.mktemp(f"world{world}") / "root"
        save_all(job(1, world, filled=True), roots[world])
    return roots


def crashed_save(root: Path, world: int, machine: Machine) -> list[object]:
    """Save step 2 on ``world`` ranks, of which the machine stops the last one at its operation."""
    made = job(2, world, filled=True)
    if world == 1:
        with machine.on():
            return run_ranks(comms(1), lambda rank: ckpt.save(made[rank], root))
    kv = dist.HashStore()
    jobs = comms(world, kv)
    victim = 0 if machine.victim_is_root else world - 1
    jobs[victim].kv = DyingKeyValue(kv, machine)

    def work(rank: int) -> object:
        if rank == victim:
            machine.only = threading.current_thread()
        return ckpt.save(made[rank], root, timeout=100)

    machine.only = threading.Thread()  # nobody yet
    with machine.on():
        return run_ranks(jobs, work, clock=machine.clock)


def check_aftermath(root: Path, world: int) -> None:
    repo = Repository(LocalStore(str(root)))
    assert ckpt.steps(root) in ([1], [1, 2])
    found = verify(repo)
    assert not found.damaged, found.findings
    loads(root, 1, world)
    again = ckpt.steps(root) == [1, 2]
    if again:
        loads(root, 2, world)
    save_all(job(2, world, filled=True), root, overwrite=again)
    loads(root, 2, world)
    loads(root, 1, world)
    assert not verify(repo).damaged


def operations(root: Path, world: int, tmp_path: Path, victim_is_root: bool = False) -> list[str]:
    copy = tmp_path / "count"
    shutil.copytree(root, copy)
    machine = Machine()
    machine.victim_is_root = victim_is_root
    each(crashed_save(copy, world, machine))
    assert machine.count > 20
    return machine.log


@pytest.mark.parametrize("mode", ["before", "after", "torn"])
def test_one_rank_stops_at_every_operation(good, tmp_path, mode):
    log = operations(good[1], 1, tmp_path)
    listed = []
    for at, name in enumerate(log, 1):
        if mode == "torn" and name != "write":
            continue
        root = tmp_path / f"{mode}{at}"
        shutil.copytree(good[1], root)
        machine = Machine(at, after=mode == "after", torn=mode == "torn")
        assert isinstance(crashed_save(root, 1, machine)[0], Crash)
        listed.append(ckpt.steps(root) == [1, 2])
        check_aftermath(root, 1)
        shutil.rmtree(root)
    assert not listed[0]
    assert mode == "torn" or listed[-1], "the sweep must have passed the commit point"
    assert listed == sorted(listed), "once committed, always committed"


@pytest.mark.parametrize("victim_is_root", [False, True], ids=["rank 1 dies", "rank 0 dies"])
def test_one_of_two_ranks_stops_at_every_operation(good, tmp_path, victim_is_root):
    log = operations(good[2], 2, tmp_path, victim_is_root)
    for at in itertools.count(1):
        root = tmp_path / f"at{at}"
        shutil.copytree(good[2], root)
        machine = Machine(at)
        machine.victim_is_root = victim_is_root
        results = crashed_save(root, 2, machine)
        victim, other = results if victim_is_root else reversed(results)
        if not machine.dead:  # past the end; which rank makes a directory, and so how many calls, is a race
            each(results)
            assert at > len(log) - 10
            break
        assert isinstance(victim, Crash)
        # The last operations of rank 0 come after the commit point; its peer still waits for its word.
        assert isinstance(other, ckpt.RankFailure), other
        check_aftermath(root, 2)
        shutil.rmtree(root)


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path) -> Path:
    """Steps 1 and 2 of two ranks; step 2 refers to step 1's pack for the frozen tensor."""
    where = tmp_path / "root"
    for step in (1, 2):
        save_all(job(step, 2, filled=True), where)
    assert not verify(Repository(LocalStore(str(where)))).findings
    return where


def attempt(root: Path, step: int) -> Path:
    return next(p for p in (root / "steps" / str(step)).iterdir() if p.is_dir())


def found_and_refused(root: Path, key: str, *, tensor: bool) -> None:
    """verify names the file; load refuses by name; fallback takes step 1 and says what it skipped."""
    findings = [f for f in verify(Repository(LocalStore(str(root)))).findings if f.severity == DAMAGE and f.step == 2]
    assert any(f.key == key and key in f.message for f in findings), findings
    if tensor:
        assert any("tensor '" in f.message or "object '" in f.message for f in findings)
    made = job(2, 2, filled=False)
    with pytest.raises(ckpt.CkptError, match=key) as caught:
        load_all(made, root)
    assert not tensor or "tensor '" in str(caught.value) or "object '" in str(caught.value)
    made = job(1, 2, filled=False)
    reports = load_all(made, root, fallback=True)
    assert [line for one in made for line in one.differences()] == []
    for report in reports:
        assert report.step == 1
        assert len(report.skipped) == 1
        assert report.skipped[0].startswith("step 2: ")
        assert key in report.skipped[0]


def every_chunk(root: Path) -> list[tuple[str, Path, int, int]]:
    """(identity, pack path, start, nbytes) of everything that step 2 wrote itself."""
    index = Repository(LocalStore(str(root))).read_index(2)
    mine = f"steps/2/{index.commit.attempt}/"
    found = []
    for part in index.parts:
        entries = [(str(index.specs[c.spec]), c) for c in part.chunks if c.pack >= 0]
        entries += [(f"object {o.name!r}", b) for o in part.objects
                    for b in (o.document, *(b for t in o.tensors for b in t.blobs))]  # fmt: skip
        for identity, entry in entries:
            key = part.packs[entry.pack].key
            if key.startswith(mine):
                found.append((identity, root / key, entry.start, entry.nbytes))
    return found


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def test_one_bit_flipped_in_any_file_is_found_and_named(root):
    files = sorted(p for p in (root / "steps" / "2").rglob("*") if p.is_file() and p.name != "attempt.json")
    assert len(files) == 6, "commit, root, two parts, two packs"
    for path in files:
        whole, key = path.read_bytes(), path.relative_to(root).as_posix()
        pack = path.suffix == ".safetensors"
        data_from = 8 + int.from_bytes(whole[:8], "little") if pack else 0
        for at in (data_from, (data_from + len(whole)) // 2, len(whole) - 2):
            flip(path, at, at % 8)
            found_and_refused(root, key, tensor=pack)
            path.write_bytes(whole)


def test_a_bit_flipped_in_a_pack_header_is_found_and_does_no_harm_to_a_load(root):
    """Readers find chunks through the index; a stranger's tool reads the header, so it is checked too."""
    for path in sorted((root / "steps" / "2").rglob("*.safetensors")):
        whole = path.read_bytes()
        for at in (0, 5, 8, 30, 60, 7 + int.from_bytes(whole[:8], "little")):
            flip(path, at)
            found = verify(Repository(LocalStore(str(root))))
            key = path.relative_to(root).as_posix()
            assert any(f.severity == DAMAGE and f.step == 2 and key in f.message for f in found.findings), at
            loads(root, 2, 2)
            path.write_bytes(whole)


def test_each_chunk_flipped_alone_is_named_by_its_own_tensor(root):
    for identity, path, start, nbytes in every_chunk(root):
        whole = path.read_bytes()
        flip(path, start + nbytes // 2)
        messages = [f.message for f in verify(Repository(LocalStore(str(root)))).findings if f.severity == DAMAGE]
        assert messages
        assert all(m.startswith(identity) for m in messages), (identity, messages)
        with pytest.raises(ckpt.CkptError, match=path.name) as caught:
            load_all(job(2, 2, filled=False), root)
        assert identity in str(caught.value)
        path.write_bytes(whole)


def test_one_byte_cut_off_or_added_anywhere_is_found(root):
    for path in sorted(p for p in (root / "steps" / "2").rglob("*") if p.is_file() and p.name != "attempt.json"):
        whole, key = path.read_bytes(), path.relative_to(root).as_posix()
        cuts = [whole[:-2], b""] if path.name == "commit.json" else [whole[:-1], whole + b"\0", b""]
        for data in cuts:
            path.write_bytes(data)
            found_and_refused(root, key, tensor=False)
        path.write_bytes(whole)


def test_a_pack_or_an_index_file_deleted_is_found(root):
    for path in sorted(p for p in attempt(root, 2).rglob("*") if p.is_file() and p.name != "attempt.json"):
        whole = path.read_bytes()
        path.unlink()
        found_and_refused(root, path.relative_to(root).as_posix(), tensor=path.suffix == ".safetensors")
        path.write_bytes(whole)


def test_two_chunks_of_equal_size_swapped_are_found(root):
    by_size: dict[tuple[Path, int], list[tuple[str, int]]] = {}
    for identity, path, start, nbytes in every_chunk(root):
        by_size.setdefault((path, nbytes), []).append((identity, start))
    pairs = [(path, n, *same[:2]) for (path, n), same in by_size.items() if len(same) > 1]
    assert pairs, "the model must have two chunks of equal size in one pack"
    for path, nbytes, (one, a), (two, b) in pairs:
        whole = path.read_bytes()
        data = bytearray(whole)
        data[a : a + nbytes], data[b : b + nbytes] = whole[b : b + nbytes], whole[a : a + nbytes]
        path.write_bytes(data)
        messages = " ".join(f.message for f in verify(Repository(LocalStore(str(root)))).findings)
        assert one in messages
        assert two in messages
        found_and_refused(root, path.relative_to(root).as_posix(), tensor=True)
        path.write_bytes(whole)


def test_the_index_of_another_attempt_is_found(root):
    """Another attempt at the same step, by another layout: well-formed, whole, and not what was committed."""
    first = attempt(root, 2)
    kept = {name: (first / "index" / name).read_bytes() for name in ("root.json.zst", "part-00000.json.zst")}
    save_all(job(3, 2, filled=True), root, step=2, overwrite=True)
    second = next(p for p in (root / "steps" / "2").iterdir() if p.is_dir() and p != first)
    for name, data in kept.items():
        path = second / "index" / name
        whole = path.read_bytes()
        path.write_bytes(data)
        found_and_refused(root, path.relative_to(root).as_posix(), tensor=False)
        path.write_bytes(whole)


def test_the_commit_of_another_step_is_found(root):
    commit = root / "steps" / "2" / "commit.json"
    commit.write_bytes((root / "steps" / "1" / "commit.json").read_bytes())
    found_and_refused(root, "steps/2/commit.json", tensor=False)


def test_damage_in_a_pack_of_an_earlier_step_is_damage_of_both(root):
    """Step 2 refers to step 1's bytes for the frozen tensor: falling back does not help, and that is said."""
    index = Repository(LocalStore(str(root))).read_index(2)
    places = {(p.packs[c.pack].key, c.start) for p in index.parts for c in p.chunks
              if c.pack >= 0 and p.packs[c.pack].key.startswith("steps/1/")}  # fmt: skip
    assert places
    key, start = sorted(places)[0]
    flip(root / key, start)
    findings = verify(Repository(LocalStore(str(root)))).findings
    assert {f.step for f in findings} == {1, 2}
    with pytest.raises(ckpt.NoSuchCheckpoint, match=r"no checkpoint is whole: step 2: .*; step 1: "):
        load_all(job(1, 2, filled=False), root, fallback=True)


def test_without_fallback_a_damaged_newest_step_is_never_replaced_in_silence(root):
    (root / "steps" / "2" / "commit.json").write_bytes(b"")
    made = job(1, 2, filled=False)
    with pytest.raises(ckpt.FormatError, match=r"steps/2/commit\.json"):
        load_all(made, root)
    assert made[0].differences(), "and nothing was placed"


def test_the_damaged_step_can_be_saved_again(root):
    (root / "steps" / "2" / "commit.json").write_bytes(b"")
    with pytest.raises(ckpt.CheckpointExists):
        save_all(job(2, 2, filled=True), root)
    save_all(job(2, 2, filled=True), root, overwrite=True)
    loads(root, 2, 2)
    assert not verify(Repository(LocalStore(str(root)))).damaged
