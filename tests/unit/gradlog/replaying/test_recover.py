"""A load goes as far as the records of all ranks are of the same steps, and says why they are not, or why it stops."""

from __future__ import annotations

import functools
import json
import logging
from typing import TYPE_CHECKING

import msgspec
import pytest

from ckpt.compact.job import Options, compact
from ckpt.errors import ReplayError
from ckpt.gradlog.copies.near import Near
from ckpt.gradlog.history import history_of
from ckpt.gradlog.record import DOCUMENT, Record, decode
from ckpt.gradlog.replaying.recover import Recovery, find_recovery
from ckpt.repo.log_files import scan, segment_key
from ckpt.runtime.comm import Comm
from ckpt.store.memory import MemoryStore
from tests.harness.logged_jobs import changed_record, frames_in, logged, on_two_ranks, parts_of, with_objects

if TYPE_CHECKING:
    from ckpt.store.base import Store

STEPS = 7
KEY = "log/000001"


@functools.cache
def _of_two() -> tuple[tuple[str, bytes], ...]:
    store = MemoryStore()
    logged(store, STEPS)
    return tuple(on_two_ranks(store.objects).items())


def of_two() -> dict[str, bytes]:
    return dict(_of_two())


def idle(objects: dict[str, bytes], rank: int, step: int) -> dict[str, bytes]:
    """Return the same with a record as a call writes it behind which there is no step."""
    ((_, payload),) = frames_in(objects[segment_key(KEY, rank, step - 1)])
    before = decode(parts_of(payload)[DOCUMENT], Record, "a record")
    key = segment_key(KEY, rank, step)
    changed = changed_record(
        objects[key], lambda record: msgspec.structs.replace(record, calls=(), square=None, objects=before.objects)
    )
    return {**objects, key: changed}


def without(objects: dict[str, bytes], rank: int, first: int) -> dict[str, bytes]:
    """Return the same without the records of a rank from a step on."""
    gone = {segment_key(KEY, rank, step) for step in range(first, STEPS + 1)}
    return {key: data for key, data in objects.items() if key not in gone}


def recovery(store: Store, step: int | None = None) -> Recovery:
    return find_recovery(Comm(None, 0, 1), store, step, lenient=False)[0]


def test_ordinary_ends_are_not_worth_a_word() -> None:
    found = recovery(with_objects(of_two()))
    assert (found.step, found.notes) == (STEPS, ())
    found = recovery(with_objects(without(of_two(), 1, STEPS)))
    assert (found.step, found.notes) == (STEPS - 1, ())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_call_too_many_on_one_rank_ends_the_log_of_all(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    store = with_objects(idle(of_two(), rank, 5))
    with caplog.at_level(logging.WARNING, "ckpt"):
        found = recovery(store)
    words = f"log 1: step 5 was taken on rank {1 - rank} and skipped on rank {rank}: "
    assert found.step == 4
    assert [note.startswith(words) and note.endswith("ends behind step 4") for note in found.notes] == [True]
    assert [line.startswith(words) for line in caplog.messages] == [True]
    assert recovery(store, 3).notes == ()
    with pytest.raises(
        ReplayError, match=r"step 6 cannot be reached: .* behind step 4; log 1: step 5 was taken on rank"
    ):
        recovery(store, 6)
    history = history_of(store)
    assert (history.reaches, history.damaged) == (4, False)
    assert [one.step for one in history.steps if one.reached] == [1, 2, 3, 4]
    assert history.logs[0].parted(1) is not None
    said = compact(store, Options(dry_run=True))
    assert said.step == 4
    assert any(note.startswith(words) for note in said.notes)


def test_damage_behind_such_a_step_does_not_count() -> None:
    objects = idle(of_two(), 1, 4)
    key = segment_key(KEY, 0, 6)
    store = with_objects({**objects, key: objects[key][:-16] + bytes(16)})
    found = recovery(store)
    assert found.step == 3
    assert len(found.notes) == 1
    with pytest.raises(ReplayError, match="step 6 is not what was written"):
        recovery(with_objects({**of_two(), key: store.objects[key]}))


def test_a_rank_that_steps_nothing_is_not_asked() -> None:
    objects = of_two()
    for step in range(1, STEPS + 1):
        objects = idle(objects, 1, step) if step > 1 else objects
        key = segment_key(KEY, 1, step)
        objects[key] = changed_record(
            objects[key], lambda record: msgspec.structs.replace(record, calls=(), samples=(), square=None)
        )
    found = recovery(with_objects(objects))
    assert (found.step, found.notes) == (STEPS, ())


@pytest.mark.parametrize("first", [1, 4])
def test_a_rank_whose_newest_records_are_gone_is_told(first: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ckpt"):
        found = recovery(with_objects(without(of_two(), 1, first)))
    assert found.step == first - 1
    (note,) = found.notes
    assert note.startswith("log 1: the records of rank 1 ")
    assert f"those of rank 0 go on to step {STEPS}" in note
    assert caplog.messages == [note]


def test_words_of_records_that_are_near_are_read_there() -> None:
    class Counting(MemoryStore):
        url = "s3://bucket/run"
        read = 0

        def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
            data = super().get(key, start, nbytes)
            self.read += len(data) if key.endswith(".log") and nbytes != 64 else 0
            return data

    store = Counting()
    store.objects = idle(of_two(), 1, 5)
    run = json.loads(store.objects[f"{KEY}/log.json"])["run"]
    near = Near(None, 1 << 30)
    plain = scan(store, 1, 1, 1, None)
    store.read = 0
    found = scan(
        store, 1, 1, 1, None, lambda one: near.is_sound(store, run, 1, one), lambda one: near.beside(run, 1, one)
    )
    size = sum(len(data) for key, data in store.objects.items() if "/rank00001/" in key and key.endswith(".log"))
    assert found == plain
    assert (found.taking.skipped, found.taking.idle, found.taking.steps) == ([(5, 5)], [(5, 5)], True)
    assert store.read <= size
