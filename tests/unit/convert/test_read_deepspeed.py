"""DeepSpeed's own layout by synthetic folders: many ranks, paddings, what older releases wrote, and damage."""

from __future__ import annotations

import argparse
import copy
import os
import shutil
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckpt.convert.deepspeed.read import is_deepspeed, open_deepspeed
from ckpt.convert.deepspeed.read_universal import is_universal, open_universal
from ckpt.convert.deepspeed.write import write_deepspeed
from ckpt.convert.find import open_source
from ckpt.convert.known import known_layout
from ckpt.convert.options import ReadOptions, WriteOptions
from ckpt.convert.target import target_of
from ckpt.errors import (
    CkptError,
    ConfigError,
    MalformedData,
    MissingChunk,
    NoSuchCheckpoint,
    StoreError,
    UnsupportedFeature,
    UnsupportedLayout,
)
from ckpt.layout.rules import Rules
from ckpt.layout.spec import PARAM
from ckpt.store.memory import MemoryStore
from ckpt.store.open import open_store
from tests.harness.conversions import differences, raw
from tests.harness.deepspeed_files import (
    Model,
    numbered,
    options,
    write_plain,
    write_plain_pipeline,
    write_zero3,
    write_zero12,
)
from tests.harness.foreign import arrays_of

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt.convert.opened import Opened

TAG = "global_step5"


def model(**more: Any) -> Model:
    """Odd sizes, a parameter of one element, an empty one, a group smaller than many a number of ranks."""
    first = {"a.weight": numbered((7, 5), 1), "b.weight": numbered((3,), 2), "c.weight": numbered((4, 3, 2), 3)}
    second = {"a.bias": numbered((5,), 4), "scale": numbered((1,), 5)}
    return Model([first, second], buffers={"seen": torch.tensor(48)}, tied={"z.weight": "b.weight"}, **more)


def opened(folder: Path, rules: dict[str, Any] | None = None, step: int | None = None, **more: Any) -> Opened:
    store = open_store(str(folder))
    assert is_deepspeed(store)
    return open_deepspeed(store, store.url, step=step, options=ReadOptions(rules=Rules.of(rules or {}), **more))


def check(found: Opened, held: Model) -> None:
    """Check every tensor against the model that was written."""
    wanted = {(n, "buffer"): t for n, t in held.buffers.items()} | {
        (n, "param"): t.to(held.low) for n, t in held.frozen.items()
    }
    for group in held.groups:
        for name, master in group.items():
            wanted |= {(name, "master"): master, (name, "param"): master.to(held.low)}
            wanted |= {(name, role): held.state(name, role) for role in held.states}
            if held.step is not None:
                wanted[name, "step"] = torch.tensor(held.step)
    arrays = arrays_of(found)
    assert arrays.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert arrays[key].tobytes() == raw(tensor).tobytes(), key
    assert dict(found.aliases) == held.tied
    assert found.derived == tuple(sorted(n for group in held.groups for n in group))
    assert (found.step, found.engine) == (5, "deepspeed")


@pytest.mark.parametrize("dp", [1, 2, 3, 13])
@pytest.mark.parametrize(
    "how",
    [{}, {"stage": 2, "books": False}, {"lean": "last", "books": False}, {"lean": "none"}, {"align": 4}],
    ids=["new", "without books", "older padding", "BF16_Optimizer", "other alignment"],
)
def test_flat_partitions_are_put_together(dp: int, how: dict[str, Any], tmp_path: Path) -> None:
    held = model()
    write_zero12(tmp_path / TAG, held, dp, **how)
    found = opened(tmp_path)
    check(found, held)
    assert found.world == dp
    assert dict(found.degrees) == {"dp": dp, "tp": 1, "pp": 1, "ep": 1, "zero": how.get("stage", 1)}


@pytest.mark.parametrize("dp", [1, 2, 3, 13])
def test_every_parameter_of_zero3_is_cut_and_padded_by_itself(dp: int, tmp_path: Path) -> None:
    held = model(frozen={"frozen": numbered((5, 3), 8), "nothing": numbered((0, 4), 9)})
    first = held.groups[0]  # a group of three sub-groups
    held.groups[:1] = [{"a.weight": first["a.weight"]}, {"b.weight": first["b.weight"], "c.weight": first["c.weight"]}]
    write_zero3(tmp_path / TAG, held, dp, owners=[0, 0, 1])
    found = opened(tmp_path)
    check(found, held)
    (groups,) = [one.tree["groups"] for one in found.objects if one.name == "optimizer"]
    assert [g["params"] for g in groups] == [["a.weight", "b.weight", "c.weight"], ["a.bias", "scale"]]
    assert [g["options"]["weight_decay"] for g in groups] == [0.0, 0.1]


def test_an_optimizer_may_have_any_state_or_none(tmp_path: Path) -> None:
    for n, held in enumerate((model(states=("lion_avg",), step=None), model(states=(), step=None))):
        write_zero12(tmp_path / f"{n}" / TAG, held, 3)
        check(opened(tmp_path / f"{n}"), held)


def test_the_files_of_one_tag_are_enough_and_latest_says_which_is_meant(tmp_path: Path) -> None:
    held = model()
    write_zero12(tmp_path / TAG, held, 2)
    check(opened(tmp_path / TAG), held)
    write_zero12(tmp_path / "final", held, 2, global_steps=9)
    with pytest.raises(ConfigError, match="several checkpoints"):
        opened(tmp_path)
    (tmp_path / "latest").write_text("global_step5\n")
    assert opened(tmp_path).step == 5
    assert opened(tmp_path, step=9).step == 9
    with pytest.raises(NoSuchCheckpoint, match="no step 7, found final, global_step5"):
        opened(tmp_path, step=7)
    (tmp_path / "latest").write_text("global_step4")
    with pytest.raises(NoSuchCheckpoint, match="latest names 'global_step4'"):
        opened(tmp_path)


# -------------------------------------------------------------------------------------------------------------- objects


def test_counters_scheduler_and_client_state_come_along(tmp_path: Path) -> None:
    client: dict[str, Any] = {"epoch": 3, "args": argparse.Namespace(lr=0.1), "rng": torch.arange(5, dtype=torch.uint8)}
    write_zero12(tmp_path / TAG, model(), 2, skipped_steps=1, **client)
    found = opened(tmp_path)
    trees = {one.name: one.tree for one in found.objects}
    assert all(one.ranks == (0, 1) for one in found.objects)
    assert trees["engine"] == {
        "global_steps": 5, "global_samples": 20, "micro_steps": 5, "skipped_steps": 1, "_step_applied": True,
        "_unmanaged_backward_count": 0,
    }  # fmt: skip
    assert trees["scheduler"]["state"] == {"last_batch_iteration": 4}
    assert trees["scheduler"]["class"] == "deepspeed.runtime.lr_schedules.WarmupLR"
    assert trees["optimizer"]["class"] == "torch.optim.adamw.AdamW"
    assert (trees["epoch"], trees["args"], trees["rng"].tolist()) == (3, {"lr": 0.1}, [0, 1, 2, 3, 4])
    assert {one.kind for one in found.objects if one.name in client} == {"value"}


# ------------------------------------------------------------------------------------------------------ tensor parallel

CUT: dict[str, Any] = {
    "tensors": [
        {"match": "embed", "dim": 0, "size": 7},
        {"match": "fused", "dim": 0, "fused": [6, 4]},
        {"match": "row", "dim": 1},
        {"match": "wide", "dim": -1, "fused": [4, 2]},
        {"match": "norm|tail"},
    ]
}


def parts(tp: int) -> tuple[Model, list[Model]]:
    """A model and what each of ``tp`` ranks holds of it; what is cut is of another size than what is not."""
    whole = {
        "embed": numbered((7, 3), 1), "fused": numbered((10, 2), 2), "row": numbered((3, 4), 3),
        "norm": numbered((5,), 4), "tail": numbered((3,), 5), "wide": numbered((2, 3, 6), 6),
    }  # fmt: skip
    padded = torch.cat([whole["embed"], torch.full((-7 % tp, 3), -9.0)])
    first, second = whole["fused"].split([6, 4])
    left, right = whole["wide"].split([4, 2], dim=-1)
    ranks = []
    for rank in range(tp):
        own = {
            "embed": padded.chunk(tp)[rank],
            "fused": torch.cat([first.chunk(tp)[rank], second.chunk(tp)[rank]]),
            "row": whole["row"].chunk(tp, dim=1)[rank].contiguous(),
            "norm": whole["norm"],
            "tail": whole["tail"],
            "wide": torch.cat([left.chunk(tp, -1)[rank], right.chunk(tp, -1)[rank]], dim=-1),
        }
        ranks.append(Model([own], states=("exp_avg",)))
    return Model([whole], states=("exp_avg",)), ranks


@pytest.mark.parametrize("stage", [1, 3])
def test_rules_say_how_tensor_parallelism_cut(stage: int, tmp_path: Path) -> None:
    held, ranks = parts(2)
    for mp, one in enumerate(ranks):
        write = write_zero3 if stage == 3 else write_zero12
        write(tmp_path / TAG, one, 3, mp=mp, mp_world_size=2)
    check(opened(tmp_path, CUT), held)
    with pytest.raises(UnsupportedLayout, match="give --rules") as error:
        opened(tmp_path)
    assert len(error.value.problems) == 6
    with pytest.raises(UnsupportedLayout, match="'row': no rule explains it"):
        opened(tmp_path, {"tensors": [one for one in CUT["tensors"] if one["match"] != "row"]})


def test_replicas_that_zero_cut_differently_count_once(tmp_path: Path) -> None:
    """Rank 1 holds more of the cut tensor, so that its partitions begin elsewhere."""
    big, norm = numbered((9, 2), 1), numbered((7,), 2)
    for mp, rows in enumerate((big[:4], big[4:])):
        info = {"tp_replicated_parameter_patterns": ["^norm$"]}
        one = Model([{"big": rows.clone(), "norm": norm}])
        write_zero12(tmp_path / TAG, one, 2, mp=mp, mp_world_size=2, universal_checkpoint_info=info)
    check(opened(tmp_path), Model([{"big": big, "norm": norm}]))


def test_the_record_of_autotp_is_followed(tmp_path: Path) -> None:
    held, ranks = parts(2)
    info = {
        "tp_replicated_parameter_patterns": ["^norm$", "^tail$"],
        "parameter_with_row_parallelism_patterns": ["^row$"],
        "parameter_with_sub_params": [
            {"patterns": ["^fused$"], "shape": [(6, 4), -1], "partition_dim": 0},
            {"patterns": ["^wide$"], "shape": [2, 3, (4, 2)], "partition_dim": 2},
        ],
        "sub_param_shard_widths": {"^fused$": [[3, 3], [2, 2]]},
        "vocabulary_parameter_patterns": ["^embed$"],
        "original_vocab_size": 7,
    }
    for mp, one in enumerate(ranks):
        one.buffers["seen"] = torch.tensor(48)
        write_zero12(tmp_path / TAG, one, 3, mp=mp, mp_world_size=2, universal_checkpoint_info=info)
    held.buffers["seen"] = torch.tensor(48)
    check(opened(tmp_path), held)


def test_the_record_of_autotp_lays_out_the_target_too(tmp_path: Path) -> None:
    _, ranks = parts(2)
    info = {
        "tp_replicated_parameter_patterns": ["^norm$", "^tail$"],
        "parameter_with_row_parallelism_patterns": ["^row$"],
        "parameter_with_sub_params": [
            {"patterns": ["^fused$"], "shape": [(6, 4), -1], "partition_dim": 0},
            {"patterns": ["^wide$"], "shape": [2, 3, (4, 2)], "partition_dim": 2},
        ],
    }
    for mp, one in enumerate(ranks):
        write_zero12(tmp_path / TAG, one, 2, mp=mp, mp_world_size=2, universal_checkpoint_info=info)
    found = opened(tmp_path)
    target = target_of(found, engine="deepspeed")
    assert (target.parallel.dp, target.parallel.tp) == (2, 2)
    for spec in (one for one in found.specs if one.role == PARAM):
        for mp, one in enumerate(ranks):
            boxes = [shard.box for shard in target.layouts[mp].shards if shard.spec == spec]
            assert sum(box.volume for box in boxes) == one.groups[0][spec.fqn].numel()
    with pytest.raises(ConfigError, match="nothing says how tensor parallelism cuts"):
        target_of(found, engine="deepspeed", tp=4)  # where heads are is not recorded
    assert target_of(found, otherwise_whole=True).parallel.tp == 2
    bare = replace(found, splits={})
    whole = target_of(bare, otherwise_whole=True)
    assert (whole.parallel.dp, whole.parallel.tp) == (4, 1)
    assert any("nothing says how tensors are cut" in note for note in whole.notes)
    with pytest.raises(ConfigError, match="tp 2 is SRC's"):
        target_of(bare)


def test_a_record_that_names_nothing_is_not_believed(tmp_path: Path) -> None:
    for mp, one in enumerate(parts(2)[1]):
        info = {"universal_checkpoint_version": 0.2}
        write_zero12(tmp_path / TAG, one, 1, mp=mp, mp_world_size=2, universal_checkpoint_info=info)
    with pytest.raises(UnsupportedLayout, match="no rule explains it"):
        opened(tmp_path)


# ------------------------------------------------------------------------------------------------------- without ZeRO


def plain_state(held: Model, *, masters: bool = False) -> dict[str, Any]:
    names = [n for group in held.groups for n in group]
    state = {i: {r: held.state(n, r) for r in held.states} | held.scalars() for i, n in enumerate(names)}
    numbers = iter(range(len(names)))
    groups = [options(0.1 * g, [next(numbers) for _ in group]) for g, group in enumerate(held.groups)]
    inner = {"state": state, "param_groups": groups}
    if not masters:
        return inner
    return {"optimizer_state_dict": inner, "fp32_groups": [list(group.values()) for group in held.groups]}


def test_numbered_state_gets_its_names_back_by_shape_or_by_value(tmp_path: Path) -> None:
    held = model()
    held.groups[1]["d.bias"] = numbered((3,), 6)  # as b.weight in the other group: only values tell
    write_plain(tmp_path / "low" / TAG, held, 2, plain_state(held, masters=True))
    found = opened(tmp_path / "low")
    check(found, held)
    assert [one.tree["wrapper"] for one in found.objects if one.name == "setup"] == ["FP16_UnfusedOptimizer"]
    held = Model([{"w": numbered((4, 2), 1), "v": numbered((2, 3), 2)}, {"b": numbered((4,), 3)}], low=torch.float32)
    write_plain(tmp_path / "fp32" / TAG, held, 2, plain_state(held), ds_config={})
    arrays = arrays_of(opened(tmp_path / "fp32"))
    for name in ("w", "v", "b"):
        assert arrays[name, "exp_avg"].tobytes() == raw(held.state(name, "exp_avg")).tobytes()
    assert (("w", "master") in arrays, ("w", "step") in arrays) == (False, True)


def some_frozen(tmp_path: Path, change: float) -> tuple[Opened, Model]:
    """Read a job of which the first block is frozen, and all norms but the first have changed by so much."""
    ones = torch.ones(3)
    frozen = {"0.norm": ones, "0.w": numbered((2, 2), 1)}
    held = Model([{"1.norm": ones + change, "1.w": numbered((2, 2), 2), "norm": ones - change}], frozen=frozen)
    module = {**frozen, **{n: m.to(held.low) for n, m in held.groups[0].items()}}
    module = {name: tensor.to(held.low) for name, tensor in module.items()}
    write_plain(tmp_path / TAG, held, 1, plain_state(held, masters=True))
    edit(tmp_path / TAG / "mp_rank_00_model_states.pt", lambda tree: tree.update(module=module))
    return opened(tmp_path), held


def test_what_is_frozen_follows_from_values_and_order(tmp_path: Path) -> None:
    check(*some_frozen(tmp_path, 0.25))


def test_what_is_frozen_is_not_guessed(tmp_path: Path) -> None:
    """The norms are still the same in 16 bits: any of them may be the frozen one."""
    found, _ = some_frozen(tmp_path, 1e-4)
    assert {role for _, role in arrays_of(found)} == {"param"}
    assert any("optimizer state was left out" in line for line in found.lost)


def numbers_of(stage: list[tuple[str, torch.Tensor]], seed: int = 0, *, masters: bool = False) -> dict[str, Any]:
    """The optimizer of a stage that steps these; moments depend on the name."""
    state = {
        n: {"exp_avg": numbered(tuple(t.shape), sum(name.encode()) + seed), "step": torch.tensor(5.0)}
        for n, (name, t) in enumerate(stage)
    }
    inner = {"state": state, "param_groups": [options(0.1, list(range(len(stage))))]}
    return {"optimizer_state_dict": inner, "fp32_groups": [[t for _, t in stage]]} if masters else inner


def linears(count: int, low: torch.dtype = torch.float32) -> tuple[dict[int, dict[str, torch.Tensor]], list[Any]]:
    """Layers of one shape: what their files hold, and (name, master) of all."""
    layers = {n: {"weight": numbered((2, 2), n + 1), "bias": numbered((2,), 10 + n)} for n in range(count)}
    flat = [(f"{n}.{name}", tensor) for n, held in layers.items() for name, tensor in held.items()]
    return {n: {k: t.to(low) for k, t in held.items()} for n, held in layers.items()}, flat


def moments(found: Opened) -> dict[str, bytes]:
    return {fqn: array.tobytes() for (fqn, role), array in arrays_of(found).items() if role == "exp_avg"}


def expected(*stages: dict[str, Any], names: list[str]) -> dict[str, bytes]:
    states = [one for stage in stages for one in stage.get("optimizer_state_dict", stage)["state"].values()]
    return {n: raw(one["exp_avg"]).tobytes() for n, one in zip(names, states, strict=True)}


def test_layers_without_buffers_are_of_the_stage_that_steps_them(tmp_path: Path) -> None:
    layers, flat = linears(5)
    stages = [numbers_of(flat[:6]), numbers_of(flat[6:])]
    write_plain_pipeline(tmp_path / TAG, layers, stages)
    found = opened(tmp_path)
    assert moments(found) == expected(*stages, names=[name for name, _ in flat])
    assert found.lost == ()


@pytest.mark.parametrize("frozen", [0, 2, 4])
def test_a_frozen_layer_of_a_pipeline_is_not_guessed(tmp_path: Path, frozen: int) -> None:
    layers, flat = linears(5)
    stepped = [one for one in flat if not one[0].startswith(f"{frozen}.")]
    write_plain_pipeline(tmp_path / "fp32" / TAG, layers, [numbers_of(stepped)])
    found = opened(tmp_path / "fp32")
    assert moments(found) == {}
    assert any("optimizer state was left out" in line for line in found.lost)
    write_plain_pipeline(tmp_path / "two" / TAG, layers, [numbers_of(stepped[:4]), numbers_of(stepped[4:])])
    assert moments(opened(tmp_path / "two")) == {}
    layers, _ = linears(5, torch.float16)
    stages = [numbers_of(stepped[:4], masters=True), numbers_of(stepped[4:], masters=True)]
    write_plain_pipeline(tmp_path / "fp16" / TAG, layers, stages)
    assert moments(opened(tmp_path / "fp16")) == expected(*stages, names=[name for name, _ in stepped])


def test_a_shared_module_is_told_by_its_state(tmp_path: Path) -> None:
    layers, flat = linears(4)
    layers[0] = {"weight": numbered((5, 2), 1)}
    shared = ("0.weight", layers[0]["weight"])
    first, last = numbers_of([shared, *flat[2:4]]), numbers_of([shared, *flat[4:]])
    write_plain_pipeline(tmp_path / TAG, layers, [first, last])
    found = opened(tmp_path)
    names = ["0.weight", "1.weight", "1.bias", "0.weight", "2.weight", "2.bias", "3.weight", "3.bias"]
    assert moments(found) == expected(first, last, names=names)
    assert any("layer 0 is shared by stages" in note for note in found.notes)
    assert known_layout(found)[1] == (2, 2)


@pytest.mark.parametrize("low", [torch.float32, torch.float16])
def test_a_shared_module_goes_out_by_its_key_or_not_at_all(tmp_path: Path, low: torch.dtype) -> None:
    layers, flat = linears(4, low)
    layers[0], masters = {"weight": numbered((5, 2), 1, low)}, low != torch.float32
    shared = ("0.weight", layers[0]["weight"].float())
    stages = [numbers_of([shared, *part], masters=masters) for part in (flat[2:4], flat[4:])]  # layer 4: a function
    fp16 = {"fp16": {"enabled": masters}}
    write_plain_pipeline(tmp_path / TAG, layers, stages, ds_config=fp16)
    found = opened(tmp_path)
    with pytest.raises(UnsupportedLayout, match=r"stages share layer 0, .*tied_modules\.KEY"):
        write_deepspeed(found, MemoryStore(), target_of(found, engine="deepspeed", zero=1), WriteOptions())
    found = opened(tmp_path, {"names": [{"match": r"0\.(.*)", "name": "tied_modules.embed.{1}"}]})
    for zero in (0, 1):
        store = MemoryStore()
        write_deepspeed(found, store, target_of(found, engine="deepspeed", zero=zero), WriteOptions())
        back = open_deepspeed(store, "back")
        lines = differences(arrays_of(back), arrays_of(found))
        assert [line for line in lines if zero == 0 or masters or "(master)" not in line] == []
        assert known_layout(back)[0]["pp"] == 2


def test_what_is_frozen_comes_back_from_a_conversion(tmp_path: Path) -> None:
    held = Model([{"v": numbered((2,), 2)}], frozen={"w": numbered((2,), 1)}, low=torch.float32)
    write_zero12(tmp_path / TAG, held, 1, ds_config={}, frozen_param_shapes={"w": torch.Size((2,))})
    found, store = opened(tmp_path), MemoryStore()
    write_deepspeed(found, store, target_of(found, engine="deepspeed", zero=0), WriteOptions())
    back = open_deepspeed(store, "back")
    assert back.lost == ()
    assert moments(back) == {"v": raw(held.state("v", "exp_avg")).tobytes()}


def test_which_of_equal_layers_is_shared_is_not_guessed(tmp_path: Path) -> None:
    layers, flat = linears(4)
    first, last = numbers_of(flat[:4]), numbers_of([*flat[:2], *flat[4:]])
    write_plain_pipeline(tmp_path / TAG, layers, [first, last])
    assert moments(opened(tmp_path)) == {}  # layer 1 comes first if it is the shared one


def test_names_that_a_conversion_wrote_are_taken(tmp_path: Path) -> None:
    layers, flat = linears(4)
    stages = [numbers_of(flat[2:4]), numbers_of([flat[4], flat[7]])]
    stages[0]["ckpt_reshard_names"] = [["1.weight", "1.bias"]]
    stages[1]["ckpt_reshard_names"] = [["2.weight", "3.bias"]]
    write_plain_pipeline(tmp_path / TAG, layers, stages)
    found = opened(tmp_path)
    assert moments(found) == expected(*stages, names=["1.weight", "1.bias", "2.weight", "3.bias"])
    stages[1]["ckpt_reshard_names"] = [["2.weight", "3.weight"]]  # of another shape: not believed
    write_plain_pipeline(tmp_path / TAG, layers, stages)
    assert moments(opened(tmp_path)) == {}


def test_flat_masters_are_cut_where_the_parameters_are(tmp_path: Path) -> None:
    held = model()
    flats = [torch.cat([m.reshape(-1) for m in group.values()]) for group in held.groups]
    state = {
        g: {r: torch.cat([held.state(n, r).reshape(-1) for n in group]) for r in held.states} | held.scalars()
        for g, group in enumerate(held.groups)
    }
    inner = {"state": state, "param_groups": [options(0.1 * g, [g]) for g in range(2)]}
    write_plain(tmp_path / TAG, held, 2, {"optimizer_state_dict": inner, "fp32_groups_flat": flats})
    check(opened(tmp_path), held)


def test_a_fused_optimizer_counts_in_the_last_tensor_of_a_group(tmp_path: Path) -> None:
    held = Model([{"w": numbered((4, 3), 1), "v": numbered((2, 3), 2)}], low=torch.float32)
    state = {
        0: {"exp_avg": held.state("w", "exp_avg"), "exp_avg_sq": held.state("w", "exp_avg_sq"), "step": 0},
        1: {"exp_avg": held.state("v", "exp_avg"), "exp_avg_sq": held.state("v", "exp_avg_sq"), "step": 5},
    }
    group = {
        "lr": 0.1,
        "bias_correction": True,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "params": [0, 1],
    }
    write_plain(tmp_path / TAG, held, 1, {"state": state, "param_groups": [group]}, ds_config={})
    found = opened(tmp_path)
    arrays = arrays_of(found)
    assert [arrays[name, "step"].view("int64").tolist() for name in ("v", "w")] == [[5], [5]]
    (optimizer,) = [one.tree["class"] for one in found.objects if one.name == "optimizer"]
    assert optimizer.endswith("FusedAdam")


def test_a_weight_that_was_saved_transposed_comes_out_row_by_row(tmp_path: Path) -> None:
    held = Model([{"w": numbered((4, 3), 1)}], low=torch.float32)
    write_plain(tmp_path / TAG, held, 1, plain_state(held), ds_config={})
    across = numbered((3, 4), 7).t()
    edit(tmp_path / TAG / "mp_rank_00_model_states.pt", lambda tree: tree.update(module={"w": across}))
    assert arrays_of(opened(tmp_path))["w", "param"].tobytes() == raw(across).tobytes()


def test_state_that_could_be_of_several_parameters_is_left_out_and_said(tmp_path: Path) -> None:
    held = Model([{"w": numbered((4,), 1)}, {"v": numbered((4,), 2)}], low=torch.float32)
    write_plain(tmp_path / TAG, held, 1, plain_state(held), ds_config={})
    found = opened(tmp_path)
    assert sorted(arrays_of(found)) == [("v", "param"), ("w", "param")]
    assert any("optimizer state was left out: the files do not tell which of w, v" in line for line in found.lost)
    assert next(one.tree for one in found.objects if one.name == "optimizer") is None


def test_factors_are_carried_whole(tmp_path: Path) -> None:
    held = Model([{"w": numbered((4, 3), 1)}], low=torch.float32)
    factors: dict[str, Any] = {
        "exp_avg_sq_row": numbered((4,), 2),
        "exp_avg_sq_col": numbered((3,), 3),
        "step": 5,
        "exp_avg": None,
    }
    optimizer = {"state": {0: factors}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    write_plain(tmp_path / TAG, held, 1, optimizer, ds_config={})
    found = opened(tmp_path)
    assert {(s.role, s.dtype, s.shape) for s in found.specs} == {
        ("param", "float32", (4, 3)), ("exp_avg_sq_row", "float32", (4,)), ("exp_avg_sq_col", "float32", (3,)),
        ("step", "int64", ()),
    }  # fmt: skip
    assert arrays_of(found)["w", "exp_avg_sq_row"].tobytes() == raw(factors["exp_avg_sq_row"]).tobytes()
    assert any("'exp_avg_sq_row' is not as its parameters are: it is carried whole" in note for note in found.notes)


# --------------------------------------------------------------------------------------------------------------- damage


def name_of(rank: int) -> str:
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def edit(path: Path, change: Any) -> None:
    tree = torch.load(path, weights_only=False)
    change(tree)
    torch.save(tree, path)


def broken(folder: Path) -> tuple[type[CkptError], str]:
    try:
        opened(folder)
    except CkptError as error:
        return type(error), str(error)
    raise AssertionError("it was opened")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for stage, name in (
        (1, name_of(11)),
        (1, "mp_rank_00_model_states.pt"),
        (3, name_of(0)),
        (3, "zero_pp_rank_0_mp_rank_00_model_states.pt"),
        (3, "zero_pp_rank_10_mp_rank_00_model_states.pt"),
    ):
        folder = tmp_path / f"{stage}{name}"
        (write_zero3 if stage == 3 else write_zero12)(folder, model(), 12)
        (folder / name).unlink()
        kind, message = broken(folder)
        assert kind is MissingChunk
        assert f"{name} missing" in message


def test_all_files_of_the_model_are_missing(tmp_path: Path) -> None:
    for stage, name in ((1, "mp_rank_00_model_states.pt"), (3, "zero_pp_rank_0_mp_rank_00_model_states.pt")):
        folder = tmp_path / f"{stage}" / TAG
        (write_zero3 if stage == 3 else write_zero12)(folder, model(), 2)
        for path in folder.glob("*model_states.pt"):
            path.unlink()
        assert broken(tmp_path / f"{stage}") == (MissingChunk, f"{folder}: {name} missing")
        with pytest.raises(NoSuchCheckpoint):
            opened(tmp_path / f"{stage}", step=77)


def test_without_any_file_of_the_optimizer_there_are_weights(tmp_path: Path) -> None:
    held = model()
    for stage in (1, 3):
        folder = tmp_path / f"{stage}"
        (write_zero3 if stage == 3 else write_zero12)(folder, held, 2)
        for path in folder.glob("*optim_states.pt"):
            path.unlink()
    assert broken(tmp_path / "3")[0] is MissingChunk  # nothing else holds the parameters
    found = opened(tmp_path / "1")
    assert {spec.role for spec in found.specs} == {"param", "buffer"}
    arrays = arrays_of(found)
    assert arrays["a.weight", "param"].tobytes() == raw(held.groups[0]["a.weight"].to(held.low)).tobytes()
    assert (found.derived, found.world, found.degrees["zero"]) == ((), 2, 1)
    assert any("no file *_optim_states.pt" in note for note in found.notes)


def test_a_fifo_in_place_of_a_file_is_told(tmp_path: Path) -> None:
    for name in ("mp_rank_00_model_states.pt", name_of(1)):
        folder = tmp_path / name
        write_zero12(folder, model(), 2)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        kind, message = broken(folder)
        assert kind is StoreError
        assert name in message
        assert "a FIFO is there, expected a file" in message


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    write_zero12(tmp_path, model(), 3)
    path = tmp_path / name_of(1)
    path.write_bytes(path.read_bytes()[:-300])
    kind, message = broken(tmp_path)
    assert issubclass(kind, MalformedData)
    assert path.name in message


def test_two_checkpoints_in_one_folder_are_told_apart(tmp_path: Path) -> None:
    held, later = model(), model(step=6.0)
    worlds, stages, twice = (tmp_path / name for name in ("worlds", "stages", "twice"))
    write_zero12(worlds, held, 3)
    write_zero12(worlds, held, 2)
    write_zero3(stages, held, 2)
    write_zero12(stages, held, 2)
    write_zero12(twice, held, 2)
    shutil.copy(twice / name_of(0), twice / name_of(0).removeprefix("bf16_"))
    for folder, expected in (
        (worlds, name_of(2)),
        (stages, "zero_pp_rank_0_mp_rank_00_model_states.pt"),
        (twice, "are of one rank"),
    ):
        kind, message = broken(folder)
        assert kind is MalformedData
        assert "two checkpoints in one folder" in message
        assert expected in message
    mixed, other = tmp_path / "steps", tmp_path / "other"
    write_zero12(mixed, held, 3)
    write_zero12(other, later, 3, global_steps=6)
    shutil.copy(other / name_of(1), mixed / name_of(1))
    kind, message = broken(mixed)
    assert kind is MalformedData
    assert "files of several steps" in message
    assert name_of(1) in message


def test_a_model_of_another_step_than_its_optimizer_is_seen(tmp_path: Path) -> None:
    write_zero12(tmp_path, model(), 2)
    moved = model()
    for group in moved.groups:
        for master in group.values():
            master.add_(512.0)
    moved.step = 7.0
    write_zero12(tmp_path / "other", moved, 2, global_steps=7)
    shutil.copy(tmp_path / "other" / "mp_rank_00_model_states.pt", tmp_path)
    kind, message = broken(tmp_path)
    assert kind is MalformedData
    assert "files of several steps" in message
    assert "mp_rank_00_model_states.pt is of 7 optimizer steps" in message


def test_files_of_zero3_of_another_step_than_the_optimizers_are_seen(tmp_path: Path) -> None:
    write_zero3(tmp_path / "4", model(step=4.0), 2, global_steps=4)
    write_zero3(tmp_path / "3", model(step=3.0), 2, global_steps=3)
    opened(tmp_path / "4")
    for later, earlier in (("4", "3"), ("3", "4")):
        mixed = tmp_path / f"mixed{later}"
        shutil.copytree(tmp_path / later, mixed)
        for path in (tmp_path / earlier).glob("*optim_states.pt"):
            shutil.copy(path, mixed)
        kind, message = broken(mixed)
        assert kind is MalformedData
        names = f"zero_pp_rank_0_mp_rank_00_model_states.pt is of {later} optimizer steps, {name_of(0)} of {earlier}"
        assert f"files of several steps: {names}" in message
    for n, held in enumerate((model(step=None), model(step=4.0))):
        write_zero3(tmp_path / f"good{n}", held, 2, global_steps=6, skipped_steps=2)
        assert opened(tmp_path / f"good{n}").step == 6


def test_an_optimizer_of_zero3_that_was_started_anew_is_behind_in_all_checkpoints(tmp_path: Path) -> None:
    for n in (7, 9):
        write_zero3(tmp_path / f"global_step{n}", model(step=n - 5.0), 2, global_steps=n)
    (tmp_path / "latest").write_text("global_step9")
    assert "the optimizer counts 4 steps, the engine 9, as in global_step7" in opened(tmp_path).notes
    assert broken(tmp_path / "global_step9")[0] is MalformedData  # seen alone
    for path in (tmp_path / "global_step7").glob("*optim_states.pt"):
        shutil.copy(path, tmp_path / "global_step9")
    kind, message = broken(tmp_path)
    assert kind is MalformedData
    assert "is of 9 optimizer steps" in message


@pytest.mark.parametrize("write", [write_zero3, write_zero12])
def test_an_optimizer_that_was_started_anew_is_taken_if_the_user_says_its_count(tmp_path: Path, write: Any) -> None:
    held = model(step=4.0)
    write(tmp_path, held, 2, global_steps=9)
    if write is write_zero3:  # where no elements can be compared, the files alone do not tell
        kind, message = broken(tmp_path)
        assert kind is MalformedData
        assert "say so with --optimizer-step 4" in message
    found = opened(tmp_path, optimizer_step=4)
    assert "the optimizer counts 4 steps, the engine 9, as you say" in found.notes
    assert arrays_of(found)["a.weight", "step"].tobytes() == raw(torch.tensor(4.0)).tobytes()
    with pytest.raises(ConfigError, match=r"said to have taken 9 steps .* counts 4"):
        opened(tmp_path, optimizer_step=9)
    other = tmp_path / "other"
    write(other, model(step=9.0), 2, global_steps=9)
    path = next(other.glob("*zero_pp_rank_1_*optim_states.pt"))
    shutil.copy(path, tmp_path)  # of another step: no word of the user covers both
    with pytest.raises(ConfigError, match=rf"said to have taken 4 steps .*{path.name} counts 9"):
        opened(tmp_path, optimizer_step=4)


def test_a_count_is_only_said_where_there_is_one(tmp_path: Path) -> None:
    write_plain(tmp_path / "plain", model(), 2, {"state": {}, "param_groups": []})
    with pytest.raises(ConfigError, match="whose count of steps there is to say"):
        opened(tmp_path / "plain", optimizer_step=4)
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    with pytest.raises(ConfigError, match="is torch"):
        open_source(str(tmp_path / "m.pt"), options=ReadOptions(optimizer_step=4))


def test_an_older_optimizer_of_zero3_counts_one_more(tmp_path: Path) -> None:
    write_zero3(tmp_path / "old", model(step=6.0), 2, ds_version="0.9.2")
    assert "the optimizer counts 6 steps, the engine 5" in opened(tmp_path / "old").notes
    write_zero3(tmp_path / "much", model(step=7.0), 2, ds_version="0.9.2")
    assert broken(tmp_path / "much")[0] is MalformedData


def test_ranks_of_several_steps_of_zero3_are_seen(tmp_path: Path) -> None:
    write_zero3(tmp_path, model(), 2)
    edit(tmp_path / "zero_pp_rank_1_mp_rank_00_model_states.pt", lambda tree: tree.update(global_steps=4))
    kind, message = broken(tmp_path)
    assert kind is MalformedData
    assert "global_steps is 5 in zero_pp_rank_0_mp_rank_00_model_states.pt; 4 in zero_pp_rank_1" in message


def test_what_does_not_fit_the_shapes_is_refused_by_name(tmp_path: Path) -> None:
    def short(tree: Any) -> None:
        flat = tree["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        flat[0] = flat[0][:4].clone()

    def odd(tree: Any) -> None:
        tree["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"] = torch.zeros(3, 2)

    def strange(tree: Any) -> None:
        tree["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["hook"] = "text"

    def books(tree: Any) -> None:
        tree["optimizer_state_dict"]["param_slice_mappings"][0]["a.weight"]["start"] = 3

    def counts(tree: Any) -> None:
        tree["optimizer_state_dict"]["partition_count"] = 5

    for n, (change, kind, expected) in enumerate(
        [
            (short, MalformedData, "group 0 has"),
            (odd, UnsupportedFeature, "optimizer state 'exp_avg' of ['a.weight'] is of shape [3, 2]"),
            (strange, UnsupportedFeature, "optimizer state 'hook' of ['a.weight'] is a str"),
            (books, MalformedData, "'a.weight' is said to be (3,"),
            (counts, MalformedData, "partition_count is 5"),
        ]
    ):
        folder = tmp_path / f"{n}"
        write_zero12(folder, model(), 2)
        edit(folder / name_of(0), change)
        found = broken(folder)
        assert found[0] is kind, found
        assert expected in found[1]
        assert name_of(0) in found[1]
    zero3 = tmp_path / "zero3"
    write_zero3(zero3, model(), 2)
    edit(zero3 / name_of(1), lambda t: t["optimizer_state_dict"]["fp32_flat_groups"].__setitem__(0, torch.zeros(0)))
    assert "sub-group 0 has 0 elements, its parameters on 2 ranks have" in broken(zero3)[1]


@pytest.mark.parametrize(
    ("entry", "value"),
    [("global_steps", -1), ("dp_world_size", 0), ("dp_world_size", 10**12), ("mp_world_size", "2"),
     ("param_shapes", [{"a": (-1,)}]), ("param_shapes", 3), ("buffer_names", [1]), ("module", [])],
)  # fmt: skip
def test_numbers_and_names_from_a_file_are_checked(entry: str, value: Any, tmp_path: Path) -> None:
    write_zero12(tmp_path, model(), 1)
    edit(tmp_path / "mp_rank_00_model_states.pt", lambda tree: tree.update({entry: value}))
    assert broken(tmp_path)[0] is MalformedData


ODD: tuple[Any, ...] = (
    None,
    -1,
    2**70,
    1.5,
    "x",
    [],
    {},
    [None],
    {"x": 1},
    b"x",
    torch.zeros(0),
    torch.zeros(3, 2),
    True,
)


def places_in(tree: Any) -> list[tuple[Any, Any]]:
    """Return every container of a tree with each of its keys."""
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree))) if isinstance(tree, list) else []
    return [(tree, key) for key in keys] + [place for key in keys for place in places_in(tree[key])]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_any_value_in_place_of_another_is_an_error_that_we_know_or_none(stage: int, tmp_path: Path) -> None:
    held, random = model(), Random(stage)
    if stage == 0:
        write_plain(tmp_path, held, 2, plain_state(held, masters=True))
    elif stage == 1:
        write_zero12(tmp_path, held, 2)
    else:
        write_zero3(tmp_path, held, 2)
    files = sorted(tmp_path.iterdir())
    whole = {path: torch.load(path, weights_only=False) for path in files}
    refused = 0
    for _ in range(25):
        path = random.choice(files)
        tree = copy.deepcopy(whole[path])
        container, key = random.choice(places_in(tree))
        container[key] = random.choice(ODD)
        torch.save(tree, path)
        try:
            opened(tmp_path)
        except CkptError:
            refused += 1
        torch.save(whole[path], path)
    assert refused > 4


# ------------------------------------------------------------------------------------------------------------ universal


def write_universal(root: Path, held: Model, dp: int) -> None:
    write_zero12(root / TAG, held, dp)
    target = root / f"{TAG}_universal"
    for group in held.groups:
        for name, master in group.items():
            folder = target / "zero" / name
            folder.mkdir(parents=True)
            torch.save({"cat_dim": 0, "param": master}, folder / "fp32.pt")
            for role in held.states:
                torch.save({"cat_dim": 0, "param": held.state(name, role)}, folder / f"{role}.pt")
            torch.save(torch.tensor(held.step), folder / "step.pt")
    shutil.copy(root / TAG / "mp_rank_00_model_states.pt", target)
    tree = torch.load(root / TAG / name_of(0))["optimizer_state_dict"]
    state = {k: v for k, v in tree.items() if k not in ("base_optimizer_state", "single_partition_of_fp32_groups")}
    torch.save(
        {**state, "param_groups": tree["base_optimizer_state"]["param_groups"]}, target / "zero/optimizer_state.pt"
    )


def test_a_universal_checkpoint_lies_beside_the_one_it_was_made_of(tmp_path: Path) -> None:
    held = model(frozen={"frozen": numbered((5, 3), 8)})
    write_universal(tmp_path, held, 3)
    store = open_store(str(tmp_path))
    assert is_universal(store)
    check(open_universal(store, store.url), held)
    check(opened(tmp_path), held)
    alone = open_store(str(tmp_path / f"{TAG}_universal"))
    assert is_universal(alone)
    assert not is_deepspeed(alone)
    check(open_universal(alone, alone.url, step=5), held)


def test_a_universal_checkpoint_with_a_parameter_gone_is_refused(tmp_path: Path) -> None:
    write_universal(tmp_path, model(), 2)
    zero = tmp_path / f"{TAG}_universal" / "zero"
    store = open_store(str(tmp_path))
    (zero / "a.bias" / "fp32.pt").unlink()
    with pytest.raises(MissingChunk, match=r"zero/a\.bias/fp32\.pt missing"):
        open_universal(store, store.url)
    shutil.rmtree(zero / "a.bias")
    with pytest.raises(MissingChunk, match=r"zero/a\.bias missing"):
        open_universal(store, store.url)
    shutil.copytree(zero / "scale", zero / "a.bias")
    with pytest.raises(MalformedData, match=r"a\.bias/fp32\.pt"):
        open_universal(store, store.url)
    shutil.copytree(zero / "scale", zero / "of another model")
    with pytest.raises(MalformedData, match="of another model"):
        open_universal(store, store.url)
