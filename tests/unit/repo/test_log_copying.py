from __future__ import annotations

import pytest

from ckpt.errors import CheckpointExists, DigestMismatch
from ckpt.repo.copying import copy_steps
from ckpt.repo.lineage import log_numbers
from ckpt.repo.repository import Repository
from ckpt.repo.verify import verify
from ckpt.store.local import LocalStore
from ckpt.store.memory import MemoryStore
from tests.harness.logged_jobs import LoggedJob, loaded, logged, two_logs, with_objects


def of_logs(store: MemoryStore) -> dict[str, bytes]:
    return {key: data for key, data in store.objects.items() if key.startswith("log/")}


def test_a_copy_of_the_newest_step_leads_to_the_same_last_step() -> None:
    src, dst = with_objects(two_logs()), MemoryStore()
    report = copy_steps(src, dst)
    assert (report.steps, report.logs, report.log_files_copied, report.log_files_present) == ([10], [1, 2], 5, 0)
    assert loaded(dst) == loaded(src)
    assert verify(Repository(dst)).findings == []
    assert sorted(key.rpartition("/")[2] for key in of_logs(dst) if key.endswith(".log")) == [
        f"{step:012d}.log" for step in range(11, 16)
    ]


def test_a_copy_of_all_steps_has_all_of_the_log() -> None:
    src, dst = with_objects(two_logs()), MemoryStore()
    copy_steps(src, dst, [0, 5, 10])
    assert of_logs(dst) == of_logs(src)
    assert loaded(dst, step=3) == loaded(src, step=3)


def test_an_earlier_step_takes_the_whole_way_along() -> None:
    src, dst = with_objects(two_logs()), MemoryStore()
    copy_steps(src, dst, [5])
    assert loaded(dst) == loaded(src)


def test_what_is_there_is_checked_and_not_copied_again() -> None:
    src, dst = with_objects(two_logs()), MemoryStore()
    first = copy_steps(src, dst)
    key = "log/000002/rank00000/000000000014.log"
    again = copy_steps(src, dst)
    assert (again.log_files_copied, again.log_bytes_copied) == (0, 0)
    assert (again.log_files_present, again.log_bytes_present) == (5, first.log_bytes_copied)
    dst.objects[key] = dst.objects[key][:-20] + b"x" * 20
    assert copy_steps(src, dst, verify=False).log_files_copied == 0
    mended = copy_steps(src, dst)
    assert (mended.log_files_copied, mended.log_files_present) == (1, 4)
    assert of_logs(dst)[key] == src.objects[key]


def test_a_log_that_has_grown_is_copied_again(tmp_path) -> None:
    src, dst = LocalStore(str(tmp_path / "a")), LocalStore(str(tmp_path / "b"))
    job = LoggedJob(src).train(3)
    job.keeper.flush()
    copy_steps(src, dst, [0])
    assert loaded(dst)[0] == 3
    weights = job.train(2).close()
    report = copy_steps(src, dst, [0])
    assert (report.present, report.log_files_copied) == ([0], 1)
    assert loaded(dst) == (5, weights)


def test_a_torn_end_is_left_out(tmp_path) -> None:
    src, dst = LocalStore(str(tmp_path / "a")), LocalStore(str(tmp_path / "b"))
    logged(src, 4)
    path = tmp_path / "a/log/000001/rank00000/000000000001.log"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    copy_steps(src, dst)
    assert loaded(dst)[0] == 3
    assert verify(Repository(dst)).findings == []
    path.write_bytes(whole[:-100] + bytes(100))  # all of it is there, and it is not what was to be written
    copy_steps(src, dst)
    assert loaded(dst)[0] == 3


def test_damage_in_the_middle_is_named_and_the_checkpoint_is_there() -> None:
    objects, key = two_logs(), "log/000002/rank00000/000000000014.log"
    src, dst = with_objects({**objects, key: objects[key][:500] + b"?" + objects[key][501:]}), MemoryStore()
    with pytest.raises(DigestMismatch, match=f"{key} in memory: the record of step 14"):
        copy_steps(src, dst)
    assert Repository(dst).steps() == [10]
    assert key not in dst.objects
    assert "log/000002/log.json" not in dst.objects
    assert loaded(dst)[0] == 12


def test_another_log_of_the_same_number_is_never_mixed_with_it() -> None:
    src, dst = with_objects(two_logs()), MemoryStore()
    logged(dst, 2)
    before = dict(dst.objects)
    with pytest.raises(CheckpointExists, match=r"log/000001/log\.json in memory is of another log"):
        copy_steps(src, dst, overwrite=True)
    assert dst.objects == before
    report = copy_steps(src, dst, logs=False)
    assert (report.steps, report.logs) == ([10], [])


def test_a_step_that_names_another_log_of_the_same_number_is_in_the_way() -> None:
    src, dst, third = with_objects(two_logs()), MemoryStore(), MemoryStore()
    logged(third, 8, full_every=7)
    copy_steps(third, dst, [7], logs=False)
    with pytest.raises(CheckpointExists, match="step 7 in memory names a log 1 that is not the one of memory"):
        copy_steps(src, dst)
    assert Repository(dst).steps() == [7]
    assert log_numbers(dst) == []


def test_without_logs_a_job_goes_on_with_a_log_of_a_new_number() -> None:
    src, dst = with_objects(two_logs()), MemoryStore()
    copy_steps(src, dst, [5, 10], logs=False)
    weights = logged(dst, 2)
    assert log_numbers(dst) == [2]
    assert loaded(dst) == (12, weights)
