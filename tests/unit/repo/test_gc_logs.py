from __future__ import annotations

import json

import pytest

from ckpt.errors import FormatError
from ckpt.gradlog.retention import retire
from ckpt.repo.gc import collect
from ckpt.repo.log_needs import EMPTY, GIVEN_UP, LOG
from ckpt.repo.repository import Repository
from ckpt.repo.verify import verify
from ckpt.store.local import LocalStore
from tests.harness.logged_jobs import LoggedJob, loaded, logged, two_logs, with_objects


def of_logs(store) -> set[str]:
    return {info.key for info in store.walk("log")}


def removed(store, older_than: float = 0, **options) -> set[tuple[str, str]]:
    return {(one.kind, one.key) for one in collect(store, older_than, **options).removed}


def moved_log(objects: dict[str, bytes], number: int, **changes) -> dict[str, bytes]:
    """A copy of log 1 under another number."""
    found = {k.replace("log/000001", f"log/{number:06d}"): v for k, v in objects.items() if k.startswith("log/000001/")}
    key = f"log/{number:06d}/log.json"
    found[key] = json.dumps({**json.loads(found[key]), "number": number, **changes}).encode()
    return found


def test_what_leads_from_a_checkpoint_to_a_later_step_is_never_garbage() -> None:
    store = with_objects(two_logs())
    before, end = of_logs(store), loaded(store)
    assert removed(store) == set()
    assert of_logs(store) == before
    assert loaded(store) == end
    assert end[0] == 15


def test_an_empty_log_that_nothing_follows_goes() -> None:
    store = with_objects(two_logs())
    LoggedJob(store).close()  # log 3, killed before its first step
    weights = logged(store, 2)  # goes on from log 2
    assert removed(store) == {(EMPTY, "log/000003")}
    assert loaded(store) == (17, weights)


def test_an_empty_log_on_the_way_is_needed_for_its_head() -> None:
    store = with_objects(two_logs())
    LoggedJob(store).close()
    weights = logged(store, 2)
    head = json.loads(store.get("log/000004/log.json"))
    store.put("log/000004/log.json", json.dumps({**head, "follows": 3}).encode(), overwrite=True)
    assert removed(store) == set()
    assert loaded(store) == (17, weights)


def test_a_log_that_no_checkpoint_leads_to_and_one_without_records_go() -> None:
    objects = two_logs()
    lost = moved_log(objects, 8, start=100)
    empty = {k: v for k, v in moved_log(objects, 9, start=100).items() if not k.endswith(".log")}
    store = with_objects({**objects, **lost, **empty})
    assert removed(store, dry_run=True) == {(LOG, "log/000008"), (EMPTY, "log/000009")}
    assert of_logs(store) == of_logs(with_objects(objects)) | set(lost) | set(empty)
    assert removed(store) == {(LOG, "log/000008"), (EMPTY, "log/000009")}
    assert of_logs(store) == of_logs(with_objects(objects))
    assert loaded(store)[0] == 15


def test_a_log_of_a_training_that_was_begun_anew_goes(tmp_path) -> None:
    store = LocalStore(str(tmp_path))
    logged(store, 4, full_every=3)
    weights = logged(store, 5, resume=False, lr=1e-3)
    assert (GIVEN_UP, "log/000001") in removed(store)
    assert not (tmp_path / "log/000001").exists()
    assert loaded(store) == (5, weights)
    assert Repository(store).steps() == [0, 3]
    assert verify(Repository(store)).findings == []


def test_files_of_steps_that_were_taken_anew_go_and_those_before_stay(tmp_path) -> None:
    store = LocalStore(str(tmp_path))
    logged(store, 12, full_every=5)
    job = LoggedJob(store, load_options={"step": 3}).train(4)
    weights = job.close()
    there = "log/000001/rank00000"
    assert removed(store) == {(GIVEN_UP, f"{there}/000000000006.log"), (GIVEN_UP, f"{there}/000000000011.log")}
    assert (tmp_path / there / "000000000001.log").exists()
    assert loaded(store, step=7) == (7, weights)
    assert removed(store) == set()


def test_records_before_the_oldest_checkpoint_go() -> None:
    store = with_objects(two_logs())
    store.delete("steps/0/commit.json")
    found = removed(store)
    assert {key for kind, key in found if kind == LOG} == {
        f"log/000001/rank00000/{step:012d}.log" for step in range(1, 6)
    }
    assert loaded(store)[0] == 15


def test_what_is_young_stays(tmp_path) -> None:
    store = LocalStore(str(tmp_path))
    logged(store, 1, full_every=1)
    logged(store, 1, resume=False)
    report = collect(store, 3600)
    kept = [one for one in report.kept if one.key == "log/000001"]
    assert [(one.kind, one.kept) for one in kept] == [(GIVEN_UP, "may be at work: younger than asked for")]
    assert (tmp_path / "log/000001/log.json").exists()


def test_a_log_that_cannot_be_read_may_go_on_from_any_before_it_so_those_stay() -> None:
    objects = {**two_logs(), "log/000004/log.json": b"{"}
    lost = {**moved_log(objects, 3, start=100), **moved_log(objects, 8, start=100)}
    after = moved_log(objects, 9, start=100, follows=4)
    store = with_objects({**objects, **lost, **after})
    before = of_logs(store)
    report = collect(store, 0)
    assert {(one.kind, one.key) for one in report.removed} == {(LOG, "log/000008")}
    assert of_logs(store) == {key for key in before if not key.startswith("log/000008/")}
    assert {one.key: one.kept for one in report.kept} == {
        "log/000003": "log 4, whose log.json cannot be read, may go on from it",
        "log/000004": "log/000004/log.json cannot be read, so nobody knows what leads to it",
        "log/000009": "it follows a log whose log.json cannot be read",
    }


def test_retention_keeps_what_a_damaged_head_may_need(caplog) -> None:
    store = with_objects({**two_logs(), "log/000002/log.json": b"{"})
    job = LoggedJob(store, load_options={"fallback": True}, full_every=3, keep=1)
    job.train(7).close()
    assert "old checkpoints could not be removed" not in caplog.text
    assert Repository(store).steps() == [19]
    assert not any(key.startswith(("log/000001/", "log/000002/")) for key in of_logs(store))  # both are of the past
    store.put("log/000009/log.json", b"{")  # this may be of the present
    before = of_logs(store)
    with pytest.raises(FormatError, match="where log 9 belongs is not known"):
        retire(store, 1)
    assert of_logs(store) == before


def test_records_whose_head_is_lost_stay_and_so_does_what_follows_them() -> None:
    store = with_objects(two_logs())
    logged(store, 1)
    store.delete("log/000002/log.json")
    before = of_logs(store)
    report = collect(store, 0)
    assert of_logs(store) >= {key for key in before if "log/000001" not in key}
    assert {one.key: one.kept for one in report.kept} == {
        "log/000002": "log/000002/log.json is not there, so nobody knows what leads to it",
        "log/000003": "it follows a log whose log.json is not there",
    }


def test_an_interrupted_collection_is_finished_by_the_next(monkeypatch) -> None:
    objects = two_logs()
    store = with_objects({**objects, **moved_log(objects, 8, start=100)})
    delete, done = store.delete, []

    def stop(key: str) -> None:
        if len(done) == 5:
            raise KeyboardInterrupt
        done.append(key)
        delete(key)

    monkeypatch.setattr(store, "delete", stop)
    with pytest.raises(KeyboardInterrupt):
        collect(store, 0)
    monkeypatch.undo()
    assert {key for key in store.objects if key.endswith(".json")} >= {"log/000008/log.json"}
    assert removed(store) == {(LOG, "log/000008")}
    assert of_logs(store) == of_logs(with_objects(objects))
