from __future__ import annotations

import pytest
import torch

from ckpt.engine.base import LiveShard
from ckpt.errors import LayoutError
from ckpt.layout.box import Box
from ckpt.layout.spec import TensorSpec
from ckpt.runtime.pieces import PieceTable

SPEC = TensorSpec("w", "param", "float32", (4, 3))


def test_the_view_of_a_box_is_the_live_memory() -> None:
    memory = torch.arange(6.0).view(2, 3)
    table = PieceTable([LiveShard(SPEC, Box((2, 0), (2, 3)), memory)])
    table.view(SPEC, Box((3, 1), (1, 2))).fill_(-1)
    assert memory.tolist() == [[0, 1, 2], [3, -1, -1]]
    with pytest.raises(LayoutError, match="not in this rank's memory"):
        table.view(SPEC, Box((0, 0), (1, 3)))


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (torch.zeros(3, 2), r"live memory has shape \[3, 2\], expected \[2, 3\]"),
        (torch.zeros(2, 3, dtype=torch.float64), "live memory is float64, expected float32"),
    ],
)
def test_memory_that_is_not_what_the_spec_says(memory: torch.Tensor, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        PieceTable([LiveShard(SPEC, Box((2, 0), (2, 3)), memory)])
