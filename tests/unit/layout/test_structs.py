from __future__ import annotations

import msgspec
import pytest

from ckpt.errors import ConfigError
from ckpt.layout.rules import NameRule, Rules, TensorRule
from ckpt.layout.structs import gather


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int


class Outer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    counts: tuple[int, ...] = ()
    parts: tuple[Inner, ...] = ()


def test_what_is_sound_is_returned_and_the_rest_is_told() -> None:
    plain = {"counts": [1, "2"], "parts": [{"size": 1}, {"size": "x", "odd": 1}, 3, {"size": 2}], "colour": "red"}
    sound, problems = gather(plain, Outer)
    assert sound == {"parts": (Inner(1), Inner(2))}
    assert problems == [
        "Object contains unknown field `colour`",
        "Object missing required field `name`",
        "Expected `int`, got `str` - at `$.counts[1]`",
        "Object contains unknown field `odd` - at `$.parts[1]`",
        "Expected `int`, got `str` - at `$.parts[1].size`",
        "Expected `object`, got `int` - at `$.parts[2]`",
    ]


@pytest.mark.parametrize(
    "plain",
    [{}, {"name": 1}, {"name": "a", "counts": 3}, {"name": "a", "parts": 3}, {"name": "a", "parts": [{}]}, [], 3,
     {"name": "a", "odd": 1}],
)  # fmt: skip
def test_a_single_problem_is_told_in_the_words_of_msgspec(plain) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(plain, Outer)
    assert gather(plain, Outer)[1] == [str(caught.value)]


def test_sound_data_is_what_msgspec_makes_of_it() -> None:
    plain = {"name": "a", "counts": [1, 2], "parts": [{"size": 3}]}
    assert Outer(**gather(plain, Outer)[0]) == msgspec.convert(plain, Outer)
    assert gather(plain, Outer)[1] == []


def test_rules_tell_wrong_keys_and_wrong_rules_together() -> None:
    fused = {"match": "b", "dim": 0, "fused": [2, 2], "stride": 2}
    plain = {"nmaes": [], "tensors": [fused, {"match": 3}, {"match": "c"}], "names": [{"match": "(", "name": "a"}]}
    with pytest.raises(ConfigError) as caught:
        Rules.of(plain)
    for said in (
        "unknown field `nmaes`",
        "Expected `str`, got `int` - at `$.tensors[1].match`",
        "'b': expected one of fused, stride, heads and size",
        "'(' is no regular expression",
    ):
        assert said in str(caught.value)
    assert Rules.gather(plain)[0] == Rules(tensors=(TensorRule(match="c"),))
    sound = Rules(names=(NameRule(match="a", name="b"),))
    assert Rules.gather({"names": [{"match": "a", "name": "b"}]}) == (sound, [])
