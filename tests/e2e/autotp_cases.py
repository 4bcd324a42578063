"""Rank functions of test_convert_autotp.py: AutoTP's own engine loads what was written for it."""

from __future__ import annotations

from typing import Any

import torch


def load(rank: int, world: int, path: str, config: str, zero: int, tokens: list[list[int]]) -> dict[str, Any]:
    """Let DeepSpeed cut a model of transformers, load, and train two steps; return the losses."""
    import deepspeed
    import transformers

    torch.manual_seed(9)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(config))
    settings = {
        "train_micro_batch_size_per_gpu": len(tokens),
        "tensor_parallel": {"autotp_size": world},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": zero},
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]
    where, _ = engine.load_checkpoint(path)
    assert where is not None
    batch, losses = torch.tensor(tokens), []
    for _ in range(2):
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return {"losses": losses, "steps": engine.global_steps}
