from __future__ import annotations

import json
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from ckpt.errors import MalformedData
from ckpt.format import pack as module
from ckpt.format.pack import SAFETENSORS_DTYPE, PackItem, lay_out, parse_header, plan_packs, room_for
from ckpt.layout.spec import ITEMSIZE
from ckpt.runtime.staging import tensor_bytes
from tests.property.fake import numbered

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def build(items: list[tuple[PackItem, bytes]]) -> bytes:
    (keys,) = plan_packs([one for one, _ in items])
    layout = lay_out([items[k][0] for k in keys])
    data = layout.header + b"".join(items[k][1] for k in keys)
    assert len(data) == layout.nbytes
    for k, start in zip(keys, layout.starts, strict=True):
        assert data[start : start + items[k][0].nbytes] == items[k][1]
    return data


def item(name: str, dtype: str, shape: tuple[int, ...], seed: int = 1) -> tuple[PackItem, bytes]:
    raw = bytes(tensor_bytes(numbered(dtype, shape, seed)))
    return PackItem(name, dtype, shape, len(raw)), raw


def test_the_reference_library_reads_every_dtype_that_it_knows():
    """A stranger must be able to open a pack with stock tools."""
    items = [item(f"ü|{dtype}@0", dtype, (3, 2), k) for k, dtype in enumerate(ITEMSIZE)]
    items += [item("0d", "float32", ()), item("empty", "float32", (0, 3)), item('quote"\\\n', "int8", (1,))]
    found = load(build(items))
    assert set(found) == {one.name for one, _ in items}
    for one, raw in items:
        tensor = found[one.name]
        assert bytes(tensor_bytes(tensor)) == raw
        if one.dtype in SAFETENSORS_DTYPE:
            assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{one.dtype}", one.shape)
        else:
            assert (tensor.dtype, tuple(tensor.shape)) == (torch.uint8, (one.nbytes,))


def test_every_chunk_is_aligned_to_its_item_in_the_file():
    items = [item(f"{k}{dtype}", dtype, (k + 1,)) for k in range(3) for dtype in ITEMSIZE]
    (keys,) = plan_packs([one for one, _ in items])
    layout = lay_out([items[k][0] for k in keys])
    for k, start in zip(keys, layout.starts, strict=True):
        one = items[k][0]
        if one.dtype in SAFETENSORS_DTYPE:
            assert start % ITEMSIZE[one.dtype] == 0


def test_header_parsing_gives_back_what_was_laid_out():
    items = [item("a", "float32", (2, 3)), item("b", "bfloat16", (5,)), item("c", "complex64", (2,))]
    data = build(items)
    found = parse_header(data, len(data), "p")
    assert {n: (d, s) for n, (d, s, _, _) in found.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("BF16", (5,)),
        "c": ("U8", (16,)),
    }
    for one, raw in items:
        _, _, start, stop = found[one.name]
        assert data[start:stop] == raw


def test_packs_are_split_by_count_and_by_bytes(monkeypatch):
    monkeypatch.setattr(module, "MAX_CHUNKS", 3)
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    items = [PackItem(f"n{k}", "uint8", (n,), n) for k, n in enumerate([90, 20, 1, 1, 1, 1, 100, 500])]
    packs = plan_packs(items)
    assert sorted(k for keys in packs for k in keys) == list(range(8))
    for keys in packs:
        assert len(keys) <= 3
        assert len(keys) == 1 or sum(items[k].nbytes for k in keys) <= 100


@given(st.data())
def test_the_room_set_aside_suffices_for_every_choice(data):
    """Which chunks are stored, and how long the encoded ones are, is known only after the room was set aside."""
    names = data.draw(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), unique=True, max_size=8))
    dtypes = st.sampled_from(sorted(ITEMSIZE))
    shapes = st.lists(st.integers(0, 10**6), max_size=5).map(tuple)
    items = []
    for name in names:
        dtype, shape = data.draw(dtypes), data.draw(shapes)
        items.append(PackItem(name, dtype, shape, prod(shape) * ITEMSIZE[dtype]))
    room = room_for(items)
    stored = []
    for one in items:
        if data.draw(st.booleans()):
            nbytes = data.draw(st.integers(0, 2 * one.nbytes + 1024))
            encoded = PackItem(one.name, "uint8", (nbytes,), nbytes)
            stored.append(encoded if data.draw(st.booleans()) else one)
    layout = lay_out(stored, room)
    assert len(layout.header) == room
    assert set(parse_header(layout.header, layout.nbytes, "p")) == {one.name for one in stored}


def test_a_room_that_is_too_small_is_refused():
    with pytest.raises(MalformedData, match="pack header"):
        lay_out([PackItem("a", "uint8", (1,), 1)], 64)


def test_a_header_that_readers_would_refuse_is_not_written(monkeypatch):
    monkeypatch.setattr(module, "MAX_HEADER", 1000)
    with pytest.raises(MalformedData, match="at most 1000 bytes"):
        lay_out([PackItem("n" * 100 + str(k), "uint8", (1,), 1) for k in range(20)])


def test_two_chunks_of_one_name_are_refused():
    with pytest.raises(MalformedData, match="unique names"):
        lay_out([PackItem("a", "uint8", (1,), 1)] * 2)


def pack_with(table: object, data: bytes = b"1234") -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(1,), offsets=(0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "table",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        {"a": 5},
        {"a": []},
        {"a": {}},
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": entry(offsets=(0,))},
        {"a": entry(offsets=(0, 4, 8))},
        {"a": entry(offsets="04")},
        {"a": entry(offsets=(-4, 0))},
        {"a": entry(offsets=(4, 8))},
        {"a": entry(offsets=(4, 0))},
        {"a": entry(offsets=(0, 3))},
        {"a": entry(offsets=(0, 5))},
        {"a": entry(offsets=(0, 2**64))},
        {"a": entry(offsets=(0, float("inf")))},
        {"a": entry(offsets=(float("nan"), 4))},
        {"a": entry(offsets=(None, 4))},
        {"a": entry(shape=(2,))},
        {"a": entry(shape=(-1,))},
        {"a": entry(shape=(-1, -1))},
        {"a": entry(shape=None)},
        {"a": entry(shape=(float("inf"),))},
        {"a": entry(shape=(2**70,))},
        {"a": entry(shape=("x",))},
        {"a": entry(shape=(1.0,))},
        {"a": entry(shape=(True,))},
        {"a": entry(shape=("1",))},
        {"a": entry(offsets=(0.0, 4.0))},
        {"a": entry(dtype="F9", shape=(4,))},
        {"a": entry(dtype=None, shape=(4,))},
        {"a": entry(dtype=["F32"])},
        {"a": entry(), "b": entry()},
        {"a": entry(offsets=(0, 4)), "b": entry(offsets=(2, 6))},
        {},
    ],
    ids=lambda t: str(t)[:40],
)
def test_a_header_that_safetensors_forbids_is_malformed_never_a_crash(table):
    data = pack_with(table)
    with pytest.raises(MalformedData, match=r"^p: "):
        parse_header(data, len(data), "p")


@pytest.mark.parametrize("length", [0, 1, 2**63, 2**64 - 1, 10**9, 5000])
def test_a_header_length_that_does_not_fit_is_malformed(length):
    data = bytearray(pack_with({"a": entry()}))
    data[:8] = length.to_bytes(8, "little")
    with pytest.raises(MalformedData, match=r"^p: "):
        parse_header(bytes(data), len(data), "p")


def test_a_file_shorter_than_the_length_field_is_malformed():
    for size in range(8):
        with pytest.raises(MalformedData):
            parse_header(bytes(size), size, "p")
