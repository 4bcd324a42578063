from __future__ import annotations

import json

import numpy as np
import pytest

from ckpt.convert.model_of import parameter_groups
from ckpt.convert.naming import expert_of, layer_of, place_of, stack_of
from ckpt.convert.opened import Loose
from ckpt.convert.options import WEIGHTS
from ckpt.convert.target import Layouts, Target, target_of
from ckpt.describe.huggingface import model_of_config
from ckpt.errors import ConfigError
from ckpt.layout.graph import ShardGraph
from ckpt.layout.rules import Rules
from ckpt.plan.wire import combined
from ckpt.runtime.agree import layout_digest
from tests.unit.convert.sources import ADAM, Source

LAYERS = 4
RULES = Rules.of(
    {
        "tensors": [
            {"match": r".*qkv\.weight", "dim": 0, "fused": [{"size": 8, "heads": 4}, 4, 4]},
            {"match": r".*\.out\.weight", "dim": 1},
            {"match": r"embed\.weight", "dim": 0, "size": 65},
            {"match": r".*(norm|position|seen).*"},
        ]
    }
)


def gpt(roles=ADAM) -> Source:
    """A model of four layers with a fused matrix, a frozen tensor, a buffer, a tied head, an empty tensor."""
    source = Source().weights({"embed.weight": (65, 8)}, roles).weights({"position": (5, 8)})
    for n in range(LAYERS):
        shapes = {"qkv.weight": (16, 8), "out.weight": (8, 8), "norm.weight": (8,)}
        source.weights({f"layers.{n}.{name}": shape for name, shape in shapes.items()}, roles)
    source.weights({"norm.weight": (8,)}, roles).add("seen", "buffer", (), "int64").add("nothing", "param", (0, 3))
    source.builder.aliases["head.weight"] = "embed.weight"
    return source


def held(target: Target) -> set[tuple[str, str]]:
    """Every tensor and role, after all ranks together were found to hold each exactly as a whole."""
    graph = ShardGraph.build(list(target.layouts))
    assert isinstance(target.layouts, Layouts)
    assert target.layouts.graph() == graph
    assert target.layouts.digest() == combined([layout_digest(one) for one in target.layouts])
    return {spec.key for spec in graph.specs}


@pytest.mark.parametrize(
    "flags",
    [
        {"dp": 3, "zero": 1}, {"dp": 5, "zero": 3}, {"dp": 2, "tp": 2, "pp": 2, "zero": 1}, {"tp": 4, "zero": 2},
        {"dp": 2, "pp": 4, "zero": 3}, {"pp": 2, "zero": 2}, {"tp": 2, "stages": (1, 3), "pp": 2}, {},
    ],
    ids=str,
)  # fmt: skip
def test_the_ranks_of_the_target_hold_everything_that_the_source_has(flags) -> None:
    source = gpt().open()
    target = target_of(source, rules=RULES, **flags)
    degrees = [flags.get(name, 1) for name in ("dp", "tp", "pp")]
    assert len(target.layouts) == np.prod(degrees)
    assert held(target) == {spec.key for spec in source.specs} == {spec.key for spec in target.specs}
    assert target.notes == ()
    assert target.layouts[0].aliases == (("head.weight", "embed.weight"),)


def test_stages_and_ties_follow_the_names() -> None:
    stages = target_of(gpt().open(), pp=2).description.stages
    assert {stages[f"layers.{n}.qkv.weight"] for n in (0, 1)} == {(0,)}
    assert {stages[f"layers.{n}.qkv.weight"] for n in (2, 3)} == {(1,)}
    assert stages["norm.weight"] == (1,)
    assert stages["position"] == (0,)
    assert stages["embed.weight"] == (0, 1), "the head on the last stage is the same tensor"
    uneven = target_of(gpt().open(), pp=2, stages=(3, 1)).description.stages
    assert uneven["layers.2.qkv.weight"] == (0,)


def test_a_pipeline_of_deepspeed_numbers_what_has_no_tensors_too() -> None:
    names = {"tied_modules.embed.weight": (9, 4), "1.w": (4,), "2.w": (4,), "4.w": (4,)}
    target = target_of(Source().weights(names, ADAM).open(), pp=2, stages=(3, 3), zero=1)
    stages = target.description.stages
    assert [stages[name] for name in names] == [(0, 1), (0,), (0,), (1,)]
    with pytest.raises(ConfigError, match="the stages hold 4 layers, the names of its tensors show 5"):
        target_of(Source().weights(names).open(), pp=2, stages=(2, 2))


def test_what_the_flags_leave_open_stays_as_it_was() -> None:
    source = gpt()
    source.builder.degrees = {"dp": 4, "zero": 3}
    parallel = target_of(source.open()).parallel
    assert (parallel.dp, parallel.tp, parallel.zero) == (4, 1, 3)
    assert target_of(source.open(), dp=2).parallel.ranks == 2
    source = gpt()
    source.builder.objects.append(Loose("setup", "engine", (0,), {"data_parallel_world_size": 3, "zero_stage": 2}))
    source.builder.world = 3
    assert target_of(source.open()).parallel.dp == 3
    source.builder.world = 6
    assert target_of(source.open(), rules=RULES).parallel.tp == 2, "6 ranks, of which 3 share a slice, and no stages"
    source.builder.world = 4
    assert target_of(source.open()).parallel.dp == 1, "which cannot be"


def test_stages_stay_as_they_were_too() -> None:
    source = gpt()
    for rank, layers in enumerate(((0,), (1, 2, 3))):
        groups = [{"params": ["embed.weight", *(f"layers.{n}.qkv.weight" for n in layers)], "options": {}}]
        source.builder.objects.append(Loose("optimizer", "engine", (rank,), {"groups": groups}))
    source.builder.objects.append(Loose("setup", "engine", (0, 1), {"data_parallel_world_size": 1, "zero_stage": 1}))
    source.builder.world = 2
    parallel = target_of(source.open(), dp=3).parallel
    assert (parallel.pp, parallel.stages, parallel.ranks) == (2, (1, 3), 6)
    assert target_of(source.open(), pp=4).parallel.stages == ()
    source.builder.degrees = {"pp": 2, "dp": 1}
    assert target_of(source.open()).parallel.stages == (1, 3)


def test_the_order_of_flat_buffers_is_that_of_the_optimizers_groups() -> None:
    names = [f"layers.{n}.{name}.weight" for n in range(LAYERS) for name in ("qkv", "out")]
    norms = [f"layers.{n}.norm.weight" for n in range(LAYERS)]
    source = gpt().groups(["embed.weight", *names], [*norms, "norm.weight"]).open()
    target = target_of(source, dp=2, zero=1, engine="deepspeed")
    assert [group.params for group in target.groups] == [("embed.weight", *names), (*norms, "norm.weight")]
    order = [t.fqn for t in target.description.on_stage[0]]
    assert [fqn for fqn in order if fqn in names] == names
    sizes = [sum(s.box.volume for s in one.shards if s.spec.role == "exp_avg") for one in target.layouts]
    flat = [65 * 8 + LAYERS * 24 * 8, (LAYERS + 1) * 8]
    assert sizes == [sum(n // 2 for n in flat)] * 2, "each group is cut by itself"


def test_groups_of_several_stages_are_one() -> None:
    source = gpt().open()
    trees = [
        {"groups": [{"params": ["layers.0.qkv.weight"], "options": {"lr": 1}}]},
        {"groups": [{"params": ["layers.1.qkv.weight", "unknown"], "options": {"lr": 1}}]},
        {"groups": [{"params": ["head.weight"], "options": {"lr": 2}}, {"params": [], "options": {"lr": 1}}]},
    ]
    source = gpt()
    source.builder.objects += [Loose("optimizer", "engine", (n,), tree) for n, tree in enumerate(trees)]
    groups = parameter_groups(source.open())
    assert [(g.params, g.options) for g in groups] == [
        (("layers.0.qkv.weight", "layers.1.qkv.weight"), {"lr": 1}),
        (("embed.weight",), {"lr": 2}),
    ]


def test_frozen_parameters_and_states_of_other_shapes_are_carried() -> None:
    source = gpt(("param", "exp_avg")).add("embed.weight", "row", (65,)).add("embed.weight", "column", (8,)).open()
    target = target_of(source, dp=3, zero=1)
    assert held(target) == {spec.key for spec in source.specs}
    rows = [s.box.sizes for one in target.layouts for s in one.shards if s.spec.key == ("embed.weight", "row")]
    assert set(rows) == {(65,)}, "whole, wherever a part of the parameter is stepped"
    trainable = {t.fqn: t.trainable for t in target.description.model.tensors}
    assert not trainable["position"]
    assert trainable["embed.weight"]
    assert all(t.trainable for t in target_of(gpt(("param",)).open()).description.model.tensors if t.kind != "buffer")


def test_weights_alone_and_their_dtype() -> None:
    source = gpt().add("ids", "buffer", (3,), "int64").open()
    target = target_of(source, dp=2, zero=1, roles=WEIGHTS, dtype="float16")
    dtypes = {spec.key: spec.dtype for spec in target.specs}
    assert {role for _, role in dtypes} == {"param", "buffer"}
    assert dtypes["embed.weight", "param"] == "float16"
    assert dtypes["ids", "buffer"] == dtypes["seen", "buffer"] == "int64"
    only_master = Source().add("w", "master", (4,)).open()
    assert [s.key for s in target_of(only_master, roles=WEIGHTS).specs] == [("w", "param")]


def test_experts_are_dealt_out() -> None:
    source = Source()
    for expert in range(4):
        source.weights({f"layers.0.mlp.experts.{expert}.up.weight": (4, 4)}, ADAM)
    target = target_of(source.weights({"layers.0.router.weight": (4, 4)}, ADAM).open(), dp=4, ep=2, zero=1)
    first = {s.spec.fqn for s in target.layouts[0].shards if s.spec.role == "param"}
    assert first == {"layers.0.router.weight", *(f"layers.0.mlp.experts.{n}.up.weight" for n in (0, 1))}
    assert target.description.model.experts == 4


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        ({"tp": 3}, ["tp 3 does not divide 4 heads"]),
        ({"tp": 2, "rules": None}, ["nothing says how tensor parallelism cuts its tensors: give --rules"]),
        ({"pp": 5}, ["pp 5 is more stages than the 4 layers"]),
        ({"pp": 3}, ["pp 3 does not divide the 4 layers: give those of each stage (--stages)"]),
        ({"pp": 2, "stages": (1, 1)}, ["the stages hold 2 layers, the names of its tensors show 4"]),
        ({"dp": 2, "ep": 2}, ["ep 2, and no name shows an expert"]),
        ({"zero": 4}, ["zero is 4"]),
        ({"dp": 2, "tp": 3, "pp": 5, "ep": 2, "zero": 1}, ["4 heads", "pp 5 is more", "no name shows an expert"]),
        ({"pp": 2, "zero": 2, "engine": "deepspeed"}, ["DeepSpeed refuses ZeRO-2 with a pipeline"]),
    ],
    ids=str,
)
def test_all_that_cannot_be_is_told_at_once(flags, lines) -> None:
    with pytest.raises(ConfigError) as caught:
        target_of(gpt().open(), **{"rules": RULES, **flags})
    assert all(line in str(caught.value) for line in lines), str(caught.value)
    assert "layers.1.qkv.weight" not in str(caught.value), "what is alike is told once"


def test_a_tensor_that_no_rule_explains_is_named() -> None:
    source = gpt().weights({"layers.0.gate.weight": (8, 8), "layers.1.gate.weight": (8, 8)}).open()
    with pytest.raises(ConfigError) as caught:
        target_of(source, tp=2, rules=RULES)
    assert str(caught.value).count("no rule says how tensor parallelism cuts it") == 2
    assert "'layers.1.gate.weight'" in str(caught.value)
    assert target_of(source, rules=RULES).parallel.tp == 1, "without tensor parallelism none is needed"


def test_a_config_beside_the_weights_says_what_rules_would() -> None:
    config = {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    model = model_of_config(config)
    source = Source("safetensors").weights({t.fqn: t.shape for t in model.tensors})
    with pytest.raises(ConfigError, match="give --rules"):
        target_of(source.open(), tp=2)
    source._store.put("config.json", json.dumps(config).encode())
    splits = {t.fqn: t.split for t in target_of(source.open(), tp=2).description.model.tensors}
    assert splits == {t.fqn: t.split for t in model.tensors}
    with pytest.raises(ConfigError, match="tp 3 does not divide 4 heads"):
        target_of(source.open(), tp=3)
    rule = Rules.of({"tensors": [{"match": ".*q_proj.weight"}]})
    target = target_of(source.open(), tp=2, rules=rule)
    assert {t.split for t in target.description.model.tensors if "q_proj" in t.fqn} == {None}, "rules come first"
    with pytest.raises(ConfigError, match="'extra': no rule says"):
        target_of(source.weights({"extra": (3,)}).open(), tp=2)


def test_rules_that_match_nothing_are_told() -> None:
    rules = Rules.of({"tensors": [*({"match": r.match, "dim": r.dim} for r in RULES.tensors), {"match": "typo"}]})
    assert target_of(gpt().open(), rules=rules).notes == ("rules: 'tensors: typo' matches nothing",)


def test_only_one_layout_of_a_large_world_is_made() -> None:
    target = target_of(gpt().open(), dp=512, tp=4, pp=4, zero=1, rules=RULES)
    assert len(target.layouts) == 8192
    assert target.layouts[8191].rank == 8191
    assert [one.rank for one in target.layouts[:2]] == [0, 1]
    with pytest.raises(IndexError):
        target.layouts[8192]


@pytest.mark.parametrize(
    ("names", "stack"),
    [
        (["model.embed_tokens.weight", "model.layers.0.w", "model.layers.10.w", "visual.blocks.0.w"], "model.layers."),
        (["transformer.h.0.attn.w", "transformer.h.1.attn.w"], "transformer.h."),
        (["decoder.layers.0.mlp.experts.local_experts.7.w", "decoder.layers.1.w"], "decoder.layers."),
        (["0.w", "1.layers.0.w", "1.layers.1.w", "1.layers.2.w", "1.layers.3.w", "2.w"], "1.layers."),
        (["layers.0.heads.0.w", "layers.0.heads.1.w", "layers.0.heads.2.w", "layers.1.heads.0.w"], "layers."),
        (["tied_modules.embed.w", "1.w", "2.w"], ""),
        (["weight", "bias"], None),
    ],
)
def test_the_longest_stack_that_is_not_inside_of_another_counts_layers(names, stack) -> None:
    assert stack_of(names) == stack


@pytest.mark.parametrize(
    ("name", "expert"),
    [
        ("model.layers.0.mlp.experts.11.up_proj.weight", 11),
        ("layers.0.moe.deepspeed_moe.experts.deepspeed_experts.3.fc.weight", 3),
        ("decoder.layers.0.mlp.experts.local_experts.5.linear_fc1.weight", 5),
        ("model.layers.0.mlp.shared_expert.up_proj.weight", None),
        ("model.layers.0.mlp.experts.gate_up_proj", None),
    ],
)
def test_experts_by_name(name, expert) -> None:
    assert expert_of(name) == expert


def test_places_by_name() -> None:
    last = ["lm_head.weight", "model.norm.weight", "transformer.ln_f.bias", "output_layer.weight", "embed_out.weight"]
    first = ["model.embed_tokens.weight", "transformer.wpe.weight", "embeddings.norm.weight", "whatever.weight"]
    assert {place_of(name) for name in last} == {"last"}
    assert {place_of(name) for name in first} == {"first"}
    assert layer_of("model.layers.12.mlp.w", "model.layers.") == 12


ATTENTION = {"k.weight": (16, 32), "k.bias": (16,), "o.weight": (32, 32), "q.weight": (32, 32), "up.weight": (64, 32)}


def attention(**heads: int) -> Rules:
    """Eight query heads of four, and four key heads."""
    q, k = heads.get("q", 8), heads.get("k", 4)
    return Rules.of(
        {
            "tensors": [
                {"match": r"q\.weight", "dim": 0, "heads": q},
                {"match": r"k\..*", "dim": 0, "heads": k},
                {"match": r"o\.weight", "dim": 1, "heads": q},
                {"match": r"up\.weight", "dim": 0},
            ]
        }
    )


def test_heads_of_keys_may_be_shared_and_those_of_queries_never() -> None:
    source = Source().weights(ATTENTION).open()
    target = target_of(source, tp=8, rules=attention())
    assert len(target.layouts) == 8
    with pytest.raises(ConfigError) as refused:
        target_of(source, tp=16, rules=attention())
    _, *lines = str(refused.value).split("\n  - ")
    assert [line.split()[0] for line in lines] == ["'o.weight'", "'q.weight'"]
    assert all("tp 16 is more than its 8 heads" in line for line in lines)


@pytest.mark.parametrize(
    ("rule", "refused"),
    [
        ({"fused": [{"size": 16, "heads": 4}, {"size": 8, "heads": 2}, {"size": 8, "heads": 2}]}, "4 heads"),
        ({"fused": [{"size": 16, "heads": 8}, {"size": 8, "heads": 2}, {"size": 8, "heads": 2}]}, ""),
        ({"fused": [{"size": 16, "heads": 4}, {"size": 16, "heads": 4}]}, ""),
        ({"heads": 4}, ""),
        ({"heads": 4, "dim": 1}, "4 heads"),
        ({"size": 32}, ""),
    ],
    ids=str,
)
def test_what_eight_ranks_may_share(rule, refused) -> None:
    rules = Rules.of({"tensors": [{"match": "w", "dim": 0, **rule}]})
    source = Source().weights({"w": (32, 32)}).open()
    if not refused:
        assert target_of(source, tp=8, rules=rules).parallel.tp == 8
        return
    with pytest.raises(ConfigError, match=f"tp 8 is more than its {refused}"):
        target_of(source, tp=8, rules=rules)


def test_rows_that_do_not_suffice_for_all_ranks_are_not_shared() -> None:
    rules = Rules.of({"tensors": [{"match": "w", "dim": 1}]})
    with pytest.raises(ConfigError, match="tp 8 is more than its size 4"):
        target_of(Source().weights({"w": (8, 4)}).open(), tp=8, zero=1, rules=rules)


def test_a_config_says_how_many_heads_queries_have() -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8, "vocab_size": 64,
        "num_key_value_heads": 4, "intermediate_size": 64, "max_position_embeddings": 8, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    source = Source("safetensors").weights({t.fqn: t.shape for t in model_of_config(config).tensors})
    source._store.put("config.json", json.dumps(config).encode())
    assert target_of(source.open(), tp=8).parallel.tp == 8
    with pytest.raises(ConfigError) as refused:
        target_of(source.open(), tp=16)
    _, *lines = str(refused.value).split("\n  - ")
    assert sorted(line.split()[0].split(".")[-2] for line in lines) == ["o_proj", "q_proj"]


def test_a_format_of_whole_tensors_needs_no_cut_and_others_say_what_to_do() -> None:
    source = gpt()
    source.builder.degrees = {"dp": 2, "tp": 2, "pp": 2, "zero": 1}
    parallel = target_of(source.open(), cut=False).parallel
    assert (parallel.dp, parallel.tp, parallel.pp, parallel.zero) == (2, 1, 1, 1)
    with pytest.raises(ConfigError, match=r"tp 2 is SRC's: give --rules, or --tp 1"):
        target_of(source.open(), dp=4)
    assert target_of(source.open(), dp=4, tp=1).parallel.ranks == 8
    assert target_of(source.open(), rules=RULES).parallel.ranks == 8


def test_a_slip_of_the_finger_is_no_layout() -> None:
    with pytest.raises(ConfigError, match="dp 1048576: 1048576 ranks, at most 65536"):
        target_of(gpt().open(), dp=2**20, zero=1)
