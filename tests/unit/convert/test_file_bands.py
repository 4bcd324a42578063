"""Files side by side: how many, and in which order their wants come."""

from __future__ import annotations

import pytest

from ckpt.convert.file_bands import LONG, MOST, WIDE, Lane, merged, width_of
from ckpt.errors import MalformedData, StoreError
from ckpt.layout.box import Box
from ckpt.layout.spec import Shard, TensorSpec
from ckpt.store.blocks import Blocks
from ckpt.store.memory import MemoryStore


def want(name: str, start: int, count: int) -> Shard:
    return Shard(TensorSpec(name, "param", "uint8", (1 << 40,)), Box((start,), (count,)))


def test_files_of_long_wants_are_written_one_by_one() -> None:
    assert width_of([want("a", 0, LONG)]) == 1
    assert width_of([want("a", 0, 10), want("b", 0, 0)]) == MOST
    assert width_of([]) == MOST
    assert width_of([want("a", 0, LONG // 2)]) == 4
    few, many = want("a", 0, 2 * LONG), [want("b", n, 8) for n in range(1000)]
    assert width_of([few, *many]) == 1  # most bytes lie in the long one


def test_of_small_files_that_take_no_memory_many_are_written_at_once() -> None:
    wants = [want("a", n, 8) for n in range(10)]
    assert width_of(wants, 1 << 20, wide=WIDE) == WIDE
    assert width_of(wants, 64 << 20, wide=WIDE) == 16
    assert width_of(wants, 1 << 30, wide=WIDE) == width_of(wants, 1 << 20) == MOST
    assert width_of([want("a", 0, LONG // 8)], 1 << 20, wide=WIDE) == 16


def test_wants_of_one_tensor_come_together_and_each_file_keeps_its_order() -> None:
    files = [
        [want("a", 0, 2), want("b", 0, 2), want("a", 9, 1)],
        [want("a", 2, 2), want("c", 0, 1), want("b", 2, 2)],
        [want("c", 1, 1)],
    ]
    found = list(merged(files))
    for number, wants in enumerate(files):
        assert [w for n, w in found if n == number] == wants
    names = [(n, w.spec.fqn, w.box.offsets[0]) for n, w in found]
    assert names[:3] == [(0, "a", 0), (1, "a", 2), (0, "b", 0)]
    assert (1, "c", 0) in names[3:]


def test_a_lane_tells_what_its_file_failed_with() -> None:
    store = MemoryStore()

    def write(out, feed) -> None:
        for data in feed([]):
            if bytes(data) == b"bad":
                raise StoreError("no", "k")
            out(data)
        if not total:
            raise MalformedData("too few")

    total = 2
    lane = Lane(store, "k", 2, Blocks(1 << 24), write, lambda nbytes: None)
    lane.give(b"x")
    lane.give(memoryview(b"y"))
    lane.close()
    assert (lane.error, store.objects) == (None, {"k": b"xy"})
    lane = Lane(store, "l", 2, Blocks(1 << 24), write, lambda nbytes: None)
    with pytest.raises(StoreError, match="no"):
        lane.give(b"bad")
    lane.close()
    total = 0
    lane = Lane(store, "m", 2, Blocks(1 << 24), write, lambda nbytes: None)
    lane.close()
    assert isinstance(lane.error, MalformedData)
    assert list(store.objects) == ["k"]
