"""GPT-2 and GPT-NeoX. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.describe.hf_parts import Builder, Line, bias, columns, rows, vocabulary, whole
from ckpt.describe.model import Split, Tied

if TYPE_CHECKING:
    from ckpt.describe.read import Fields

MAX_LAYERS = 10_000


def gpt2(builder: Builder, fields: Fields, kind: str) -> None:
    """Describe GPT-2 (``modeling_gpt2.py``): its ``Conv1D`` weights lie transposed, ``[inputs, outputs]``."""
    hidden = fields.integer("n_embd", 768)
    vocab = fields.integer("vocab_size", 50_257, most=2**26)
    positions = fields.integer("n_positions", 1024)
    layers = fields.integer("n_layer", 12, most=MAX_LAYERS)
    heads = fields.integer("n_head", 12, most=2**16)
    inner = fields.integer("n_inner", 4 * hidden, most=2**26)
    fields.require(hidden % heads == 0, f"n_head {heads} does not divide n_embd {hidden}")
    qkv = ((hidden, heads),) * 3
    layer_lines = [
        *_norm("ln_1", hidden),
        Line("attn.c_attn.weight", (hidden, 3 * hidden), "matrix", Split(1, qkv)),
        Line("attn.c_attn.bias", (3 * hidden,), "bias", Split(0, qkv)),
        Line("attn.c_proj.weight", (hidden, hidden), "matrix", Split(0, ((hidden, heads),))),
        bias("attn.c_proj", hidden, split=False),
        *_norm("ln_2", hidden),
        Line("mlp.c_fc.weight", (hidden, inner), "matrix", Split(1)),
        bias("mlp.c_fc", inner, split=True),
        Line("mlp.c_proj.weight", (inner, hidden), "matrix", Split(0)),
        bias("mlp.c_proj", hidden, split=False),
    ]
    builder.one(vocabulary("transformer.wte.weight", vocab, hidden), "first")
    builder.one(whole("transformer.wpe.weight", positions, hidden, kind="embedding"), "first")
    for layer in range(layers):
        builder.block(f"transformer.h.{layer}.", lambda: iter(layer_lines), len(layer_lines), layer=layer)
    for line in _norm("transformer.ln_f", hidden):
        builder.one(line, "last")
    if fields.boolean("tie_word_embeddings", True):
        builder.tied.append(Tied("lm_head.weight", "transformer.wte.weight"))
    else:
        builder.one(vocabulary("lm_head.weight", vocab, hidden), "last")


def gpt_neox(builder: Builder, fields: Fields, kind: str) -> None:
    """Describe GPT-NeoX (``modeling_gpt_neox.py``): query, key and value of one head lie side by side."""
    hidden = fields.integer("hidden_size")
    vocab = fields.integer("vocab_size", most=2**26)
    layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    heads = fields.integer("num_attention_heads", most=2**16)
    inner = fields.integer("intermediate_size", most=2**26)
    with_bias = fields.boolean("attention_bias", True)
    fields.require(hidden % heads == 0, f"num_attention_heads {heads} does not divide hidden_size {hidden}")
    attention = [columns("attention.query_key_value", 3 * hidden, hidden, heads)]
    attention += [bias("attention.query_key_value", 3 * hidden, heads, split=True)] if with_bias else []
    attention += [rows("attention.dense", hidden, hidden, heads)]
    attention += [bias("attention.dense", hidden, split=False)] if with_bias else []
    layer_lines = [
        *_norm("input_layernorm", hidden),
        *_norm("post_attention_layernorm", hidden),
        *attention,
        columns("mlp.dense_h_to_4h", inner, hidden),
        bias("mlp.dense_h_to_4h", inner, split=True),
        rows("mlp.dense_4h_to_h", hidden, inner),
        bias("mlp.dense_4h_to_h", hidden, split=False),
    ]
    builder.one(vocabulary("gpt_neox.embed_in.weight", vocab, hidden), "first")
    for layer in range(layers):
        builder.block(f"gpt_neox.layers.{layer}.", lambda: iter(layer_lines), len(layer_lines), layer=layer)
    for line in _norm("gpt_neox.final_layer_norm", hidden):
        builder.one(line, "last")
    if fields.boolean("tie_word_embeddings", False):
        builder.tied.append(Tied("embed_out.weight", "gpt_neox.embed_in.weight"))
    else:
        builder.one(vocabulary("embed_out.weight", vocab, hidden), "last")


def _norm(name: str, hidden: int) -> list[Line]:
    return [whole(f"{name}.weight", hidden), whole(f"{name}.bias", hidden)]
