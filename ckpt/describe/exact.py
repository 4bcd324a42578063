"""RankLayout of any one rank of a described job, exactly as the rank itself would declare it; of a small job the graph.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.layout.box import Box
from ckpt.layout.graph import ShardGraph
from ckpt.layout.spec import RankLayout, Shard, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt.describe.cuts import Cut
    from ckpt.describe.engines import Cuts
    from ckpt.describe.model import Described
    from ckpt.describe.placement import Description


EXACT_RANKS, EXACT_SIZE = 64, 1 << 16
"""Ranks, and ranks times tensors, up to which a described job is laid out rank by rank: a matter of seconds."""


def exact_graph(description: Description) -> ShardGraph | None:
    """Return the graph of all ranks, equal to that of the live job, so that a loss is told by box like there.

    None of a larger job (:data:`EXACT_RANKS`, :data:`EXACT_SIZE`), of which only the closed form is affordable.
    """
    world = description.parallel.ranks
    if world > EXACT_RANKS or world * len(description.model.tensors) > EXACT_SIZE:
        return None
    return ShardGraph.build([rank_layout(description, rank) for rank in range(world)])


def rank_layout(description: Description, rank: int) -> RankLayout:
    """Return everything that a rank holds.

    Raises:
        ConfigError: no such rank.
    """
    stage, tensor_rank, data_index = description.mesh.place(rank)
    expert_rank = data_index % description.parallel.ep if description.parallel.ep > 1 else None
    cuts = description.cuts(stage, tensor_rank, None)
    if expert_rank is not None:
        cuts = cuts | description.cuts(stage, tensor_rank, expert_rank)
    shards: list[Shard] = []
    held = description.on_stage[stage]
    for tensor in held:
        if tensor.kind == "buffer":
            for column in description.columns(tensor):
                spec = TensorSpec(tensor.fqn, column.role, column.dtype, tensor.shape)
                shards.append(Shard(spec, Box.whole(tensor.shape)))
            continue
        if tensor.fqn not in cuts:
            continue
        own = cuts[tensor.fqn]
        param = list(_boxes(description, tensor, tensor_rank, own.param, data_index))
        state = param
        if own.state is not None and own.state is not own.param:
            state = list(_boxes(description, tensor, tensor_rank, own.state, data_index))
        for column in description.columns(tensor):
            boxes = param if column.of_param else state
            if column.scalar:
                boxes = [Box.whole(column.shape)] if _has_scalars(own, data_index) else []
            shape = column.shape if column.scalar else tensor.shape
            spec = TensorSpec(tensor.fqn, column.role, column.dtype, shape)
            shards += [Shard(spec, box) for box in boxes]
    derived = tuple(t.fqn for t in held if t.fqn in cuts and description.derived(t))
    names = {t.fqn for t in held}
    aliases = tuple((a, t) for a, t in description.aliases.items() if t in names)
    return RankLayout(rank, tuple(shards), aliases, derived)


def _has_scalars(cuts: Cuts, data_index: int) -> bool:
    """Does the optimizer of this rank step a part of the tensor, be it nothing but padding?"""
    if cuts.state is None:
        return False
    owner = cuts.state.group.owner_of.get(data_index)
    return owner is not None and (cuts.scalars_everywhere or owner in cuts.state.owners)


def _boxes(description: Description, tensor: Described, tensor_rank: int, cut: Cut, data_index: int) -> Iterator[Box]:
    owner = cut.group.owner_of.get(data_index)
    if owner is None:
        return
    tiling = description.tiling(tensor, tensor_rank)
    for i in (cut.owners == owner).nonzero()[0]:
        yield from tiling.boxes(int(cut.bounds[i]), int(cut.bounds[i + 1]))
