"""Reading once in one random layout what another has saved, with hardly any memory to do it in."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.errors import StoreError
from ckpt.format.manifest import DERIVED
from ckpt.repo.repository import Repository
from ckpt.store.memory import MemoryStore
from tests.property.fake import comms, engines, load_all, run_ranks, save_all
from tests.property.test_any_to_any import layouts, models

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


def cramped(ahead: int, span: int) -> ExitStack:
    """Units of a few bytes, and few of them on their way."""
    stack = ExitStack()
    stack.enter_context(mock.patch("ckpt.runtime.broadcast.AHEAD", ahead))
    stack.enter_context(mock.patch("ckpt.runtime.restoring.span_for", return_value=span))
    stack.enter_context(mock.patch("ckpt.plan.local_plan.CHUNK_BYTES", 16))
    return stack


def stored_bytes(store: MemoryStore) -> int:
    """Bytes of all places that hold chunks; one that serves in two phases is counted in each."""
    index, places = Repository(store).read_index(1), set()
    for part in index.parts:
        for chunk in part.chunks:
            if chunk.pack != DERIVED:
                phase = 2 if chunk.ranks else int(index.specs[chunk.spec].role != "master")
                places.add((phase, part.packs[chunk.pack].key, chunk.start, chunk.nbytes))
    return sum(nbytes for *_, nbytes in places)


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(st.data())
def test_any_layout_is_filled_by_reading_once(data):
    model = data.draw(models())
    n, m = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 4))
    before, after = data.draw(layouts(model, n)), data.draw(layouts(model, m))
    store = MemoryStore()
    with cramped(data.draw(st.integers(1, 3)), data.draw(st.sampled_from([16, 64, 4096]))):
        save_all(engines(model, before, n, filled=True), store)
        made = engines(model, after, m, filled=False)
        reports = load_all(made, store, read="once")
    assert [line for one in made for line in one.differences()] == []
    assert {report.read for report in reports} == {"once"}
    assert sum(report.bytes_read for report in reports) <= stored_bytes(store)
    assert len({report.read_by_rank for report in reports}) == 1


class Refusing(MemoryStore):
    """A memory store whose ``at``-th read of a pack fails."""

    def __init__(self, of: MemoryStore, at: int) -> None:
        super().__init__()
        self.__dict__.update(of.__dict__)
        self.left = at

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        self.left -= 1
        if self.left == 0:
            raise StoreError(f"read {key!r}: no", key)
        return super().read_into(key, start, buffer)


@settings(max_examples=40, deadline=None, suppress_health_check=SLOW)
@given(st.data())
def test_one_rank_that_cannot_read_is_one_error_on_all_and_the_next_load_is_whole(data):
    model = data.draw(models())
    world = data.draw(st.integers(2, 4))
    layout, store = data.draw(layouts(model, world)), MemoryStore()
    victim, at = data.draw(st.integers(0, world - 1)), data.draw(st.integers(1, 6))
    stores = [Refusing(store, at) if rank == victim else store for rank in range(world)]
    with cramped(data.draw(st.integers(1, 3)), 16):
        save_all(engines(model, layout, world, filled=True), store)
        made = engines(model, layout, world, filled=False)
        jobs = comms(world)
        ended = run_ranks(jobs, lambda rank: ckpt.load(made[rank], stores[rank], read="once"))
        if stores[victim].left > 0:  # it had not so much to read
            assert all(isinstance(one, ckpt.LoadReport) for one in ended), ended
        else:
            assert {type(one) for one in ended} == {StoreError}, ended
            assert len({str(one) for one in ended}) == 1
        again = run_ranks(jobs, lambda rank: ckpt.load(made[rank], store, read="once"))
    assert all(isinstance(one, ckpt.LoadReport) for one in again), again
    assert [line for one in made for line in one.differences()] == []
