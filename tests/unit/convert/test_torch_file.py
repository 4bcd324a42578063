"""What ``torch.save`` writes is read as a tree with the places of tensors, without reading them or running anything."""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import io
import sys
import types
import zipfile

import numpy as np
import pytest
import torch

from ckpt.convert.torchfile.file import Inert, Stored, is_torch_file, read_pickle, read_tree, stored_in
from ckpt.convert.torchfile.stored import load_stored, loaded
from ckpt.errors import MalformedData, ObjectNotFound, UnsupportedFeature
from ckpt.layout.spec import ITEMSIZE
from ckpt.store.memory import MemoryStore
from tests.unit.convert.torch_files import Watched, same, saved, store_of

WAYS = [
    {},
    {"pickle_protocol": 3},
    {"pickle_protocol": 4},
    {"pickle_protocol": 5},
    {"_use_new_zipfile_serialization": False},
]
ways = pytest.mark.parametrize("way", WAYS, ids=str)


def read(value, way=None, **options):
    return read_tree(store_of(x__pt=saved(value, **(way or {}))), "x.pt", **options)


def tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(120.0).reshape(10, 12)
    return {
        "whole": base,
        "tied": base,
        "rows": base[2:5],
        "columns": base[:, 3:7],
        "transposed": base.t(),
        "steps": base[1::3, ::2],
        "channels_last": torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last),
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
        "number": torch.tensor(3.5),
        "none": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.arange(4.0)),
        "other": base.clone(),
    }


@ways
def test_tensors_of_every_kind(way) -> None:
    expected = tensors()
    store = store_of(x__pt=saved(expected, **way))
    tree = read_tree(store, "x.pt")
    assert list(tree) == list(expected)
    for name, tensor in expected.items():
        assert isinstance(tree[name], Stored)
        assert tree[name].shape == tuple(tensor.shape)
        assert same(load_stored(store, tree[name]), tensor), name
    assert tree["whole"] == tree["tied"] != tree["other"]
    assert tree["rows"].start == tree["whole"].start + 2 * 12 * 4
    contiguous = {name for name, one in tree.items() if one.is_contiguous}
    assert contiguous == {name for name, tensor in expected.items() if tensor.is_contiguous()}


@pytest.mark.parametrize("dtype", [d for d in ITEMSIZE if hasattr(torch, d)])
def test_every_dtype(dtype) -> None:
    expected = torch.arange(ITEMSIZE[dtype] * 6, dtype=torch.uint8).view(getattr(torch, dtype))
    if dtype == "bool":
        expected = torch.tensor([True, False, True])
    store = store_of(x__pt=[expected])
    (stored,) = read_tree(store, "x.pt")
    assert stored.dtype == dtype
    assert same(load_stored(store, stored), expected)


@ways
def test_plain_values(way) -> None:
    value = {
        "none": None,
        "numbers": [True, 0, -5, 255, 70_000, 2**31, 2**100, -(2**100), 1.5, float("inf"), 1 + 2j],
        "text": ["", "ä\U0001f600", "x" * 300],
        "bytes": [b"", b"abc\xff", b"y" * 300],
        "bytearray": bytearray(b"12"),
        "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        "sets": [{1, 2}, frozenset({"a"})],
        "ordered": collections.OrderedDict(b=1, a=2),
        "counter": collections.Counter("aab"),
        "defaultdict": collections.defaultdict(list, {1: [2]}),
        "size": torch.Size((1, 2)),
        "dtypes": [torch.bfloat16, torch.float8_e4m3fn],
        "device": torch.device("cpu"),
        "scalars": [np.float64(3), np.int32(-4), np.bool_(True)],
        "nested": {"a": {"b": [{"c": 1}]}},
    }
    tree = read(value, way)
    assert tree == value
    assert type(tree["ordered"]) is dict
    assert list(tree["ordered"]) == ["b", "a"]
    assert [type(one) for one in tree["scalars"]] == [np.float64, np.int32, np.bool_]


@ways
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.arange(6.0).reshape(2, 3).T,
        np.array(["a", "bcd"]),
        np.zeros((0, 4)),
        np.array(5, dtype=np.uint8),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}",
)
def test_numpy_arrays(way, array) -> None:
    twice = read([array, array], way)
    assert twice[0] is twice[1]
    assert (twice[0].dtype.newbyteorder("="), twice[0].shape) == (array.dtype.newbyteorder("="), array.shape)
    assert (twice[0] == array).all()


@ways
def test_attributes_of_tensors_are_left_out(way) -> None:
    tensor, parameter = torch.arange(3.0), torch.nn.Parameter(torch.ones(2))
    tensor.mine, parameter.tensor_model_parallel = "x", True
    store = store_of(x__pt=saved([tensor, parameter, torch.nn.Buffer(torch.ones(4))], **way))
    found = [load_stored(store, one) for one in read_tree(store, "x.pt")]
    assert [one.tolist() for one in found] == [[0, 1, 2], [1, 1], [1, 1, 1, 1]]


def test_generator_states() -> None:
    state = {"numpy": np.random.RandomState(3).get_state(), "torch": torch.get_rng_state()}
    store = store_of(x__pt=state)
    found = loaded(store, read_tree(store, "x.pt"))
    assert same(found["torch"], state["torch"])
    np.random.RandomState().set_state(found["numpy"])


def test_a_state_dict_of_modules() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    store = store_of(x__pt={"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    tree = read_tree(store, "x.pt")
    assert list(tree["model"]) == list(model.state_dict())
    assert tree["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
    for path, stored in stored_in(tree["optimizer"]["state"]):
        assert same(load_stored(store, stored), optimizer.state_dict()["state"][path[0]][path[1]])


def test_only_directory_and_pickle_are_read() -> None:
    store = Watched()
    data = saved({f"w{n}": torch.zeros(1 << 18) for n in range(8)})
    store.put("x.pt", b"prefix" * 9 + data + b"suffix")
    tree = read_tree(store, "x.pt", start=54, nbytes=len(data))
    assert len(tree) == 8
    # A window for the directory at the end, the pickle at the front, and the header in front of each record.
    assert store.read < 12 * (64 << 10) < len(data) // 8
    assert same(load_stored(store, tree["w3"]), torch.zeros(1 << 18))


def test_blobs_one_behind_the_other() -> None:
    blobs = [saved(torch.full((n + 1,), float(n))) for n in range(3)]
    store = store_of(x__distcp=b"".join(blobs))
    at = 0
    for n, blob in enumerate(blobs):
        stored = read_tree(store, "x.distcp", start=at, nbytes=len(blob))
        assert same(load_stored(store, stored), torch.full((n + 1,), float(n)))
        at += len(blob)


def test_what_is_a_torch_file() -> None:
    store = store_of(a__pt=saved(1), b__pt=saved(1, _use_new_zipfile_serialization=False), c__pt=b"hello, world")
    assert [is_torch_file(store, key) for key in ("a.pt", "b.pt", "c.pt")] == [True, True, False]


def test_a_bare_pickle() -> None:
    import pickle

    store = store_of(x__pkl=pickle.dumps({"a": collections.OrderedDict(b=1)}))
    assert read_pickle(store, "x.pkl") == {"a": {"b": 1}}


# ----------------------------------------------------------------------------------------------- classes of others


class _Stranger:
    def __init__(self) -> None:
        self.x = 1


def _module(name: str, **members: object) -> types.ModuleType:
    """A module that can be pickled from, and is gone afterwards."""
    module = types.ModuleType(name)
    for member, value in members.items():
        value.__module__, value.__qualname__ = name, member
        setattr(module, member, value)
    return module


@pytest.fixture
def deepspeed_like(monkeypatch):
    """Classes as DeepSpeed's files have them, from a package that is not there when they are read."""

    class Stage(enum.IntEnum):
        weights = 3

    class Address:
        __slots__ = ("numel", "start")

        def __init__(self) -> None:
            self.start, self.numel = 4, 5

    class Scaler:
        def __init__(self) -> None:
            self.cur_scale, self.held = 2.0, torch.ones(2)

    name = "deepspeed.nowhere"
    module = _module(name, Stage=Stage, Address=Address, Scaler=Scaler)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        data = saved({"stage": Stage.weights, "address": Address(), "scaler": Scaler(), "twice": [Stage.weights] * 2})
    assert name not in sys.modules
    return data


def test_objects_of_deepspeed_and_megatron_become_records(deepspeed_like) -> None:
    store = store_of(x__pt=deepspeed_like)
    tree = read_tree(store, "x.pt")
    assert tree["stage"].name == "deepspeed.nowhere.Stage"
    assert tree["stage"].args in ((3,), ("weights",))
    assert tree["address"].attributes == {"start": 4, "numel": 5}
    assert tree["scaler"].attributes["cur_scale"] == 2.0
    assert same(load_stored(store, tree["scaler"].attributes["held"]), torch.ones(2))


def test_a_namespace_is_a_record_and_loads_as_a_dictionary() -> None:
    store = store_of(x__pt={"args": argparse.Namespace(lr=0.1, w=torch.ones(2))})
    tree = read_tree(store, "x.pt")
    assert isinstance(tree["args"], Inert)
    assert tree["args"].name == "argparse.Namespace"
    assert loaded(store, tree)["args"]["lr"] == 0.1
    assert same(loaded(store, tree)["args"]["w"], torch.ones(2))


@ways
@pytest.mark.parametrize(
    ("value", "name"),
    [
        (_Stranger(), f"{__name__}._Stranger"),
        (functools.partial(print, 1), "functools.partial"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (print, "builtins.print"),
        (np.array([object()]), "O8"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_other_classes_are_refused_by_name(way, value, name) -> None:
    with pytest.raises(UnsupportedFeature, match=name.replace(".", r"\.")) as caught:
        read({"a": value}, way)
    assert "'x.pt' in memory" in str(caught.value)
    assert "--trust-pickle" in str(caught.value) or name == "O8"


def test_further_classes_can_be_records() -> None:
    tree = read({"a": _Stranger()}, inert=(f"{__name__}.",))
    assert tree["a"].attributes == {"x": 1}
    assert read({"a": _Stranger()}, inert=(f"{__name__}._Stranger",))["a"].name == f"{__name__}._Stranger"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(2, 2).to_sparse(), "sparse"),
        (torch.empty(3, device="meta"), "meta"),
        (torch.ones(2, dtype=torch.complex64).conj(), "conjugated"),
        (torch.ones(3).untyped_storage(), "a Storage by itself"),
    ],
    ids=["sparse", "meta", "conjugated", "storage"],
)
def test_tensors_without_plain_bytes_are_refused_by_name(value, text) -> None:
    with pytest.raises((UnsupportedFeature, MalformedData), match=rf"x.pt' in memory: 'model\.a': .*{text}"):
        read({"model": {"a": value, "b": torch.ones(2)}, "epoch": 3})
    with pytest.raises((UnsupportedFeature, MalformedData), match=rf"memory: 'all\.1': .*{text}"):
        read({"all": [3, value]})


def test_a_parameter_of_a_tensor_without_plain_bytes_is_refused_by_name() -> None:
    value = torch.nn.Parameter(torch.ones(2, 2).to_sparse(), requires_grad=False)
    with pytest.raises(UnsupportedFeature, match=r"'w': a sparse tensor"):
        read({"w": value})


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")  # torch is about to drop them
def test_quantized_tensors_are_refused() -> None:
    value = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with pytest.raises(UnsupportedFeature, match="QInt8Storage"):
        read(value)
    with pytest.raises(UnsupportedFeature, match=r"'a\.w': .*QInt8Storage"):
        read({"a": {"w": value}})


def test_trust_runs_what_the_file_names() -> None:
    value = {"a": _Stranger(), "b": functools.partial(int, base=2), "c": torch.ones(3), "d": enum.Enum}
    store = store_of(x__pt=saved(value))
    tree = read_tree(store, "x.pt", trust_pickle=True)
    assert type(tree["a"]) is _Stranger
    assert tree["a"].x == 1
    assert tree["b"]("101") == 5
    assert tree["d"] is enum.Enum
    assert same(load_stored(store, tree["c"]), torch.ones(3))


def test_trust_names_what_cannot_be_imported(monkeypatch) -> None:
    module = _module("nowhere_at_all", Thing=type("Thing", (), {}))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "nowhere_at_all", module)
        data = saved(module.Thing())
    with pytest.raises(MalformedData, match=r"nowhere_at_all\.Thing"):
        read_tree(store_of(x__pt=data), "x.pt", trust_pickle=True)


# ------------------------------------------------------------------------------------------------- files of other kinds


def rezipped(data: bytes, change=None, **how) -> bytes:
    """The archive written anew; ``change`` gets and returns its records by name, without their folder."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", **how) as new:
        records = {info.filename.removeprefix("archive/"): old.read(info) for info in old.infolist()}
        for name, content in (change(records) if change else records).items():
            new.writestr(f"archive/{name}", content)
    return out.getvalue()


def ones(**changes: bytes | None) -> bytes:
    """An archive of nine ones with other records: ``data__pkl`` is ``data.pkl``, ``data___0`` is ``data/0``."""

    def change(records):
        names = {name: name.replace("___", "/").replace("__", ".") for name in changes}
        kept = {name: data for name, data in records.items() if name not in names.values()}
        return kept | {names[name]: data for name, data in changes.items() if data is not None}

    return rezipped(saved([torch.ones(9)]), change)


def test_an_archive_written_by_another_tool() -> None:
    store = store_of(x__pt=rezipped(saved([torch.arange(5)])))
    assert same(load_stored(store, read_tree(store, "x.pt")[0]), torch.arange(5))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "no file of torch.save"),
        (b"PK\3\4", "truncated"),
        (b"hello world, hello world", "no file of torch.save"),
        (rezipped(saved([torch.ones(9)]), compression=zipfile.ZIP_DEFLATED), "compressed"),
        (ones(byteorder=b"big"), "byte order"),
        (ones(data___0=None), "no record"),
        (ones(data___0=b"1234" * 8), "32 bytes"),
        (ones(data__pkl=None), "0 records"),
        (ones(constants__pkl=b""), "TorchScript"),
    ],
    ids=["empty", "cut", "text", "deflated", "big", "record", "short", "pickle", "script"],
)
def test_files_that_are_none(data, text) -> None:
    with pytest.raises((MalformedData, UnsupportedFeature), match=text) as caught:
        read_tree(store_of(x__pt=data), "x.pt")
    assert "'x.pt' in memory" in str(caught.value)


def test_no_file() -> None:
    with pytest.raises(ObjectNotFound, match=r"x\.pt"):
        read_tree(MemoryStore(), "x.pt")


@pytest.mark.parametrize(("start", "nbytes"), [(-1, None), (0, 1 << 40), (1 << 40, None), (5, -2)])
def test_ranges_outside_of_the_file(start, nbytes) -> None:
    with pytest.raises(MalformedData, match="the file has"):
        read_tree(store_of(x__pt=saved(1)), "x.pt", start=start, nbytes=nbytes)


@pytest.mark.parametrize("way", [{}, {"_use_new_zipfile_serialization": False}], ids=str)
def test_cut_at_every_place(way) -> None:
    data = saved({"a": torch.arange(4), "b": torch.ones(2)}, **way)
    for length in range(0, len(data), 7):
        with pytest.raises((MalformedData, UnsupportedFeature)):
            read_tree(store_of(x__pt=data[:length]), "x.pt")
