"""What a load has looked at is not read again, as far as there is room; and only what is sound."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ckpt.format.frames import HEADER, frame_of
from ckpt.gradlog.copies.near import Near, room_for
from ckpt.repo.log_files import places_in, scan, segment_key
from ckpt.store.memory import MemoryStore
from tests.harness.logged_jobs import LoggedJob

if TYPE_CHECKING:
    from pathlib import Path

RUN = "0123456789abcdef" * 2
KEY = "log/000001"


class Counting(MemoryStore):
    """Counts the bytes of records that are read, headers left out."""

    def __init__(self, url: str = "s3://bucket/run") -> None:
        super().__init__()
        self.url, self.read = url, 0

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        data = super().get(key, start, nbytes)
        self.read += len(data) if key.endswith(".log") and nbytes != HEADER else 0
        return data


def written(steps: int, nbytes: int = 1000) -> Counting:
    store = Counting()
    for step in range(1, steps + 1):
        store.put(segment_key(KEY, 0, step), b"".join(map(bytes, frame_of(step, [bytes([step]) * nbytes]))))
    return store


def test_what_was_looked_at_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    store, near = written(5), Near(None, 3500)
    found = scan(store, 1, 0, 1, None, lambda place: near.is_sound(store, RUN, 0, place))
    assert (found.last, found.trouble, store.read) == (5, "", 5000)
    places = [one for step in range(1, 6) for one in places_in(store, segment_key(KEY, 0, step))]
    kept = [near.find(RUN, 0, place) for place in places]  # type: ignore[arg-type]
    assert [one is not None for one in kept] == [True, True, True, False, False]
    for step, one in enumerate(kept[:3], 1):
        assert one is not None
        assert one[0].get(one[1].key, one[1].start, one[1].nbytes) == bytes([step]) * 1000
    near.forget()
    assert near.find(RUN, 0, places[0]) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("at", [HEADER, HEADER + 999])
def test_damage_is_found_as_without(at: int) -> None:
    store, near = written(3), Near(None, 1 << 20)
    key = segment_key(KEY, 0, 2)
    data = bytearray(store.objects[key])
    data[at] ^= 1
    store.objects[key] = bytes(data)
    found = scan(store, 1, 0, 1, None, lambda place: near.is_sound(store, RUN, 0, place))
    assert found == scan(store, 1, 0, 1, None)
    assert found.last == 1
    assert "step 2 is not what was written" in found.trouble


def test_a_load_reads_a_log_once_from_an_object_store() -> None:
    store = Counting()
    weights = LoggedJob(store).train(6).close()
    size = sum(len(data) for key, data in store.objects.items() if key.endswith(".log"))
    store.read = 0
    job = LoggedJob(store)
    assert job.keeper.resumed is not None
    assert job.keeper.resumed.replayed == 6
    assert job.weights() == weights
    assert 0.8 * size < store.read <= size
    assert job.keeper.resumed.log_bytes == store.read
    job.close()


def test_a_file_system_has_a_cache_of_its_own(tmp_path: Path) -> None:
    assert room_for(str(tmp_path), 1) == 0
    assert 0 < room_for("s3://bucket/run", 8) <= room_for("s3://bucket/run", 1)
