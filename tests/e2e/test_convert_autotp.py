"""A model of Hugging Face goes to DeepSpeed's AutoTP by its config.json alone, and trains on there as it did whole."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import ckpt
from ckpt.cli.main import cli
from tests.harness.pool import ranks

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="transformers has left Python 3.10 behind")

SMALL = {
    "vocab_size": 65, "hidden_size": 24, "intermediate_size": 31, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 4, "max_position_embeddings": 32,
}  # fmt: skip
"""Nothing that two ranks could halve: neither key heads nor vocabulary nor the inner size."""
TOKENS = (torch.arange(24).reshape(2, 12) * 7 % 61).tolist()


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.tensor(TOKENS), labels=torch.tensor(TOKENS)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(*arguments: Any) -> dict[str, Any]:
    result = CliRunner().invoke(cli, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.output)
    return document


@pytest.mark.parametrize(("kind", "tied", "zero"), [("Llama", False, 1), ("Qwen3", True, 3)])
def test_its_engine_loads_what_the_config_cuts(kind, tied, zero, tmp_path) -> None:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL, tie_word_embeddings=tied)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    train(model, optimizer, 2)
    ckpt.save([model, optimizer], tmp_path / "ours", step=2)
    config.save_pretrained(tmp_path)  # beside the repository, not in it
    flags = ("--to", "deepspeed", "--tp", 2, "--dp", 1, "--zero", zero, "--verify")
    said = run("reshard", tmp_path / "ours", tmp_path / "theirs", *flags)
    assert said["verified"]["equal"], "the files say how they are cut, so no rules are needed to read them"
    assert any("AutoTP" in note and str(tmp_path / "config.json") in note for note in said["notes"])
    expected = train(model, optimizer, 2)
    case = {"path": str(tmp_path / "theirs"), "config": str(tmp_path), "zero": zero, "tokens": TOKENS}
    for found in ranks(2, "tests.e2e.autotp_cases:load", timeout=120, **case).values():
        assert found["losses"][0] == pytest.approx(expected[0], rel=1e-6)
        assert found["losses"][1] == pytest.approx(expected[1], rel=2e-3), "AutoTP's gradients have another scale"
        assert found["steps"] == 4
