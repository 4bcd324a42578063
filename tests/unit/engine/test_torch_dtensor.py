"""Placements become runs of indexes: checked against ``torch.chunk`` done in the order in which layers were wrapped."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt.engine.torch_dtensor import nested
from ckpt.engine.torch_dtensor import tiling_at as tiling
from ckpt.layout.rules import TensorRule, tiling_of

if TYPE_CHECKING:
    from ckpt.layout.tiling import Tiling


def held(tiling: Tiling, whole: torch.Tensor, hole: float = -1.0) -> torch.Tensor:
    """Return the local tensor that a tiling describes."""
    local = torch.full(tiling.local, hole)
    for tile in tiling.tiles:
        local[tuple(slice(a, a + n) for a, n in zip(tile.at, tile.box.sizes, strict=True))] = whole[
            tuple(slice(o, o + n) for o, n in zip(tile.box.offsets, tile.box.sizes, strict=True))
        ]
    return local


def chunk(t: torch.Tensor, parts: int, index: int, dim: int) -> torch.Tensor:
    """``torch.chunk`` that gives empty parts where torch gives none."""
    found = t.chunk(parts, dim)
    return found[index] if index < len(found) else t.narrow(dim, 0, 0)


@given(rows=st.integers(0, 20), columns=st.integers(1, 6), dp=st.integers(1, 4), tp=st.integers(1, 4), data=st.data())
def test_fsdp_inside_of_tensor_parallelism_is_what_two_chunks_leave(
    rows: int, columns: int, dp: int, tp: int, data: Any
) -> None:
    whole = torch.arange(float(rows * columns)).reshape(rows, columns)
    dim = data.draw(st.sampled_from([0, 1, -1, -2]), label="dimension that tensor parallelism cuts")
    same = dim % 2 == 0
    fsdp = _StridedShard(0, split_factor=tp) if same and tp > 1 else Shard(0)
    for d, t in product(range(dp), range(tp)):
        expected = chunk(chunk(whole, tp, t, dim), dp, d, 0)
        found = held(tiling((rows, columns), (fsdp, Shard(dim)), (dp, tp), (d, t)), whole)
        assert torch.equal(found.reshape(-1), expected.reshape(-1)), (d, t)
        hsdp = tiling((rows, columns), (Replicate(), fsdp, Shard(dim)), (2, dp, tp), (1, d, t))
        assert torch.equal(held(hsdp, whole).reshape(-1), expected.reshape(-1))


def test_three_cuts_of_one_dimension_come_in_the_order_in_which_they_were_made() -> None:
    whole = torch.arange(23.0)
    placements = (_StridedShard(0, split_factor=6), Shard(0), Shard(0))
    for d, e, t in product(range(2), range(3), range(2)):
        expected = chunk(chunk(chunk(whole, 3, e, 0), 2, t, 0), 2, d, 0)
        assert torch.equal(held(tiling((23,), placements, (2, 3, 2), (d, e, t)), whole), expected)


def test_a_strided_cut_without_a_later_one_is_read_from_left_to_right() -> None:
    found = tiling((8,), (_StridedShard(0, split_factor=2),), (2,), (1,))
    assert held(found, torch.arange(8.0)).tolist() == [2, 3, 6, 7]  # as a TP dimension was gathered behind FSDP's back


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_of_a_tensor_parallel_tensor_is_a_part_of_a_part(rank: int) -> None:
    whole = torch.arange(7.0 * 2).reshape(7, 2)
    outer = tiling_of(TensorRule(match="x", dim=0, size=7), (4, 2), rank, 2)
    padded = torch.cat([whole, torch.full((1, 2), -1.0)])
    for index in range(3):
        inner = tiling((4, 2), (Shard(0),), (3,), (index,))
        both = nested(outer, inner)
        expected = chunk(padded.chunk(2)[rank], 3, index, 0)
        assert torch.equal(held(both, whole).reshape(-1), expected.reshape(-1))
        assert both.shape == (7, 2)
        assert sum(box.volume for box in both.padding) == int((expected == -1).sum())
