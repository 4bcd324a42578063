"""Torch files written front to back: read by torch itself, by ``zipfile``, and with zip64 fields in all places."""

from __future__ import annotations

import io
import zipfile
from collections import OrderedDict
from enum import IntEnum

import pytest
import torch

from ckpt.convert.torchfile import zip_stream
from ckpt.convert.torchfile.pickle_write import Instance, Named, Planned
from ckpt.convert.torchfile.write import TorchFile
from ckpt.errors import ConfigError, MalformedData
from ckpt.layout.box import Box
from ckpt.layout.spec import ITEMSIZE, Shard, TensorSpec
from ckpt.store.local import LocalStore
from ckpt.store.memory import MemoryStore
from ckpt.store.s3 import S3Store


def nothing(wants):
    assert not wants
    return []


def written(tree, feed=nothing) -> bytes:
    file, parts = TorchFile(tree), []
    file.write(lambda data: parts.append(bytes(data)), feed)
    data = b"".join(parts)
    assert len(data) == file.nbytes
    return data


def write_torch(store, key: str, tree, feed=nothing) -> int:
    file = TorchFile(tree)
    with store.writer(key, size=file.nbytes) as writer:
        file.write(writer.write, feed)
        writer.finish()
    return file.nbytes


def loaded(data: bytes, **options):
    return torch.load(io.BytesIO(data), weights_only=True, **options)


class Stage(IntEnum):
    TWO = 2


PLAIN = {
    "none": None, "yes": True, "no": False, "numbers": [0, -1, 2**31 - 1, -(2**31), 2**31, 2**63, -(2**70)],
    "floats": [0.1, float("inf"), -0.0], "text": "näme\n", "bytes": b"\x00\xff\n", "empty": [[], (), {}, ""],
    "tuples": ((1,), (1, 2, (3, 4, 5, 6))), 7: "key", "size": torch.Size([3, 0]), "dtype": torch.bfloat16,
}  # fmt: skip


def test_plain_values_come_back() -> None:
    found = loaded(written(PLAIN))
    assert found == PLAIN
    assert [type(v) for v in found.values()] == [type(v) for v in PLAIN.values()]
    ordered = loaded(written({"o": OrderedDict(b=1, a=OrderedDict())}))["o"]
    assert list(ordered) == ["b", "a"]
    assert type(ordered) is OrderedDict
    assert loaded(written([Stage.TWO, {"x": Stage.TWO}])) == [2, {"x": 2}]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
def test_tensors_of_every_dtype_come_back(dtype) -> None:
    kind = getattr(torch, dtype)
    tensor = torch.arange(1, 1 + 6 * kind.itemsize, dtype=torch.uint8).view(kind).view(2, 3)
    if dtype == "bool":
        tensor = torch.tensor([[True, False, True], [False, False, True]])
    if not hasattr(torch, dtype):
        pytest.skip(f"this torch has no {dtype}")
    found = loaded(written({"t": tensor, "row": tensor[1], "none": tensor[:, :0], "one": tensor[0, 0]}))
    for name, expected in (("t", tensor), ("row", tensor[1]), ("none", tensor[:, :0]), ("one", tensor[0, 0])):
        assert found[name].dtype == kind
        assert found[name].shape == expected.shape
        assert found[name].is_contiguous()
        assert bytes(found[name].contiguous().view(torch.uint8).numpy() if found[name].ndim else b"") == bytes(
            expected.contiguous().view(torch.uint8).numpy() if expected.ndim else b""
        )


def test_pieces_and_zeros_are_streamed_in_order_and_one_object_is_one_storage() -> None:
    source = torch.arange(40, dtype=torch.float32)
    spec = TensorSpec("w", "master", "float32", (40,))
    asked = []

    def feed(wants):
        asked.extend(wants)
        whole = b"".join(source[w.box.relative_to(Box.whole((40,)))].numpy().tobytes() for w in wants)
        return [whole[at : at + 7] for at in range(0, len(whole), 7)]  # cut anywhere

    want = [Shard(spec, Box((a,), (n,))) for a, n in ((10, 5), (0, 0), (30, 3), (0, 2))]
    flat = Planned("float32", (5, 2), (want[0], want[1], 8, want[2]))
    found = loaded(written({"flat": flat, "again": flat, "last": Planned("float32", (2,), (want[3],))}, feed))
    assert asked == [want[0], want[2], want[3]]
    assert found["flat"].flatten().tolist() == [10, 11, 12, 13, 14, 0, 0, 30, 31, 32]
    assert found["again"].data_ptr() == found["flat"].data_ptr()
    assert found["last"].tolist() == [0, 1]


def test_a_feed_that_ends_early_is_an_error() -> None:
    want = Shard(TensorSpec("w", "param", "int32", (4,)), Box((0,), (4,)))
    with pytest.raises(MalformedData, match="4 bytes less"):
        written([Planned("int32", (4,), (want,))], lambda wants: [b"x" * 12])


@pytest.mark.parametrize("limit", [0, 100, 3000, 0xFFFFFFFF])
def test_zip64_fields_where_numbers_are_large(limit, monkeypatch) -> None:
    monkeypatch.setattr(zip_stream, "LIMIT", limit)  # so small archives get what only large ones need
    tensors = {f"t{n}": torch.full((50 * n,), n, dtype=torch.int16) for n in range(8)}
    data = written(tensors)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None  # names and checksums
        assert archive.read("archive/version") == b"3\n"
    found = loaded(data)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_storages_lie_at_multiples_of_64_bytes_and_can_be_mapped(tmp_path) -> None:
    tensors = {f"{n}": torch.arange(n, dtype=torch.float64) for n in range(70)}
    (tmp_path / "f.pt").write_bytes(written(tensors))
    with zipfile.ZipFile(tmp_path / "f.pt") as archive:
        for entry in archive.infolist():
            with archive.open(entry):
                assert archive.fp.tell() % 64 == 0
    found = torch.load(tmp_path / "f.pt", weights_only=True, mmap=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("make", [lambda path: LocalStore(str(path)), lambda path: MemoryStore()])
def test_a_file_appears_whole_in_any_store(tmp_path, make) -> None:
    store = make(tmp_path)
    nbytes = write_torch(store, "a/b.pt", {"x": torch.ones(3)})
    assert store.size("a/b.pt") == nbytes
    assert loaded(store.get("a/b.pt"))["x"].tolist() == [1, 1, 1]

    def breaks(wants):
        raise MalformedData("broken")

    want = Shard(TensorSpec("w", "param", "int32", (4,)), Box((0,), (4,)))
    with pytest.raises(MalformedData, match="broken"):
        write_torch(store, "c.pt", Planned("int32", (4,), (want,)), breaks)
    assert store.size("c.pt") is None


@pytest.mark.usefixtures("s3_environment")
def test_a_file_of_several_parts_on_s3(moto) -> None:
    bucket, prefix = moto.place()
    store = S3Store.from_url(f"s3://{bucket}/{prefix}?endpoint={moto.url}")
    ones = torch.ones(3 << 20)
    write_torch(store, "big.pt", {"ones": ones, "zeros": Planned("int8", (9 << 20,), (9 << 20,))})
    found = loaded(store.get("big.pt"))
    assert torch.equal(found["ones"], ones)
    assert not found["zeros"].any()


def test_one_tensor_is_a_file_of_its_own() -> None:
    one = Planned("float32", (2, 2), (8, b"\0\0\x80?" * 2))
    assert loaded(written(one)).tolist() == [[0, 0], [1, 1]]


def test_instances_are_made_by_their_framework_and_refused_without_it() -> None:
    data = written({"p": Instance(Named("fractions", "Fraction"), {"_numerator": 1, "_denominator": 2})})
    namespace = written({"o": Instance(Named("types", "SimpleNamespace"), {"a": 1})})
    found = torch.load(io.BytesIO(namespace), weights_only=False)
    assert vars(found["o"]) == {"a": 1}
    with pytest.raises(Exception, match=r"fractions\.Fraction"):
        loaded(data)


@pytest.mark.parametrize("value", [{1, 2}, object(), [lambda: 0], {"a": {"b": 1j}}, Planned("float32", (3,), (8,))])
def test_what_cannot_be_written_is_refused_with_its_place(value) -> None:
    with pytest.raises(ConfigError, match="tree"):
        TorchFile(value)


def test_equal_trees_give_equal_bytes() -> None:
    assert written(PLAIN) == written(dict(PLAIN))
