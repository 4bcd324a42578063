"""Llama and what came of it: Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE, DeepSeek-V3, Kimi-K2. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.describe.hf_parts import Builder, Line, bias, columns, rows, vocabulary, whole
from ckpt.describe.model import Tied

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt.describe.read import Fields

DEEPSEEK = ("deepseek_v3", "kimi_k2")
MOE = ("mixtral", "qwen3_moe", *DEEPSEEK)
MAX_LAYERS, MAX_EXPERTS = 10_000, 65_536

KEY_VALUE_HEADS = {"mistral": 8, "mixtral": 8, "qwen2": 32, "qwen3": 32, "qwen3_moe": 4}
"""Defaults of transformers' ``configuration_<model_type>.py``, for a config that does not say it; one that says null,
or another model_type, has as many as heads."""


def llama_family(builder: Builder, fields: Fields, kind: str) -> None:
    """Describe a decoder of this model_type (``modeling_<model_type>.py`` of transformers)."""
    hidden = fields.integer("hidden_size")
    vocab = fields.integer("vocab_size", most=2**26)
    layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    inner = fields.integer("intermediate_size")
    attention = _Latent.read(fields, hidden) if kind in DEEPSEEK else _Grouped.read(fields, kind, hidden)
    moe = _Moe.read(fields, kind, hidden) if kind in MOE else None
    mlp_bias = kind == "llama" and fields.boolean("mlp_bias", False)
    dense = _mlp("mlp", hidden, inner, mlp_bias)
    norms = [whole("input_layernorm.weight", hidden), whole("post_attention_layernorm.weight", hidden)]

    builder.one(vocabulary("model.embed_tokens.weight", vocab, hidden), "first")
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        builder.block(prefix, lambda: iter(attention.lines), len(attention.lines), layer=layer)
        if moe is not None and moe.sparse(layer):
            builder.block(prefix, moe.lines, moe.count, layer=layer)
        else:
            builder.block(prefix, lambda: iter(dense), len(dense), layer=layer)
        builder.block(prefix, lambda: iter(norms), len(norms), layer=layer)
    ahead = fields.integer("num_nextn_predict_layers", 0, least=0, most=MAX_LAYERS) if kind in DEEPSEEK else 0
    if ahead:
        builder.notes.append(
            f"num_nextn_predict_layers is {ahead}: layers that predict further tokens are left out, as in transformers"
        )
    builder.one(whole("model.norm.weight", hidden), "last")
    if fields.boolean("tie_word_embeddings", False):
        builder.tied.append(Tied("lm_head.weight", "model.embed_tokens.weight"))
    else:
        builder.one(vocabulary("lm_head.weight", vocab, hidden), "last")


def _mlp(name: str, hidden: int, inner: int, with_bias: bool = False) -> list[Line]:
    found = []
    for part in (
        columns(f"{name}.gate_proj", inner, hidden),
        columns(f"{name}.up_proj", inner, hidden),
        rows(f"{name}.down_proj", hidden, inner),
    ):
        found.append(part)
        if with_bias:
            found.append(bias(part.name.removesuffix(".weight"), part.shape[0], split="down_proj" not in part.name))
    return found


@dataclass(frozen=True, slots=True)
class _Grouped:
    """Multi-head attention with key and value heads shared by groups of query heads."""

    lines: list[Line]

    @classmethod
    def read(cls, fields: Fields, kind: str, hidden: int) -> _Grouped:
        heads = fields.integer("num_attention_heads", most=2**16)
        default = heads if fields.given("num_key_value_heads") else KEY_VALUE_HEADS.get(kind, heads)
        kv = fields.integer("num_key_value_heads", default, most=2**16)
        fields.require(heads % kv == 0, f"num_key_value_heads {kv} does not divide num_attention_heads {heads}")
        head = fields.integer("head_dim", 128 if kind == "qwen3" else max(1, hidden // heads))
        if kind == "qwen2":
            biased = {"q": True, "k": True, "v": True, "o": False}
        else:
            biased = dict.fromkeys("qkvo", kind in ("llama", "qwen3", "qwen3_moe") and _attention_bias(fields))
        lines = []
        for letter, units in (("q", heads), ("k", kv), ("v", kv)):
            lines.append(columns(f"self_attn.{letter}_proj", units * head, hidden, units))
            if biased[letter]:
                lines.append(bias(f"self_attn.{letter}_proj", units * head, units, split=True))
        lines.append(rows("self_attn.o_proj", hidden, heads * head, heads))
        if biased["o"]:
            lines.append(bias("self_attn.o_proj", hidden, split=False))
        if kind in ("qwen3", "qwen3_moe"):
            lines += [whole("self_attn.q_norm.weight", head), whole("self_attn.k_norm.weight", head)]
        return cls(lines)


def _attention_bias(fields: Fields) -> bool:
    return fields.boolean("attention_bias", False)


@dataclass(frozen=True, slots=True)
class _Latent:
    """DeepSeek's multi-head latent attention: the projections down to the latent are whole on every rank."""

    lines: list[Line]

    @classmethod
    def read(cls, fields: Fields, hidden: int) -> _Latent:
        heads = fields.integer("num_attention_heads", most=2**16)
        q_rank = fields.integer("q_lora_rank", 0)
        kv_rank = fields.integer("kv_lora_rank")
        plain, rope = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
        value = fields.integer("v_head_dim")
        with_bias = _attention_bias(fields)
        lines = []
        if q_rank:
            lines.append(whole("self_attn.q_a_proj.weight", q_rank, hidden, kind="matrix"))
            lines += [bias("self_attn.q_a_proj", q_rank, split=False)] if with_bias else []
            lines.append(whole("self_attn.q_a_layernorm.weight", q_rank))
            lines.append(columns("self_attn.q_b_proj", heads * (plain + rope), q_rank, heads))
        else:
            lines.append(columns("self_attn.q_proj", heads * (plain + rope), hidden, heads))
        lines.append(whole("self_attn.kv_a_proj_with_mqa.weight", kv_rank + rope, hidden, kind="matrix"))
        lines += [bias("self_attn.kv_a_proj_with_mqa", kv_rank + rope, split=False)] if with_bias else []
        lines.append(whole("self_attn.kv_a_layernorm.weight", kv_rank))
        lines.append(columns("self_attn.kv_b_proj", heads * (plain + value), kv_rank, heads))
        lines.append(rows("self_attn.o_proj", hidden, heads * value, heads))
        lines += [bias("self_attn.o_proj", hidden, split=False)] if with_bias else []
        return cls(lines)


@dataclass(frozen=True, slots=True)
class _Moe:
    """A mixture of experts in some of the layers."""

    kind: str
    hidden: int
    inner: int
    experts: int
    shared: int
    first: int
    frequency: int
    dense: frozenset[int]

    @classmethod
    def read(cls, fields: Fields, kind: str, hidden: int) -> _Moe:
        experts = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts"}.get(kind, "n_routed_experts")
        count = fields.integer(experts, most=MAX_EXPERTS)
        inner = fields.integer("intermediate_size" if kind == "mixtral" else "moe_intermediate_size")
        deepseek, qwen = kind in DEEPSEEK, kind == "qwen3_moe"
        return cls(
            kind,
            hidden,
            inner,
            count,
            fields.integer("n_shared_experts", 0, least=0, most=MAX_EXPERTS) if deepseek else 0,
            fields.integer("first_k_dense_replace", 0, least=0, most=MAX_LAYERS) if deepseek else 0,
            fields.integer("decoder_sparse_step", 1, most=MAX_LAYERS)
            if qwen
            else fields.integer("moe_layer_freq", 1, most=MAX_LAYERS)
            if deepseek
            else 1,
            frozenset(fields.integers("mlp_only_layers", most=MAX_LAYERS)) if qwen else frozenset(),
        )

    def sparse(self, layer: int) -> bool:
        """Does this layer have experts?"""
        if self.kind == "qwen3_moe":
            return layer not in self.dense and (layer + 1) % self.frequency == 0
        return layer >= self.first and layer % self.frequency == 0

    @property
    def count(self) -> int:
        """Tensors of one such layer."""
        return 3 * self.experts + 1 + (self.kind in DEEPSEEK) + (3 if self.shared else 0)

    def lines(self) -> Iterator[Line]:
        """Yield the tensors of one such layer, in the order of the modules."""
        if self.kind == "mixtral":
            yield whole("block_sparse_moe.gate.weight", self.experts, self.hidden, kind="router")
            for e in range(self.experts):
                name = f"block_sparse_moe.experts.{e}"
                yield _expert(columns(f"{name}.w1", self.inner, self.hidden), e)
                yield _expert(rows(f"{name}.w2", self.hidden, self.inner), e)
                yield _expert(columns(f"{name}.w3", self.inner, self.hidden), e)
            return
        gate = [whole("mlp.gate.weight", self.experts, self.hidden, kind="router")]
        if self.kind in DEEPSEEK:
            # Training moves it to balance the experts, but not by gradients.
            gate.append(whole("mlp.gate.e_score_correction_bias", self.experts, kind="buffer"))
        else:
            yield from gate
        for e in range(self.experts):
            for line in _mlp(f"mlp.experts.{e}", self.hidden, self.inner):
                yield _expert(line, e)
        if self.kind in DEEPSEEK:
            yield from gate
        if self.shared:
            yield from _mlp("mlp.shared_experts", self.hidden, self.inner * self.shared)


def _expert(line: Line, expert: int) -> Line:
    return line._replace(kind="expert", expert=expert)
