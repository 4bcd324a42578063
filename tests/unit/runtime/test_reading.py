from __future__ import annotations

import pytest
import torch

from ckpt.errors import BudgetTooSmall, ConfigError, DigestMismatch, MalformedData, MissingChunk, PlanError
from ckpt.format.codec import encode
from ckpt.format.digest import digest
from ckpt.format.manifest import ChunkEntry, IndexPart, PackRef
from ckpt.layout.box import Box
from ckpt.layout.spec import PARAM, TensorSpec
from ckpt.plan.load_plan import ChunkRead, Use
from ckpt.plan.read_plan import Places, plan_alone, runs_of_numbers
from ckpt.runtime.placing import Chunks
from ckpt.runtime.reading import check_packs, read_unit
from ckpt.runtime.reading_mode import (
    checked_budget,
    checked_read,
    choose,
    file_system_of,
    span_for,
)
from ckpt.store.memory import MemoryStore

KEY = "steps/1/a/packs/rank0.safetensors"
WHOLE = torch.arange(12, dtype=torch.float32).reshape(6, 2)


class Case:
    """A tensor of 6 x 2 in chunks of two rows in one pack, and the pieces that want it."""

    def __init__(self, codec: str | None = None, dtype: str = "float32") -> None:
        self.store = MemoryStore()
        self.spec = TensorSpec("w", PARAM, "float32", (6, 2))
        data, entries = bytearray(b"header!!"), []
        for row in (0, 2, 4):
            raw = WHOLE[row : row + 2].numpy().tobytes()
            stored = raw if codec is None else encode(raw, codec, 4)
            more = () if codec is None else ((), 1, len(stored))
            entries.append(ChunkEntry(0, (row, 0), (2, 2), digest(raw), 0, len(data), len(raw), *more))
            data += stored
        self.store.put(KEY, bytes(data))
        self.sizes = {KEY: len(data)}
        pack = PackRef(key=KEY, nbytes=len(data))
        codecs = () if codec is None else (codec,)
        self.places = Places([self.spec], [IndexPart(rank=0, packs=(pack,), chunks=tuple(entries), codecs=codecs)])
        self.entries = entries
        (self.unit,) = plan_alone(self.places.order, runs_of_numbers(range(3)), 0, gap=0)

    def chunks(self, *targets: torch.Tensor) -> Chunks:
        """All of ``targets`` want all that there is."""
        pieces = [Piece(self.spec, Box.whole((6, 2)), target) for target in targets]
        reads = [
            ChunkRead(KEY, self.spec, entry, 1, [Use(t, entry.box) for t in range(len(pieces))])
            for entry in self.entries
        ]
        return Chunks(self.store, self.places, reads, pieces)


class Piece:
    def __init__(self, spec: TensorSpec, box: Box, tensor: torch.Tensor) -> None:
        self.spec, self.box, self.tensor = spec, box, tensor


@pytest.mark.parametrize("codec", [None, "zstd", "shuffle4+zstd"])
def test_a_unit_is_the_chunks_own_bytes(codec):
    case, target = Case(codec), torch.zeros(6, 2)
    data = memoryview(bytearray(case.unit.nbytes))
    read_unit(case.store, case.places.order, case.unit, data)
    assert bytes(data) == WHOLE.numpy().tobytes()
    case.chunks(target).put(case.unit, data)
    assert torch.equal(target, WHOLE)


@pytest.mark.parametrize("codec", [None, "shuffle4+zstd"])
def test_bytes_are_read_into_live_memory_that_they_fill(codec):
    case, target = Case(codec), torch.zeros(6, 2)
    chunks = case.chunks(target)
    live = chunks.live(case.unit)
    assert live is not None
    chunks.read(case.unit, live)
    assert torch.equal(target, WHOLE)


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(2, 6).t(),
        torch.zeros(6, 3)[:, :2],
        torch.zeros(6, 2, dtype=torch.float64),
        torch.zeros(1, 2).expand(6, 2),
    ],
    ids=["transposed", "slice", "other dtype", "expanded"],
)
def test_other_memory_is_no_place_to_read_into(target):
    assert Case().chunks(target).live(Case().unit) is None


def test_what_two_pieces_want_is_no_place_to_read_into():
    case = Case()
    assert case.chunks(torch.zeros(6, 2), torch.zeros(6, 2)).live(case.unit) is None


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_a_short_pack_names_the_chunk_that_it_lacks(codec):
    case = Case(codec)
    whole = case.store.get(KEY)
    case.store.put(KEY, whole[:-3], overwrite=True)
    with pytest.raises(MissingChunk, match=r"\[4:6, 0:2\].*ends 3 bytes before"):
        read_unit(case.store, case.places.order, case.unit, memoryview(bytearray(case.unit.nbytes)))


def test_an_absent_pack_is_a_missing_chunk():
    case = Case()
    case.store.delete(KEY)
    with pytest.raises(MissingChunk, match="is not in"):
        read_unit(case.store, case.places.order, case.unit, memoryview(bytearray(case.unit.nbytes)))
    with pytest.raises(MissingChunk, match=r"and 2 more: pack .* is not there"):
        check_packs(case.store, case.places.order, case.sizes)


@pytest.mark.parametrize(("codec", "error"), [(None, DigestMismatch), ("zstd", (DigestMismatch, MalformedData))])
def test_a_wrong_byte_names_tensor_pack_and_position(codec, error):
    case = Case(codec)
    at = case.entries[1].start + 5
    data = bytearray(case.store.get(KEY))
    data[at] ^= 1
    case.store.put(KEY, bytes(data), overwrite=True)
    with pytest.raises(error, match=rf"'w' .*\[2:4, 0:2\].*{KEY} at {case.entries[1].start}"):
        read_unit(case.store, case.places.order, case.unit, memoryview(bytearray(case.unit.nbytes)))


def test_a_count_that_the_target_cannot_hold_is_refused():
    store, raw = MemoryStore(), torch.tensor(2.5).numpy().tobytes()
    spec, wanted = TensorSpec("w", "step", "float32", ()), TensorSpec("w", "step", "int64", ())
    entry = ChunkEntry(0, (), (), digest(raw), 0, 8, 4)
    places = Places([spec], [IndexPart(rank=0, packs=(PackRef(key=KEY, nbytes=12),), chunks=(entry,))])
    (unit,) = plan_alone(places.order, runs_of_numbers([0]), 0, gap=0)
    piece = Piece(wanted, Box.whole(()), torch.tensor(0))
    chunks = Chunks(store, places, [ChunkRead(KEY, spec, entry, 1, [Use(0, Box.whole(()))])], [piece])
    with pytest.raises(PlanError, match=r"2\.5 is not exact"):
        chunks.put(unit, memoryview(bytearray(raw)))


MOUNTS = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:26 / /data rw shared:2 - nfs4 server:/export rw
31 30 0:27 / /data/fast\040disk rw - xfs /dev/nvme0n1 rw
32 22 0:28 / /scratch rw - tmpfs tmpfs rw
33 32 0:29 / /scratch rw - lustre mgs:/fs rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/x", "ext4"),
        ("/data/run", "nfs4"),
        ("/database", "ext4"),
        ("/data/fast disk/a", "xfs"),
        ("/scratch", "lustre"),
    ],
)
def test_a_path_is_on_the_nearest_mount_that_was_made_last(path, kind):
    assert file_system_of(path, MOUNTS) == kind


@pytest.mark.parametrize(
    ("read", "hosts", "url", "expected"),
    [
        ("auto", "abcd", "s3://bucket/run", "once"),
        ("auto", "aaaa", "gs://bucket/run", "once"),
        ("auto", "aabb", "/nfs/run", "once"),
        ("auto", "aabb", "/disk/run", "once per host"),
        ("auto", "aaaa", "/disk/run", "once"),
        ("auto", "abcd", "/disk/run", "each"),  # a copy on each disk, or none of them would find it
        ("auto", "aaaa", "/dev/shm/run", "each"),
        ("once", "abcd", "/disk/run", "once"),
        ("each", "abcd", "s3://bucket/run", "each"),
        ("once", "a", "s3://bucket/run", "each"),  # nobody to hand anything to
    ],
)
def test_how_ranks_read_follows_from_where_the_bytes_are(read, hosts, url, expected, monkeypatch):
    kinds = {"/nfs": "nfs4", "/disk": "xfs", "/dev": "tmpfs"}
    monkeypatch.setattr("ckpt.runtime.reading_mode.file_system_of", lambda url: kinds["/" + url.split("/")[1]])
    assert choose(read, hosts, url) == expected


def test_wrong_arguments_are_refused():
    with pytest.raises(ConfigError, match="'auto', 'once' or 'each'"):
        checked_read("twice")
    for budget in (True, "1 GiB", 1e9):
        with pytest.raises(ConfigError, match="a number of bytes"):
            checked_budget(budget)
    with pytest.raises(BudgetTooSmall):
        checked_budget((16 << 20) - 1)
    for read in ("once", "each"):
        assert 4 * span_for(read, checked_budget(16 << 20)) <= 16 << 20


def test_live_memory_on_a_device_is_one_piece_of_one_allocation():
    case, cpu = Case(), torch.device("cpu")
    whole = torch.zeros(9, 2)
    raw = case.chunks(whole[1:7]).live_on(case.unit, cpu)
    assert raw is not None
    assert raw.tolist() == [0] * 48
    raw.copy_(torch.frombuffer(bytearray(WHOLE.numpy().tobytes()), dtype=torch.uint8))
    assert torch.equal(whole[1:7], WHOLE)
    assert not whole[0].any()
    assert not whole[7:].any()
    assert case.chunks(whole[1:7]).live_on(case.unit, torch.device("cuda", 0)) is None
    assert case.chunks(torch.zeros(2, 6).T).live_on(case.unit, cpu) is None
    assert case.chunks(torch.zeros(6, 2), torch.zeros(6, 2)).live_on(case.unit, cpu) is None
    assert case.chunks(torch.zeros(6, 2, dtype=torch.bfloat16)).live_on(case.unit, cpu) is None


def test_live_memory_of_neighbours_that_are_two_allocations_is_none_on_a_device():
    """Next to each other by chance they are one piece for the CPU, and not for a tensor."""
    case, page = Case(), bytearray(48)
    parts = [torch.frombuffer(memoryview(page)[at : at + 16], dtype=torch.float32).reshape(2, 2) for at in (0, 16, 32)]
    specs = [TensorSpec(name, PARAM, "float32", (2, 2)) for name in "abc"]
    pieces = [Piece(spec, Box.whole((2, 2)), part) for spec, part in zip(specs, parts, strict=True)]
    entries = [ChunkEntry(0, (0, 0), (2, 2), e.digest, 0, e.start, e.nbytes) for e in case.entries]
    places = Places(
        specs, [IndexPart(rank=0, packs=(PackRef(key=KEY, nbytes=case.sizes[KEY]),), chunks=tuple(entries))]
    )
    (unit,) = plan_alone(places.order, runs_of_numbers(range(3)), 0, gap=0)
    reads = [
        ChunkRead(KEY, spec, e, 1, [Use(k, e.box)]) for k, (spec, e) in enumerate(zip(specs, entries, strict=True))
    ]
    chunks = Chunks(case.store, places, reads, pieces)
    assert chunks.live(unit) is not None
    assert chunks.live_on(unit, torch.device("cpu")) is None
    chunks.place(unit, torch.frombuffer(bytearray(WHOLE.numpy().tobytes()), dtype=torch.uint8))
    assert bytes(page) == WHOLE.numpy().tobytes()
