"""From tensors whose place is known to shards: parameters and buffers, and masters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.engine.base import LiveShard, dtype_name
from ckpt.engine.shared_check import check_tensor
from ckpt.engine.shared_partition import tile_views
from ckpt.layout.spec import MASTER, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckpt.engine.shared_partition import Named, Partition


def tensor_shards(tensors: Iterable[Named], role: str) -> Iterator[LiveShard]:
    """Yield what this rank holds of each tensor.

    Raises:
        UnsupportedLayout: a tensor is no plain memory.
    """
    for entry in tensors:
        check_tensor(entry.fqn, role, entry.param)
        spec = TensorSpec(entry.fqn, role, dtype_name(entry.param.dtype), entry.shape)
        for box, view in tile_views(entry.param, entry.tiling):
            yield LiveShard(spec, box, view, entry.param)


def master_shards(partition: Partition) -> Iterator[LiveShard]:
    """Yield the masters in a partition; none if the optimizer steps the model's own parameters.

    Raises:
        UnsupportedLayout: the partition is no plain memory.
    """
    if partition.separate:
        check_tensor(partition.members[0], MASTER, partition.key)
        for piece in partition.pieces:
            spec = TensorSpec(piece.fqn, MASTER, dtype_name(partition.key.dtype), piece.shape)
            for box, view in partition.views(partition.key, piece):
                yield LiveShard(spec, box, view, partition.key)
