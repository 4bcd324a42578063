"""Tensor, pipeline, expert and sequence parallelism of DeepSpeed, on real engines of several ranks.

Two witnesses: an engine that was loaded must train on bit for bit, and what a checkpoint holds must be, in any other
layout, what DeepSpeed's own accessors said of the engine that was saved.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.harness import ranks

CASES = "tests.e2e.parallel_cases:"
Layout = dict[str, Any]


def dp(stage: int, dtype: str = "bf16", **more: Any) -> Layout:
    return {"kind": "dp", "stage": stage, "dtype": dtype, **more}


def tp(stage: int, dtype: str = "bf16", **more: Any) -> Layout:
    return {"kind": "tp", "tp": 2, "stage": stage, "dtype": dtype, **more}


def pp(stage: int = 1, dtype: str = "bf16", **more: Any) -> Layout:
    return {"kind": "pp", "pp": 2, "stage": stage, "dtype": dtype, "gas": 2, **more}


def moe(ep: int, stage: int = 1, dtype: str = "bf16", **more: Any) -> Layout:
    return {"kind": "moe", "ep": ep, "stage": stage, "dtype": dtype, **more}


def autotp(stage: int, **more: Any) -> Layout:
    return {"kind": "autotp", "tp": 2, "stage": stage, "dtype": "bf16", "scheduler": False, **more}


def plain(stage: int) -> Layout:
    return {"kind": "plain", "stage": stage, "dtype": "bf16", "scheduler": False}


def sp(stage: int) -> Layout:
    return {"kind": "sp", "stage": stage, "dtype": "bf16"}


def run(world: int, case: str, **options: Any) -> list[Any]:
    return ranks(world, CASES + case, timeout=100, **options).values()


CONTINUED: dict[str, tuple[int, Layout, dict[str, Any]]] = {
    "tp, zero 0 fp32": (4, tp(0, "fp32"), {"tp": [0, 1], "dp": [0, 2]}),
    "tp, zero 0 bf16": (4, tp(0), {"tp": [0, 1], "dp": [0, 2]}),
    "tp, zero 1": (4, tp(1), {"tp": [0, 1], "dp": [0, 2]}),
    "tp, zero 2 fp16": (4, tp(2, "fp16"), {"tp": [0, 1], "dp": [0, 2]}),
    "tp, zero 3": (4, tp(3), {"tp": [0, 1], "dp": [0, 2]}),
    "tp, BF16_Optimizer": (4, tp(1, grad_accum_dtype="fp32"), {"tp": [0, 1], "dp": [0, 2]}),
    "tp alone": (4, tp(1, tp=4), {"tp": [0, 1, 2, 3], "dp": [0]}),
    "tp by attributes": (2, tp(1, tp=2, rules={"tensors": []}), {"tp": [0, 1], "dp": [0]}),
    "pp, zero 0 fp32": (4, pp(0, "fp32"), {"tp": [0], "pp": [0, 2], "dp": [0, 1]}),
    "pp, zero 1": (4, pp(), {"tp": [0], "pp": [0, 2], "dp": [0, 1]}),
    "pp, zero 1 fp32, by parameters": (4, pp(1, "fp32", split="parameters"), {"tp": [0], "pp": [0, 2], "dp": [0, 1]}),
    "pp, BF16_Optimizer": (4, pp(grad_accum_dtype="fp32"), {"tp": [0], "pp": [0, 2], "dp": [0, 1]}),
    "pp, uneven": (3, pp(pp=3, split="type:block"), {"tp": [0], "pp": [0, 1, 2], "dp": [0]}),
    "pp x tp x dp": (8, pp(tp=2), {"tp": [0, 1], "pp": [0, 4], "dp": [0, 2]}),
    "pp, shared module": (4, pp(positions=True), {"tp": [0], "pp": [0, 2], "dp": [0, 1]}),
    "experts, zero 0 fp32": (4, moe(2, 0, "fp32"), {"dp": [0, 1, 2, 3], "ep ep_size_2": [0, 1]}),
    "experts, zero 1": (4, moe(2), {"dp": [0, 1, 2, 3], "ep ep_size_2": [0, 1]}),
    "experts, zero 2, noisy gate": (4, moe(4, 2, noisy="RSample"), {"dp": [0, 1, 2, 3], "ep ep_size_4": [0, 1, 2, 3]}),
    "AutoTP, zero 1": (4, autotp(1), {"tp": [0, 1], "dp": [0, 2]}),
    "AutoTP, zero 3": (4, autotp(3), {"tp": [0, 1], "dp": [0, 2]}),
    "sequence, zero 2": (4, sp(2), {"cp": [0, 1], "dp": [0, 2]}),
    "sequence, zero 3": (4, sp(3), {"cp": [0, 1], "dp": [0, 2]}),
}


@pytest.mark.parametrize("name", CONTINUED)
def test_a_loaded_engine_trains_on_bit_for_bit(name: str, tmp_path: Any) -> None:
    world, layout, groups = CONTINUED[name]
    found = run(world, "continue_bitwise", root=str(tmp_path), layout=layout)
    for report in found:
        assert (report["strays"], report["state"], report["final"]) == ([], [], [])
        assert report["losses"][0] == report["losses"][1]
        written, unique = report["written"]
        assert 0.98 * unique < written <= unique  # equal pieces (step counts, zeros) are stored once
    assert found[0]["groups"] == groups


CROSSED: dict[str, tuple[int, Layout, list[tuple[int, Layout]]]] = {
    "tp": (4, tp(1), [(4, dp(1)), (2, dp(3, "fp32")), (4, tp(3, tp=4)), (8, pp(tp=2)), (4, pp())]),
    "pp": (
        4,
        pp(),
        [(4, dp(1)), (4, tp(1)), (3, pp(0, "fp32", pp=3)), (4, pp(split="parameters")), (2, dp(0, "fp32"))],
    ),
    "pp x tp x dp": (8, pp(tp=2), [(4, dp(3)), (4, dp(3, "fp32")), (4, tp(2))]),
    "zero 3": (4, dp(3), [(8, pp(tp=2)), (4, tp(3, "fp32")), (4, pp(grad_accum_dtype="fp32")), (4, sp(3))]),
    "two expert ranks": (4, moe(2), [(4, moe(4)), (2, moe(1)), (4, moe(4, 0, "fp32"))]),
    "four expert ranks": (4, moe(4, 2), [(4, moe(2)), (2, moe(1, 0, "fp32"))]),
    "experts in one place": (2, moe(1), [(4, moe(2)), (4, moe(4, 2))]),
    "AutoTP": (4, autotp(1), [(4, plain(2)), (2, plain(3))]),
    "before AutoTP": (4, plain(2), [(4, autotp(1)), (4, autotp(3))]),
    "sequence": (4, sp(2), [(4, dp(2)), (4, tp(1))]),
}


@pytest.mark.parametrize("name", CROSSED)
def test_another_layout_holds_what_deepspeed_said_of_the_first(name: str, tmp_path: Any) -> None:
    world, layout, targets = CROSSED[name]
    for written, unique in run(world, "save_with_witness", root=str(tmp_path), layout=layout):
        assert 0.98 * unique < written <= unique
    for other_world, target in targets:
        for report in run(other_world, "load_and_compare", root=str(tmp_path), layout=target):
            assert (report["strays"], report["names"], report["differ"]) == ([], [], []), target
            assert report["trains"]
            allowed = ("train_batch_size", "micro_steps", "random generators")
            if layout.get("pp") or layout.get("ep", 1) > 1 or target["kind"] not in ("pp", "moe"):
                assert all(any(word in note for word in allowed) for note in report["notes"]), report["notes"]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_load_clears_the_padding_of_a_vocabulary(stage: int, tmp_path: Any) -> None:
    found = run(2, "padding_is_cleared", root=str(tmp_path), layout=tp(stage))
    assert found[0][0] > 0
    assert found[0][1] > 0  # the first rank's last row is a real one
    assert found[1][0] > 0
    assert found[1][1] == 0


def test_experts_depend_on_the_generator_that_is_saved(tmp_path: Any) -> None:
    found = run(4, "gate_noise", root=str(tmp_path), layout=moe(2))
    assert not all(report["reseeded"] for report in found)


def test_what_stages_share_a_module_for_but_do_not_share_keeps_apart(tmp_path: Any) -> None:
    found = run(2, "not_tied", root=str(tmp_path), layout=pp(positions=True))
    assert found[0]["names"] == ["embed.positions", "embed.weight"]
    assert found[1]["names"] == ["embed.weight", "tied_modules.embed@5.positions"]
    for report in found:
        assert "ReplicaDivergence" in report["merged"]
        assert "embed.positions" in report["merged"]
    (strays,) = run(1, "strays_of", root=str(tmp_path), layout=dp(1, positions=True))
    assert "MissingState" in strays["strict"]  # a job without stages has no place for the second one
    assert strays["strays"] != []
    assert all("tied_modules.embed@5.positions" in stray for stray in strays["strays"])


def test_weights_that_only_the_user_knows_to_be_tied_are_stored_once(tmp_path: Any) -> None:
    found = run(2, "tied_by_rule", root=str(tmp_path))
    assert [report["aliases"] for report in found] == [{}, {"head.weight": "embed.weight"}]
    assert run(1, "has_embedding", root=str(tmp_path), layout=dp(0, "fp32")) == [True]
    written, unique = found[0]["written"]
    assert 0.98 * unique < written <= unique


def test_a_pipeline_that_is_half_loaded_refuses_to_train() -> None:
    first, second = ranks(2, CASES + "half_loaded", timeout=60, layout=pp())
    assert first.error_type == "ConfigError"
    assert "failed midway" in first.message
    assert not second.ok  # it waits for the first stage, which is gone


def test_every_mistake_is_one_error_with_all_of_it_on_all_ranks(tmp_path: Any) -> None:
    expected = {
        "idle": [
            r"LayoutError: .*\(2 problem",
            "rule 'names: a' fits nothing",
            r"rule 'tensors: encoder\.\*' fits noth",
        ],
        "unexplained": ["UnsupportedLayout", "'norm.bias': no rule explains", "'blocks.2.calls': no rule explains it"],
        "disagree": ["LayoutError", r"'embed.weight' \(param\): ranks disagree", r"'embed.weight' \(master\): ranks"],
        "groups": [
            "LayoutError",
            r"axis 'tp': rank\(s\) 2 name the group \(0, 2\)",
            r"axis 'tp': rank\(s\) 3 name the group \(1, 3\)",
            "ranks 2 and 0 share both the dp and the tp group",
        ],
        "orders": ["'embed.weight' .* held by no rank", "axis 'tp': ranks 2, 3 name their group in different orders"],
        "orders, load": ["LayoutError", "axis 'tp': ranks 0, 1 name their group in different orders"],
        "uneven": [
            "UnsupportedLayout",
            r"'blocks.0.gate_up.weight': .*size 20 cannot",
            r"'blocks.0.gate_up.weight': rule .* expected 40 rows on each of 1 ranks",
            r"rank 0: its groups have dp 2 x tp 3 = 6 ranks, the world has 4",
            r"rank 3: its groups have dp 2 x tp 1 = 2 ranks, the world has 4",
            r"rule 'tensors: encoder\.\*' fits nothing",
        ],
        "unfit": [
            "UnsupportedLayout",
            "'embed.weight': rule .* cuts dimension 2",
            "'blocks.2.gate_up.weight': .* 2 x 20",
        ],
        "no dimension, and hpz": ["hpZ", "'embed.weight': it is marked", "'blocks.0.down.weight': it is marked"],
        "all whole": ["LayoutError", "there is a tensor-parallel group, but on no rank does a rule"],
        "nothing said": ["LayoutError", "there is a tensor-parallel group, but on no rank does a rule"],
        "liar": [
            r"get_data_parallel_world_size\(\) is 3, its group has 2",
            r"tensor_model_parallel_rank\(\) is \d, in",
        ],
        "fine": [""],
    }
    expected |= {
        "idle, load": expected["idle"][1:],
        "groups, load": expected["groups"],
        "uneven, load": expected["uneven"],
    }
    first, *others = run(4, "refusals", root=str(tmp_path))
    assert all(other == first for other in others)
    assert first.keys() == expected.keys()
    for label, patterns in expected.items():
        assert bool(first[label]) == (label != "fine"), (label, first[label])
        for pattern in patterns:
            assert re.search(pattern, first[label]), (label, pattern, first[label])
