"""The models of this harness as files of shapes, the way a user would describe them; and holdings made comparable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.describe.load import model_of
from ckpt.describe.parallel import Parallel
from ckpt.describe.placement import Description
from ckpt.describe.read import parse

if TYPE_CHECKING:
    from ckpt.analysis.holdings import Holdings

ENGINES_AND_STAGES = [
    ("ddp", 0),
    *(("deepspeed", zero) for zero in range(4)),
    ("fsdp2", 3),
    ("zero_redundancy_optimizer", 1),
    ("megatron", 0),
    ("megatron", 1),
]
"""Every engine that can be described, with every ZeRO stage that it has."""

TINY_GPT = """
name: TinyGPT
layers: 2
tensors:
  positions: {shape: [12, 24]}
  embed.weight: {shape: [61, 24], kind: embedding}
  blocks.{layer}.norm1.weight: {shape: [24]}
  blocks.{layer}.norm1.bias: {shape: [24], kind: bias}
  blocks.{layer}.norm2.weight: {shape: [24]}
  blocks.{layer}.norm2.bias: {shape: [24], kind: bias}
  blocks.{layer}.qkv.weight: {shape: [72, 24]}
  blocks.{layer}.qkv.bias: {shape: [72]}
  blocks.{layer}.proj.weight: {shape: [24, 24]}
  blocks.{layer}.proj.bias: {shape: [24]}
  blocks.{layer}.up.weight: {shape: [49, 24]}
  blocks.{layer}.up.bias: {shape: [49]}
  blocks.{layer}.down.weight: {shape: [24, 49]}
  blocks.{layer}.down.bias: {shape: [24]}
  norm.weight: {shape: [24]}
  norm.bias: {shape: [24]}
  tokens_seen: {shape: [], kind: buffer, dtype: int64}
  running: {shape: [3, 24], kind: buffer}
tied: {head.weight: embed.weight}
"""

TORCH_GPT = """
name: TorchGPT
layers: 3
tensors:
  positions: {shape: [12, 24]}
  embed.weight: {shape: [61, 24], kind: embedding}
  tokens_seen: {shape: [], kind: buffer, dtype: int64}
  blocks.{layer}.norm1.weight: {shape: [24]}
  blocks.{layer}.norm1.bias: {shape: [24]}
  blocks.{layer}.norm2.weight: {shape: [24]}
  blocks.{layer}.norm2.bias: {shape: [24]}
  blocks.{layer}.q.weight: {shape: [24, 24], tp: {dim: 0, heads: 4}}
  blocks.{layer}.q.bias: {shape: [24], tp: {dim: 0, heads: 4}}
  blocks.{layer}.k.weight: {shape: [24, 24], tp: {dim: 0, heads: 4}}
  blocks.{layer}.k.bias: {shape: [24], tp: {dim: 0, heads: 4}}
  blocks.{layer}.v.weight: {shape: [24, 24], tp: {dim: 0, heads: 4}}
  blocks.{layer}.v.bias: {shape: [24], tp: {dim: 0, heads: 4}}
  blocks.{layer}.up.weight: {shape: [48, 24], tp: {dim: 0}}
  blocks.{layer}.up.bias: {shape: [48], tp: {dim: 0}}
  blocks.{layer}.proj.weight: {shape: [24, 24], tp: {dim: 1, heads: 4}}
  blocks.{layer}.proj.bias: {shape: [24]}
  blocks.{layer}.down.weight: {shape: [24, 48], tp: {dim: 1}}
  blocks.{layer}.down.bias: {shape: [24]}
  norm.weight: {shape: [24]}
  norm.bias: {shape: [24]}
  running: {shape: [3, 24], kind: buffer}
tied: {head.weight: embed.weight}
"""
"""Without tensor parallelism of embedding and head, as DTensor cuts it in ``torch_jobs``."""

NET = """
name: Net
layers: 3
tensors:
  embed.weight: {shape: [61, 16], kind: embedding, stage: ends, tp: {dim: 0, size: 61}}
  blocks.{layer}.norm.weight: {shape: [16]}
  blocks.{layer}.norm.bias: {shape: [16]}
  blocks.{layer}.gate_up.weight: {shape: [40, 16], tp: {dim: 0, stride: 2}}
  blocks.{layer}.gate_up.bias: {shape: [40], tp: {dim: 0, stride: 2}}
  blocks.{layer}.down.weight: {shape: [16, 20], tp: {dim: 1}}
  blocks.{layer}.down.bias: {shape: [16]}
  blocks.{layer}.calls: {shape: [], kind: buffer, dtype: int64}
  norm.weight: {shape: [16]}
  norm.bias: {shape: [16]}
"""
"""Of ``parallel_models``. A pipeline there has one name for the embedding on both ends, so there is no alias."""

MIXTURE = """
name: Mixture
experts: 4
tensors:
  embed.weight: {shape: [61, 16], kind: embedding}
  norm.weight: {shape: [16]}
  norm.bias: {shape: [16]}
  moe.deepspeed_moe.gate.wg.weight: {shape: [4, 16], kind: router}
  moe.deepspeed_moe.experts.deepspeed_experts.{expert}.0.weight: {shape: [20, 16]}
  moe.deepspeed_moe.experts.deepspeed_experts.{expert}.0.bias: {shape: [20]}
  moe.deepspeed_moe.experts.deepspeed_experts.{expert}.2.weight: {shape: [16, 20]}
  moe.deepspeed_moe.experts.deepspeed_experts.{expert}.2.bias: {shape: [16]}
"""

PLAIN = """
name: Plain
tensors:
  embed.weight: {shape: [61, 16], kind: embedding}
  norm.weight: {shape: [16]}
  norm.bias: {shape: [16]}
  up.weight: {shape: [20, 16], tp: {dim: 0}}
  up.bias: {shape: [20], tp: {dim: 0}}
  gate_up.weight: {shape: [40, 16], tp: {dim: 0, stride: 2}}
  gate_up.bias: {shape: [40], tp: {dim: 0, stride: 2}}
  down.weight: {shape: [16, 20], tp: {dim: 1}}
  down.bias: {shape: [16]}
  down2.weight: {shape: [16, 20], tp: {dim: 1}}
  head.weight: {shape: [61, 16], tp: {dim: 0, size: 61}}
"""
"""Of ``parallel_models``, as AutoTP cuts it."""

MEGATRON_GPT = """
name: MegatronGPT
layers: 4
tensors:
  embedding.word_embeddings.weight: {shape: [128, 32], kind: embedding, tp: {dim: 0}}
  embedding.position_embeddings.weight: {shape: [16, 32], kind: embedding}
  decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight: {shape: [32]}
  decoder.layers.{layer}.self_attention.linear_proj.weight: {shape: [32, 32], tp: {dim: 1}}
  decoder.layers.{layer}.self_attention.linear_proj.bias: {shape: [32]}
  decoder.layers.{layer}.self_attention.linear_qkv.weight: {shape: [64, 32], tp: {dim: 0, heads: 2}}
  decoder.layers.{layer}.self_attention.linear_qkv.bias: {shape: [64], tp: {dim: 0, heads: 2}}
  decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight: {shape: [32]}
  decoder.layers.{layer}.mlp.linear_fc1.weight: {shape: [96, 32], tp: {dim: 0, stride: 2}}
  decoder.layers.{layer}.mlp.linear_fc1.bias: {shape: [96], tp: {dim: 0, stride: 2}}
  decoder.layers.{layer}.mlp.linear_fc2.weight: {shape: [32, 48], tp: {dim: 1}}
  decoder.layers.{layer}.mlp.linear_fc2.bias: {shape: [32]}
  decoder.final_layernorm.weight: {shape: [32]}
tied: {output_layer.weight: embedding.word_embeddings.weight}
"""


def described(file: str, **parallel: Any) -> Description:
    """Return the description of one of the files above."""
    model, _ = model_of(parse(file, "a test"), "a test")
    return Description(model, Parallel.of(parallel))


def canonical(found: Holdings) -> Any:
    """Return holdings without what depends on the order in which sets of ranks were numbered."""
    tensors = {}
    for t in found.tensors:
        rows = sorted(
            (tuple(found.sets[int(n)] for n in row), int(volume))
            for row, volume in zip(t.holders, t.volume, strict=True)
        )
        tensors[t.fqn] = (t.shape, t.columns, t.derived, rows)
    return found.world, tensors, found.aliases
