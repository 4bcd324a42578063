"""Which parameter is where in Megatron's buckets: told by the weights, or refused."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckpt.convert.megatron.bucket_state import BucketState, Found
from ckpt.convert.opened import Builder
from ckpt.errors import MalformedData, UnsupportedFeature
from ckpt.layout.spec import MASTER, PARAM
from ckpt.store.open import open_store
from tests.unit.convert.contents import contents
from tests.unit.convert.megatron_buckets import LOCAL, MOE, NORM, TE, WORDS, Files, Job, Model, save, state_of

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt.convert.opened import Opened

QKV_NORM, FC1_NORM = "self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"
PROJ_BIAS = "self_attention.linear_proj.bias"


def read(files: Files) -> tuple[Found, Opened | None]:
    """Give the buckets' state to the parameters; return what is there then, if that was possible."""
    chains = files.write().chains()
    store = open_store(str(files.folder))
    builder = Builder("megatron", "it", store)
    shapes = {name: tuple(master.shape) for name, master in files.model.masters.items()}
    for name, pieces in files.pieces.items():
        for box, stored in pieces:
            spec = builder.spec(name, PARAM, stored.dtype, shapes[name])
            builder.add(spec, box, stored.key, stored.start)
    found = BucketState(store, files.pieces, shapes).add(chains, builder)
    return found, None if found.problem else builder.build()


def check(files: Files) -> Found:
    """Check that each parameter got its own state."""
    found, opened = read(files)
    assert found.problem == ""
    assert opened is not None
    there = contents(opened)
    fp32 = files.model.dtype == torch.float32
    roles = {"exp_avg": "exp_avg"} if fp32 else {"param": MASTER, "exp_avg": "exp_avg"}
    assert {key for key in there if key[1] != PARAM} == {(n, r) for n in files.model.masters for r in roles.values()}
    for name in files.model.masters:
        for role, ours in roles.items():
            assert torch.equal(there[name, ours], state_of(files.model, name, role)), (name, role)
    assert set(opened.derived) == (set() if fp32 else set(files.model.masters))
    return found


@pytest.mark.parametrize("seed", range(16))
def test_each_parameter_gets_its_own_state_in_any_layout(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    job = Job(
        tp=draw.choice([1, 2, 4]),
        pp=draw.choice([1, 2, 3]),
        dp=draw.choice([1, 2, 3]),
        virtual=draw.choice([1, 1, 2]),
        bucket=draw.choice([None, None, 1, 2000, 7000]),
        joined=draw.random() < 0.3,
    )
    if job.joined and job.bucket == 1:  # refused, below
        job.bucket = None
    layers = job.pp * job.virtual * draw.choice([1, 2])
    dtype = draw.choice([torch.bfloat16, torch.float32, torch.float16])
    model = Model.make(draw.choice([TE, LOCAL]), layers, tied=draw.random() < 0.5, dtype=dtype, seed=seed)
    found = check(save(tmp_path, model, job))
    assert found.told == set()
    assert set(found.chains.values()) == {0}


@pytest.mark.parametrize("job", [Job(ep=2), Job(ep=2, pp=2), Job(ep=4, dp=4, joined=True), Job(ep=2, tp=2, dp=2)])
def test_experts_are_in_groups_of_their_own(tmp_path: Path, job: Job) -> None:
    found = check(save(tmp_path, Model.make(MOE, 2, tied=False), job))
    assert {chain for name, chain in found.chains.items() if ".experts." in name} == {1}
    assert {chain for name, chain in found.chains.items() if ".experts." not in name} == {0}


def same(model: Model, layers: range, leafs: tuple[str, ...], value: float) -> Model:
    """Give parameters the same weights (their masters differ by less than 16 bit show)."""
    for layer in layers:
        for n, leaf in enumerate(leafs):
            master = model.masters[f"decoder.layers.{layer}.{leaf}"]
            master.fill_(value + 1e-5 * (n + 1))
    return model


@pytest.mark.parametrize("layer", [TE, LOCAL], ids=["te", "local"])
def test_same_weights_in_every_layer_follow_megatrons_order(tmp_path: Path, layer: dict[str, Any]) -> None:
    model = same(Model.make(layer, 4, tied=True), range(4), (QKV_NORM, FC1_NORM), 1.0)
    assert check(save(tmp_path, model, Job(tp=2, pp=2))).told == {QKV_NORM, FC1_NORM}


@pytest.mark.parametrize("layer", [TE, LOCAL], ids=["te", "local"])
def test_same_weights_in_some_layers_follow_the_others(tmp_path: Path, layer: dict[str, Any]) -> None:
    model = same(Model.make(layer, 4, tied=True), range(1, 4), (QKV_NORM, PROJ_BIAS), 0.0)
    model.masters[f"decoder.layers.1.{QKV_NORM}"].fill_(1e-5)
    model.masters[f"decoder.layers.1.{PROJ_BIAS}"].fill_(1e-5)
    assert check(save(tmp_path, model, Job(dp=2))).told == set()


@pytest.mark.parametrize("layer", [TE, LOCAL], ids=["te", "local"])
def test_an_order_that_is_not_known_is_no_order(tmp_path: Path, layer: dict[str, Any]) -> None:
    model = Model.make(layer, 2, tied=False)
    for n in range(2):
        for leaf in (QKV_NORM, PROJ_BIAS):
            model.masters[f"decoder.layers.{n}.{leaf}"].zero_()
    found, _ = read(save(tmp_path, model, Job()))
    assert found.problem == f"{PROJ_BIAS}, {QKV_NORM} have the same weights, and which of them is where is not known"


def test_one_element_that_is_another_is_enough(tmp_path: Path) -> None:
    files = save(tmp_path, Model.make(TE, 2, tied=False), Job(tp=2, pp=2, dp=2))
    box, stored = files.pieces["decoder.layers.1.mlp.linear_fc2.weight"][1]
    at = stored.start + 2 * (box.volume - 1)
    files.data[at : at + 2] = b"\x00\x01"
    found, _ = read(files)
    assert found.problem.startswith("at element ")
    assert "of bucket 0 of buffer 0 of group 2 are the weights of none of " in found.problem
    assert "decoder.layers.1.mlp.linear_fc2.weight" in found.problem


def test_two_parameters_that_changed_places_are_found_or_refused(tmp_path: Path) -> None:
    files = save(tmp_path, Model.make(TE, 2, tied=False), Job())
    one, other = "decoder.layers.0.mlp.linear_fc2.bias", "decoder.layers.1.mlp.linear_fc2.bias"
    files.pieces[one], files.pieces[other] = files.pieces[other], files.pieces[one]
    assert "are the weights of none of" in read(files)[0].problem
    changed = dict(TE)
    changed["mlp.linear_fc2.bias"] = changed.pop("mlp.linear_fc2.bias")
    changed[FC1_NORM] = changed.pop(FC1_NORM)  # some other order, the same in all layers
    check(save(tmp_path, Model.make(changed, 2, tied=False), Job(dp=2)))


def test_a_model_that_is_more_or_less_than_the_buckets(tmp_path: Path) -> None:
    model = Model.make(TE, 2, tied=False)
    files = save(tmp_path, model, Job())
    files.pieces["frozen.weight"] = [*files.pieces[NORM]]
    model.masters["frozen.weight"] = model.masters[NORM]
    assert read(files)[0].problem == "no bucket has frozen.weight"
    files = save(tmp_path, Model.make(TE, 2, tied=False), Job())
    del files.pieces[WORDS]
    problem = "bucket 0 of buffer 0 of group 0 goes on at element 14656, and all parameters are placed"
    assert read(files)[0].problem == problem


def test_buckets_without_the_weights_prove_nothing(tmp_path: Path) -> None:
    files = save(tmp_path, Model.make(TE, 1, tied=False), Job(roles=("exp_avg",)))
    assert read(files)[0].problem == "buckets without a copy of the weights"


def test_where_a_joined_bucket_ends_is_never_guessed(tmp_path: Path) -> None:
    found, _ = read(save(tmp_path, Model.make(TE, 2, tied=False), Job(bucket=1, joined=True)))
    assert found.problem == "buffer 0 of group 0 goes on at element 1312 or 1344, both have weights"


def test_files_that_do_not_fit_together(tmp_path: Path) -> None:
    def files() -> Files:
        return save(tmp_path, Model.make(TE, 2, tied=False), Job(pp=2, dp=2))

    prefix = "optimizer.distributed.dp_group_idx_"
    broken = files()
    broken.values[f"{prefix}1.per_bucket_numel_unpadded/shard_0_1"][0][("torch.bfloat16",) * 2][0] += 64
    with pytest.raises(MalformedData, match=r"group 1 of data-parallel ranks: bucket 0 of buffer 0 has not"):
        broken.write().chains()
    broken = files()
    broken.values[f"{prefix}0.per_bucket_numel/shard_0_1"] = "many"
    with pytest.raises(MalformedData, match=r"group 0 of data-parallel ranks: no sizes of buckets"):
        broken.write().chains()
    broken = files()
    del broken.values[f"{prefix}0.optimizer/shard_0_1"]
    with pytest.raises(MalformedData, match=r"group 0 of data-parallel ranks: .*no settings"):
        broken.write().chains()
    broken = files()
    numel, parts = next(iter(broken.tensors.values()))
    broken.tensors[next(iter(broken.tensors))] = numel, parts[1:]
    with pytest.raises(MalformedData, match=r"element 0 is missing, or stored twice"):
        broken.write()
    broken = files()
    broken.values[f"{prefix}1.optimizer/shard_0_1"]["param_groups"][0]["lr"] = 5
    with pytest.raises(UnsupportedFeature, match="settings differ between groups"):
        broken.write().chains()
    broken = files()
    broken.tensors = {key.replace("group_idx_1", "group_idx_9"): one for key, one in broken.tensors.items()}
    with pytest.raises(MalformedData, match=r"group 1 of data-parallel ranks: buckets \[\], expected"):
        broken.write().chains()
    joined = save(tmp_path, Model.make(TE, 1, tied=False), replace(Job(), joined=True))
    joined.values[f"{prefix}0.param_state/shard_0_1"].pop("buckets_coalesced")
    with pytest.raises(UnsupportedFeature, match="a release before buckets were joined"):
        joined.write().chains()
