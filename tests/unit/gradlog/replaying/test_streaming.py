"""Records are read once, a piece at a time: what arrives is what was logged, and little memory is needed for it."""

from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from ckpt.errors import DigestMismatch, MalformedData, ReplayError
from ckpt.format.codec import codec_of, encode
from ckpt.format.frames import frame_of
from ckpt.gradlog.record import (
    VERSION,
    Call,
    Entry,
    Gradient,
    Inner,
    Object,
    Part,
    RankHead,
    Record,
    encode_record,
)
from ckpt.gradlog.replaying import opened as opening
from ckpt.gradlog.replaying import streaming
from ckpt.gradlog.replaying.incoming import Incoming
from ckpt.gradlog.replaying.mapping import Copy, Target
from ckpt.gradlog.replaying.opened import Opened
from ckpt.gradlog.replaying.reading import RankReader
from ckpt.layout.box import Box
from ckpt.repo.log_files import segment_key
from ckpt.runtime.staging import tensor_bytes
from ckpt.store.local import LocalStore
from ckpt.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.store.base import Store

SHAPE = (7, 5, 3)
NUMEL = 105
SCALE = 0.3


def head_of(*shapes: tuple[int, ...]) -> RankHead:
    entries = [
        Entry(
            optimizer=0,
            group=0,
            dtype="float32",
            members=(f"p{i}",),
            layout="",
            parts=(Part(f"p{i}", shape, (0,) * len(shape), shape),),
        )
        for i, shape in enumerate(shapes)
    ]
    return RankHead(format=VERSION, rank=0, world=1, entries=tuple(entries), kernels=(), software={})


def put(store: Store, gradients: Sequence[Gradient], tensors: dict[str, Any], objects: Any = ()) -> None:
    calls = (Call(gradients=tuple(gradients), options=()),)
    record = Record(format=VERSION, step=1, rank=0, calls=calls, options=(), objects=objects, loose=(), digest="")
    frame = frame_of(1, encode_record(record, tensors))
    store.put(segment_key("log/000001", 0, 1), b"".join(bytes(part) for part in frame))


def target_of(*copies: Copy) -> Target:
    class _Stepped:
        members = ("p",)

    return Target(_Stepped(), torch.empty(0), list(copies))  # type: ignore[arg-type]


def incoming(head: RankHead, *copies: Copy) -> Incoming:
    return Incoming(1, {0: head}, [target_of(*copies)], [], 0, [0])


def opened(store: Store) -> Opened:
    return RankReader(store, 1, 0, 1, run="").open(1, Opened)


def coded(tensor: torch.Tensor, gradient: Gradient, block: int) -> tuple[Gradient, tuple[str, list[bytes]]]:
    raw, codec = tensor_bytes(tensor), codec_of(tensor.element_size())
    blocks = [encode(raw[at : at + block], codec, tensor.element_size()) for at in range(0, len(raw), block)]
    said = msgspec.structs.replace(gradient, codec=codec, block=block, blocks=tuple(map(len, blocks)))
    return said, ("uint8", blocks)


@pytest.mark.parametrize("piece", [8, 24, 64, 4096])
@pytest.mark.parametrize("codec", [False, True])
def test_any_box_of_a_part_arrives_whatever_the_pieces(
    piece: int, codec: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "PIECE", piece)
    monkeypatch.setattr(opening, "FIRST_READ", 100)
    drawn, generator = random.Random(piece), torch.Generator().manual_seed(piece)
    for _ in range(30):
        half = torch.randn(2 * NUMEL, generator=generator).bfloat16()
        other = torch.randn(4, generator=generator)
        first = Gradient(name="grad/0", entries=(1, 0), dtype="bfloat16", wide="float32", scale=SCALE.hex())
        second = Gradient(name="grad/1", entries=(2,), dtype="float32", wide="float32")
        tensors: dict[str, Any] = {"grad/0": half, "grad/1": other}
        if codec:
            first, tensors["grad/0"] = coded(half, first, 48)
        store = MemoryStore()
        put(store, (first, second), tensors)
        head = head_of(SHAPE, SHAPE, (4,))
        copies, expected = [], []
        for entry, at in ((0, NUMEL), (1, 0), (1, 0)):
            offsets = tuple(drawn.randrange(n) for n in SHAPE)
            box = Box(offsets, tuple(drawn.randrange(1, n - o + 1) for n, o in zip(SHAPE, offsets, strict=True)))
            copies.append(Copy(0, entry, 0, SHAPE, box, torch.zeros(box.sizes)))
            whole = (half[at : at + NUMEL].float() * SCALE).view(SHAPE)
            expected.append(whole[box.relative_to(Box.whole(SHAPE))])
        copies.append(Copy(0, 2, 0, (4,), Box((1,), (2,)), torch.zeros(2)))
        expected.append(other[1:3])
        found = incoming(head, *copies).read(1, {0: opened(store)})
        assert len(found.filled) == 1
        for copy, value in zip(copies, expected, strict=True):
            assert torch.equal(copy.view, value)


def test_objects_are_kept_and_proved() -> None:
    store = MemoryStore()
    said = Object(name="a", kind="extra", document='{"tensor":0}', tensors=(Inner("object/a", "int64", (2,)),))
    put(store, (), {"object/a": torch.tensor([3, 4])}, (said,))
    one = opened(store)
    kept = streaming.Keeping(16)
    streaming.read_verified(one, {"object/a": kept}, streaming.Scratch())
    assert bytes(kept.data) == tensor_bytes(torch.tensor([3, 4]))


def test_a_byte_that_changed_is_found_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "PIECE", 64)
    monkeypatch.setattr(opening, "FIRST_READ", 100)
    store = MemoryStore()
    gradient = Gradient(name="grad/0", entries=(0,), dtype="float32", wide="float32")
    put(store, (gradient,), {"grad/0": torch.ones(NUMEL)})
    (key,) = store.objects
    sound = store.objects[key]
    place = opened(store).place
    for at in range(0, place.nbytes, 3):
        damaged = bytearray(sound)
        damaged[place.start + at] ^= 1
        store.objects[key] = bytes(damaged)
        with pytest.raises((DigestMismatch, MalformedData)):
            incoming(head_of(SHAPE), Copy(0, 0, 0, SHAPE, Box.whole(SHAPE), torch.zeros(SHAPE))).read(
                1, {0: opened(store)}
            )


def test_a_part_of_a_gradient_or_an_unknown_entry_is_refused() -> None:
    head = head_of((4,), (4,))
    views = [Copy(0, entry, 0, (4,), Box((0,), (4,)), torch.zeros(4)) for entry in (0, 1)]
    for entries, error, message in (
        ((0,), ReplayError, "a part of the gradient of 'p' was not logged"),
        ((0, 2), MalformedData, "a gradient of entry 2"),
        ((0, 0), MalformedData, "a gradient of entry 0"),
    ):
        store = MemoryStore()
        gradient = Gradient(name="grad/0", entries=entries, dtype="float32", wide="float32")
        put(store, (gradient,), {"grad/0": torch.ones(4 * len(entries))})
        with pytest.raises(error, match=message):
            incoming(head, *views).read(1, {0: opened(store)})


@pytest.mark.parametrize("codec", [False, True])
def test_memory_does_not_grow_with_the_record(codec: bool, tmp_path: Path) -> None:
    numel = 32 << 20  # 64 MiB as it is stored
    store = LocalStore(str(tmp_path))
    data = torch.arange(numel, dtype=torch.int32).remainder_(251).to(torch.bfloat16)
    gradient = Gradient(name="grad/0", entries=(0,), dtype="bfloat16", wide="float32", scale=SCALE.hex())
    tensors: dict[str, Any] = {"grad/0": data}
    if codec:
        gradient, tensors["grad/0"] = coded(data, gradient, 4 << 20)
    put(store, (gradient,), tensors)
    grad = torch.zeros(numel)
    job = incoming(head_of((numel,)), Copy(0, 0, 0, (numel,), Box((0,), (numel,)), grad))
    tracemalloc.start()
    try:
        job.read(1, {0: opened(store)})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20
    assert torch.equal(grad[::997], data[::997].float() * SCALE)


RESIDENT = """
import re, sys, torch
sys.path.insert(0, {here!r})
from test_streaming import *
from ckpt.store.local import LocalStore
numel = 32 << 20
grad = torch.zeros(numel)
job = incoming(head_of((numel,)), Copy(0, 0, 0, (numel,), Box((0,), (numel,)), grad))
torch.ones(1 << 20, dtype=torch.bfloat16).float().mul_(2)
def high():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
grad.fill_(1)
before = high()
job.read(1, {{0: opened(LocalStore(sys.argv[1]))}})
print(high() - before)
"""


def test_the_process_does_not_grow_either(tmp_path: Path) -> None:
    gradient = Gradient(name="grad/0", entries=(0,), dtype="bfloat16", wide="float32", scale=SCALE.hex())
    put(LocalStore(str(tmp_path)), (gradient,), {"grad/0": torch.ones(32 << 20).bfloat16()})
    program = RESIDENT.format(here=str(Path(__file__).parent))
    said = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(said.stdout) < 16 << 20
