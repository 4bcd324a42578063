"""Who has logged what, told in few rows; and who reads whose heads."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

import ckpt
from ckpt.engine.base import Stepped
from ckpt.errors import MalformedData
from ckpt.format.codec import compress
from ckpt.gradlog.record import VERSION, Entry, Part, RankHead
from ckpt.gradlog.replaying.needed import read_heads
from ckpt.gradlog.replaying.reading import read_rank_head
from ckpt.layout.box import Box, boxes_of_range
from ckpt.repo.lineage import read_head
from ckpt.repo.log_directory import Logged, Row, directory_of, range_of, read_directory, write_directory
from ckpt.repo.log_files import DIRECTORY
from ckpt.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEY = f"log/000001/{DIRECTORY}"


def partitions(shape: tuple[int, ...], world: int) -> Iterator[Logged]:
    total = Box.whole(shape).volume
    each = -(-total // world)
    for rank in range(world):
        for box in boxes_of_range(shape, min(rank * each, total), min((rank + 1) * each, total)):
            yield Logged("p", shape, box, rank)


def test_even_partitions_are_a_row_or_two_whatever_their_number() -> None:
    for world in (2, 64, 1000):
        said = directory_of(partitions((500, 36), world), world, "")
        assert len(said.rows["p"]) <= 2
        assert sum(row.count for row in said.rows["p"]) == world


def test_what_overlaps_is_found_in_any_layout() -> None:
    drawn = random.Random(3)
    shape = (6, 5, 4)
    for _ in range(200):
        cuts = sorted({0, 120, *(drawn.randrange(1, 120) for _ in range(drawn.randrange(9)))})
        logged = [
            Logged("p", shape, box, drawn.randrange(12))
            for low, high in pairwise(cuts)
            for box in boxes_of_range(shape, low, high)
        ]
        said = directory_of(logged, 12, "")
        low = drawn.randrange(120)
        for box in boxes_of_range(shape, low, drawn.randrange(low + 1, 121)):
            assert said.ranks([("p", shape, box)]) == {one.rank for one in logged if one.box.intersect(box)}
        assert said.ranks([("q", shape, Box.whole(shape))]) == set()


def test_columns_may_name_too_many_and_never_too_few() -> None:
    shape = (8, 12)
    logged = [Logged("p", shape, Box((0, 3 * rank), (8, 3)), rank) for rank in range(4)]
    said = directory_of(logged, 4, "")
    assert [(row.count, row.by) for row in said.rows["p"]] == [(4, 3)]
    assert said.ranks([("p", shape, Box((0, 0), (1, 3)))]) >= {0}
    assert said.ranks([("p", shape, Box((2, 3), (6, 6)))]) >= {1, 2}
    assert range_of((), Box((), ())) == (0, 1)
    scalar = directory_of([Logged("s", (), Box((), ()), 2)], 4, "")
    assert scalar.ranks([("s", (), Box((), ()))]) == {2}


@pytest.mark.parametrize(
    "row",
    [
        {"rank": 4},
        {"rank": -1},
        {"count": 0},
        {"count": 1 << 40},
        {"count": 2, "step": 4},
        {"numel": 0},
        {"start": 1 << 63},
        {"by": -1},
    ],
)
def test_rows_that_cannot_be_are_refused(row: dict[str, Any]) -> None:
    store = MemoryStore()
    said = directory_of(partitions((4, 4), 4), 4, "")
    said.rows["p"] = [msgspec.structs.replace(Row(0, 0, 4), **row)]
    write_directory(store, 1, said)
    with pytest.raises(MalformedData):
        read_directory(store, 1, 4, "")


def test_a_directory_of_another_log_is_refused() -> None:
    store = MemoryStore()
    assert read_directory(store, 1, 4, "") is None
    write_directory(store, 1, directory_of(partitions((4, 4), 4), 4, "0" * 32))
    assert read_directory(store, 1, 4, "0" * 32) is not None
    for world, run in ((5, "0" * 32), (4, "1" * 32)):
        with pytest.raises(MalformedData):
            read_directory(store, 1, world, run)
    for data in (b"", b"{}", compress(b"[]"), compress(b"\0" * 100)):
        store.objects[KEY] = data
        with pytest.raises(MalformedData):
            read_directory(store, 1, 4, "")


def logged(store: MemoryStore) -> torch.nn.Module:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with ckpt.Checkpointer((model, optimizer), store, full_every=100) as keeper:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            keeper.step()
    return model


def test_a_log_begins_with_its_directory_and_is_read_without_it() -> None:
    store = MemoryStore()
    model = logged(store)
    head = read_head(store, 1)
    assert head is not None
    said = read_directory(store, 1, 1, head.run)
    assert said is not None
    assert {fqn: [row.numel for row in rows] for fqn, rows in said.rows.items()} == {"weight": [6], "bias": [2]}
    assert read_rank_head(store, 1, 0).peers == ()
    del store.objects[KEY]
    key = "log/000001/rank00000/head.json"
    old = msgspec.json.decode(store.objects[key])
    del old["peers"]
    store.objects[key] = msgspec.json.encode(old)
    other = torch.nn.Linear(3, 2)
    report = ckpt.load((other, torch.optim.AdamW(other.parameters())), store)
    assert (report.step, report.exact) == (3, True)
    assert torch.equal(other.weight, model.weight)


class Elsewhere:
    """A log of several ranks that hold a slice of a vector each, and who reads it."""

    def __init__(self, world: int) -> None:
        self.store, self.world, self.numel = MemoryStore(), world, 24
        logged = [Logged("p", (self.numel,), box, rank) for rank in range(world) for box in self.boxes(rank, world)]
        write_directory(self.store, 1, directory_of(logged, world, ""))
        for rank in range(world):
            parts = tuple(Part("p", (self.numel,), box.offsets, box.sizes) for box in self.boxes(rank, world))
            entry = Entry(optimizer=0, group=0, dtype="float32", members=("p",), layout="", parts=parts)
            head = RankHead(format=VERSION, rank=rank, world=world, entries=(entry,), kernels=(), software={}, peers=())
            self.store.put(f"log/000001/rank{rank:05d}/head.json", msgspec.json.encode(head))

    def boxes(self, rank: int, world: int) -> list[Box]:
        return [Box((rank * (self.numel // world),), (self.numel // world,))]

    def heads(self, rank: int, world: int, *, same: bool = False) -> list[int]:
        key, optimizer = torch.zeros(self.numel // world), torch.optim.SGD([torch.zeros(1)])
        places = [("p", (self.numel,), box) for box in self.boxes(rank, world)]
        one = Stepped(optimizer, key, 0, ("p",), lambda flat: ((*place, flat) for place in places), optimizer)
        own = read_rank_head(self.store, 1, rank % self.world, "")
        found = read_heads(self.store, 1, own, self.world, [one], same=same)
        assert found.logged == {"p"}
        return sorted(found.of)


def test_a_rank_reads_the_heads_that_it_needs(caplog: pytest.LogCaptureFixture) -> None:
    there = Elsewhere(8)
    assert there.heads(5, 8, same=True) == [5]
    assert there.heads(5, 8) == [5]
    assert there.heads(1, 4) == [1, 2, 3]
    assert there.heads(2, 3) == [2, 5, 6, 7]
    there.store.objects[KEY] = b"nothing"
    assert there.heads(1, 4) == list(range(8))
    assert "its directory cannot be" in caplog.text
    del there.store.objects[KEY]
    assert there.heads(1, 4) == list(range(8))


def test_a_head_of_ranks_that_there_are_not_is_refused() -> None:
    there = Elsewhere(2)
    key = "log/000001/rank00001/head.json"
    said = msgspec.json.decode(there.store.objects[key])
    there.store.objects[key] = msgspec.json.encode({**said, "peers": [2]})
    with pytest.raises(MalformedData, match=r"ranks \[2\] of 2"):
        there.heads(1, 2, same=True)
    there.store.objects[key] = msgspec.json.encode({**said, "world": 3, "peers": [0]})
    with pytest.raises(MalformedData, match="different numbers of ranks"):
        there.heads(1, 2, same=True)


def test_others_are_asked_where_a_head_or_the_directory_names_too_few(caplog: pytest.LogCaptureFixture) -> None:
    there = Elsewhere(4)
    there.boxes = lambda rank, world: [Box((0,), (24,))]  # type: ignore[method-assign]
    assert there.heads(1, 4, same=True) == [0, 1, 2, 3]  # its head has no peers
    assert "the rank's head names" in caplog.text
    short = [Logged("p", (24,), Box((6 * rank,), (6,)), rank) for rank in range(2)]
    del there.store.objects[KEY]
    write_directory(there.store, 1, directory_of(short, 4, ""))
    assert there.heads(1, 4, same=True) == [0, 1, 2, 3]
    assert "the directory names" in caplog.text


def test_a_folder_in_the_place_of_the_directory_is_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with ckpt.Checkpointer((model, optimizer), tmp_path, full_every=100) as keeper:
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        keeper.step()
    (place,) = tmp_path.glob("log/*/directory.json.zst")
    place.unlink()
    place.mkdir()
    (head,) = tmp_path.glob("log/*/rank*/head.json")
    head.write_bytes(msgspec.json.encode({**msgspec.json.decode(head.read_bytes()), "peers": None}))
    again = torch.nn.Linear(3, 2)
    assert ckpt.load((again, torch.optim.AdamW(again.parameters())), tmp_path).step == 1
    assert torch.equal(again.weight, model.weight)
    assert "its directory cannot be" in caplog.text
