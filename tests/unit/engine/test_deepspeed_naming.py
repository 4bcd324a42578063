"""AutoTP's records become tilings: checked against the cutting that they describe, done by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckpt.engine.deepspeed_naming import autotp_tiling
from ckpt.errors import LayoutError


def held(record: dict[str, Any], whole: torch.Tensor, local: tuple[int, ...], rank: int) -> torch.Tensor:
    """Return the local tensor that the tiling of a record describes."""
    found = torch.full(local, -1)
    for tile in autotp_tiling(record, local, rank).tiles:
        target = tuple(slice(a, a + n) for a, n in zip(tile.at, tile.box.sizes, strict=True))
        found[target] = whole[tuple(slice(o, o + n) for o, n in zip(tile.box.offsets, tile.box.sizes, strict=True))]
    return found


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("sizes", [(4, 4), (5, 3), (8, 0), (2, 3, 3)])
def test_uneven_parts_one_behind_the_other(dim: int, sizes: tuple[int, ...]) -> None:
    whole = torch.arange(64).view(8, 8)
    for rank, part in enumerate(whole.split(sizes, dim)):
        record = {"partition_dim": dim, "logical_shape": [8, 8], "partition_sizes": list(sizes)}
        assert torch.equal(held(record, whole, tuple(part.shape), rank), part)


@pytest.mark.parametrize("widths", [[[2, 2], [1, 1], [1, 1]], [[3, 1], [2, 2]], [[4, 0], [0, 4]]])
def test_each_of_several_fused_matrices_is_cut_by_itself(widths: list[list[int]]) -> None:
    whole = torch.arange(40).view(8, 5)
    fused = whole.split([sum(one) for one in widths])
    for rank in range(2):
        part = torch.cat([matrix.split(one)[rank] for matrix, one in zip(fused, widths, strict=True)])
        record = {"partition_dim": 0, "logical_shape": [8, 5], "sub_param_shard_widths": widths}
        assert torch.equal(held(record, whole, tuple(part.shape), rank), part)


def test_a_bias_that_all_ranks_hold_is_whole() -> None:
    record = {"partition_dim": None, "logical_shape": [8], "replicated": True, "partition_type": "row"}
    assert torch.equal(held(record, torch.arange(8), (8,), 1), torch.arange(8))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"conversion": {"unsupported_reason": "heads are shuffled"}}, "cannot describe: heads are shuffled"),
        ({"partition_dim": 0, "logical_shape": [8, 5]}, "has not recorded where"),
        ({"partition_dim": 0, "logical_shape": [8, 5], "partition_sizes": [5, 3]}, r"shape \[5, 5\], found \[4, 5\]"),
        ({"partition_dim": None, "logical_shape": [8, 5]}, r"holds all of \[8, 5\], found \[4, 5\]"),
    ],
)
def test_a_record_that_is_not_what_is_there_is_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        autotp_tiling(record, (4, 5), 0)
