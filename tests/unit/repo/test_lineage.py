from __future__ import annotations

import json

import pytest

from ckpt.errors import MalformedData, UnsupportedVersion
from ckpt.gradlog.history import history_of
from ckpt.repo.copying import copy_steps
from ckpt.repo.lineage import LogHead, begin_log, heads_of, log_behind, log_numbers, read_head, ways
from ckpt.repo.log_reach import reaches
from ckpt.repo.repository import Repository
from ckpt.repo.verify import verify
from ckpt.store.memory import MemoryStore
from tests.harness.logged_jobs import LoggedJob, loaded, logged, two_logs, with_objects

HEAD = {"format": 1, "number": 2, "start": 12, "world": 1, "attempt": "", "follows": 1, "created": ""}


def test_each_checkpoint_has_a_way_forward_along_both_logs() -> None:
    found = ways(with_objects(two_logs()))
    assert [(way.step, way.spans) for way in found] == [
        (0, ((1, 1, 12), (2, 13, None))),
        (5, ((1, 6, 12), (2, 13, None))),
        (10, ((1, 11, 12), (2, 13, None))),
    ]


def test_a_job_that_was_brought_back_by_name_continues_the_log_that_leads_there() -> None:
    store = with_objects(two_logs())
    objects = dict(store.objects)
    for step in (5, 10):
        del objects[f"steps/{step}/commit.json"]
    store.objects = objects
    job = LoggedJob(store, load_options={"step": 7})  # of log 1, though log 2 was begun last
    assert (job.number, read_head(store, 3).follows) == (7, 1)
    job.train(2).close()
    assert loaded(store) == (9, logged(MemoryStore(), 9))
    assert log_behind(store, 0, 9) == 3
    assert log_behind(store, 0, 7) == 1
    assert log_behind(store, 5, 7) is None


def test_a_log_that_begins_at_a_checkpoint_goes_on_from_the_one_that_passes_through_it() -> None:
    store = MemoryStore()
    logged(store, 10, full_every=5)  # nothing behind the last full save
    weights = logged(store, 3)
    head = read_head(store, 2)
    assert (head.start, head.follows, bool(head.attempt)) == (10, 1, True)
    assert [way.step for way in ways(store)] == [0, 5, 10]
    assert loaded(store) == (13, weights)
    assert loaded(store, step=7) == (7, logged(MemoryStore(), 7))
    store.delete("log/000001/rank00000/000000000010.log")  # was not durable yet, though the checkpoint is
    assert verify(Repository(store)).findings == []
    assert not history_of(store).damaged
    assert loaded(store) == (13, weights)


def test_a_damaged_commit_hides_no_other_checkpoint() -> None:
    store = with_objects({**two_logs(), "steps/5/commit.json": b"{"})
    assert [way.step for way in ways(store)] == [0, 10]
    assert loaded(store)[0] == 15


def test_a_number_that_a_commit_names_is_never_given_again() -> None:
    store, other = with_objects(two_logs()), MemoryStore()
    copy_steps(store, other, [5, 10], logs=False)
    assert log_numbers(other) == []
    assert reaches(other) == {}
    assert begin_log(other, LogHead(format=1, number=0, start=5, world=1)).number == 2


def test_only_names_that_a_release_gives_are_logs() -> None:
    store = MemoryStore()
    for name in ("1", "01", "000001", "1000000", "0000001", "x", "\u0661\u0661\u0661\u0661\u0661\u0661", "9" * 30):
        store.put(f"log/{name}/x", b"")
    assert log_numbers(store) == [1, 1000000]


@pytest.mark.parametrize(
    "changes",
    [
        {"follows": 2},
        {"follows": 3},
        {"follows": 0},
        {"follows": -1},
        {"start": -1},
        {"start": 10**18},
        {"start": 1 << 70},
        {"world": 0},
        {"world": -3},
        {"world": 1 << 21},
        {"number": 1},
        {"number": "2"},
        {"start": None},
    ],
)
def test_a_head_that_says_what_cannot_be_is_refused(changes) -> None:
    store = with_objects({"log/000002/log.json": json.dumps({**HEAD, **changes}).encode()})
    with pytest.raises(MalformedData, match=r"log/000002/log\.json"):
        heads_of(store)


def test_a_log_that_begins_before_the_one_that_it_follows_is_refused() -> None:
    first = json.dumps({**HEAD, "number": 1, "follows": None, "start": 13}).encode()
    store = with_objects({"log/000001/log.json": first, "log/000002/log.json": json.dumps(HEAD).encode()})
    with pytest.raises(MalformedData, match="begins behind step 12, but follows log 1, which begins behind step 13"):
        heads_of(store)


def test_a_newer_version_is_refused_by_name() -> None:
    store = with_objects({"log/000002/log.json": json.dumps({**HEAD, "format": 2}).encode()})
    with pytest.raises(UnsupportedVersion, match="has format 2, this release reads 1"):
        heads_of(store)
