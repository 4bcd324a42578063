from __future__ import annotations

import json

import pytest
import torch

import ckpt
from ckpt.errors import MalformedData, ReplayError, UnsupportedVersion
from ckpt.gradlog.history import history_of
from ckpt.repo.copying import copy_steps
from ckpt.repo.lineage import LogHead, begin_log, heads_of, known_heads, log_behind, log_numbers, read_head, ways
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


LOG_1, LOG_2 = "log/000001/log.json", "log/000002/log.json"


def three_logs() -> dict[str, bytes]:
    """Those of :func:`two_logs`, and a third that was begun anew at step 5 and has checkpoints of its own."""
    store = with_objects(two_logs())
    job = LoggedJob(store, load_options={"step": 5}, full_every=5).train(11)
    job.keeper.flush()
    job.close()
    return dict(store.objects)


def test_a_damaged_head_that_the_newest_history_does_not_need_is_left_out() -> None:
    objects = three_logs()
    sound = loaded(with_objects(objects))
    assert sound[0] == 16
    for keys in ([LOG_2], [LOG_1], [LOG_1, LOG_2]):  # log 3 follows log 1, and has a checkpoint behind it
        store = with_objects({**objects, **dict.fromkeys(keys, b"{")})
        assert loaded(store) == sound
        assert set(known_heads(store).damaged) == {int(key[4:10]) for key in keys}
        assert [way.step for way in ways(store)][-1] == 15
        job = LoggedJob(store)
        assert (job.number, job.train(1).number) == (16, 17)
        job.close()
        assert loaded(store)[0] == 17
        assert read_head(store, 4).follows == 3


@pytest.mark.parametrize("data", [b"", b"{", b'{"format": 2}', b'{"format": 1, "number": 7, "start": 3, "world": 1}'])
def test_a_damaged_head_that_may_hide_a_newer_history_is_an_error_that_says_how_to_go_on(data: bytes) -> None:
    store = with_objects({**two_logs(), LOG_2: data})
    with pytest.raises(ReplayError, match=r"log/000002/log\.json.*where log 2 belongs is not known") as caught:
        loaded(store)
    assert "replay=False or the step= of a checkpoint" in str(caught.value)
    for step in (None, 7):  # log 2 may have another step 7
        with pytest.raises(ReplayError):
            LoggedJob(store, load_options={} if step is None else {"step": step})
    assert loaded(store, replay=False)[0] == loaded(store, step=10)[0] == 10
    assert loaded(store, fallback=True) == (12, loaded(with_objects(two_logs()), step=12)[1])
    assert loaded(store, fallback=True, step=7)[0] == 7


@pytest.mark.parametrize("options", [{"replay": False}, {"fallback": True}])
def test_a_job_goes_on_without_what_is_damaged_and_then_needs_it_no_more(options: dict[str, bool]) -> None:
    store = with_objects({**two_logs(), LOG_2: b"{"})
    job = LoggedJob(store, load_options=options)
    start = 10 if "replay" in options else 12
    assert job.number == start
    assert any("where log 2 belongs is not known" in note for note in job.keeper.resumed.notes) is (
        "fallback" in options
    )
    weights = job.train(2).close()
    assert (read_head(store, 3).start, read_head(store, 3).follows) == (start, 1)
    assert loaded(store) == (start + 2, weights)


def test_a_damaged_head_at_which_the_newest_history_begins_does_not_send_the_job_back_in_time() -> None:
    objects = two_logs()
    with pytest.raises(ReplayError, match="where log 1 belongs is not known"):  # log 2 has no checkpoint of its own
        loaded(with_objects({**objects, LOG_1: b"{"}))
    with pytest.raises(MalformedData, match="where log 1 belongs is not known"):  # nothing that can be read leads to it
        loaded(with_objects({**objects, LOG_1: b"{"}), step=7, fallback=True)
    with pytest.raises(MalformedData, match="where log 1 belongs"):
        copy_steps(with_objects({**objects, LOG_1: b"{"}), MemoryStore(), [10])


def test_what_logs_say_of_their_run_is_a_number_and_no_path() -> None:
    for run in ("../../x", "0" * 31, "G" * 32, "A" * 32):
        with pytest.raises(MalformedData, match=r"expected 32 hexadecimal digits"):
            heads_of(with_objects({LOG_2: json.dumps({**HEAD, "run": run}).encode()}))


def test_a_log_that_has_lost_its_head_is_not_left_out_in_silence() -> None:
    store = with_objects(two_logs())
    store.delete(LOG_2)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias]}])
    report = ckpt.load((model, optimizer), store)
    assert report.step == 12
    assert report.notes == ("log 2 has records and no log.json: where it belongs is not known, and it is left out",)
