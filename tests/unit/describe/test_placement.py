from __future__ import annotations

import numpy as np
import pytest

from ckpt.analysis.domains import Domains
from ckpt.analysis.report import analyze
from ckpt.describe.closed import holdings
from ckpt.describe.cuts import Groups
from ckpt.describe.engines import Local, cuts_of
from ckpt.describe.exact import rank_layout
from ckpt.describe.huggingface import model_of_config
from ckpt.describe.model import ModelSpec
from ckpt.describe.parallel import Parallel
from ckpt.describe.placement import Description
from ckpt.describe.presets import PRESETS, preset
from ckpt.errors import ConfigError
from tests.harness.descriptions import TINY_GPT, canonical, described

SMALL = {
    "model_type": "qwen3_moe", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "vocab_size": 50,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "num_experts": 4, "moe_intermediate_size": 8,
    "tie_word_embeddings": True,
}  # fmt: skip


def test_everything_that_does_not_fit_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Description(model_of_config(SMALL), Parallel(engine="megatron", zero=1, tp=3, dp=3, ep=3))
    message = str(caught.value)
    assert "self_attn.q_proj.weight' [16, 16]: tp 3 does not divide 4 heads" in message
    assert "mlp.experts.0.gate_proj.weight' [8, 16]: tp 3 does not divide size 8" in message
    assert "ep 3 does not divide the 4 experts" in message


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"pp": 2}, "pp 2 does not divide the 3 layers"), ({"pp": 2, "stages": (1, 1)}, "hold 2 layers, the model has 3")],
)
def test_pipelines_that_do_not_hold_the_model(fields, said) -> None:
    with pytest.raises(ConfigError, match=said):
        Description(model_of_config(SMALL), Parallel(**fields))


def test_uneven_stages_and_a_tie_across_them() -> None:
    description = Description(model_of_config(SMALL), Parallel(engine="deepspeed", zero=1, pp=3, stages=(0, 1, 2)))
    held = [{s.spec.fqn for s in rank_layout(description, rank).shards} for rank in range(3)]
    assert held[0] == {"model.embed_tokens.weight"}
    assert {n.split(".")[2] for n in held[1]} == {"0"}
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.gate.weight"} <= held[2]
    assert rank_layout(description, 2).aliases == (("lm_head.weight", "model.embed_tokens.weight"),)
    assert rank_layout(description, 1).aliases == ()
    table = {t.fqn: t for t in holdings(description).tensors}
    embed = table["model.embed_tokens.weight"]
    assert [holdings(description).sets[int(n)] for n in embed.holders[0]] == [(0, 2)] * 5


def test_experts_lie_on_every_ep_th_data_rank() -> None:
    description = Description(model_of_config(SMALL), Parallel(engine="deepspeed", zero=1, dp=4, ep=2))
    found = holdings(description)
    table = {t.fqn: t for t in found.tensors}
    for expert, ranks in ((0, (0, 2)), (1, (0, 2)), (2, (1, 3)), (3, (1, 3))):
        rows = table[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"]
        assert {found.sets[int(n)] for n in rows.holders[:, 3]} == {ranks}
        assert {found.sets[int(n)] for n in rows.holders[:, 0]} <= {(r,) for r in ranks}


def bounds(cut) -> list[tuple[int, list[int]]]:
    return [(int(o), [int(a), int(b)]) for o, a, b in zip(cut.owners, cut.bounds, cut.bounds[1:], strict=False)]


def test_deepspeed_cuts_a_group_as_one_buffer_padded_at_its_end() -> None:
    parallel = Parallel(engine="deepspeed", zero=2, dp=3, decay_groups=True)
    tensors = [Local((5, 2)), Local((3,), decay=False), Local((4, 2))]
    found = cuts_of(tensors, Groups.of(3, 3), parallel)
    # 18 elements of the first group: 6 a rank; 3 of the second, padded to 6: 2 a rank
    assert bounds(found[0].state) == [(0, [0, 6]), (1, [6, 10])]
    assert bounds(found[2].state) == [(1, [0, 2]), (2, [2, 8])]
    assert bounds(found[1].state) == [(0, [0, 2]), (1, [2, 3])]


def test_megatron_pads_parameters_and_the_buffer_and_goes_backwards() -> None:
    parallel = Parallel(engine="megatron", zero=1, dp=2)
    found = cuts_of([Local((100,)), Local((70,))], Groups.of(2, 2), parallel)
    # the second parameter first, at 0; the first at 128; 228 padded to 256: 128 a rank
    assert bounds(found[1].state) == [(0, [0, 70])]
    assert bounds(found[0].state) == [(1, [0, 100])]


def test_zero_redundancy_gives_the_largest_to_whom_has_least() -> None:
    parallel = Parallel(engine="zero_redundancy_optimizer", zero=1, dp=2)
    found = cuts_of([Local((n,)) for n in (3, 9, 4, 5)], Groups.of(2, 2), parallel)
    assert [int(cut.state.owners[0]) for cut in found if cut.state] == [0, 0, 1, 1]


def test_rows_of_fsdp_may_run_out() -> None:
    found = cuts_of([Local((5, 2))], Groups.of(4, 4), Parallel(engine="fsdp2", zero=3, dp=4))
    assert bounds(found[0].param) == [(0, [0, 4]), (1, [4, 8]), (2, [8, 10])]


def test_context_ranks_are_data_ranks() -> None:
    a = described(TINY_GPT, engine="deepspeed", zero=1, dp=2, cp=2)
    b = described(TINY_GPT, engine="deepspeed", zero=1, dp=4)
    assert canonical(holdings(a)) == canonical(holdings(b))


def shares(found) -> tuple[float, int]:
    """Return (share of parameters, gradients and optimizer state that more than one rank holds, total bytes)."""
    redundant = total = 0
    for t in found.tensors:
        for c, column in enumerate(t.columns):
            if column.role in ("buffer", "step"):
                continue
            weight = column.itemsize * (2 if column.role == "param" else 1)  # a gradient lies where its parameter does
            for volume, number in zip(t.volume, t.holders[:, c], strict=True):
                total += weight * int(volume)
                redundant += weight * int(volume) * (len(found.sets[int(number)]) > 1)
    return redundant / total, total


@pytest.mark.parametrize("name", ["yi-34b", "megascale-530b"])
def test_presets_give_the_published_redundancy(name) -> None:
    share, total = shares(holdings(preset(name)))
    assert PRESETS[name].paper == pytest.approx(100 * share, abs=0.05)
    assert total == pytest.approx(16 * preset(name).model.parameters, rel=1e-6), "16 bytes a parameter"


@pytest.mark.parametrize(
    ("name", "billions", "ranks"),
    [("yi-34b", 34.4, 128), ("megascale-530b", 529.9, 11_200), ("deepseek-v3", 671.0, 2048), ("kimi-k2", 1026.4, 512),
     ("llama3-405b", 405.9, 16_384)],
)  # fmt: skip
def test_presets_are_the_published_models(name, billions, ranks) -> None:
    description = preset(name)
    assert description.model.parameters / 1e9 == pytest.approx(billions, abs=0.05)
    assert description.mesh.ranks.size == ranks
    assert PRESETS[name].open


@pytest.mark.parametrize("changed", [{}, {"engine": "fsdp2", "zero": 3}], ids=["zero 1", "zero 3"])
def test_sixteen_thousand_ranks(changed) -> None:
    description = preset("llama3-405b", **changed)
    found = holdings(description)
    assert sum(int(t.volume.sum()) for t in found.tensors) == description.model.parameters
    column = {c.role: i for i, c in enumerate(found.tensors[0].columns)}
    copies = np.array([len(found.sets[n]) for n in range(len(found.sets))])
    for t in found.tensors:
        if t.fqn.endswith("up_proj.weight"):  # a norm, and its state, is on all tensor ranks
            assert set(copies[t.holders[:, column["exp_avg"]]]) == {1}
            assert set(copies[t.holders[:, column["param"]]]) == ({1} if changed else {128})
    rank = 777
    with_rank = [n for n in range(len(found.sets)) if rank in found.sets[n]]
    for role in ("param", "exp_avg"):
        exact = sum(s.box.volume for s in rank_layout(description, rank).shards if s.spec.role == role)
        closed = sum(int(t.volume[np.isin(t.holders[:, column[role]], with_rank)].sum()) for t in found.tensors)
        assert closed == exact > 0


def test_a_preset_can_be_changed_and_an_unknown_one_names_the_others() -> None:
    assert preset("llama3-405b", dp=4, engine="fsdp2", zero=3).mesh.ranks.size == 512
    with pytest.raises(ConfigError, match="no preset 'gpt-5', expected one of yi-34b"):
        preset("gpt-5")


@pytest.mark.parametrize(("name", "hosts"), [("yi-34b", 16), ("llama3-405b", 2048)])
def test_a_preset_that_says_what_lies_in_a_host_places_it_there(name, hosts) -> None:
    description = preset(name)
    ranks, per_host = description.mesh.ranks, description.parallel.host_size
    assert ranks.size == hosts * per_host
    inside = ranks[:, :, 0] if name == "yi-34b" else ranks[:1, :, 0]
    assert set((inside // per_host).reshape(-1)) == {0}


def test_autotp_pads_nothing_and_the_first_ranks_hold_more() -> None:
    file = """
tensors:
  embed: {shape: [61, 4], tp: {dim: 0, size: 61}}
  gate_up: {shape: [20, 4], tp: {dim: 0, stride: 2}}
  q: {shape: [12, 4], tp: {dim: 0, heads: 3}}
"""
    found = described(file, engine="deepspeed", zero=1, tp=3, autotp=True)
    geometry = [[runs for runs, _ in found.geometry(t)] for t in found.model.tensors]
    assert geometry == [
        [((0, 21),), ((21, 20),), ((41, 20),)],
        [((0, 4), (10, 4)), ((4, 3), (14, 3)), ((7, 3), (17, 3))],
        [((0, 4),), ((4, 4),), ((8, 4),)],
    ]
    with pytest.raises(ConfigError, match=r"'q' .* tp 2 does not divide 3 heads"):
        described(file, engine="deepspeed", zero=1, tp=2, autotp=True)


def test_a_rank_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="rank 2 is not in a world of 2"):
        rank_layout(described(TINY_GPT, dp=2), 2)


def test_what_no_int64_could_count_is_refused() -> None:
    large = ModelSpec.from_named_shapes({"w": (2**25, 2**25)})
    with pytest.raises(ConfigError, match=f"could hold {2**50 * 14 * 128} bytes in all"):
        Description(large, Parallel(engine="megatron", zero=1, dp=128))
    held = holdings(Description(large, Parallel(engine="megatron", zero=1, dp=64)))  # 2**50 * 14 * 64 < 2**60
    assert analyze(held, Domains.by_host(64, 8)).total.bytes_held == 2**50 * (2 * 64 + 12) + 4 * 64
