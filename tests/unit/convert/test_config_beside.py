"""A config.json beside a checkpoint of any format stands in for rules; where it cannot, the error says why."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from ckpt.convert.safetensors.config import config_beside
from ckpt.convert.target import target_of
from ckpt.describe.huggingface import model_of_config
from ckpt.errors import ConfigError
from ckpt.layout.rules import Rules
from ckpt.store.local import LocalStore
from tests.unit.convert.sources import Source

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt.convert.opened import Opened

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 33,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def source(format: str = "deepspeed", config: dict[str, Any] = LLAMA) -> Source:
    return Source(format).weights({t.fqn: t.shape for t in model_of_config(config).tensors})


def write(folder: Path, text: str = json.dumps(LLAMA)) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(text)


def at(folder: Path, *, step: str = "") -> Opened:
    """An opened checkpoint in a folder, or in the folder of a step below it."""
    opened = source().open()
    prefix = f"{step}/" if step else ""
    (part,) = opened.parts
    packs = tuple(msgspec.structs.replace(pack, key=f"{prefix}{pack.key}") for pack in part.packs)
    store = LocalStore(str(folder))
    where = str(folder / step) if step else store.url
    return replace(opened, store=store, where=where, parts=(msgspec.structs.replace(part, packs=packs),))


@pytest.mark.parametrize("format", ["deepspeed", "universal", "dcp", "torch", "megatron", "ckpt", "safetensors"])
def test_it_counts_for_every_format(format) -> None:
    made = source(format)
    with pytest.raises(ConfigError, match=r"give --rules .*, or put the config\.json of a model of Hugging Face into"):
        target_of(made.open(), tp=2)
    made._store.put("config.json", json.dumps(LLAMA).encode())
    splits = {t.fqn: t.split for t in target_of(made.open(), tp=2).description.model.tensors}
    assert splits == {t.fqn: t.split for t in model_of_config(LLAMA).tensors}


def test_it_may_lie_in_the_folder_of_the_step_around_it_or_above_the_checkpoint(tmp_path) -> None:
    write(tmp_path / "a/step5")
    write(tmp_path / "a", "{}")
    assert config_beside(at(tmp_path / "a", step="step5")).where == str(tmp_path / "a/step5/config.json")
    write(tmp_path / "b")
    (tmp_path / "b/step5").mkdir()
    assert config_beside(at(tmp_path / "b", step="step5")).where == str(tmp_path / "b/config.json")
    assert config_beside(at(tmp_path / "b/step5")).where == str(tmp_path / "b/config.json")
    (tmp_path / "b/step5/deep").mkdir()
    assert config_beside(at(tmp_path / "b/step5", step="deep")).where == "", "two above it is somebody else's"


def test_autotp_is_who_reads_what_is_written_for_deepspeed() -> None:
    made = source()
    made._store.put("config.json", json.dumps(LLAMA).encode())
    target = target_of(made.open(), tp=2, engine="deepspeed", zero=1)
    split = {t.fqn: t.split for t in target.description.model.tensors}
    assert split["model.embed_tokens.weight"] is None
    head = next(t for t in target.description.model.tensors if t.fqn == "lm_head.weight")
    assert [target.description.local_shape(head, rank) for rank in range(2)] == [(17, 16), (16, 16)]
    assert [note for note in target.notes if "AutoTP cuts a llama" in note]
    rule = Rules.of({"tensors": [{"match": ".*embed_tokens.*", "dim": 0}]})
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight' \[33, 16\]: tp 2 does not divide size 33"):
        target_of(made.open(), tp=2, engine="deepspeed", rules=rule)
    with pytest.raises(ConfigError, match="AutoTP pads no vocabulary"):
        target_of(made.open(), tp=2, engine="deepspeed", vocabulary_multiple=4)


def test_what_it_cannot_say_is_in_the_error() -> None:
    made = source()
    made._store.put("config.json", b'{"model_type": "bloom"}')
    with pytest.raises(ConfigError, match=r"give --rules .*; \S*config\.json: model_type 'bloom' is not known"):
        target_of(made.open(), tp=2)
    mixtral = {**LLAMA, "model_type": "mixtral", "num_local_experts": 2}
    made = source(config=mixtral)
    made._store.put("config.json", json.dumps(mixtral).encode())
    with pytest.raises(ConfigError, match=r"AutoTP is not known to cut a mixtral .*: only rules can say how"):
        target_of(made.open(), tp=2, engine="deepspeed")
    assert target_of(made.open(), tp=2).parallel.tp == 2
    made = Source().weights({"model.odd.weight": (4, 4)})
    made._store.put("config.json", json.dumps(LLAMA).encode())
    with pytest.raises(ConfigError, match=r"give --rules .*config\.json describes other names or shapes"):
        target_of(made.open(), tp=2)


def test_key_heads_that_neighbours_hold_both_are_told() -> None:
    heads = [{"match": ".*q_proj.*", "dim": 0, "heads": 4}, {"match": ".*[kv]_proj.*", "dim": 0, "heads": 2}]
    rules = Rules.of({"tensors": [*heads, {"match": ".*o_proj.*", "dim": 1, "heads": 4}, {"match": ".*"}]})
    opened = source().open()
    line = "tp 4 is more than the 2 heads of keys and values: neighbouring ranks hold the same ones"
    assert target_of(opened, tp=4, engine="deepspeed", rules=rules).notes == (line,)
    assert target_of(opened, tp=2, engine="deepspeed", rules=rules).notes == ()
