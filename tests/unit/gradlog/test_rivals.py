"""Two jobs on one root: each is told of the other, and neither counts in silence on a log that is not loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ckpt
from ckpt.gradlog import rivals
from ckpt.gradlog.rivals import taken_over, tell_of_others
from ckpt.repo.lineage import read_head
from ckpt.store.limited import limited
from ckpt.store.local import LocalStore
from ckpt.store.memory import MemoryStore
from tests.harness.logged_jobs import LoggedJob, loaded, logged

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_log_that_is_being_written_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = LocalStore(str(tmp_path))
    job = LoggedJob(store).train(2)
    job.keeper.flush()
    key = "log/000001/rank00000/000000000001.log"
    assert tell_of_others(limited(store, 1e9), 0.0) == key
    assert f"{key} in {store.url} is being written to: another job" in caplog.text
    job.close()
    assert tell_of_others(store, 0.0) is None


def test_a_writer_that_dies_in_time_is_no_other_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(str(tmp_path))
    job = LoggedJob(store).train(1)
    job.keeper.flush()
    monkeypatch.setattr(rivals.time, "sleep", lambda _seconds: job.close())
    assert tell_of_others(store, 60.0) is None


def test_a_store_without_locks_says_nothing_of_writers() -> None:
    store = MemoryStore()
    LoggedJob(store).train(1).keeper.flush()
    assert tell_of_others(store, 60.0) is None


def test_a_job_that_starts_beside_another_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rivals.tell_of_others, "__defaults__", (0.0,))
    first = LoggedJob(tmp_path).train(2)
    first.keeper.flush()
    second = LoggedJob(tmp_path).train(1)
    assert "another job (or one that was not closed) logs to this root" in caplog.text
    first.close()
    second.close()


def test_a_job_whose_root_was_taken_over_says_so_and_begins_a_log_that_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = LoggedJob(tmp_path, full_every=4).train(2)
    first.keeper.flush()
    logged(tmp_path, 1, lr=1e-4)  # goes on from step 2 in log 2
    assert "another job has begun" not in caplog.text
    first.train(2)  # a full save
    text = f"another job has begun log 2 in {LocalStore(str(tmp_path)).url} since this one began log 1"
    assert text in caplog.text
    weights = first.train(1).close()
    store = LocalStore(str(tmp_path))
    assert (read_head(store, 3).start, read_head(store, 3).follows) == (4, None)
    assert loaded(tmp_path) == (5, weights)
    assert ckpt.steps(tmp_path)[-1] == 4


def test_what_makes_a_log_the_last_one() -> None:
    store = MemoryStore()
    logged(store, 1)
    head = read_head(store, 1)
    assert taken_over(store, head) == ""
    store.put("log/000002/rank00000/000000000001.log", b"")  # a copy that has not come to its end
    assert taken_over(store, head) == ""
    store.put("log/000002/log.json", b"{")
    assert "log 2" in taken_over(store, head)
