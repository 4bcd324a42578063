"""From a DTensor's mesh and placements to the part of the global tensor that its local tensor is.

Placements are read as ``torch.distributed.tensor`` documents them: from left to right over the mesh's dimensions, each
cutting what the ones before left, by the rule of ``torch.chunk``.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from ckpt.engine.shared_check import class_names, local_tensor
from ckpt.layout.box import Box
from ckpt.layout.tiling import Runs, Tile, Tiling, chunked, strided

if TYPE_CHECKING:
    from collections.abc import Sequence


def is_dtensor(tensor: Any) -> bool:
    """Is this a ``torch.distributed.tensor.DTensor``?"""
    return "DTensor" in class_names(tensor)


def mesh_ranks(tensor: Any) -> set[int]:
    """Return the ranks that a DTensor is spread over."""
    return set(_ranks_of(tensor.device_mesh))


@lru_cache(maxsize=8)
def _ranks_of(mesh: Any) -> tuple[int, ...]:
    return tuple(mesh.mesh.flatten().tolist())


def dtensor_tiling(tensor: Any) -> tuple[Tiling, str]:
    """Return which part of a tensor of shape ``tensor.shape`` this rank's local tensor is, and what is wrong with it.

    A rank outside of the mesh holds nothing. What is wrong: empty, or a placement that no tiling expresses, or a local
    tensor of another shape than the placements say.
    """
    shape, local = tuple(tensor.shape), tuple(local_tensor(tensor).shape)
    mesh, placements = tensor.device_mesh, tensor.placements
    foreign = [repr(p) for p in placements if not class_names(p) & {"Replicate", "Shard", "_StridedShard"}]
    if foreign:
        return Tiling.whole(shape), f"has placement {', '.join(foreign)}: expected Shard or Replicate in each place"
    coordinate, sizes = _place_in(mesh)
    if coordinate is None:
        return Tiling(shape, local, ()), ""
    tiling = _tiling_of(shape, tuple(placements), sizes, coordinate)
    if tiling.local != local:
        return tiling, (
            f"has a local tensor of shape {list(local)}, expected {list(tiling.local)} by its global shape "
            f"{list(shape)}, its placements {tuple(placements)} and its mesh of shape {list(sizes)}"
        )
    return tiling, ""


# Both are asked for every tensor in every save, and a model has few meshes and few different shapes.
@lru_cache(maxsize=8)
def _place_in(mesh: Any) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """Return this rank's coordinate in a mesh, None outside of it, and the mesh's shape."""
    coordinate = mesh.get_coordinate()
    sizes = tuple(mesh.size(i) for i in range(mesh.ndim))
    return None if coordinate is None else tuple(coordinate), sizes


@lru_cache(maxsize=4096)
def _tiling_of(
    shape: tuple[int, ...], placements: tuple[Any, ...], sizes: tuple[int, ...], coordinate: tuple[int, ...]
) -> Tiling:
    return tiling_at(shape, placements, sizes, coordinate)


def tiling_at(
    shape: Sequence[int], placements: Sequence[Any], sizes: Sequence[int], coordinate: Sequence[int]
) -> Tiling:
    """Return what the rank at ``coordinate`` of a mesh of shape ``sizes`` holds; placements are shards or replicas."""
    tiling = Tiling.of_runs(shape, _runs(shape, placements, sizes, coordinate))
    if 0 in shape:  # has no elements, and is held all the same
        here = (0,) * len(shape)
        return Tiling(tiling.shape, tiling.local, (Tile(Box(here, tiling.local), here),))
    return tiling


def _runs(
    shape: Sequence[int], placements: Sequence[Any], sizes: Sequence[int], coordinate: Sequence[int]
) -> dict[int, Runs]:
    axes: dict[int, list[int]] = {}
    for axis, placement in enumerate(placements):
        if "Replicate" not in class_names(placement):
            axes.setdefault(placement.dim % len(shape), []).append(axis)
    found: dict[int, Runs] = {}
    for dim, cutting in axes.items():
        runs: Runs = ((0, shape[dim]),) if shape[dim] else ()
        for axis, factor in _cutting_order(cutting, placements, sizes):
            if factor > 1:
                runs = strided(runs, sizes[axis], coordinate[axis], factor)
            else:
                runs = chunked(runs, sizes[axis], coordinate[axis])
        found[dim] = runs
    return found


def _cutting_order(cutting: list[int], placements: Sequence[Any], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return the mesh's axes in the order in which they really cut one dimension, with what is left of a split factor.

    FSDP cuts what tensor parallelism has cut before, though its axis stands to the left: ``_StridedShard`` records it,
    by a split factor that is the product of the later axes' sizes. Played back from left to right, as a strided cut, it
    comes to the same rows only if all sizes divide; the local tensors are what the real order gives.
    """
    order: list[tuple[int, int]] = []
    for axis in reversed(cutting):
        later = prod(sizes[other] for other in cutting if other > axis)
        factor = _factor(placements[axis])
        if factor > 1 and factor == later:
            order.append((axis, 1))
        else:
            order.insert(0, (axis, factor))
    return order


def _factor(placement: Any) -> int:
    return int(placement.split_factor) if "_StridedShard" in class_names(placement) else 1


def nested(outer: Tiling, inner: Tiling) -> Tiling:
    """Return the tiling of a local tensor that is part ``inner`` of a tensor that is part ``outer`` of the global one.

    ``inner.shape`` is ``outer.local``: FSDP cuts a tensor that tensor parallelism has cut by its own means.
    """
    tiles, padding = [], list(inner.padding)
    for part in inner.tiles:
        for tile in outer.tiles:
            common = part.box.intersect(tile.local)
            if common is not None:
                offsets = tuple(g + c - a for g, c, a in zip(tile.box.offsets, common.offsets, tile.at, strict=True))
                tiles.append(Tile(Box(offsets, common.sizes), _moved(part, common)))
        for hole in outer.padding:
            common = part.box.intersect(hole)
            if common is not None:
                padding.append(Box(_moved(part, common), common.sizes))
    return Tiling(outer.shape, inner.local, tuple(tiles), tuple(padding))


def _moved(part: Tile, box: Box) -> tuple[int, ...]:
    return tuple(a + b - p for a, b, p in zip(part.at, box.offsets, part.box.offsets, strict=True))
