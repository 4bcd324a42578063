"""Experts in DeepSpeed's files without DeepSpeed: names, numbers, groups and their order on each of their ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ckpt.convert.compare import compare_written
from ckpt.convert.deepspeed import write_experts
from ckpt.convert.deepspeed.read import open_deepspeed
from ckpt.convert.deepspeed.write import DeepSpeedFiles, write_deepspeed
from ckpt.convert.deepspeed.write_slice import dealt
from ckpt.convert.deepspeed.write_universal import write_universal
from ckpt.convert.file_writing import MARK
from ckpt.convert.loose import merged_groups
from ckpt.convert.opened import Builder, Loose, Opened
from ckpt.convert.options import WEIGHTS, WriteOptions
from ckpt.convert.target import target_of
from ckpt.convert.torchfile.file import read_tree
from ckpt.errors import ConfigError, UnsupportedLayout
from ckpt.layout.box import Box
from ckpt.layout.rules import Rules
from ckpt.runtime.staging import tensor_bytes
from ckpt.store.memory import MemoryStore

PLACES = {"layers.0.z": 8, "layers.0.a": 4, "layers.1.a": 4}
"""MoE layers in module order, which is not that of their names, and the experts of each."""
DENSE = {"0.weight": (13, 6), **{f"{p}.deepspeed_moe.gate.wg.weight": (n, 6) for p, n in PLACES.items()}}
PARTS = {"up.weight": (5, 6), "up.bias": (5,), "down.weight": (6, 5)}
SEEN = "seen"
OPTIONS = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def expert(place: str, number: int, part: str) -> str:
    return f"{place}.deepspeed_moe.experts.deepspeed_experts.{number}.{part}"


def order(ep: int, rank: int, parts: tuple[str, ...] = tuple(PARTS)) -> list[str]:
    """Return what an expert-parallel rank has, in the order of its modules."""
    found = []
    for place, count in PLACES.items():
        own = range(rank * count // ep, (rank + 1) * count // ep)
        found += [expert(place, number, part) for number in own for part in parts]
    return found


def groups_of(ep: int, rank: int, **options: Any) -> list[dict[str, Any]]:
    """Return the groups of a rank, experts' matrices and vectors in groups of their own."""
    label = {**OPTIONS, "name": f"ep_size_{ep}", "moe": True, **options}
    matrices, vectors = ("up.weight", "down.weight"), ("up.bias",)
    return [
        {"params": list(DENSE), "options": {**OPTIONS, "name": "all"}},
        {"params": order(ep, rank, matrices), "options": label},
        {"params": order(ep, rank, vectors), "options": {**label, "weight_decay": 0.0}},
    ]


def of_ranks(trees: list[list[dict[str, Any]]]) -> list[Loose]:
    count = len(trees)
    return [
        *(Loose("optimizer", "engine", (n,), {"class": "", "groups": tree}) for n, tree in enumerate(trees)),
        Loose("engine", "engine", tuple(range(count)), {"global_steps": 7, "global_samples": 70, "skipped_steps": 0}),
    ]


def source(ep: int = 2, low: str = "bfloat16", **changes: Any) -> Opened:
    """Return a source of which every element is a different number, and parameters the rounding of their masters; in
    fp32 without.
    """
    store = MemoryStore()
    builder = Builder("test", "source", store)
    builder.step, builder.world, builder.engine = 7, ep, "deepspeed"
    data, number = bytearray(), 0
    shapes = {**DENSE, **{expert(p, n, k): s for p, c in PLACES.items() for n in range(c) for k, s in PARTS.items()}}

    def add(fqn: str, role: str, dtype: str, tensor: torch.Tensor) -> None:
        spec = builder.spec(fqn, role, dtype, tuple(tensor.shape))
        tensor = tensor.to(getattr(torch, dtype))
        builder.add(spec, Box.whole(spec.shape), "data", len(data))
        data.extend(tensor_bytes(tensor))

    for fqn, shape in shapes.items():
        roles = ("param", "exp_avg", "exp_avg_sq") if low == "float32" else ("master", "exp_avg", "exp_avg_sq")
        for role in roles:
            number += 1
            tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 40 * number
            add(fqn, role, "float32", tensor)
            if role == "master":
                add(fqn, "param", low, tensor)
        add(fqn, "step", "float32", torch.full((), 7.0))
    for n in range(4):
        add(expert("layers.1.a", n, SEEN), "buffer", "int64", torch.full((2,), n))
    store.objects["data"] = bytes(data)
    builder.objects = of_ranks([groups_of(ep, rank) for rank in range(ep)])
    return replace(builder.build(), **changes)


def made(opened: Opened, **layout: Any) -> DeepSpeedFiles:
    return DeepSpeedFiles(opened, target_of(opened, engine="deepspeed", **layout), WriteOptions())


LAYOUTS = [(2, 1, 1, 1), (2, 3, 1, 0), (2, 2, 2, 2), (2, 6, 2, 1), (2, 8, 4, 2), (1, 4, 4, 0), (1, 2, 1, 2)]


@pytest.mark.parametrize(("saved", "dp", "ep", "zero"), LAYOUTS)
def test_what_is_written_is_read_back_equal(saved, dp, ep, zero) -> None:
    opened, store = source(saved), MemoryStore()
    target = target_of(opened, engine="deepspeed", dp=dp, ep=ep, zero=zero)
    written = write_deepspeed(opened, store, target, WriteOptions())
    assert sorted(store.objects) == sorted([*written.files, MARK])
    back = open_deepspeed(store, "back")
    rows = compare_written(opened, back, target.specs)
    assert [row for row in rows if row.status != "equal"] == []
    assert len(rows) == len(target.specs)
    assert back.degrees == {"dp": dp, "tp": 1, "pp": 1, "ep": ep, "zero": zero}
    trees = {one.ranks[0]: one.tree["groups"] for one in back.objects if one.name == "optimizer"}
    assert trees == {rank: groups_of(ep, rank) for rank in range(ep)}
    assert any("use_data_before_expert_parallelism" in line for line in written.made) == (zero > 0 and 1 < ep < dp)


def test_files_are_named_and_counted_as_load_checkpoint_asks_for_them() -> None:
    opened, store = source(), MemoryStore()
    written = write_deepspeed(opened, store, target_of(opened, engine="deepspeed", dp=4, ep=4, zero=0), WriteOptions())
    names = {key.partition("/")[2] for key in written.files}
    experts = {
        f"layer_{n}_expert_{e}_mp_rank_00_model_states.pt" for n, c in enumerate(PLACES.values()) for e in range(c)
    }
    expected = {f"expp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(4)}
    assert names == {"", "mp_rank_00_model_states.pt", *experts, *expected}
    model = read_tree(store, "global_step7/mp_rank_00_model_states.pt")
    assert list(model["module"]) == list(DENSE)
    assert (model["num_experts"], model["optimizer"]) == ([8, 4, 4], None)
    assert model["buffer_names"] == [expert("layers.1.a", 0, SEEN)]  # as rank 0 calls that of its expert
    seventh = read_tree(store, "global_step7/layer_0_expert_6_mp_rank_00_model_states.pt")
    assert set(seventh) == {expert("layers.0.z", 6, part) for part in PARTS}
    third = read_tree(store, "global_step7/layer_2_expert_3_mp_rank_00_model_states.pt")
    assert expert("layers.1.a", 3, SEEN) in third
    groups = read_tree(store, "global_step7/expp_rank_3_mp_rank_00_optim_states.pt")["optimizer"][
        "optimizer_state_dict"
    ]
    assert [(g["name"], g.get("moe")) for g in groups["param_groups"]] == [
        ("all", None), ("ep_size_4", True), ("ep_size_4", True),
    ]  # fmt: skip


def test_zero_cuts_experts_over_those_that_have_them() -> None:
    opened, store = source(), MemoryStore()
    write_deepspeed(opened, store, target_of(opened, engine="deepspeed", dp=6, ep=2, zero=1), WriteOptions())
    for rank in range(6):
        held = read_tree(store, f"global_step7/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        optimizer = held["optimizer_state_dict"]
        assert optimizer["partition_count"] == [6, 3, 3]
        mine = optimizer["param_slice_mappings"]
        assert set(mine[1]) <= set(order(2, 0))  # named as on every rank: from 0
        last = order(2, 0, ("up.weight", "down.weight"))[-1]
        assert (last in mine[1]) == (rank >= 4)


def test_weights_alone_are_read_back() -> None:
    for zero in (0, 2):
        opened, store = source(), MemoryStore()
        target = target_of(opened, engine="deepspeed", dp=2, ep=2, zero=zero, roles=WEIGHTS)
        write_deepspeed(opened, store, target, WriteOptions(roles=WEIGHTS))
        rows = compare_written(opened, open_deepspeed(store, "back"), target.specs)
        assert {row.status for row in rows} == {"equal"}
        assert len(rows) == len(target.specs)


def as_pipeline(opened: Opened) -> Opened:
    """Return a source with the names of a pipeline of four layers, the third of which has no experts, nor tensors."""
    pipe = {"layers.0": "1", "layers.1": "3"}

    def renamed(fqn: str) -> str:
        return next((fqn.replace(old, new, 1) for old, new in pipe.items() if fqn.startswith(old)), fqn)

    objects = [
        replace(o, tree={"groups": [{**g, "params": list(map(renamed, g["params"]))} for g in o.tree["groups"]]})
        if o.name == "optimizer" else o
        for o in opened.objects
    ]  # fmt: skip
    specs = tuple(replace(spec, fqn=renamed(spec.fqn)) for spec in opened.specs)
    return replace(opened, specs=specs, objects=tuple(objects))


def test_stages_of_a_pipeline_number_their_own_layers() -> None:
    opened, store = as_pipeline(source()), MemoryStore()
    inner = expert("3.a", 2, "inner")
    modules = Loose("modules", "engine", (0, 1), {"1.z": {"seen": 1}, "3.a": {"seen": 3}, inner: {"seen": 4}})
    opened = replace(opened, objects=(*opened.objects, modules))
    target = target_of(opened, engine="deepspeed", dp=2, ep=2, pp=3, zero=1, stages=(1, 1, 2))
    written = write_deepspeed(opened, store, target, WriteOptions())
    names = [key.partition("/")[2] for key in written.files]
    assert [n for n in names if n.startswith("layer_00")] == ["layer_00-model_00-model_states.pt"]  # a stage without
    assert sum(n.startswith("layer_1_expert") for n in names) == 4
    assert sum(n.startswith("layer_0_expert") for n in names) == 8 + 4
    assert read_tree(store, "global_step7/mp_rank_00_model_states.pt")["module"] is None
    last = read_tree(store, "global_step7/mp_rank_02_model_states.pt")
    assert last["num_experts"] == [4]
    extra = {name: state for name, state in last["module"].items() if name.endswith("_extra_state")}
    assert extra == {"3.a._extra_state": {"seen": 3}}
    third = read_tree(store, "global_step7/layer_0_expert_2_mp_rank_02_model_states.pt")
    assert third[f"{inner}._extra_state"] == {"seen": 4}
    rows = compare_written(opened, open_deepspeed(store, "back"), target.specs)
    assert [row for row in rows if row.status != "equal"] == []
    assert len(rows) == len(target.specs)


def test_stages_of_a_pipeline_without_zero_are_read_back_equal() -> None:
    opened, store = as_pipeline(source(low="float32")), MemoryStore()
    target = target_of(opened, engine="deepspeed", dp=2, ep=2, pp=2, zero=0, stages=(2, 2))
    write_deepspeed(opened, store, target, WriteOptions())
    rows = compare_written(opened, open_deepspeed(store, "back"), target.specs)
    assert [row for row in rows if row.status != "equal"] == []
    assert len(rows) == len(target.specs)


def test_experts_a_rank_are_those_of_the_source_unless_asked_for() -> None:
    setup = Loose("setup", "engine", (0, 1), {"zero_stage": 1, "data_parallel_world_size": 2})
    opened = replace(source(), objects=(*source().objects, setup))
    assert (target_of(opened, dp=4).parallel.ep, target_of(opened, dp=4, ep=1).parallel.ep) == (2, 1)
    with pytest.raises(ConfigError, match="ep 2 does not divide the 3 ranks"):
        target_of(opened, dp=3)


# ---------------------------------------------------------------------------------------------------- groups and order


def names(files: DeepSpeedFiles, group: int) -> list[list[str]]:
    """Return the members of a group on each expert-parallel rank."""
    return [[m.fqn for m in held[0].groups[group]] for held in files.ranked]


def test_groups_that_were_put_together_for_fewer_ranks_come_apart_again() -> None:
    tree = merged_groups([{"groups": groups_of(2, rank)} for rank in range(2)])
    joined = replace(source(), objects=tuple(of_ranks([tree["groups"]])))
    matrices = ("up.weight", "down.weight")
    turned = replace(source(), objects=tuple(of_ranks([groups_of(2, 1), groups_of(2, 0)])))
    for opened in (joined, turned):
        for ep in (1, 2, 4):
            assert names(made(opened, dp=4, ep=ep, zero=1), 1) == [order(ep, rank, matrices) for rank in range(ep)]


def test_large_groups_are_split_as_deepspeed_splits_them(monkeypatch) -> None:
    limit = 12 * 30  # elements: of twelve matrices
    monkeypatch.setattr(write_experts, "DEEPSPEED_EXPERT_GROUP", limit)

    def split(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        found = []
        for group in groups:
            size = (
                12
                if len(group["params"]) > 12 and group["options"].get("moe") and group["options"]["weight_decay"]
                else 99
            )
            found += [{**group, "params": group["params"][n : n + size]} for n in range(0, len(group["params"]), size)]
        return found

    opened = replace(source(), objects=tuple(of_ranks([split(groups_of(2, rank)) for rank in range(2)])))
    for ep in (1, 2, 4):
        files = made(opened, dp=4, ep=ep, zero=1)
        for rank, held in enumerate(files.ranked):
            expected = split(groups_of(ep, rank))
            assert [[m.fqn for m in group] for group in held[0].groups] == [group["params"] for group in expected]
    large = source()  # of a user who splits nothing
    assert len(made(large, dp=4, ep=1, zero=1).ranked[0][0].groups) == 3


def test_experts_beside_others_get_groups_of_their_own_with_zero() -> None:
    def mixed(rank: int) -> list[dict[str, Any]]:
        members = [*list(DENSE)[:2], *order(2, rank), *list(DENSE)[2:]]
        return [{"params": members, "options": OPTIONS}]

    opened = replace(source(), objects=tuple(of_ranks([mixed(0), mixed(1)])))
    files = made(opened, dp=4, ep=4, zero=2)
    assert names(files, 0) == [list(DENSE)] * 4
    assert names(files, 1) == [order(4, rank) for rank in range(4)]
    assert files.target.groups[1].options == {**OPTIONS, "name": "ep_size_4", "moe": True}
    plain = made(opened, dp=4, ep=1, zero=0)
    assert names(plain, 0) == [[*list(DENSE)[:2], *order(1, 0), *list(DENSE)[2:]]]


def test_experts_among_the_others_of_their_module_are_found_again() -> None:
    def mixed(rank: int) -> list[dict[str, Any]]:
        gates = dict(zip(PLACES, list(DENSE)[1:], strict=True))
        members = [f for p, gate in gates.items() for f in (gate, *(f for f in order(2, rank) if f.startswith(p)))]
        return [{"params": ["0.weight", *members], "options": OPTIONS}]

    opened, store = replace(source(), objects=tuple(of_ranks([mixed(0), mixed(1)]))), MemoryStore()
    target = target_of(opened, engine="deepspeed", dp=2, ep=2, zero=0)
    write_deepspeed(opened, store, target, WriteOptions())
    back = open_deepspeed(store, "back")
    assert {row.status for row in compare_written(opened, back, target.specs)} == {"equal"}
    assert [one.tree["groups"] for one in back.objects if one.name == "optimizer"] == [mixed(0), mixed(1)]


def test_round_robin_gradients_deal_experts_over_their_own_ranks() -> None:
    def shuffled(rank: int) -> list[dict[str, Any]]:
        dense, *experts = groups_of(2, rank)
        return [{**g, "params": dealt(g["params"], n)} for g, n in ((dense, 6), *((e, 3) for e in experts))]

    setup = {"round_robin_gradients": True, "zero_stage": 2, "data_parallel_world_size": 6}
    objects = [*of_ranks([shuffled(0), shuffled(1)]), Loose("setup", "engine", (0, 1), setup)]
    opened = replace(source(), objects=tuple(objects))
    files = made(opened, dp=8, ep=4, zero=1)
    assert names(files, 0) == [dealt(list(DENSE), 8)] * 4
    assert names(files, 1) == [dealt(order(4, rank, ("up.weight", "down.weight")), 2) for rank in range(4)]
    assert names(made(opened, dp=8, ep=4, zero=0), 0) == [list(DENSE)] * 4


def test_an_order_that_is_not_the_modules_is_kept_or_refused() -> None:
    def backwards(rank: int) -> list[dict[str, Any]]:
        dense, *experts = groups_of(2, rank)
        return [dense, *({**group, "params": group["params"][::-1]} for group in experts)]

    opened = replace(source(), objects=tuple(of_ranks([backwards(0), backwards(1)])))
    assert names(made(opened, dp=4, ep=2, zero=1), 1) == [backwards(rank)[1]["params"] for rank in range(2)]
    with pytest.raises(UnsupportedLayout, match="layer by layer and expert by expert"):
        made(opened, dp=4, ep=4, zero=1)


# ----------------------------------------------------------------------------------------------------------- refused


def test_what_deepspeed_has_no_place_for_is_refused_by_name() -> None:
    opened = source()
    for problem, layout in (
        ("ZeRO-3", {"zero": 3}),
        ("tensor-parallel ranks too", {"tp": 2, "zero": 1, "rules": Rules.of({"tensors": [{"match": ".*"}]})}),
    ):
        with pytest.raises(UnsupportedLayout, match=problem):
            made(opened, **layout)
    with pytest.raises(ConfigError, match="does not say with which settings"):
        made(source(objects=()), dp=2, ep=2, zero=1)
    with pytest.raises(ConfigError, match=r"\n  - ep 8 does not divide 4 experts, layers.0.a.*"):
        made(opened, dp=8, ep=8, zero=1)
    with pytest.raises(ConfigError, match="ZeRO-3"):
        made(opened, dp=2, ep=2, zero=3)
    target = target_of(opened, engine="deepspeed", dp=2, ep=2)
    with pytest.raises(UnsupportedLayout, match="in a universal checkpoint by their number on each rank"):
        write_universal(opened, MemoryStore(), target, WriteOptions())


def test_names_that_deepspeed_would_not_find_are_refused() -> None:
    opened = source()
    other = [replace(spec, fqn=spec.fqn.replace("deepspeed_moe.experts.deepspeed_", "")) for spec in opened.specs]
    with pytest.raises(UnsupportedLayout, match=r"here is 'layers.0.a.experts.0"):
        made(replace(opened, specs=tuple(other), objects=()), dp=2, ep=2, zero=0, roles=WEIGHTS)
    native = f"z{write_experts.NATIVE}"
    fewer = [replace(spec, fqn=spec.fqn.replace(f"{native}2.", f"{native}8.")) for spec in opened.specs]
    with pytest.raises(UnsupportedLayout, match=r"missing\n  - 'layers.0.z.*deepspeed_experts.2'"):
        made(replace(opened, specs=tuple(fewer)), dp=1, ep=1, zero=1)
    several = of_ranks([groups_of(2, 0), groups_of(2, 1, name="ep_size_4")])
    with pytest.raises(UnsupportedLayout, match="several expert-parallel sizes"):
        made(replace(opened, objects=tuple(several)), dp=2, ep=2, zero=1)
