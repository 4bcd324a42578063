"""What Megatron-core leaves to be told from names and shapes, on checkpoints made with DCP alone."""

from __future__ import annotations

import argparse
import io
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

from ckpt.convert.megatron.read import is_megatron, open_megatron
from ckpt.errors import NoSuchCheckpoint, UnsupportedFeature
from ckpt.layout.spec import BUFFER, MASTER, PARAM
from ckpt.store.open import open_store
from tests.unit.convert.contents import contents
from tests.unit.convert.logical import objects

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.checkpoint.planner import WriteItem

    from ckpt.convert.opened import Opened

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # one process is meant

FC1 = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
BIAS = "decoder.layers.self_attention.linear_proj.bias"
WORDS = "embedding.word_embeddings.weight"


def model(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    shapes = {FC1: (2, 3, 4, 5), BIAS: (2, 4), WORDS: (8, 4), "decoder.final_layernorm.weight": (4,)}
    return {key: torch.randn(shape).to(dtype) for key, shape in shapes.items()}


def states(tensors: dict[str, torch.Tensor], **roles: float) -> dict[str, torch.Tensor]:
    return {
        f"optimizer.state.{role}.{key}": torch.full(t.shape, value)
        for role, value in roles.items()
        for key, t in tensors.items()
    }


GROUPS = [{"wd_mult": 1.0, "lr": 0.1, "max_lr": 0.1}, {"wd_mult": 0.0, "lr": 0.1, "max_lr": 0.1}]


class Planner(DefaultSavePlanner):
    """Writes objects that are bytes already as they are, as Megatron's own does."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object if isinstance(object, io.BytesIO) else super().transform_object(write_item, object)


def as_bytes(tree: Any) -> io.BytesIO:
    data = io.BytesIO()
    torch.save(tree, data)
    return data


def saved(folder: Path, tensors: dict[str, Any], optimizer: Any = None, **common: Any) -> Opened:
    dcp.save(tensors, checkpoint_id=folder, planner=Planner())
    found = {"iteration": 7, **common}
    if optimizer is not None:
        found["optimizer"] = optimizer
    torch.save(found, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return open_megatron(open_store(str(folder)), "it")


def test_axes_in_front_become_names_and_groups_follow_megatrons_rule(tmp_path: Path) -> None:
    tensors = model()
    optimizer = {"optimizer": {"state": {"common_step": torch.tensor(5.0)}, "param_groups": GROUPS}}
    opened = saved(tmp_path, {**tensors, **states(tensors, exp_avg=1.0, fp32_param=2.0)}, optimizer)
    found = contents(opened)
    for layer in range(2):
        assert torch.equal(
            found[f"decoder.layers.{layer}.self_attention.linear_proj.bias", PARAM], tensors[BIAS][layer]
        )
        for expert in range(3):
            name = f"decoder.layers.{layer}.mlp.experts.experts.{expert}.linear_fc1.weight"
            assert torch.equal(found[name, PARAM], tensors[FC1][layer, expert])
            assert found[name, MASTER].dtype == torch.float32
            assert name in opened.derived
            assert found[name, "step"].item() == 5
    assert (opened.step, opened.aliases) == (5, {"output_layer.weight": WORDS})
    decayed, others = (group["params"] for group in objects(opened)["optimizer"]["groups"])
    assert len(decayed) == 7
    assert WORDS in decayed
    assert others == [
        "decoder.final_layernorm.weight",
        *(f"decoder.layers.{layer}.self_attention.linear_proj.bias" for layer in range(2)),
    ]
    assert objects(opened)["setup"] == {"wrappers": ["Float16OptimizerWithFloat16Params"]}


def test_an_optimizer_that_keeps_a_copy_of_fp32_parameters_has_no_masters(tmp_path: Path) -> None:
    tensors = model(torch.float32)
    groups = [{**group, "step": 3.0} for group in GROUPS]
    optimizer = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}
    copies = {f"optimizer.state.param.{key}": tensor.clone() for key, tensor in tensors.items()}
    opened = saved(tmp_path / "right", {**tensors, **states(tensors, exp_avg=1.0), **copies}, optimizer)
    assert {spec.role for spec in opened.specs} == {PARAM, "exp_avg", "step"}
    assert torch.equal(contents(opened)[WORDS, PARAM], tensors[WORDS])
    assert all("step" not in group["options"] for group in objects(opened)["optimizer"]["groups"])
    assert objects(opened)["setup"] == {"wrappers": ["DistributedOptimizer"]}
    shifted = {**copies, f"optimizer.state.param.{WORDS}": tensors[WORDS].roll(1)}
    with pytest.raises(UnsupportedFeature, match=r"for embedding\.word_embeddings\.weight is not that parameter's"):
        saved(tmp_path / "shifted", {**tensors, **states(tensors, exp_avg=1.0), **shifted}, optimizer)


def test_weights_alone_and_buffers(tmp_path: Path) -> None:
    extra = {"decoder.layers.mlp.router.expert_bias": torch.zeros(2, 3), "output_layer.weight": torch.zeros(8, 4)}
    opened = saved(tmp_path, {**model(), **extra}, args={"a": 1})
    assert {spec.role for spec in opened.specs if "expert_bias" in spec.fqn} == {BUFFER}
    assert (opened.step, opened.aliases) == (7, {})
    assert objects(opened)["megatron"] == {"iteration": 7, "args": {"a": 1}}


def test_what_only_megatrons_script_knows_is_carried_or_named(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {**model(), "rng_state/shard_0.0_1.1": [{"random_rng_state": (3, (1, 2), None)}]}
    opened = saved(tmp_path, tensors, args=argparse.Namespace(lr=0.1), num_floating_point_operations_so_far=5)
    common = {"iteration": 7, "args": {"lr": 0.1}, "num_floating_point_operations_so_far": 5}
    assert objects(opened)["megatron"] == common
    assert any(line.startswith("rng_state/shard_0.0_1.1") for line in opened.lost)


def test_a_dynamic_loss_scale(tmp_path: Path) -> None:
    tensors = model(torch.float16)
    scaler = {"scale": torch.tensor([1024.0]), "growth_tracker": 1, "hysteresis_tracker": 2}
    optimizer = {
        "optimizer": {"state": {"common_step": torch.tensor(1.0)}, "param_groups": GROUPS},
        "grad_scaler": scaler,
    }
    opened = saved(tmp_path, {**tensors, **states(tensors, exp_avg=1.0, fp32_param=2.0)}, optimizer)
    assert objects(opened)["loss_scaler"] == {"cur_scale": 1024.0, "growth_tracker": 1, "hysteresis_tracker": 2}


def test_what_cannot_be_told_is_refused_by_name(tmp_path: Path) -> None:
    tensors = model()
    state = states(tensors, exp_avg=1.0)
    flat = {**tensors, **state, f"optimizer.state.exp_avg.{WORDS}": torch.zeros(32)}
    with pytest.raises(UnsupportedFeature, match=r"word_embeddings.*\[32\].*whose shape is \[8, 4\].*flattened"):
        saved(tmp_path / "flat", flat, {"param_groups": GROUPS, "state": {}})
    with pytest.raises(UnsupportedFeature, match=r"which group.*no weight decay.*into \[0, 3\] of its 3 groups"):
        saved(tmp_path / "groups", {**tensors, **state}, {"param_groups": [GROUPS[0], GROUPS[0], {"wd_mult": 2.0}]})
    with pytest.raises(UnsupportedFeature, match="is state of 'gone', which the model lacks"):
        saved(tmp_path / "gone", {**tensors, "optimizer.state.exp_avg.gone": torch.zeros(1)})


def buckets(tensors: dict[str, torch.Tensor], masters: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the state of a distributed optimizer that one rank has gathered, in a model without experts."""
    order = [(key, n) for n in (1, 0) for key in (BIAS,)]
    flat = [masters["decoder.final_layernorm.weight"], *(masters[key][n] for key, n in order), masters[WORDS]]
    padded = [torch.nn.functional.pad(one.reshape(-1), (0, -one.numel() % 64)) for one in flat[:-1]]
    state = torch.cat([*padded, flat[-1].reshape(-1)])
    kind = (torch.bfloat16, torch.bfloat16)
    roles = {"param": state, "exp_avg": state + 1, "numel_unpadded": state.numel()}
    prefix = "optimizer.distributed.dp_group_idx_0"
    return {
        **tensors,
        f"{prefix}.param_state/shard_0_1": as_bytes([{"buckets_coalesced": True, 0: {kind: roles}}]),
        f"{prefix}.optimizer/shard_0_1": as_bytes([{"param_groups": [{**group, "step": 4.0} for group in GROUPS]}]),
    }


def test_state_in_buckets_belongs_to_the_parameters_whose_weights_are_there(tmp_path: Path) -> None:
    masters = {key: torch.randn(t.shape) for key, t in model().items() if key != FC1}
    tensors = {key: master.to(torch.bfloat16) for key, master in masters.items()}
    kind = {"param_state_sharding_type": "dp_zero_gather_scatter"}
    opened = saved(tmp_path / "right", buckets(tensors, masters), kind)
    found = contents(opened)
    assert torch.equal(found[WORDS, MASTER], masters[WORDS])
    for layer in range(2):
        assert torch.equal(
            found[f"decoder.layers.{layer}.self_attention.linear_proj.bias", MASTER], masters[BIAS][layer]
        )
    assert torch.equal(found[WORDS, "exp_avg"], masters[WORDS] + 1)
    assert found[WORDS, "step"].item() == opened.step == 4
    assert opened.notes[0].startswith("the distributed optimizer's state is stored as its buckets ('dp_zero_gather_s")
    assert objects(opened)["setup"] == {"wrappers": ["DistributedOptimizer"]}
    assert [len(group["params"]) for group in objects(opened)["optimizer"]["groups"]] == [1, 3]
    others = {**masters, WORDS: masters[WORDS].roll(1)}
    message = (
        r"stored as its buckets \('dp_zero_gather_scatter'\), which do not record which parameter is where, and the "
        r"weights do not tell: at element 192 of buffer 0 of group 0 are the weights of none of .*word_embeddings"
        r".*save it as 'fully_reshardable'"
    )
    with pytest.raises(UnsupportedFeature, match=message):
        saved(tmp_path / "wrong", buckets(tensors, others), kind)


def test_zarr_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000010"
    folder.mkdir()
    torch.save({"iteration": 10}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    store = open_store(str(tmp_path))
    assert is_megatron(store)
    with pytest.raises(UnsupportedFeature, match=r"iter_0000010: format 'zarr' version 1 .*--dist-ckpt-format torch_d"):
        open_megatron(store, "it")


def test_the_newest_iteration_is_taken(tmp_path: Path) -> None:
    for step in (5, 40):
        saved(tmp_path / f"iter_{step:07d}", {WORDS: torch.full((2, 2), float(step))})
    store = open_store(str(tmp_path))
    assert is_megatron(store)
    assert contents(open_megatron(store, "it"))[WORDS, PARAM][0, 0] == 40
    assert open_megatron(store, "it", step=5).where == "it/iter_0000005"
    with pytest.raises(NoSuchCheckpoint, match="step 6"):
        open_megatron(store, "it", step=6)
    (tmp_path / "x").mkdir()
    assert not is_megatron(open_store(str(tmp_path / "x")))
