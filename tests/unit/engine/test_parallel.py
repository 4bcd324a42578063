"""What a user says of a layout and cannot be right is refused before anything is read of the engine."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import ckpt
from ckpt.engine.base import Context
from ckpt.engine.find import adapter_for
from ckpt.engine.shared_tiling import Tiler


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"names": "blocks.{1}"}, "names is a str: expected a function"),
        ({"names": str, "rules": {"names": [{"match": "a", "name": "b"}]}}, "both as a function and in the rules"),
        ({"groups": {"tp": 2}}, r"groups\['tp'\] is a int"),
        ({"groups": {"tp": [0, 1, 1]}}, r"groups\['tp'\] names a rank twice: \[0, 1, 1\]"),
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


@pytest.mark.parametrize(("dim", "stride"), [(None, 1), (-1, 1), ("0", 1), (0, None), (0, 0)])
def test_attributes_that_do_not_say_how_a_tensor_is_cut(dim: Any, stride: Any) -> None:
    tiler, weight = Tiler(Context(), rank=0, degree=2), nn.Linear(4, 4).weight
    weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, dim, stride  # type: ignore[attr-defined]
    tiler.tiling("weight", (4, 4), weight)
    with pytest.raises(ckpt.UnsupportedLayout, match="'weight': it is marked as tensor parallel, but neither"):
        tiler.check("this engine")
