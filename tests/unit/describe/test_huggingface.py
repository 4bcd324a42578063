"""Parameter counts are those of the published checkpoints."""

from __future__ import annotations

import pytest

from ckpt.describe.huggingface import MODEL_TYPES, model_of_config
from ckpt.describe.model import Split
from ckpt.errors import ConfigError


def llama_like(kind: str, hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int, **more):
    return {
        "model_type": kind, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab, **more,
    }  # fmt: skip


PUBLISHED = {
    "Llama-3.1-8B": (llama_like("llama", 4096, 14336, 32, 32, 8, 128256), 8_030_261_248),
    "Llama-3.2-1B": (llama_like("llama", 2048, 8192, 16, 32, 8, 128256, tie_word_embeddings=True), 1_235_814_400),
    "Mistral-7B": (llama_like("mistral", 4096, 14336, 32, 32, 8, 32000), 7_241_732_096),
    "Qwen2-7B": (llama_like("qwen2", 3584, 18944, 28, 28, 4, 152064), 7_615_616_512),
    "Qwen3-8B": (llama_like("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128), 8_190_735_360),
    "Mixtral-8x7B": (llama_like("mixtral", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8), 46_702_792_704),
    "Qwen3-30B-A3B": (
        llama_like(
            "qwen3_moe", 2048, 6144, 48, 32, 4, 151936, head_dim=128, num_experts=128, moe_intermediate_size=768
        ),
        30_532_122_624,
    ),
    "gpt2": ({"model_type": "gpt2"}, 124_439_808),
    "gpt-neox-20b": (
        {
            "model_type": "gpt_neox", "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
            "intermediate_size": 24576, "vocab_size": 50432,
        },
        20_554_567_680,
    ),
}  # fmt: skip

DEEPSEEK = {
    **llama_like("deepseek_v3", 64, 96, 3, 4, 4, 50), "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "n_routed_experts": 4, "n_shared_experts": 2, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name) -> None:
    config, parameters = PUBLISHED[name]
    assert model_of_config(config).parameters == parameters


def test_deepseek_names_and_shapes() -> None:
    model = model_of_config(DEEPSEEK)
    shapes = {t.fqn: t.shape for t in model.tensors}
    prefix = "model.layers.1."
    assert {n.removeprefix(prefix): s for n, s in shapes.items() if n.startswith(prefix) and ".experts." not in n} == {
        "self_attn.q_a_proj.weight": (24, 64),
        "self_attn.q_a_layernorm.weight": (24,),
        "self_attn.q_b_proj.weight": (48, 24),
        "self_attn.kv_a_proj_with_mqa.weight": (20, 64),
        "self_attn.kv_a_layernorm.weight": (16,),
        "self_attn.kv_b_proj.weight": (64, 16),
        "self_attn.o_proj.weight": (64, 32),
        "mlp.gate.weight": (4, 64),
        "mlp.gate.e_score_correction_bias": (4,),
        "mlp.shared_experts.gate_proj.weight": (32, 64),
        "mlp.shared_experts.up_proj.weight": (32, 64),
        "mlp.shared_experts.down_proj.weight": (64, 32),
        "input_layernorm.weight": (64,),
        "post_attention_layernorm.weight": (64,),
    }
    assert shapes["model.layers.0.mlp.gate_proj.weight"] == (96, 64)
    assert shapes["model.layers.2.mlp.experts.3.down_proj.weight"] == (64, 16)
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" not in shapes
    assert model.experts == 4
    plain = model_of_config({**DEEPSEEK, "q_lora_rank": None})
    assert "model.layers.0.self_attn.q_proj.weight" in {t.fqn for t in plain.tensors}


def test_splits_follow_megatron() -> None:
    splits = {t.fqn: t.split for t in model_of_config(PUBLISHED["Qwen2-7B"][0]).tensors}
    prefix = "model.layers.27."
    assert splits[prefix + "self_attn.k_proj.weight"] == Split(0, ((512, 4),))
    assert splits[prefix + "self_attn.k_proj.bias"] == Split(0, ((512, 4),))
    assert splits[prefix + "self_attn.o_proj.weight"] == Split(1, ((3584, 28),))
    assert splits[prefix + "mlp.down_proj.weight"] == Split(1)
    assert splits[prefix + "input_layernorm.weight"] is None
    assert splits["lm_head.weight"] == Split(0, (), vocabulary=True)
    gpt = {t.fqn: t.split for t in model_of_config({"model_type": "gpt2"}).tensors}
    assert gpt["transformer.h.0.attn.c_attn.weight"] == Split(1, ((768, 12),) * 3), "Conv1D is transposed"


def test_layers_without_experts() -> None:
    config = {**PUBLISHED["Qwen3-30B-A3B"][0], "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    names = {t.fqn for t in model_of_config(config).tensors}
    sparse = [i for i in range(48) if f"model.layers.{i}.mlp.gate.weight" in names]
    assert sparse == [i for i in range(48) if i % 2 and i != 3]
    assert "model.layers.3.mlp.up_proj.weight" in names


@pytest.mark.parametrize("kind", [None, 3, "mamba", ["llama"]])
def test_an_unknown_model_type_is_named_beside_what_is_known(kind) -> None:
    with pytest.raises(ConfigError) as caught:
        model_of_config({"model_type": kind})
    assert repr(kind) in str(caught.value)
    assert all(known in str(caught.value) for known in MODEL_TYPES)


def test_missing_and_impossible_entries_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        model_of_config(
            {"model_type": "llama", "hidden_size": -4, "vocab_size": "many", "num_attention_heads": 6,
             "num_key_value_heads": 4, "num_hidden_layers": 10**12, "attention_bias": 1}
        )  # fmt: skip
    message = str(caught.value)
    for said in (
        "hidden_size is -4",
        "vocab_size is 'many'",
        "num_hidden_layers is 1000000000000",
        "intermediate_size is missing",
        "num_key_value_heads 4 does not divide num_attention_heads 6",
        "attention_bias is 1",
    ):
        assert said in message


def test_a_hostile_number_of_experts_is_refused_before_it_is_made() -> None:
    with pytest.raises(ConfigError, match="at most 1000000"):
        model_of_config({**DEEPSEEK, "num_hidden_layers": 10_000, "n_routed_experts": 65_536})


@pytest.mark.parametrize(
    ("kind", "absent"), [("llama", 64), ("mistral", 8), ("mixtral", 8), ("qwen2", 32), ("qwen3", 32), ("qwen3_moe", 4)]
)
def test_key_value_heads_that_a_config_leaves_out(kind, absent) -> None:
    config = llama_like(kind, 128, 16, 1, 64, 1, 50, head_dim=2, num_local_experts=2, num_experts=2)
    config |= {"moe_intermediate_size": 8, "num_key_value_heads": None}
    for heads in (64, absent):
        shapes = {t.fqn: t.shape for t in model_of_config(config).tensors}
        assert shapes["model.layers.0.self_attn.k_proj.weight"] == (heads * 2, 128)
        config.pop("num_key_value_heads", None)


def test_layers_that_predict_further_tokens_are_left_out_with_a_note() -> None:
    assert model_of_config(DEEPSEEK).notes == ()
    model = model_of_config(DEEPSEEK | {"num_nextn_predict_layers": 1})
    assert model.tensors == model_of_config(DEEPSEEK).tensors
    (note,) = model.notes
    assert note.startswith("num_nextn_predict_layers is 1: ")
