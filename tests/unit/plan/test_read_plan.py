from __future__ import annotations

import pytest

from ckpt.format.digest import digest
from ckpt.format.manifest import DERIVED, ChunkEntry, IndexPart, PackRef
from ckpt.layout.spec import MASTER, PARAM, TensorSpec
from ckpt.plan.read_plan import (
    Places,
    chain_from,
    decode_runs,
    encode_runs,
    fill_up,
    plan_alone,
    plan_together,
    runs_of_numbers,
)

HOSTS = ("a", "a", "b", "b")


def packs(count: int) -> tuple[PackRef, ...]:
    return tuple(PackRef(key=f"steps/1/a/packs/rank{n}.safetensors", nbytes=1 << 30) for n in range(count))


def row(number: int, pack: int, start: int, nbytes: int = 4, content: bytes = b"", **more) -> ChunkEntry:
    text = content or f"{pack}.{start}".encode()
    return ChunkEntry(0, (number,), (nbytes // 4,), digest(text), pack, start, nbytes, **more)


def places_of(*entries: ChunkEntry, count: int = 1, roles=(PARAM,), codecs=()) -> Places:
    specs = [TensorSpec("w", role, "float32", (1000,)) for role in roles]
    return Places(specs, [IndexPart(rank=0, packs=packs(count), chunks=entries, codecs=codecs)])


def everything(places: Places):
    return runs_of_numbers(range(len(places.order)))


@pytest.mark.parametrize("numbers", [[], [0], [3, 4, 5], [9, 0, 1, 7, 8], [2, 2, 3]])
def test_runs_are_the_numbers_again(numbers):
    runs = decode_runs(encode_runs(runs_of_numbers(numbers)))
    assert [n for first, stop in runs for n in range(first, stop)] == sorted(set(numbers))


def test_equal_content_is_one_place_and_derived_or_empty_chunks_have_none():
    same = b"zeros"
    places = places_of(
        row(0, 0, 8, content=same),
        row(1, 0, 8, content=same),
        row(2, DERIVED, 0),
        ChunkEntry(0, (3,), (0,), digest(b""), 0, 12, 0),
    )
    assert len(places.order) == 1


def test_what_is_laid_over_something_comes_behind_it():
    entries = [
        ChunkEntry(0, (0,), (1,), digest(b"own"), 0, 8, 4, (1,)),
        ChunkEntry(0, (0,), (1,), digest(b"param"), 0, 12, 4),
        ChunkEntry(1, (0,), (1,), digest(b"master"), 0, 16, 4),
    ]
    places = places_of(*entries, roles=(PARAM, MASTER))
    assert [(p.phase, p.entry.start) for p in places.order] == [(0, 16), (1, 12), (2, 8)]


def test_neighbours_are_one_unit_up_to_the_span_and_gaps_are_read_over_only_alone():
    places = places_of(*(row(n, 0, start) for n, start in enumerate((8, 12, 16, 24))))
    alone = plan_alone(places.order, everything(places), 0, gap=4, span=64)
    assert [(u.start, u.stored, u.items) for u in alone] == [(8, 20, ((0, 0), (1, 4), (2, 8), (3, 16)))]
    together = plan_together(places.order, [everything(places)], ["a"], span=8)
    assert [(u.start, u.stored) for u in together] == [(8, 8), (16, 4), (24, 4)]


def test_a_chunk_larger_than_the_span_is_a_unit_of_its_own():
    places = places_of(row(0, 0, 8, 4), row(1, 0, 12, 400), row(101, 0, 412, 4))
    assert [u.nbytes for u in plan_alone(places.order, everything(places), 0, gap=0, span=64)] == [4, 400, 4]


def test_encoded_chunks_are_handed_on_as_their_own_bytes():
    small = {"codec": 1, "stored": 3}
    places = places_of(row(0, 0, 8, 40, **small), row(10, 0, 11, 40, **small), row(20, 0, 14, 40), codecs=("zstd",))
    units = plan_alone(places.order, everything(places), 0, gap=0)
    assert [(u.encoded, u.stored, u.nbytes, u.items) for u in units] == [
        (True, 6, 80, ((0, 0), (1, 40))),
        (False, 40, 40, ((2, 0),)),
    ]


@pytest.mark.parametrize(
    ("loads", "total", "expected"),
    [([0, 0], 10, [5, 5]), ([8, 0], 10, [1, 9]), ([100, 0, 0], 6, [0, 3, 3]), ([3], 7, [7]), ([5, 1, 2], 0, [0, 0, 0])],
)
def test_what_is_uneven_is_filled_up(loads, total, expected):
    assert fill_up(loads, total) == expected


def test_what_all_need_is_read_by_all_hosts_and_ranks_alike_in_runs_of_one_pack():
    places = places_of(*(row(n, n // 4, 8 + 4 * (n % 4)) for n in range(16)), count=4)
    units = plan_together(places.order, [everything(places)] * 4, HOSTS, span=4)
    read = {rank: {(u.key, u.start) for u in units if u.chain[0] == rank} for rank in range(4)}
    assert [len(read[rank]) for rank in range(4)] == [4, 4, 4, 4]
    assert [len({key for key, _ in read[rank]}) for rank in range(4)] == [1, 1, 1, 1]
    assert {u.chain[0] for u in units[:4]} == {0, 1, 2, 3}  # all begin at once


def test_a_rank_that_alone_can_read_much_is_spared_the_rest():
    places = places_of(*(row(n, 0, 8 + 4 * n) for n in range(8)))
    needs = [runs_of_numbers(range(8)), runs_of_numbers(range(4, 8))]
    units = plan_together(places.order, needs, ["a", "b"], span=4)
    assert [u.chain for u in units if u.items[0][0] < 4] == [(0,)] * 4
    assert [u.chain for u in units if u.items[0][0] >= 4] == [(1, 0)] * 4


def test_a_chain_enters_each_host_once_and_begins_at_its_reader():
    assert chain_from(2, (0, 1, 2, 3), HOSTS) == (2, 3, 0, 1)
    assert chain_from(1, (0, 1, 2, 3), HOSTS) == (1, 0, 3, 2)
    assert chain_from(3, (0, 3), HOSTS) == (3, 0)
    assert chain_from(1, (1,), HOSTS) == (1,)


def test_nobody_needs_anything():
    places = places_of(row(0, 0, 8))
    assert plan_together(places.order, [runs_of_numbers([])] * 2, ["a", "b"]) == []
    assert plan_together([], [runs_of_numbers([])], ["a"]) == []
    assert plan_alone(places.order, runs_of_numbers([]), 0, gap=0) == []
