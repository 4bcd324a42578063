from __future__ import annotations

import pytest

from ckpt.describe.read import MAX_BYTES, Fields, parse
from ckpt.errors import ConfigError


@pytest.mark.parametrize("text", ['{"a": [1, 2]}', "{a: [1, 2]}", "a:\n  - 1\n  - 2\n", b"a: [1, 2]"])
def test_json_and_yaml_are_read(text) -> None:
    assert parse(text, "f") == {"a": [1, 2]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &x [1]\nb: *x\n", "aliases"),
        ("a: 1\na: 2\n", "keys listed twice: a"),
        ("- 1\n", "expected a mapping with names as keys, found list"),
        ("1: 2\n", "expected a mapping"),
        ("", "found NoneType"),
        ("a: [1", "neither JSON nor YAML"),
        ("!!python/object/apply:os.system [ls]", "neither JSON nor YAML"),
        ("a: " + "9" * 5000, "neither JSON nor YAML"),
        ("{" + '"a": {' * 100_000, "neither JSON nor YAML"),
        ("a: " + "[" * 100_000, "neither JSON nor YAML"),
        (b"\xff\xfe\x00", "neither JSON nor YAML"),
        ("a" * (MAX_BYTES + 1), "a description has at most"),
    ],
    ids=[
        "alias",
        "twice",
        "list",
        "number",
        "empty",
        "broken",
        "python",
        "digits",
        "deep",
        "deep yaml",
        "bytes",
        "long",
    ],
)
def test_what_cannot_be_trusted_is_refused(text, said) -> None:
    with pytest.raises(ConfigError, match="the file: ") as caught:
        parse(text, "the file")
    assert said in str(caught.value)


def test_fields_collect_all_problems() -> None:
    fields = Fields({"a": 0, "b": True, "c": "x" * 100, "d": [1, -1], "e": 1, "f": None, "g": 10**30})
    values = [fields.integer(name) for name in "abcg"]
    assert values == [1, 1, 1, 1]
    assert fields.integers("d", most=3) == ()
    assert fields.boolean("e", True) is True
    assert fields.integer("f", 7) == 7
    assert fields.integer("h") == 1
    fields.require(False, "the last one")
    assert [p.split(" ")[0] for p in fields.problems] == ["a", "b", "c", "g", "d", "e", "h", "the"]
    assert all(len(p) < 130 for p in fields.problems)
