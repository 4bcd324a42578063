from __future__ import annotations

import pytest

from ckpt.errors import ConfigError
from ckpt.layout.parsing import parse_mapping, shortened


@pytest.mark.parametrize(
    "text",
    ['{"a": {"b": 1, "c": 2, "b": 1}}', "{a: {b: 1, 'b': 1}}", "a:\n  b: 1\n  b: 1\n"],
    ids=["json", "flow", "yaml"],
)
def test_a_key_is_listed_once_at_every_depth(text: str) -> None:
    with pytest.raises(ConfigError, match=r"the file: neither JSON nor YAML: keys listed twice: b$"):
        parse_mapping(text, "the file")


def test_json_and_yaml_say_the_same() -> None:
    assert parse_mapping(b'{"a": {"b": [1, null]}}', "f") == parse_mapping("a: {b: [1, ~]}", "f")


def test_a_quotation_has_an_end() -> None:
    assert shortened("abc", 3) == "abc"
    assert shortened("abcdef", 5) == "ab..."
