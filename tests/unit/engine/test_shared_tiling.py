"""What the tiler makes of rules and of Megatron's attributes, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

import ckpt
from ckpt.engine.base import Context
from ckpt.engine.shared_tiling import Tiler
from ckpt.layout.mesh import UNEXPLAINED
from ckpt.layout.rules import Rules

CUT = Rules.of({"tensors": [{"match": "weight", "dim": 0}, {"match": "bias"}]})


@pytest.mark.parametrize(("dim", "stride"), [(None, 1), (-1, 1), ("0", 1), (0, None), (0, 0)])
def test_attributes_that_do_not_say_how_a_tensor_is_cut(dim: Any, stride: Any) -> None:
    tiler, weight = Tiler(Context(), rank=0, degree=2), nn.Linear(4, 4).weight
    weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, dim, stride  # type: ignore[attr-defined]
    tiler.tiling("weight", (4, 4), weight)
    with pytest.raises(ckpt.UnsupportedLayout, match="'weight': it is marked as tensor parallel, but neither"):
        tiler.check("this engine")


@pytest.mark.parametrize(
    ("rules", "marked", "why"),
    [
        (CUT, None, "rule 'weight' cuts it"),
        (CUT, False, "rule 'weight' cuts it"),
        (Rules(), True, "it is marked as tensor parallel"),
    ],
)
def test_a_slice_without_a_group_is_refused(rules: Rules, marked: bool | None, why: str) -> None:
    layer = nn.Linear(4, 4)
    if marked is not None:
        layer.weight.tensor_model_parallel = marked  # type: ignore[assignment]
    tiler = Tiler(Context(rules), unnamed=True)
    for name, p in layer.named_parameters():
        tiler.tiling(name, tuple(p.shape), p)
    assert [one.split(", but nobody says with whom")[0] for one in tiler.problems] == [f"tensor 'weight': {why}"]
    named = replace(tiler, unnamed=False, problems=[])
    named.tiling("weight", (4, 4), layer.weight)
    assert not named.problems  # a group of this rank alone says that it is whole


def test_a_stage_of_whole_tensors_leaves_it_to_the_others_to_explain_the_cuts() -> None:
    norm, cut = nn.LayerNorm(4), nn.Linear(4, 4)
    cut.weight.tensor_model_parallel, cut.weight.partition_dim = True, 0  # type: ignore[attr-defined, assignment]
    tilers = [Tiler(Context(), rank=0, degree=2) for _ in range(2)]
    for tiler, module in zip(tilers, (norm, cut), strict=True):
        for name, p in module.named_parameters():
            tiler.tiling(name, tuple(p.shape), p)
    assert not any(tiler.problems for tiler in tilers)
    assert [tiler.unused() for tiler in tilers] == [{UNEXPLAINED}, set()]
