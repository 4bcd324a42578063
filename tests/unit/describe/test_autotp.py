from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ckpt.describe.autotp import as_autotp
from ckpt.describe.huggingface import model_of_config
from ckpt.describe.model import Split
from ckpt.errors import LayoutError
from ckpt.layout.rules import Rules

SIZES: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 90, "num_hidden_layers": 1, "vocab_size": 65, "num_attention_heads": 6,
}  # fmt: skip


def rows(config: dict[str, Any], tp: int) -> dict[str, tuple[int, ...] | None]:
    """Name of a tensor, without that of its layer -> what each rank holds of the dimension that is cut."""
    found: dict[str, tuple[int, ...] | None] = {}
    for t in as_autotp(model_of_config(config)).tensors:
        name = t.fqn.removeprefix("model.layers.0.").removesuffix(".weight")
        if t.split is None:
            found[name] = None
        else:
            size = t.shape[t.split.dim]
            held = [t.split.runs(size, tp, rank, uneven=False, multiple=None) for rank in range(tp)]
            assert [sum(n for _, n in runs) for runs, _ in held] == [local for _, local in held]
            found[name] = tuple(local for _, local in held)
    return found


def test_a_llama_is_cut_as_deepspeed_was_seen_to_cut_it() -> None:
    config = {**SIZES, "model_type": "llama", "num_key_value_heads": 3, "attention_bias": True}
    assert rows(config, 2) == {
        "model.embed_tokens": None,
        "self_attn.q_proj": (32, 16),
        "self_attn.q_proj.bias": (32, 16),
        "self_attn.k_proj": (16, 8),
        "self_attn.k_proj.bias": (16, 8),
        "self_attn.v_proj": (16, 8),
        "self_attn.v_proj.bias": (16, 8),
        "self_attn.o_proj": (32, 16),
        "self_attn.o_proj.bias": None,
        "mlp.gate_proj": (45, 45),
        "mlp.up_proj": (45, 45),
        "mlp.down_proj": (45, 45),
        "input_layernorm": None,
        "post_attention_layernorm": None,
        "model.norm": None,
        "lm_head": (33, 32),
    }


def test_a_tied_embedding_is_cut_by_its_rows() -> None:
    qwen = {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
    tied = rows({**SIZES, **qwen}, 2)
    assert (tied["model.embed_tokens"], tied["self_attn.q_proj"]) == ((33, 32), (24, 24))
    assert tied["self_attn.q_norm"] is None


def test_more_ranks_than_key_heads_are_refused() -> None:
    with pytest.raises(LayoutError, match="tp 4 is more than the 3 heads of keys between which AutoTP cuts"):
        rows({**SIZES, "model_type": "llama", "num_key_value_heads": 3}, 4)


@pytest.mark.parametrize("tp", [2, 4])
def test_the_rules_of_the_docs_cut_the_same(tp) -> None:
    text = (Path(__file__).resolve().parents[3] / "docs/rules.md").read_text().partition("### What AutoTP cuts")[2]
    rules = Rules.of(yaml.safe_load(text.partition("```yaml")[2].partition("```")[0]))
    config = {**SIZES, "model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 64}
    config |= {"intermediate_size": 96, "attention_bias": True, "mlp_bias": True}
    for t in as_autotp(model_of_config(config)).tensors:
        rule = rules.rule_for(t.fqn)
        assert rule is not None
        said = Split.of_rule(rule, t.shape)
        assert (said is None) == (t.split is None), t.fqn
        if said is not None and t.split is not None:
            size = t.shape[said.dim]
            cuts = [[s.runs(size, tp, r, uneven=False, multiple=1) for r in range(tp)] for s in (said, t.split)]
            assert (said.dim, cuts[0]) == (t.split.dim, cuts[1]), t.fqn
