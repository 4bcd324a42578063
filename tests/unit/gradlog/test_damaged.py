"""What is damaged or lost around a log, told by its name, and the job goes on where it can."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

import ckpt
from ckpt.cli.log_document import document_of
from ckpt.errors import ReplayError
from ckpt.gradlog.history import history_of
from tests.harness.logged_jobs import changed_record, loaded, logged, two_logs, with_objects
from tests.unit.gradlog.test_checkpointer import Loop, equal

if TYPE_CHECKING:
    from pathlib import Path

HEAD = "log/000002/rank00000/head.json"
RECORD = "log/000002/rank00000/000000000014.log"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"format": 1, "ra', "log/000002/rank00000/head.json: Input data was truncated"),
        (b"", "log/000002/rank00000/head.json"),
        (b'{"format": 1, "rank": 3, "world": 1}', "of version 1 and rank 3 of 1, expected 1 and 0 of 1"),
        (json.dumps({"format": 1, "rank": 0, "world": 1, "run": "0" * 32}).encode(), f"of run {'0' * 32}, expected "),
    ],
)
def test_a_damaged_head_of_a_rank_is_named_with_the_last_sound_step(data: bytes, words: str) -> None:
    store = with_objects({**two_logs(), HEAD: data})
    with pytest.raises(ReplayError, match="what rank 0 says of its part of log 2 cannot be read: log/000002") as caught:
        loaded(store)
    assert words in str(caught.value)
    assert str(caught.value).endswith("step=12 is as far as the log is sound")
    assert loaded(store, step=12) == loaded(store, fallback=True) == (12, logged(with_objects({}), 12))


def test_a_head_that_lacks_what_a_replay_needs_is_named(caplog: pytest.LogCaptureFixture) -> None:
    objects = two_logs()
    said = {k: v for k, v in json.loads(objects[HEAD]).items() if k != "kernels"}
    store = with_objects({**objects, HEAD: json.dumps(said).encode()})
    with pytest.raises(ckpt.FormatError, match=r"log/000002/rank00000/head\.json: not a RankHead"):
        loaded(store)
    assert "step 10 or what leads on from it to step 15 (log 1, 2) is damaged" in caplog.text
    assert loaded(store, fallback=True)[0] == 10


def test_a_record_of_another_run_is_named_with_the_last_sound_step() -> None:
    objects = two_logs()
    objects[RECORD] = changed_record(objects[RECORD], lambda record: record.__replace__(run="0" * 32))
    store = with_objects(objects)
    right = json.loads(objects["log/000002/log.json"])["run"]
    with pytest.raises(ReplayError, match=f"000000000014.log: the record of step 14: of run {'0' * 32}, expected") as e:
        loaded(store)
    assert right in str(e.value)
    assert "step=13 is as far" in str(e.value)
    assert loaded(store, fallback=True)[0] == 13
    (part,) = history_of(store).logs[-1].ranks
    assert any(right in text for text in part.troubles)


def test_damage_right_behind_the_newest_checkpoint_is_told() -> None:
    objects, key = two_logs(), "log/000001/rank00000/000000000011.log"
    objects[key] = objects[key][:-8] + bytes(8)
    store = with_objects(objects)
    with pytest.raises(ReplayError, match=r"the record of step 11 .*step=10 is as far as the log is sound"):
        loaded(store)
    assert loaded(store, fallback=True)[0] == loaded(store, step=10)[0] == 10


@pytest.mark.parametrize(("number", "reaches"), [(1, None), (2, 12)])
def test_what_a_log_shows_when_another_cannot_be_read(number: int, reaches: int | None) -> None:
    key = f"log/{number:06d}/log.json"
    history = history_of(with_objects({**two_logs(), key: b"{"}))
    document = document_of("", history, None, None)
    assert (history.damaged, history.reaches) == (True, reaches)
    assert [one["log"] for one in document["unread"]] == [number]
    assert key in document["unread"][0]["why"]
    assert [one["number"] for one in document["logs"]] == [3 - number]


def test_a_root_that_is_removed_under_the_job_is_noticed_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, loop = tmp_path / "root", Loop()
    with ckpt.Checkpointer(loop.engine, root, full_every=100) as keeper:
        loop.train(3, 0, keeper)
        keeper.flush()
        shutil.rmtree(root)
        loop.train(1, 3, keeper)
        with pytest.raises(ReplayError, match="was removed or moved while it was being written to"):
            keeper.flush()
        loop.train(4, 4, keeper)
        assert keeper.last_full == 5
    assert "ends behind step" in caplog.text
    again = Loop(seed=9)
    report: Any = ckpt.load(again.engine, root)
    assert (report.step, report.base, report.exact) == (8, 5, True)
    assert equal(again.state(), loop.state())
