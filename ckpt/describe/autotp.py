"""What DeepSpeed's AutoTP cuts of a model of transformers, which is less than Megatron does, and unevenly. Pure.

AutoTP follows the model's own ``tp_plan`` (DeepSpeed 0.19 with transformers 5): the embedding stays whole unless the
output matrix is tied to it, attention is cut between key heads, those of queries too, and whatever a number of ranks
does not divide is cut so that the first ranks hold more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt.describe.model import Split

if TYPE_CHECKING:
    from ckpt.describe.model import Described, ModelSpec

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Models of which AutoTP was seen to cut what is said here. Of the other known types it refuses all but ``gpt_neox``,
whose output matrix has one name in memory and another in transformers' files.
"""


def as_autotp(model: ModelSpec) -> ModelSpec:
    """Return a model of :data:`MODEL_TYPES`, with Megatron's splits, as AutoTP splits it."""
    heads = [n for t in model.tensors if t.split is not None for _, n in t.split.parts]
    keys, tied = min(heads, default=1), bool(model.tied)
    return replace(model, tensors=tuple(replace(t, split=_split(t, keys, tied=tied)) for t in model.tensors))


def _split(tensor: Described, keys: int, *, tied: bool) -> Split | None:
    split = tensor.split
    if split is None or (split.vocabulary and tensor.place == "first" and not tied):
        return None
    size = tensor.shape[split.dim]
    return Split(split.dim, ((size, keys if split.parts else size),), balanced=True)
