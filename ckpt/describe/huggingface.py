"""A model from a Hugging Face ``config.json``: the tensors of transformers' ``state_dict``, and how each may be split.

Names, shapes and order follow transformers' modelling files, with one tensor for each expert, as checkpoints are
published. Splits are Megatron's: attention and MLP inputs by columns (attention between heads), outputs by rows, the
vocabulary by rows, norms and routers whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.describe.hf_gpt import gpt2, gpt_neox
from ckpt.describe.hf_llama import llama_family
from ckpt.describe.hf_parts import Builder
from ckpt.describe.model import MAX_TENSORS, ModelSpec, refuse
from ckpt.describe.read import Fields
from ckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_FAMILIES: dict[str, Callable[[Builder, Fields, str], None]] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3", "kimi_k2"), llama_family
    ),
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
}

MODEL_TYPES = tuple(_FAMILIES)


def model_of_config(config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
    """Return the model of a parsed ``config.json``, called ``where`` in errors.

    Raises:
        ConfigError: a ``model_type`` that is not known; all missing or impossible entries at once.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise ConfigError(
            f"{where}: model_type {kind!r} is not known, expected one of {', '.join(MODEL_TYPES)}; "
            "any other model can be described by its shapes (docs/shapes.md)"
        )
    fields = Fields(config)
    builder = Builder()
    _FAMILIES[kind](builder, fields, kind)
    problems = [*dict.fromkeys(fields.problems)]
    if builder.count > MAX_TENSORS:
        problems.append(f"the config describes {builder.count} tensors, at most {MAX_TENSORS}")
    if problems:
        refuse(f"{where}, model_type {kind!r}", problems)
    name = str(config.get("_name_or_path") or kind)
    model = ModelSpec(name, tuple(builder.tensors()), tuple(builder.tied), tuple(builder.notes))
    model.check()
    return model
