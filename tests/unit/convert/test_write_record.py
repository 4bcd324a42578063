"""What we write for DeepSpeed says how it is cut, in DeepSpeed's own words: it is read back without rules."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt.convert.compare import EQUAL, compare
from ckpt.convert.deepspeed.read import open_deepspeed
from ckpt.convert.deepspeed.write import write_deepspeed
from ckpt.convert.deepspeed.write_record import UNSAID
from ckpt.convert.options import ReadOptions, WriteOptions
from ckpt.convert.target import target_of
from ckpt.errors import ConfigError, UnsupportedLayout
from ckpt.layout.rules import Rules
from ckpt.store.memory import MemoryStore
from tests.unit.convert.sources import ADAM, Source

SHAPES: dict[str, Any] = {
    "embed": (65, 4), "0.qkv": (16, 4), "0.bias": (16,), "0.gate": (12, 3), "0.down": (4, 6), "0.cube": (2, 3, 8),
    "0.norm": (4,), "head": (8, 4),
}  # fmt: skip
RULES = [
    {"match": "embed", "dim": 0, "size": 65},
    {"match": r"0\.(qkv|bias)", "dim": 0, "fused": [{"size": 8, "heads": 4}, {"size": 4, "heads": 2}, 4]},
    {"match": r"0\.gate", "dim": 0, "stride": 2},
    {"match": r"0\.down", "dim": 1},
    {"match": r"0\.cube", "dim": 2},
    {"match": r"0\.norm|seen"},
    {"match": "head", "dim": 0},
]


def written(shapes: dict[str, Any], rules: list[Any], **degrees: int) -> tuple[MemoryStore, Any, tuple[str, ...]]:
    opened, store = Source().weights(shapes, ADAM).groups([*shapes]).add("seen", "buffer", (4,)).open(), MemoryStore()
    target = target_of(opened, rules=Rules.of({"tensors": rules}), engine="deepspeed", **degrees)
    return store, opened, write_deepspeed(opened, store, target, WriteOptions()).made


@pytest.mark.parametrize("degrees", [{"tp": 2, "zero": 1, "dp": 3}, {"tp": 2, "zero": 3, "dp": 2}, {"tp": 2}], ids=str)
def test_it_is_read_back_without_rules(degrees) -> None:
    store, opened, made = written(SHAPES, RULES, **degrees)
    again = open_deepspeed(store, "again")
    said = open_deepspeed(store, "again", options=ReadOptions(rules=Rules.of({"tensors": RULES})))
    assert {row.status for row in compare(said, again)} == {EQUAL}
    if degrees.get("zero") == 1:  # ZeRO-3 makes its parameters from masters, and without ZeRO state has no names
        assert {row.status for row in compare(opened, again)} == {EQUAL}
    assert UNSAID not in made


@pytest.mark.parametrize(
    "rule",
    [
        {"match": r"0\.gate", "dim": 0, "fused": [{"size": 4, "heads": 1}, {"size": 4, "heads": 1}, 4]},
        {"match": "seen", "dim": 0},
        {"match": "head", "dim": 0, "size": 7},
    ],
    ids=["heads that both ranks hold", "a buffer", "a second vocabulary with padding"],
)
def test_what_the_record_has_no_words_for_is_told(rule) -> None:
    store, _, made = written({**SHAPES, "head": (rule.get("size", 8), 4)}, [rule, *RULES], tp=2, zero=1)
    assert UNSAID in made
    with pytest.raises(UnsupportedLayout, match="no rule explains it"):
        open_deepspeed(store, "again")
    assert open_deepspeed(store, "again", options=ReadOptions(rules=Rules.of({"tensors": [rule, *RULES]}))).specs


@pytest.mark.parametrize("degrees", [{"zero": 1}, {"tp": 2, "zero": 1}], ids=str)
def test_a_rule_that_does_not_fit_is_an_argument_that_is_wrong(degrees) -> None:
    """Not a layout of which nothing is known: rules were given, and the first source is not even cut."""
    store, _, _ = written(SHAPES, RULES, **degrees)
    wrong = [{"match": r"0\.(down|gate)", "dim": 2}, {"match": "head", "dim": 0, "size": 99}, *RULES]
    with pytest.raises(ConfigError) as caught:
        open_deepspeed(store, "again", options=ReadOptions(rules=Rules.of({"tensors": wrong})))
    heading, *lines = str(caught.value).split("\n  - ")
    assert heading == "again/global_step0: a rule is wrong, or of another layout (3 problems)"
    held = 4 if degrees.get("tp") == 2 else 8
    ranks = degrees.get("tp", 1)
    assert sorted(lines) == [
        rf"tensor '0.down': rule '0\.(down|gate)' cuts dimension 2, the tensor has shape {[4, 6 // ranks]}",
        rf"tensor '0.gate': rule '0\.(down|gate)' cuts dimension 2, the tensor has shape {[12 // ranks, 3]}",
        f"tensor 'head': rule 'head': {ranks} x {held} rows, expected at least the size 99",
    ]
