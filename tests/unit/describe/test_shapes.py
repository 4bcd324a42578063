from __future__ import annotations

import pytest

from ckpt.describe.load import describe, read_model
from ckpt.describe.model import Split, Tied
from ckpt.describe.read import parse
from ckpt.describe.shapes import model_of_shapes
from ckpt.errors import ConfigError

FILE = """
name: small
layers: 2
experts: 2
tensors:
  embed: {shape: [10, 4], kind: embedding, tp: {dim: 0, size: 10}}
  l.{layer}.qkv: {shape: [12, 4], tp: {dim: 0, fused: [{size: 8, heads: 4}, {size: 4, heads: 2}]}}
  l.{layer}.e.{expert}.up: {shape: [8, 4]}
  l.{layer}.e.{expert}.down: {shape: [4, 8], tp: {dim: 1}}
  l.{layer}.mask: {shape: [3], kind: buffer, dtype: bool}
  norm: {shape: [4]}
  count: {shape: [], kind: buffer, stage: every, dtype: int64}
tied: {head: embed}
rules: {tensors: [{match: '.*\\.up', dim: 0}]}
parallel: {zero: 1, dp: 2, tp: 2, pp: 2}
"""


def test_lines_are_repeated_in_module_order() -> None:
    model = model_of_shapes(parse(FILE, "f"))
    per_layer = ["qkv", "e.0.up", "e.0.down", "e.1.up", "e.1.down", "mask"]
    assert [t.fqn for t in model.tensors] == [
        "embed", *(f"l.{i}.{name}" for i in (0, 1) for name in per_layer), "norm", "count"
    ]  # fmt: skip
    by_name = {t.fqn: t for t in model.tensors}
    assert [by_name[n].place for n in ("embed", "norm", "count")] == ["first", "last", "every"]
    assert (by_name["l.1.e.1.up"].layer, by_name["l.1.e.1.up"].expert, by_name["l.1.e.1.up"].kind) == (1, 1, "expert")
    assert by_name["l.0.e.0.up"].split == Split(0), "by the rules"
    assert by_name["l.0.qkv"].split == Split(0, ((8, 4), (4, 2)))
    assert by_name["embed"].split == Split(0, (), True)
    assert by_name["l.0.mask"].trainable is False
    assert model.tied == (Tied("head", "embed", "last"),)


def test_a_file_says_its_layout_and_keywords_override_it(tmp_path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(FILE)
    assert read_model(path)[1] == {"zero": 1, "dp": 2, "tp": 2, "pp": 2}
    description = describe(path, dp=4)
    assert (description.parallel.ranks, description.parallel.kind) == (16, "deepspeed")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layers: 1000000000000\ntensors: {'a.{layer}': {shape: [1]}}", "layers is 1000000000000"),
        ("layers: 16000000\ntensors: {'a.{layer}': {shape: [1]}}", "16000000 tensors, at most 1000000"),
        ("layers: 9000\nexperts: 9000\ntensors: {'a.{layer}.{expert}': {shape: [1]}}", "81000000 tensors"),
        ("tensors: {'a.{layer}': {shape: [1]}}", "does not say how often"),
        ("tensors: {'a.{expert}': {shape: [1]}}", "does not say how often"),
        ("tensors: {a: {shape: [1], stage: middle}}", "stage 'middle', expected one of first, last, ends, every"),
        ("tensors: {a: {shape: [1], colour: red}}", "colour"),
        ("tensors: {a: {shape: 3}}", "Expected `array`"),
        ("tensors: {a: {shape: [2], tp: {dim: 3}}, b: {shape: [2], kind: odd}}", "2 problem(s)"),
        ("tensors: {a: {shape: [2], tp: {size: 3}}}", "need dim"),
        ("tensors: {a: {shape: [2]}}\nrules: {tensors: [{match: b}]}", "matches nothing"),
        ("tensors: {a: {shape: [2]}}\ntied: {b: c}", "tied to 'c', which is not there"),
        ("tensors: {}", "it has no tensors"),
    ],
)
def test_what_cannot_be_is_refused(text, said) -> None:
    with pytest.raises(ConfigError) as caught:
        model_of_shapes(parse(text, "f"))
    assert said in str(caught.value)


def test_a_file_of_neither_kind_is_refused(tmp_path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"expected a Hugging Face config\.json"):
        read_model(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_model(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_model(tmp_path)
