"""What a user says of a layout and cannot be right is refused before anything is read of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

import ckpt
from ckpt.engine.find import adapter_for
from ckpt.engine.torch_engine import TorchAdapter

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"names": "blocks.{1}"}, "names is a str: expected a function"),
        ({"names": str, "rules": {"names": [{"match": "a", "name": "b"}]}}, "both as a function and in the rules"),
        ({"groups": {"tp": 2}}, r"groups\['tp'\] is a int"),
        ({"groups": {"tp": [0, 1, 1]}}, r"groups\['tp'\] names a rank twice: \[0, 1, 1\]"),
        ({"groups": {"TP": [0, 1], "dp": [0]}}, "groups of 'TP': expected axes of pp, dp, cp, tp, ep"),
        ({"rules": {"tensors": [{"match": "a", "dimension": 0}]}}, "unknown field `dimension`"),
        ({"rules": "nowhere.yaml"}, "nowhere.yaml: No such file"),
    ],
)
def test_what_cannot_be_right_is_refused(said: dict[str, Any], found: str) -> None:
    with pytest.raises(ckpt.ConfigError, match=found):
        ckpt.Parallel(nn.Linear(1, 1), **said)


@pytest.mark.parametrize("returned", [None, 3, ""])
def test_a_function_that_returns_no_name(returned: Any) -> None:
    engine = ckpt.Parallel(nn.Linear(1, 1, bias=False), names=lambda name: returned)
    with pytest.raises(ckpt.ConfigError, match=rf"names\('weight'\) returned {returned!r}"):
        adapter_for(engine).describe()


@pytest.mark.parametrize(
    "text", ["names: []\ntied: {}\nnames: []\n", '{"names": [], "names": []}', "tied: &a {}\nnames: *a\n"]
)
def test_a_rules_file_says_everything_once(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    with pytest.raises(ckpt.ConfigError, match=r"rules\.yaml: .*(keys listed twice: names|aliases)"):
        ckpt.Parallel(nn.Linear(1, 1), rules=path)


def test_a_function_that_fails_is_told_with_the_tensor() -> None:
    engine = ckpt.Parallel(nn.Linear(1, 1, bias=False), names=lambda name: {}[name])
    with pytest.raises(ckpt.ConfigError, match=r"names\('weight'\) raised KeyError: 'weight'") as error:
        adapter_for(engine).describe()
    assert isinstance(error.value.__cause__, KeyError)


@pytest.mark.parametrize("said", [{"rules": {"tied": {"a": "b"}}}, {"groups": {"dp": [0]}}, {"names": str}])
def test_an_adapter_of_the_users_own_takes_no_rules(said: dict[str, Any]) -> None:
    own = TorchAdapter(nn.Linear(1, 1))
    assert adapter_for(ckpt.Parallel(own)) is own
    with pytest.raises(ckpt.ConfigError, match="around an adapter of type TorchAdapter"):
        adapter_for(ckpt.Parallel(own, **said))


def test_both_ends_of_a_tie_have_to_be_there(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Linear(2, 2, bias=False), "head": nn.Linear(2, 2, bias=False)})
    tie = {"tied": {"head.weight": "embd.weight"}}
    with pytest.raises(ckpt.LayoutError, match=r"rule 'tied to: embd\.weight' fits nothing on any rank"):
        ckpt.save(ckpt.Parallel(model, rules=tie), tmp_path)
