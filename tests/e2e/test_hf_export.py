"""What we export is what ``transformers`` loads: the same logits, bit for bit. Models are made from configs, small."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

import ckpt
from ckpt.cli.main import cli

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="transformers has left Python 3.10 behind")

TOKENS = torch.arange(24).reshape(2, 12) % 61
SMALL = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def transformers() -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers


@pytest.fixture(params=["Llama", "Qwen3"])
def kind(request, transformers):
    """The classes of a model and its config."""
    return getattr(transformers, f"{request.param}ForCausalLM"), getattr(transformers, f"{request.param}Config")


def trained(kind, *, tied: bool):
    """A model and its optimizer, two steps old: no weight is what an initialisation would give."""
    model_class, config_class = kind
    torch.manual_seed(0)
    model = model_class(config_class(**SMALL, tie_word_embeddings=tied))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), optimizer


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def same_model(kind, folder: Path, expected) -> None:
    """``from_pretrained`` finds every tensor, none too many, and computes the same."""
    loaded, said = kind[0].from_pretrained(folder, output_loading_info=True, local_files_only=True)
    assert not any(said.values()), said
    assert loaded.dtype == expected.dtype
    assert loaded.config.tie_word_embeddings == expected.config.tie_word_embeddings
    tied = loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert tied == expected.config.tie_word_embeddings
    assert torch.equal(logits(loaded.eval()), logits(expected))


def run(*arguments: Any) -> dict[str, Any]:
    result = CliRunner().invoke(cli, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.output)
    return document


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_job_becomes_a_model_that_transformers_loads(kind, tied, tmp_path) -> None:
    model, optimizer = trained(kind, tied=tied)
    ckpt.save([model, optimizer], tmp_path / "ours", step=2)
    run("export", tmp_path / "ours", tmp_path / "hf", "--to", "safetensors")
    model.config.save_pretrained(tmp_path / "hf")
    tensors = safetensors.torch.load_file(tmp_path / "hf/model.safetensors")
    assert ("lm_head.weight" in tensors) != tied
    assert all(torch.equal(tensors[name], value) for name, value in model.state_dict().items() if name in tensors)
    same_model(kind, tmp_path / "hf", model)


@pytest.mark.parametrize("tied", [True, False])
def test_theirs_goes_in_and_comes_out_in_another_dtype(kind, tied, tmp_path) -> None:
    model, _ = trained(kind, tied=tied)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    run("import", tmp_path / "theirs", tmp_path / "ours")
    run("reshard", tmp_path / "theirs", tmp_path / "hf", "--to", "safetensors", "--dtype", "bf16")
    assert json.loads((tmp_path / "hf/config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "hf/generation_config.json").read_bytes()
    # Not model.to(bfloat16): that rounds the frequencies of the rotary embedding too, which are in no file.
    same_model(kind, tmp_path / "hf", kind[0].from_pretrained(tmp_path / "theirs", dtype=torch.bfloat16).eval())
    other, _ = trained(kind, tied=tied)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    ckpt.load([other], tmp_path / "ours")
    assert torch.equal(logits(other), logits(model))


def test_a_plain_file_of_a_loop_becomes_a_model_in_several_files(transformers, tmp_path) -> None:
    from ckpt.convert.find import open_source
    from ckpt.convert.options import ReadOptions, WriteOptions
    from ckpt.convert.safetensors.write import write_safetensors
    from ckpt.store.local import LocalStore

    kind = transformers.Qwen3ForCausalLM, transformers.Qwen3Config
    model, optimizer = trained(kind, tied=True)
    wrapped = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save({"model": wrapped, "optimizer": optimizer.state_dict(), "step": 2}, tmp_path / "x.pt")
    opened = open_source(str(tmp_path / "x.pt"), options=ReadOptions())
    assert opened.notes == ()
    options = WriteOptions(memory=64 << 20)
    written = write_safetensors(opened, LocalStore(tmp_path / "hf"), None, options, shard_bytes=4000)
    assert len(written.files) > 3
    model.config.save_pretrained(tmp_path / "hf")
    same_model(kind, tmp_path / "hf", model)


@pytest.mark.parametrize("to", ["deepspeed", "universal", "dcp", "ckpt"])
def test_by_way_of_every_format_it_is_the_same_model(transformers, to, tmp_path) -> None:
    kind = transformers.LlamaForCausalLM, transformers.LlamaConfig
    model, optimizer = trained(kind, tied=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}, tmp_path / "x.pt")
    layout = ("--dp", 3, "--zero", 3) if to in ("deepspeed", "ckpt") else ()
    run("reshard", tmp_path / "x.pt", tmp_path / "there", "--to", to, *layout)
    run("reshard", tmp_path / "there", tmp_path / "hf", "--to", "safetensors")
    model.config.save_pretrained(tmp_path / "hf")
    same_model(kind, tmp_path / "hf", model)
