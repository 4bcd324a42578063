"""Boxes of an opened checkpoint, put together: the right bytes, in bounded memory, each range read once a window."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from ckpt.convert.assemble import LEAST_MEMORY, Assembler
from ckpt.errors import BudgetTooSmall, DigestMismatch, LayoutError, MissingChunk, MissingState, PlanError
from ckpt.layout.box import Box
from ckpt.layout.spec import MASTER, PARAM, Shard, TensorSpec
from ckpt.store.forward import Forward
from tests.harness.conversions import again, convert, one_file, raw, tensor, values_of, whole

if TYPE_CHECKING:
    from ckpt.store.base import Store

UP = TensorSpec("up", MASTER, "float32", (40, 12))
EMB = TensorSpec("emb", PARAM, "bfloat16", (33, 7))
COUNT = TensorSpec("up", "step", "int64", ())
NONE = TensorSpec("none", "buffer", "float64", (0, 3))
WIDE = TensorSpec("wide", "buffer", "complex128", (5, 3))
SPECS = [UP, EMB, COUNT, NONE, WIDE]


class Counting(Forward):
    """Notes what is read."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.ranges: list[tuple[str, int, int]] = []

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        self.ranges.append((key, start, len(buffer)))
        return super().read_into(key, start, buffer)


def source(specs=SPECS, **ways):
    """A foreign file, and ours made of it."""
    values = values_of(specs)
    opened = one_file(specs, values, **ways)
    return values, {"foreign": opened, "ours": again(convert(opened, whole(specs)))}


def joined(assembler: Assembler, wants: list[Shard]) -> list[bytes]:
    """The bytes of each want; its pieces must come in order and tile it."""
    found: list[bytearray] = [bytearray() for _ in wants]
    at = -1
    for piece in assembler.pieces(wants):
        assert piece.number >= at
        at = piece.number
        want = wants[at]
        assert want.box.contains(piece.box)
        assert len(piece.data) == piece.box.volume * want.spec.itemsize
        found[at] += piece.data
    return [bytes(data) for data in found]


def expected(values, want: Shard) -> bytes:
    array = values[want.spec.key].reshape(*want.spec.shape, want.spec.itemsize)
    return array[want.box.relative_to(Box.whole(want.spec.shape))].tobytes()


def random_wants(count: int, seed: int) -> list[Shard]:
    pick = random.Random(seed)
    wants = []
    for _ in range(count):
        spec = pick.choice(SPECS)
        lows = [pick.randint(0, n) for n in spec.shape]
        box = Box(tuple(lows), tuple(pick.randint(0, n - low) for n, low in zip(spec.shape, lows, strict=True)))
        wants.append(Shard(spec, box))
    return wants


@pytest.mark.parametrize("window", [48, 4096, None])
@pytest.mark.parametrize("kind", ["foreign", "ours"])
def test_any_boxes_in_any_order(kind, window):
    values, opened = source()
    assembler = Assembler(opened[kind])
    assembler.window = window or assembler.window
    wants = [*random_wants(60, 1), *(Shard(spec, Box.whole(spec.shape)) for spec in SPECS)]
    assert joined(assembler, wants) == [expected(values, want) for want in wants]
    assert joined(assembler, []) == []


def test_a_tensor_larger_than_the_window_comes_by_rows():
    values, opened = source()
    assembler = Assembler(opened["foreign"])
    assembler.window = 100  # two rows of twelve floats
    want = Shard(UP, Box((1, 0), (39, 12)))
    pieces = [piece.box.sizes for piece in assembler.pieces([want])]
    assert pieces == [(2, 12)] * 19 + [(1, 12)]
    assert joined(assembler, [want]) == [expected(values, want)]


def test_what_several_wants_of_a_window_need_is_read_once_and_in_long_ranges():
    values, opened = source()
    counting = Counting(opened["ours"].store)
    assembler = Assembler(replace(opened["ours"], store=counting))
    columns = [Shard(UP, Box((0, c), (40, 1))) for c in range(12)]
    assert joined(assembler, columns) == [expected(values, want) for want in columns]
    assert len(counting.ranges) == 1
    assert assembler.bytes_read == UP.nbytes
    assert assembler.estimate(columns) == UP.nbytes
    everything = [Shard(spec, Box.whole(spec.shape)) for spec in SPECS]
    counting.ranges.clear()
    joined(assembler, everything)
    assert len(counting.ranges) == 1, "all of it lies in one pack, one behind the other"


def test_a_parameter_is_the_rounding_of_its_master():
    master = torch.tensor([1.0, 1.00390625, 1.01171875, float("inf"), float("nan"), -0.0, 3.4e38, 1e-42])
    spec = TensorSpec("w", MASTER, "float32", (8,))
    opened = one_file([spec], {spec.key: raw(master)}, derived={"w"})
    param = TensorSpec("w", PARAM, "bfloat16", (8,))
    assert joined(Assembler(opened), [Shard(param, Box.whole((8,)))]) == [raw(master.to(torch.bfloat16)).tobytes()]


def test_a_master_stands_in_for_a_parameter_of_its_dtype_and_the_reverse():
    spec = TensorSpec("w", PARAM, "float32", (8,))
    values = values_of([spec])
    opened = one_file([spec], values)
    master = Shard(TensorSpec("w", MASTER, "float32", (8,)), Box((2,), (5,)))
    assert joined(Assembler(opened), [master]) == [values[spec.key].tobytes()[8:28]]


def test_other_casts_are_made_only_when_asked_for():
    values, opened = source()
    wide = TensorSpec("emb", PARAM, "float32", EMB.shape)
    want = [Shard(wide, Box.whole(wide.shape))]
    with pytest.raises(MissingState, match=r"emb.*bfloat16 \(param\)"):
        joined(Assembler(opened["ours"]), want)
    cast = tensor(values[EMB.key], EMB).float()
    assert joined(Assembler(opened["ours"], cast=True), want) == [raw(cast).tobytes()]
    counted = TensorSpec("wide", "buffer", "float32", (5, 3))
    with pytest.raises(MissingState, match="complex128"):
        joined(Assembler(opened["ours"], cast=True), [Shard(counted, Box.whole((5, 3)))])


def test_a_count_changes_its_dtype_only_if_it_stays_what_it_is():
    real = TensorSpec("up", "step", "float32", ())
    for number, good in ((12, True), (2**24 + 1, False)):
        opened = one_file([COUNT], {COUNT.key: raw(torch.tensor(number))})
        if good:
            assert joined(Assembler(opened), [Shard(real, Box((), ()))]) == [np.float32(number).tobytes()]
        else:
            with pytest.raises(PlanError, match="not exact"):
                joined(Assembler(opened), [Shard(real, Box((), ()))])


def test_tied_names_are_found():
    opened = one_file([EMB], values_of([EMB]))
    opened.aliases["head"] = "emb"
    head = TensorSpec("head", PARAM, "bfloat16", EMB.shape)
    assert joined(Assembler(opened), [Shard(head, Box.whole(EMB.shape))]) == [values_of([EMB])[EMB.key].tobytes()]


def test_all_that_is_missing_or_has_another_shape_is_told_before_anything_is_read():
    _, opened = source()
    assembler = Assembler(opened["ours"])
    lost = [TensorSpec(f"w{n}", MASTER, "float32", (3,)) for n in range(3)]
    with pytest.raises(MissingState) as error:
        assembler.check([UP, *lost])
    assert [f"w{n}" in line for n, line in enumerate(error.value.missing)] == [True] * 3
    turned = TensorSpec("up", MASTER, "float32", (12, 40))
    with pytest.raises(LayoutError, match=r"shape \[40, 12\]"):
        assembler.check([turned])
    assert assembler.bytes_read == 0


def test_damage_is_named():
    _, opened = source()
    store = opened["ours"].store
    (key,) = (key for key in store.objects if key.endswith(".safetensors"))
    good = store.objects[key]
    store.objects[key] = good[:-1] + bytes([good[-1] ^ 1])
    with pytest.raises(DigestMismatch, match=key):
        joined(Assembler(opened["ours"]), [Shard(spec, Box.whole(spec.shape)) for spec in SPECS])
    store.objects[key] = good[:-200]
    with pytest.raises(MissingChunk, match="expected"):
        Assembler(opened["ours"]).check_packs()
    with pytest.raises(MissingChunk, match="ends"):
        joined(Assembler(opened["ours"]), [Shard(spec, Box.whole(spec.shape)) for spec in SPECS])
    foreign = opened["foreign"]
    foreign.store.inner.objects["data"] = foreign.store.inner.objects["data"][:-30]
    with pytest.raises(MissingChunk, match="data"):
        joined(Assembler(foreign), [Shard(spec, Box.whole(spec.shape)) for spec in SPECS])


def test_who_stops_half_way_leaves_no_thread_behind():
    _, opened = source()
    assembler = Assembler(opened["ours"])
    assembler.window = 64
    before = threading.active_count()
    pieces = assembler.pieces([Shard(UP, Box.whole(UP.shape))])
    next(pieces)
    pieces.close()
    assert threading.active_count() == before


def test_too_little_memory_is_refused():
    _, opened = source()
    with pytest.raises(BudgetTooSmall, match=str(LEAST_MEMORY)):
        Assembler(opened["ours"], memory=LEAST_MEMORY - 1)
    assert Assembler(opened["ours"], memory=LEAST_MEMORY).held <= LEAST_MEMORY
