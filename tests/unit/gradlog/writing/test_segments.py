"""The thread that makes records durable: groups, files, and who waits for whom."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from ckpt.errors import StoreFull
from ckpt.format.frames import frame_of
from ckpt.gradlog.writing.segments import SegmentWriter
from ckpt.repo.log_files import files_of, places_in, scan
from ckpt.store.local import LocalStore
from ckpt.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt.store.base import Buffer, Store

KEY = "log/000001"


def record(step: int, nbytes: int = 100) -> Callable[[], list[Buffer]]:
    return lambda: frame_of(step, [bytes([step % 251]) * nbytes])


def written(store: Store) -> dict[int, list[int]]:
    """First step of each file -> steps in it."""
    return {
        first: [place.step for place in places_in(store, key) if not isinstance(place, str)]
        for first, key in files_of(store, 1, 0)
    }


def writer(store: Store, **options: int) -> SegmentWriter:
    return SegmentWriter(store, KEY, 0, **{"flush_every": 1, "budget": 10_000, **options})


@pytest.mark.parametrize(
    ("flush_every", "objects", "grown"),
    [
        (1, {1: [1], 2: [2], 3: [3], 4: [4], 5: [5]}, {1: [1, 2, 3], 4: [4, 5]}),
        (2, {1: [1, 2], 3: [3], 4: [4, 5]}, {1: [1, 2, 3], 4: [4, 5]}),
        (9, {1: [1, 2, 3], 4: [4, 5]}, {1: [1, 2, 3], 4: [4, 5]}),
    ],
)
def test_groups_are_objects_and_grow_files_where_a_store_can_append(flush_every, objects, grown, tmp_path) -> None:
    for store, expected in ((MemoryStore(), objects), (LocalStore(str(tmp_path)), grown)):
        one = writer(store, flush_every=flush_every)
        for step in range(1, 6):
            if step == 4:
                one.rotate()
            one.submit(step, 100, record(step))
        one.close()
        assert written(store) == expected
        assert one.durable == 5
        assert scan(store, 1, 0, 1, None).last == 5


def test_a_file_is_not_longer_than_asked_for(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    one = writer(store, segment_bytes=400)
    for step in range(1, 6):
        one.submit(step, 100, record(step))
    one.close()
    assert written(store) == {1: [1, 2], 3: [3, 4], 5: [5]}


class Slow(MemoryStore):
    """A store that waits to be let go on."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.asked = threading.Event()

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> None:
        self.asked.set()
        assert self.gate.wait(30)
        super().put(key, data, overwrite=overwrite)


def test_who_has_more_than_the_budget_waits_for_the_store() -> None:
    store = Slow()
    one = writer(store, budget=250)
    one.submit(1, 100, record(1))
    assert store.asked.wait(30)
    one.submit(2, 100, record(2))
    third = threading.Thread(target=one.submit, args=(3, 100, record(3)))
    third.start()
    third.join(0.2)
    assert third.is_alive()
    assert one.waited >= 1
    store.gate.set()
    third.join(30)
    assert not third.is_alive()
    one.close()
    assert sorted(written(store)) == [1, 2, 3]


def test_one_record_larger_than_the_budget_is_stored_all_the_same() -> None:
    store = MemoryStore()
    one = writer(store, budget=10)
    one.submit(1, 5000, record(1, 5000))
    one.submit(2, 5000, record(2, 5000))
    one.close()
    assert sorted(written(store)) == [1, 2]


def test_a_group_that_is_not_full_does_not_hold_up_who_waits_for_room() -> None:
    store = MemoryStore()
    one = writer(store, flush_every=10, budget=250)
    for step in range(1, 6):
        one.submit(step, 100, record(step))
    one.flush()
    assert one.durable == 5
    one.close()


class Full(MemoryStore):
    """A store that has no room from the second object on."""

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> None:
        if self.children(KEY):
            raise StoreFull("no space left", key)
        super().put(key, data, overwrite=overwrite)


def test_a_failure_ends_the_writing_and_nobody_waits_for_ever() -> None:
    store = Full()
    one = writer(store, budget=150)
    for step in range(1, 8):
        one.submit(step, 100, record(step))
    one.flush()
    assert isinstance(one.failed, StoreFull)
    assert one.durable == 1
    one.close()


def test_what_cannot_be_framed_ends_the_writing() -> None:
    def bad() -> list[Buffer]:
        raise ValueError("no frame")

    one = writer(MemoryStore())
    one.submit(1, 10, record(1))
    one.submit(2, 10, bad)
    one.submit(3, 10, record(3))
    one.close()
    assert isinstance(one.failed, ValueError)
    assert one.durable == 1
