"""Hostile and broken checkpoints of DCP and Megatron-core: an error of ours or a checkpoint, never anything else."""

from __future__ import annotations

import copy
import io
import os
import pickle
import random
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.convert.dcp.read import open_dcp
from ckpt.convert.megatron.read import open_megatron
from ckpt.errors import CkptError, MalformedData, ObjectNotFound, UnsupportedFeature
from ckpt.store.memory import MemoryStore
from tests.unit.convert.logical import content

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

METADATA = ".metadata"
FILE = "__0_0.distcp"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # one process is meant


class Evil:
    """Leaves a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def files_of(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in folder.iterdir()}


def store_of(files: dict[str, bytes]) -> MemoryStore:
    store = MemoryStore()
    store.objects = dict(files)
    return store


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    model = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(2, dtype=torch.bfloat16)}
    groups = [{"lr": 0.1, "params": ["a", "b"]}]
    state = {name: {"step": torch.tensor(2.0), "exp_avg": tensor.clone()} for name, tensor in model.items()}
    folder = tmp_path_factory.mktemp("dcp")
    with pytest.warns(UserWarning, match="single process"):  # of a fixture the mark above is not
        dcp.save({"model": model, "optim": {"state": state, "param_groups": groups}, "n": 3}, checkpoint_id=folder)
    return files_of(folder)


def survives(files: dict[str, bytes]) -> Any:
    """Open and read everything: what is held, or None after an error of ours."""
    with suppress(CkptError):
        return content(open_dcp(store_of(files), "hostile"))
    return None


def test_nothing_in_it_is_unpickled_or_run(
    valid: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "evil"
    evil = pickle.dumps(Evil(mark), protocol=4)
    real = pickle.loads(valid[METADATA])
    hidden = []
    for place in ("planner_data", "storage_meta", "version", "state_dict_metadata"):
        changed = copy.copy(real)
        setattr(changed, place, Evil(mark))
        hidden.append(pickle.dumps(changed))
    buffer = io.BytesIO()
    torch.save(Evil(mark), buffer)
    value = real.storage_data[next(index for index in real.storage_data if index.fqn == "n")]
    value.offset, value.length = len(valid[FILE]), buffer.tell()
    cases = [{**valid, METADATA: one} for one in (evil, *hidden)]
    cases.append({**valid, METADATA: pickle.dumps(real), FILE: valid[FILE] + buffer.getvalue()})

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("called")

    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, forbidden)
    for case in cases:
        with pytest.raises(UnsupportedFeature, match=r"needs posix\.mkdir, which is not on the list"):
            open_dcp(store_of(case), "hostile")
    assert not mark.exists()
    assert survives(valid) is not None


BAD: list[Any] = [-1, 0, 2**62, 2**70, 1.5, None, "x", [], (), {}, (-1, 0), (2**40, 4)]
PATHS = ["__99999999999999_0.distcp", "../x", "/etc/hostname", "a/../../x", "", "no\0", "http://x/y", ".", "missing"]


def forged(valid: dict[str, bytes]) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Every field of one record of each kind, replaced by every bad value."""
    reach: dict[str, Callable[[Any], Any]] = {
        "metadata": lambda m: m,
        "tensor": lambda m: m.state_dict_metadata["model.a"],
        "chunk": lambda m: m.state_dict_metadata["model.a"].chunks[0],
        "properties": lambda m: m.state_dict_metadata["model.a"].properties,
        "index": lambda m: next(i for i in m.storage_data if i.fqn == "model.a"),
        "info": lambda m: next(v for i, v in m.storage_data.items() if i.fqn == "model.a"),
        "value": lambda m: next(v for i, v in m.storage_data.items() if i.fqn == "optim.param_groups.0.lr"),
    }
    for kind, of in reach.items():
        for field in vars(of(pickle.loads(valid[METADATA]))):
            for bad in BAD + (PATHS if field == "relative_path" else []):
                metadata = pickle.loads(valid[METADATA])
                object.__setattr__(of(metadata), field, bad)
                with suppress(Exception):  # what cannot be pickled so is no attack
                    yield f"{kind}.{field} = {bad!r}", {**valid, METADATA: pickle.dumps(metadata)}


def test_every_field_may_lie(valid: dict[str, bytes]) -> None:
    right = survives(valid)
    assert right is not None
    tried = 0
    for label, files in forged(valid):
        found = survives(files)
        tried += 1
        if found is not None and not label.startswith("info.offset"):
            assert found["a", "exp_avg"] == right["a", "exp_avg"], label
    assert tried > 150


def changed(valid: dict[str, bytes], change: Callable[[Any], Any]) -> dict[str, bytes]:
    metadata = pickle.loads(valid[METADATA])
    change(metadata)
    return {**valid, METADATA: pickle.dumps(metadata)}


def refused(files: dict[str, bytes], error: type[CkptError], match: str) -> None:
    with pytest.raises(error, match=match):
        content(open_dcp(store_of(files), "hostile"))


def test_what_does_not_fit_together_is_named(valid: dict[str, bytes]) -> None:
    def chunks(metadata: Any) -> Any:
        return metadata.state_dict_metadata["model.a"].chunks

    def info(metadata: Any) -> Any:
        return next(v for i, v in metadata.storage_data.items() if i.fqn == "model.a")

    def swap(metadata: Any) -> None:
        places = {i.fqn: v for i, v in metadata.storage_data.items()}
        info(metadata).offset, info(metadata).length = places["model.b"].offset, places["model.b"].length

    def twice(metadata: Any) -> None:
        index = next(i for i in metadata.storage_data if i.fqn == "model.a")
        second = type(chunks(metadata)[0])(torch.Size([0, 1]), torch.Size([3, 3]))
        chunks(metadata).append(second)
        metadata.storage_data[type(index)("model.a", torch.Size([0, 1]))] = info(metadata)

    def larger(metadata: Any) -> None:
        metadata.state_dict_metadata["model.a"].size = torch.Size([2**40, 4])

    refused(changed(valid, lambda m: chunks(m).clear()), MalformedData, "hold 0 of 12 elements")
    refused(changed(valid, lambda m: m.storage_data.clear()), MalformedData, "storage_data does not say where")
    refused(
        changed(valid, swap), MalformedData, r"model.a \[0:3, 0:4\]: found bfloat16\[2\], the metadata says float32"
    )
    refused(changed(valid, twice), MalformedData, r"model.a \[0:3, 1:4\]: found float32\[3, 4\]")
    refused(changed(valid, larger), MalformedData, "hold 12 of 4398046511104 elements")
    refused(changed(valid, lambda m: setattr(info(m), "length", 10)), MalformedData, "truncated")
    refused({k: v for k, v in valid.items() if k != FILE}, ObjectNotFound, FILE)
    refused({**valid, FILE: valid[FILE][:-200]}, MalformedData, r"the file has \d+")
    for end in (0, 1, 100, len(valid[METADATA]) - 1):
        refused({**valid, METADATA: valid[METADATA][:end]}, MalformedData, r"not a readable pickle|\.metadata in")


def test_paths_in_the_state_dict_may_lie(valid: dict[str, bytes]) -> None:
    paths: list[Any] = [
        (), ("optim",), ("optim", "param_groups"), ("optim", "param_groups", "x", "lr"), ("model", "a"),
        ("model", "a", "b"), ("optim", "param_groups", 2**70, "lr"), ("optim", "state", "a"), ("", ""), (0,), (0, 1),
        ("optim", "state", "c", "exp_avg"), ("model", "_extra_state", "a", 3), ("n", "x"), ("a\0", "b"),
        ("optim", "param_groups", 0, "params"),
    ]  # fmt: skip
    for key in pickle.loads(valid[METADATA]).planner_data:
        for path in paths:
            survives(changed(valid, lambda m, key=key, path=path: m.planner_data.__setitem__(key, path)))
        survives(changed(valid, lambda m, key=key: m.planner_data.pop(key)))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_damage_is_an_error_of_ours_or_none(valid: dict[str, bytes], data: Any) -> None:
    name = data.draw(st.sampled_from([METADATA, METADATA, FILE]))
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    raw = bytearray(valid[name])
    for _ in range(data.draw(st.integers(1, 4))):
        at = chance.randrange(len(raw))
        cut = chance.choice([0, 0, 0, 1, 7])
        raw[at : at + cut] = bytes(chance.randrange(256) for _ in range(chance.choice([1, 1, 3])))
    survives({**valid, name: bytes(raw)})


# ------------------------------------------------------------------------------------------------------------- Megatron


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("megatron")
    key = "decoder.layers.mlp.linear_fc1.weight"
    state = {key: torch.ones(2, 3, 4), f"optimizer.state.exp_avg.{key}": torch.zeros(2, 3, 4)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=folder)
    common = {"iteration": 2, "optimizer": {"state": {"common_step": torch.tensor(2.0)}, "param_groups": [{"lr": 1.0}]}}
    torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return files_of(folder)


def test_common_state_that_lies(megatron: dict[str, bytes], tmp_path: Path) -> None:
    assert open_megatron(store_of(megatron), "it").step == 2
    trees: list[Any] = [
        3, [], {"optimizer": 3}, {"optimizer": []}, {"optimizer": {0: 3}}, {"optimizer": {"param_groups": 3}},
        {"optimizer": {"param_groups": [3]}}, {"optimizer": {"param_groups": [{}], "state": 3}},
        {"optimizer": {0: {}, "x": 1}}, {"optimizer": {"optimizer": 3}}, {"opt_param_scheduler": 3}, {},
        {"iteration": -1}, {"iteration": "x"},
        {"optimizer": {"param_groups": [{"lr": torch.zeros(3)}], "state": {"common_step": torch.zeros(3)}}},
        {"optimizer": {"param_groups": [{"wd_mult": 0.0}], "state": {}}}, {"optimizer": {"grad_scaler": 3}},
        {"optimizer": {"param_groups": [{}], "state": {"common_step": float("nan")}}},
        {"optimizer": {"param_groups": [{}], "state": {"common_step": float("inf")}}},
    ]  # fmt: skip
    for tree in trees:
        buffer = io.BytesIO()
        torch.save(tree, buffer)
        with suppress(ckpt.CkptError):
            open_megatron(store_of({**megatron, "common.pt": buffer.getvalue()}), "it")
    zarr = b'{"sharded_backend": "zarr", "sharded_backend_version": 1}'
    for text in (b"", b"[]", b"{}", b"\xff", b"[" * 100_000, zarr):
        with pytest.raises((MalformedData, UnsupportedFeature), match=r"metadata\.json|'zarr'"):
            open_megatron(store_of({**megatron, "metadata.json": text}), "it")
    buffer = io.BytesIO()
    torch.save({"args": Evil(tmp_path / "evil")}, buffer)
    with pytest.raises(UnsupportedFeature, match=r"posix\.mkdir"):
        open_megatron(store_of({**megatron, "common.pt": buffer.getvalue()}), "it")
    assert not (tmp_path / "evil").exists()
