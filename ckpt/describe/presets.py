"""Layouts of published models, as data: the ones that AdaCheck's motivation names, and Llama-3 405B. Pure.

Model numbers are those of the published ``config.json`` (MegaScale-530B: of its paper's table). What is published of a
layout is often not all of it: :attr:`Preset.open` says what was left open and what was chosen here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckpt.describe.huggingface import model_of_config
from ckpt.describe.parallel import Parallel
from ckpt.describe.placement import Description
from ckpt.errors import ConfigError

_LLAMA3_405B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248,
    "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8,
}  # fmt: skip
_YI_34B = {
    "model_type": "llama", "vocab_size": 64000, "hidden_size": 7168, "intermediate_size": 20480,
    "num_hidden_layers": 60, "num_attention_heads": 56, "num_key_value_heads": 8,
}  # fmt: skip
_MEGASCALE_530B = {
    "model_type": "gpt2", "vocab_size": 64000, "n_embd": 20480, "n_layer": 105, "n_head": 160, "n_positions": 2048,
}  # fmt: skip
_DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_attention_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_KIMI_K2 = {
    **_DEEPSEEK_V3, "model_type": "kimi_k2", "vocab_size": 163840, "first_k_dense_replace": 1,
    "n_routed_experts": 384, "num_attention_heads": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Preset:
    """``paper``: the redundancy that AdaCheck states for it, in percent of parameters, gradients and optimizer states;
    None: it gives a range (25-100) for the four layouts together, or does not name it. ``open``: what the sources leave
    open, and the choice made.
    """

    config: dict[str, Any]
    parallel: dict[str, Any]
    open: str
    paper: float | None = None


PRESETS: dict[str, Preset] = {
    "yi-34b": Preset(
        _YI_34B,
        {
            "engine": "megatron", "zero": 1, "tp": 4, "pp": 2, "dp": 16, "order": ("dp", "pp", "cp", "tp"),
            "ranks_per_host": 8,
        },
        "Published: ZeRO-1 over data parallelism, tensor and pipeline parallelism inside a host. Degrees are not: "
        "tp 4 x pp 2 fills a host of 8, dp 16 is chosen; the share does not depend on dp from 2 on.",
        paper=25.0,
    ),
    "megascale-530b": Preset(
        _MEGASCALE_530B,
        {"engine": "megatron", "zero": 0, "tp": 8, "pp": 35, "dp": 40, "ranks_per_host": 8},
        "Published: tp 8 x pp 35, up to 11,200 GPUs, hence dp 40. 100 % needs optimizer state on every data-parallel "
        "rank, so no distributed optimizer (zero 0); with zero 1 it would be 25 %.",
        paper=100.0,
    ),
    "deepseek-v3": Preset(
        _DEEPSEEK_V3,
        {
            "engine": "megatron", "zero": 1, "pp": 16, "dp": 128, "ep": 64, "ranks_per_host": 8,
            "stages": (3, *(4,) * 13, 3, 3),
        },
        "Published: 2,048 GPUs, pp 16, ep 64, ZeRO-1, no tensor parallelism. Open: which stages have 3 of the 61 "
        "layers (first and last two are chosen) and the multi-token-prediction layer (left out, as in transformers).",
    ),
    "kimi-k2": Preset(
        _KIMI_K2,
        {
            "engine": "megatron", "zero": 1, "pp": 16, "dp": 32, "ep": 16, "ranks_per_host": 8,
            "stages": (3, *(4,) * 13, 3, 3),
        },
        "Published: pp 16, ep 16, ZeRO-1, any multiple of 32 hosts. On 32 (dp 16) each expert is held once and 0.3 % "
        "of the state is redundant; 64 (dp 32) is chosen, where it is held twice. The model was trained with "
        "Muon (one moment); AdaCheck counts Adam, and so does this preset.",
    ),
    "llama3-405b": Preset(
        _LLAMA3_405B,
        {
            "engine": "megatron", "zero": 1, "tp": 8, "pp": 16, "dp": 128, "order": ("dp", "pp", "cp", "tp"),
            "ranks_per_host": 8,
            "stages": (7, *(8,) * 14, 7),
        },
        "Published: 16,384 GPUs, tp 8 x pp 16 x dp 128 in this order from the fastest, one layer fewer on the first "
        "and the last stage. Its data parallelism is an FSDP of its own; the distributed optimizer stands for it, "
        "engine fsdp2 with zero 3 is the other reading.",
    ),
}  # fmt: skip


def preset(name: str, **changed: Any) -> Description:
    """Return the description of a preset; keywords are fields of :class:`Parallel` that replace its own.

    Another ZeRO stage than the preset's engine has, without a word on the engine, leaves that open too.

    Raises:
        ConfigError: no such preset, or changes that do not fit.
    """
    if name not in PRESETS:
        raise ConfigError(f"no preset {name!r}, expected one of {', '.join(PRESETS)}")
    chosen = PRESETS[name]
    model = model_of_config({**chosen.config, "_name_or_path": name})
    wanted = chosen.parallel | changed
    if wanted["engine"] == "megatron" and wanted["zero"] not in (0, 1) and "engine" not in changed:
        del wanted["engine"]
    return Description(model, Parallel.of(wanted))
