"""Safetensors in and out: our writer against the reference implementation's reader, and the reverse."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from ckpt.convert.compare import EQUAL, compare
from ckpt.convert.opened import Loose
from ckpt.convert.options import ReadOptions, WriteOptions
from ckpt.convert.safetensors.read import is_safetensors, open_safetensors
from ckpt.convert.safetensors.write import INDEX, files_for, weights_of, write_safetensors
from ckpt.errors import ConfigError, MalformedData, MissingChunk, NoSuchCheckpoint, ObjectNotFound, UnsupportedFeature
from ckpt.store.local import LocalStore
from ckpt.store.memory import MemoryStore
from tests.unit.convert.contents import MEMORY, contents
from tests.unit.convert.sources import ADAM, Source
from tests.unit.convert.torch_files import same

TENSORS = {
    "bf16": torch.arange(7.0).bfloat16(),
    "f32": torch.arange(6.0).reshape(2, 3),
    "f8": torch.arange(3.0).to(torch.float8_e4m3fn),
    "f8e8": torch.ones(3).to(torch.float8_e8m0fnu),
    "c64": torch.arange(2.0) * 1j,
    "number": torch.tensor(2.5),
    "none": torch.zeros(0, 3),
    "mask": torch.tensor([True, False]),
    "ids": torch.arange(4),
    "u16": torch.ones(3).to(torch.uint16),
}


def opened(store, **options):
    return open_safetensors(store, "there", options=ReadOptions(), **options)


def options(**changed) -> WriteOptions:
    return replace(WriteOptions(memory=MEMORY), **changed)


def source(layers: int = 3):
    made = Source()
    made.add("embed.weight", "param", (10, 4), "bfloat16")
    for n in range(layers):
        for role in ADAM:
            shape = () if role == "step" else (4, 4)
            dtype = "bfloat16" if role == "param" else "float32"
            made.add(f"layers.{n}.weight", role, shape, dtype, first=n * 100)
    made.add("norm.running_mean", "buffer", (4,), "float32")
    made.add("norm.odd", "buffer", (4,), "float32")
    made.builder.aliases["head.weight"] = "embed.weight"
    made.builder.objects.append(Loose("optimizer", "engine", (0,), {"groups": []}))
    return made.builder.build()


# ------------------------------------------------------------------------------------------------------------------ in


def test_what_the_reference_writes(tmp_path) -> None:
    safetensors.torch.save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = opened(LocalStore(tmp_path), step=4)
    have = contents(found)
    assert have.keys() == {(n, "buffer" if n in ("mask", "ids", "u16") else "param") for n in TENSORS}
    assert all(same(value, TENSORS[name]) for (name, _), value in have.items())
    assert (found.format, found.step, found.notes, dict(found.aliases)) == ("safetensors", 4, (), {})


def test_tied_tensors_as_save_model_writes_them(tmp_path) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3, bias=False), "b": torch.nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    found = opened(LocalStore(tmp_path))
    assert {*found.aliases.items()} in ({("b.weight", "a.weight")}, {("a.weight", "b.weight")})
    assert len(found.specs) == 1


def sharded(tmp_path, *, index: bool = True) -> LocalStore:
    items = list(TENSORS.items())
    files = {"model-00001-of-00002.safetensors": dict(items[:4]), "model-00002-of-00002.safetensors": dict(items[4:])}
    for name, tensors in files.items():
        safetensors.torch.save_file(tensors, tmp_path / name)
    if index:
        weight_map = {name: file for file, tensors in files.items() for name in tensors}
        (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return LocalStore(tmp_path)


@pytest.mark.parametrize("index", [True, False])
def test_several_files(tmp_path, index) -> None:
    store = sharded(tmp_path, index=index)
    assert is_safetensors(store)
    assert {spec.fqn for spec in opened(store).specs} == TENSORS.keys()
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(MissingChunk, match=r"model-00002-of-00002\.safetensors of 2 files is not there"):
        opened(store)


def test_the_index_decides(tmp_path) -> None:
    store = sharded(tmp_path)
    safetensors.torch.save_file({"f32": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert {spec.fqn for spec in opened(store).specs} == TENSORS.keys()
    index = json.loads((tmp_path / INDEX).read_text())
    del index["weight_map"]["ids"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert opened(store).notes == ("ids: in a file, and not in the index",)
    index["weight_map"]["absent"] = "model-00001-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(MalformedData, match="absent of the index is in no file"):
        opened(store)


@pytest.mark.parametrize(
    "index", [b"", b"[]", b'{"weight_map": 3}', b'{"weight_map": {"a": "../x.safetensors"}}', b"[" * 100_000]
)
def test_a_bad_index(index) -> None:
    store = MemoryStore()
    store.put("model.safetensors.index.json", index)
    with pytest.raises(MalformedData, match=r"model\.safetensors\.index\.json"):
        opened(store)


def test_one_name_in_two_files_without_an_index(tmp_path) -> None:
    for name in ("a", "b"):
        safetensors.torch.save_file({"w": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(MalformedData, match=r"'w' is in 'a\.safetensors' and in 'b\.safetensors'"):
        opened(LocalStore(tmp_path))


def test_no_files() -> None:
    with pytest.raises(NoSuchCheckpoint):
        opened(MemoryStore())


def test_what_a_trainer_puts_beside_is_told(tmp_path) -> None:
    safetensors.torch.save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "optimizer.pt").write_bytes(b"")
    assert opened(LocalStore(tmp_path)).lost[0].startswith("optimizer.pt left out")


def forged(table, data: bytes = b"", length: int | None = None) -> MemoryStore:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    store = MemoryStore()
    store.put("model.safetensors", (len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return store


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("store", "error"),
    [
        (forged({"a": entry()}, b"1234", length=1 << 62), MalformedData),
        (forged({"a": entry()}, b"1234", length=90_000_000), MalformedData),
        (forged({"a": entry()}, b"123"), MalformedData),
        (forged({"a": entry()}, b"12345"), MalformedData),
        (forged({"a": entry(shape=(1 << 40,), offsets=(0, 4 << 40))}, b"1234"), MalformedData),
        (forged({"a": entry(shape=(-1,), offsets=(0, -4))}, b"1234"), MalformedData),
        (forged({"a": entry(offsets=(4, 8))}, b"12345678"), MalformedData),
        (forged({"a": entry(), "b": entry()}, b"1234"), MalformedData),
        (forged({"a": entry(dtype="X9")}, b"1234"), MalformedData),
        (forged({"a": entry(dtype="F4", shape=(8,))}, b"1234"), UnsupportedFeature),
        (forged({"a": entry(), "__metadata__": {"x": 1}}, b"1234"), MalformedData),
        (forged({"a": entry(), "__metadata__": {"ckpt.buffers": "["}}, b"1234"), MalformedData),
        (forged([], b""), MalformedData),
        (forged(b'{"a":' * 100_000, b""), MalformedData),
        (forged(b"", b""), MalformedData),
    ],
)
def test_headers_that_lie(store, error) -> None:
    with pytest.raises(error, match=r"model\.safetensors"):
        opened(store)


def test_a_file_that_is_gone() -> None:
    from ckpt.convert.safetensors.file import read_header

    with pytest.raises(ObjectNotFound):
        read_header(MemoryStore(), "x.safetensors")


# ----------------------------------------------------------------------------------------------------------------- out


def test_one_file_that_the_reference_reads(tmp_path) -> None:
    held = source()
    written = write_safetensors(held, LocalStore(tmp_path), None, options())
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    wanted = {name: value for (name, role), value in contents(held).items() if role in ("param", "buffer")}
    assert found.keys() == wanted.keys()
    assert all(same(found[name], wanted[name]) for name in wanted)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {
            "format": "pt",
            "head.weight": "embed.weight",
            "ckpt.buffers": '["norm.odd"]',
        }
    assert not (tmp_path / INDEX).exists()
    assert written.files == ("model.safetensors",)
    assert written.bytes_written == (tmp_path / "model.safetensors").stat().st_size
    assert [line.partition(":")[0] for line in written.lost] == [
        "exp_avg of 3 tensors, exp_avg_sq of 3 tensors, master of 3 tensors, step of 3 tensors",
        "engine state 'optimizer'",
        "config.json",
    ]
    assert written.made == ()


def test_files_of_bounded_size_and_their_index(tmp_path) -> None:
    written = write_safetensors(source(9), LocalStore(tmp_path), None, options(), shard_bytes=100)
    index = json.loads((tmp_path / INDEX).read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 3
    assert written.files == (*files, INDEX)
    found = {}
    for file in files:
        tensors = safetensors.torch.load_file(tmp_path / file)
        assert all(index["weight_map"][name] == file for name in tensors)
        assert sum(t.nbytes for t in tensors.values()) <= 100
        found |= tensors
    assert found.keys() == index["weight_map"].keys()
    assert index["metadata"] == {"total_size": sum(t.nbytes for t in found.values())}
    layers = [name for name in index["weight_map"] if name.startswith("layers")]
    assert layers == [f"layers.{n}.weight" for n in range(9)]


def test_a_tensor_that_is_larger_than_a_file_has_one_of_its_own() -> None:
    held = source()
    files = files_for(held, weights_of(held, None), 40)
    assert [spec.fqn for spec in files[0].specs] == ["embed.weight"]
    assert files[0].nbytes > 80


def test_out_and_in_again_is_the_same(tmp_path) -> None:
    held = source()
    write_safetensors(held, LocalStore(tmp_path), None, options(), shard_bytes=64)
    again = opened(LocalStore(tmp_path))
    rows = compare(held, again, roles=("param", "buffer"))
    assert {row.status for row in rows} == {EQUAL}
    assert again.aliases == {"head.weight": "embed.weight"}
    assert {spec.key for spec in again.specs if spec.role == "buffer"} == {
        ("norm.running_mean", "buffer"),
        ("norm.odd", "buffer"),
    }


def test_another_dtype_and_weights_of_which_there_are_masters_only(tmp_path) -> None:
    made = Source().add("a", "master", (4, 4), first=3).add("b", "param", (5,)).add("ids", "buffer", (3,), "int64")
    held = made.builder.build()
    written = write_safetensors(held, LocalStore(tmp_path), None, options(dtype="bfloat16"))
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    have = contents(held)
    assert same(found["a"], have["a", "master"].bfloat16())
    assert same(found["b"], have["b", "param"].bfloat16())
    assert same(found["ids"], have["ids", "buffer"])
    assert written.made == (
        "param of 1 tensor in bfloat16: rounded from its master in float32",
        "param of 1 tensor in bfloat16: rounded from its param in float32",
    )


@pytest.mark.parametrize("derived", [True, False])
def test_what_each_dtype_is_made_from_is_told(tmp_path, derived) -> None:
    made = Source().weights({"a": (4, 4)}, ("param", "master"))
    if derived:  # the parameter is the rounding of its master, and stored nowhere
        del made.builder._boxes["a", "param"]
        made.builder.derived.add("a")
    held = made.open()
    master = contents(held)["a", "master"]
    param = master.bfloat16() if derived else contents(held)["a", "param"]
    said = {
        "float32": (master, "as the source's master"),
        "bfloat16": (param, ""),
        "float16": (master.half(), "rounded from its master in float32")
        if derived
        else (param.half(), "rounded from its param in bfloat16"),
    }
    for dtype, (value, how) in said.items():
        written = write_safetensors(held, LocalStore(tmp_path / dtype), None, options(dtype=dtype))
        assert same(safetensors.torch.load_file(tmp_path / dtype / "model.safetensors")["a"], value)
        assert written.made == ((f"param of 1 tensor in {dtype}: {how}",) if how else ())
        assert any(line.startswith("master of") for line in written.lost) == (dtype != "float32")


@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
def test_what_belongs_to_the_model_comes_along(tmp_path, key) -> None:
    (tmp_path / "a").mkdir()
    safetensors.torch.save_file({"w": torch.ones(3)}, tmp_path / "a/model.safetensors")
    config = {"model_type": "tiny", **({key: "float32"} if key else {})}
    (tmp_path / "a/config.json").write_text(json.dumps(config))
    (tmp_path / "a/tokenizer.json").write_text("{}")
    (tmp_path / "a/notes.txt").write_text("mine")
    held = opened(LocalStore(tmp_path / "a"))
    written = write_safetensors(held, LocalStore(tmp_path / "b"), None, options(dtype="float16"))
    assert (tmp_path / "b/tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "b/config.json").read_text()) == {**config, (key or "torch_dtype"): "float16"}
    assert not (tmp_path / "b/notes.txt").exists()
    assert written.lost == ()


@pytest.mark.parametrize("dtype", ["complex128", "complex32"])
def test_a_dtype_that_the_format_does_not_have(tmp_path, dtype) -> None:
    made = Source()
    made.put("w", "param", (1,), dtype, bytes(16 if dtype == "complex128" else 4))
    with pytest.raises(UnsupportedFeature, match=f"'w' is {dtype}"):
        write_safetensors(made.builder.build(), LocalStore(tmp_path), None, options())


def test_a_source_without_weights(tmp_path) -> None:
    held = Source().add("w", "exp_avg", (3,)).builder.build()
    with pytest.raises(ConfigError, match="has no weights"):
        write_safetensors(held, LocalStore(tmp_path), None, options())


def test_a_place_that_is_not_empty_is_left_alone(tmp_path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        write_safetensors(source(), LocalStore(tmp_path), None, options())
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_dry_run_writes_nothing(tmp_path) -> None:
    store = LocalStore(tmp_path / "b")
    said = write_safetensors(source(), store, None, options(dry_run=True), shard_bytes=64)
    assert store.children("") == []
    done = write_safetensors(source(), store, None, options(), shard_bytes=64)
    assert (said.bytes_written, said.files, said.lost) == (done.bytes_written, done.files, done.lost)


class _Stop(Exception):
    pass


def test_an_interrupted_run_goes_on(tmp_path) -> None:
    held = source(9)
    store = LocalStore(tmp_path)

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise _Stop

    with pytest.raises(_Stop):
        write_safetensors(held, store, None, options(progress=stop), shard_bytes=100)
    finished = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert finished
    assert not (tmp_path / INDEX).exists()
    with pytest.raises(ConfigError, match="another conversion"):
        write_safetensors(held, store, None, options(dtype="float16"), shard_bytes=100)
    told = []
    written = write_safetensors(
        held, store, None, options(progress=lambda done, total: told.append((done, total))), shard_bytes=100
    )
    assert written.bytes_present == sum((tmp_path / name).stat().st_size for name in finished)
    assert told[-1][0] == told[-1][1] == written.bytes_present + written.bytes_written
    assert {row.status for row in compare(held, opened(store), roles=("param", "buffer"))} == {EQUAL}


def test_several_workers(tmp_path) -> None:
    held = source(9)
    write_safetensors(held, LocalStore(tmp_path), None, options(workers=2, memory=2 * MEMORY), shard_bytes=100)
    assert {row.status for row in compare(held, opened(LocalStore(tmp_path)), roles=("param", "buffer"))} == {EQUAL}
