from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from ckpt.cli.main import cli
from ckpt.describe.huggingface import MODEL_TYPES
from ckpt.describe.load import describe, read_model
from ckpt.describe.model import KINDS, PLACES, Split, Tied
from ckpt.describe.parallel import ENGINES, STATE, Parallel
from ckpt.describe.read import parse
from ckpt.describe.shapes import _File, _Line, model_of_shapes
from ckpt.errors import ConfigError
from ckpt.layout.rules import TensorRule

DOCUMENT = (Path(__file__).resolve().parents[3] / "docs/shapes.md").read_text(encoding="utf-8")

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
        ("tensors: {a: {shape: [2], tp: {dim: 3}}, b: {shape: [2], kind: odd}}", "2 problems"),
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


BAD = """
layers: 3
tensors:
  'a.{expert}': {shape: [4, 4]}
  'l.{layer}.x': {shape: [-64, 2]}
  b: {shape: [4], kind: odd}
  c: {shape: [4, 4], tp: {dim: 7}}
  d: {shape: [4], dtype: float99}
  f: {shape: 3, colour: red, tp: {dim: 1}}
  g: {shape: [4]}
tied: {e: nothing, h: f}
rules: {nmaes: [], tensors: [{match: q, dim: 0}, {match: g, dim: 0, fused: [2, 2], stride: 2}]}
parallel: {dpp: 2, tp: many}
"""


def test_every_problem_is_told_at_once(tmp_path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(BAD)
    with pytest.raises(ConfigError) as caught:
        describe(path)
    first, *listed = str(caught.value).splitlines()
    assert first == f"{path}, see docs/shapes.md (13 problems)"
    for said in (
        "'a.{expert}' is repeated, but the file does not say how often",
        "'l.0.x': shape [-64, 2]",
        "'b': kind 'odd'",
        "'c': cuts dimension 7",
        "'d': dtype 'float99' is unknown",
        "'f': Expected `array`, got `int` - at `$.shape`",
        "'f': Object contains unknown field `colour`",
        "'e' is tied to 'nothing', which is not there",
        "rules: Object contains unknown field `nmaes`",
        "rules: 'tensors: q' matches nothing",
        "rules: 'g': expected one of fused, stride, heads and size",
        "parallel: Object contains unknown field `dpp`",
        "parallel: Expected `int`, got `str` - at `$.tp`",
    ):
        assert [line for line in listed if line.startswith(f"  - {said}")], said


def test_a_file_of_neither_kind_is_refused(tmp_path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"expected a Hugging Face config\.json"):
        read_model(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_model(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_model(tmp_path)


def block(language: str) -> str:
    """The one code block of this language in docs/shapes.md."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)
    return found


def test_the_example_of_the_document_says_what_is_printed_there(tmp_path) -> None:
    (tmp_path / "tiny.yaml").write_text(block("yaml"))
    done = CliRunner().invoke(cli, ["analyze", "--model", str(tmp_path / "tiny.yaml")])
    assert done.exit_code == 0, done.output
    assert block("console").splitlines()[1:4] == done.stdout.splitlines()[:3]
    description = describe(tmp_path / "tiny.yaml", dp=64, tp=1)
    assert description.parallel.ranks == 64
    by_name = {t.fqn: t for t in description.model.tensors}
    assert by_name["blocks.3.qkv.weight"].split == Split(0, ((64, 8), (32, 4), (32, 4)))
    assert by_name["blocks.3.experts.7.up.weight"].expert == 7
    assert by_name["norm.bias"].trainable is False
    assert description.aliases == {"head.weight": "embed.weight"}


def test_every_key_is_in_the_document() -> None:
    rules = set(TensorRule.__struct_fields__) - {"match"}
    for name in {*_File.__struct_fields__, *_Line.__struct_fields__, *rules, *Parallel.__struct_fields__}:
        assert re.search(rf"^\| [^|]*`{name}`[^|]*\|", DOCUMENT, re.MULTILINE), f"{name} is in no table"
    for word in (*KINDS, *PLACES, *ENGINES, *STATE):
        assert f"`{word}`" in DOCUMENT, word
    assert all(re.search(rf"\b{name}\b", DOCUMENT) for name in MODEL_TYPES)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "tensors: [a, b]",
            "tensors: expected a mapping of names, like {embed.weight: {shape: [64, 8]}}, found a list",
        ),
        (
            "tensors: {a: [4, 4], b: {shape: 3}, c: {shape: [2]}}",
            "(2 problems)\n  - 'a': Expected `object`, got `array`",
        ),
        ("layers: many\ntensors: {a: {shape: [2]}}", "Expected `int`, got `str` - at `$.layers`"),
        ("tensors: {a: {shape: [2], kind: odd}}", "'a': kind 'odd'"),
        ("tensors: {a: {shape: [2]}}\nrules: {colour: red}", "rules: Object contains unknown field `colour`"),
        ("tensors: {a: {shape: [2]}}\nparallel: {dp: many}", "parallel: Expected `int`, got `str`"),
        (
            "tensors: {a: {shape: [2]}",
            "neither JSON nor YAML: while parsing a flow mapping in line 1, column 10, expected",
        ),
        ("model_type: odd", "model_type 'odd' is not known"),
        ("model_type: llama", "hidden_size is missing"),
    ],
)
def test_an_error_names_the_file(tmp_path, text, said) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        describe(path)
    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)
    assert all(line.startswith("  - ") for line in str(caught.value).splitlines()[1:])
