"""docs/adapter.md is run as it is printed; the rules in docs/rules.md are valid and mean what the tables say."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt.engine.base import EngineAdapter
from ckpt.layout.rules import Rules, tiling_of
from tests.harness.environment import REPO
from tests.harness.pool import ranks

if TYPE_CHECKING:
    from pathlib import Path


def blocks(document: str, language: str) -> list[str]:
    """Return the code blocks of a document."""
    text = (REPO / "docs" / document).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def test_the_printed_adapter_saves_on_three_ranks_and_loads_on_two(tmp_path: Path) -> None:
    found = blocks("adapter.md", "python")
    assert len([line for line in found[0].splitlines() if line.strip()]) <= 40
    names: dict[str, Any] = {}
    exec(found[0], names)
    assert isinstance(names["RowSharded"]({}, {}), EngineAdapter)
    case = "tests.e2e.adapter_doc_cases:from_document"
    ranks(3, case, folder=str(tmp_path), blocks=found, load=False).values()
    assert ranks(2, case, folder=str(tmp_path), blocks=found, load=True).values() == [[], []]


def test_the_printed_rules_mean_what_is_said_of_them() -> None:
    rules = Rules.of(msgspec.yaml.decode(blocks("rules.md", "yaml")[0]))
    assert rules.rename("stage1.blocks.3.qkv.weight") == "blocks.19.qkv.weight"

    def rows(name: str, shape: tuple[int, ...], rank: int, degree: int) -> list[tuple[int, int]]:
        rule = rules.rule_for(name)
        assert rule is not None
        tiles = tiling_of(rule, shape, rank, degree).tiles
        return [(t.box.offsets[0], t.box.ends[0] - 1) for t in tiles]

    assert rows("blocks.0.qkv.bias", (1536,), 1, 4) == [(1024, 2047), (4352, 4607), (5376, 5631)]
    assert rows("blocks.0.qkv.bias", (512,), 6, 16)[1:] == rows("blocks.0.qkv.bias", (512,), 7, 16)[1:]
    assert rows("blocks.0.gate_up.weight", (5504, 2), 1, 4) == [(2752, 5503), (13760, 16511)]
    assert rows("embed.weight", (12576, 2), 3, 4) == [(37728, 50256)]
    assert rows("blocks.0.norm1.weight", (8,), 3, 4) == [(0, 7)]
    for block in blocks("engines.md", "yaml"):
        Rules.of(msgspec.yaml.decode(block))
