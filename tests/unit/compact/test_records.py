"""Ranges of a record's gradients, as they were logged; and files that say what cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from ckpt.compact import records
from ckpt.compact.records import OpenRecord, records_of
from ckpt.errors import MalformedData, MissingChunk, ReplayError
from ckpt.format.codec import codec_of, encode
from ckpt.format.frames import frame_of
from ckpt.gradlog.record import Call, Entry, Gradient, Part, RankHead, Record, encode_record
from ckpt.gradlog.replaying import opened as opening
from ckpt.gradlog.replaying.opened import only_call
from ckpt.repo.log_files import segment_key
from ckpt.runtime.staging import tensor_bytes
from ckpt.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Mapping

SIZES = (300, 5, 700)
HEAD = RankHead(
    format=1,
    rank=0,
    world=1,
    entries=tuple(
        Entry(optimizer=0, group=0, dtype="float32", members=("p",), layout="", parts=(Part("p", (n,), (0,), (n,)),))
        for n in SIZES
    ),
    kernels=(),
    software={},
)


def record(step: int, *calls: Call) -> Record:
    return Record(format=1, step=step, rank=0, calls=calls, options=(), objects=(), loose=(), digest="")


def stored(store: MemoryStore, step: int, calls: tuple[Call, ...], tensors: Mapping[str, Any]) -> None:
    payload = encode_record(record(step, *calls), tensors)
    store.put(segment_key("log/000001", 0, step), b"".join(bytes(part) for part in frame_of(step, payload)))


def gradients(codec: str) -> tuple[tuple[Call, ...], dict[str, Any]]:
    """Two tensors: entries 2 and 0 in halves with a multiplier, entry 1 as it is."""
    half = torch.randn(SIZES[2] + SIZES[0], generator=torch.Generator().manual_seed(1)).bfloat16()
    first = Gradient(name="grad/0", entries=(2, 0), dtype="bfloat16", wide="float32", scale=(0.3).hex())
    second = Gradient(name="grad/1", entries=(1,), dtype="float32", wide="float32")
    tensors: dict[str, Any] = {"grad/0": half, "grad/1": torch.arange(5.0)}
    if codec:
        raw = tensor_bytes(half)
        blocks = [encode(raw[at : at + 512], codec_of(2), 2) for at in range(0, len(raw), 512)]
        tensors["grad/0"] = ("uint8", blocks)
        first = msgspec.structs.replace(first, codec=codec_of(2), block=512, blocks=tuple(map(len, blocks)))
    return (Call(gradients=(first, second), options=()),), tensors


@pytest.mark.parametrize("codec", ["", "zstd"])
@pytest.mark.parametrize("ahead", [1, 64, 1 << 20])
def test_a_range_is_what_was_logged(codec: str, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "AHEAD", ahead)
    monkeypatch.setattr(opening, "FIRST_READ", 100)
    store = MemoryStore()
    calls, tensors = gradients(codec)
    stored(store, 1, calls, tensors)
    whole = gradients("")[1]["grad/0"].float() * 0.3
    expected = {2: whole[: SIZES[2]], 0: whole[SIZES[2] :], 1: tensors["grad/1"]}
    (one,) = records_of(store, 1, 0, 1, 1)
    call = only_call(one)
    assert call == calls[0]
    for number, size in enumerate(SIZES):
        for first, stop in ((0, size), (1, 2), (size - 1, size), (size // 3, size // 2), (0, 1)):
            found = one.gradient(call, HEAD, number, first, stop)
            assert found is not None
            assert torch.equal(found, expected[number][first:stop])
    empty = msgspec.structs.replace(call, gradients=call.gradients[:1])
    (one,) = records_of(store, 1, 0, 1, 1)
    assert one.gradient(empty, HEAD, 1, 0, 1) is None


def test_steps_come_in_order_and_none_is_missing() -> None:
    store = MemoryStore()
    for step in (1, 2, 3, 5):
        stored(store, step, (), {})
    assert [one.record.step for one in records_of(store, 1, 0, 2, 3)] == [2, 3]
    with pytest.raises(MissingChunk, match="no record of step 4"):
        list(records_of(store, 1, 0, 3, 5))
    with pytest.raises(MissingChunk, match="no record of step 6"):
        list(records_of(store, 1, 0, 6, 7))
    (one,) = records_of(store, 1, 0, 5, 5)
    assert only_call(one) is None


def opened(calls: tuple[Call, ...], tensors: Mapping[str, Any]) -> OpenRecord:
    store = MemoryStore()
    stored(store, 1, calls, tensors)
    return next(iter(records_of(store, 1, 0, 1, 1)))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"entries": (2, 9)}, "a gradient of entry 9, there are 3"),
        ({"entries": (2,)}, "2000 bytes for 700 elements"),
        ({"dtype": "float31"}, "dtypes 'float31'"),
        ({"wide": "x"}, "dtypes 'bfloat16' and 'x'"),
        ({"scale": "xyz"}, "multiplier 'xyz'"),
        ({"name": "grad/7"}, "tensor 'grad/7' is not there"),
        ({"codec": "zstd", "block": 1 << 60, "blocks": (1,)}, "1 blocks of"),
        ({"codec": "zstd", "block": 0, "blocks": ()}, "0 blocks of 0 bytes for 2000"),
        ({"codec": "zstd", "block": 1000, "blocks": (2500, -500)}, "2 blocks of 1000 bytes"),
    ],
)
def test_what_cannot_be_is_refused(said: dict[str, Any], message: str) -> None:
    calls, tensors = gradients("")
    first = msgspec.structs.replace(calls[0].gradients[0], **said)
    one = opened((msgspec.structs.replace(calls[0], gradients=(first,)),), tensors)
    call = only_call(one)
    assert call is not None
    with pytest.raises(MalformedData, match=message):
        one.gradient(call, HEAD, 2, 0, 700)


def test_a_payload_that_is_no_record_is_refused() -> None:
    for payload, message in (
        (b"", "a header of 8 bytes in a record of 0"),
        ((1 << 40).to_bytes(8, "little") + bytes(16), "a header of"),
        ((2).to_bytes(8, "little") + b"{}", "tensor 'record' is not there"),
    ):
        store = MemoryStore()
        store.put(segment_key("log/000001", 0, 1), b"".join(bytes(part) for part in frame_of(1, [payload])))
        with pytest.raises(MalformedData, match=message):
            list(records_of(store, 1, 0, 1, 1))


def test_a_record_of_another_step_or_rank_is_refused() -> None:
    for other, message in (({"step": 2}, "step 2 and rank 0, expected"), ({"rank": 3}, "step 1 and rank 3, expected")):
        store = MemoryStore()
        payload = encode_record(msgspec.structs.replace(record(1), **other), {})
        store.put(segment_key("log/000001", 0, 1), b"".join(bytes(part) for part in frame_of(1, payload)))
        with pytest.raises(MalformedData, match=message):
            list(records_of(store, 1, 0, 1, 1))
    calls, tensors = gradients("")
    with pytest.raises(ReplayError, match="2 steps of the optimizers in one record"):
        only_call(opened(calls * 2, tensors))
