"""Cut: which data-parallel ranks hold which elements of a local tensor. Pure.

Whatever an engine does with the copies that data parallelism makes, to one tensor it comes to consecutive ranges of the
flattened local tensor, each with one owner. FSDP's rows are such ranges too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


class Group:
    """``members[o]``: the data indexes (ascending) that all hold what owner ``o`` holds. Compared by identity."""

    def __init__(self, members: tuple[tuple[int, ...], ...]) -> None:
        self.members = members

    @cached_property
    def owner_of(self) -> dict[int, int]:
        """Data index -> owner."""
        return {d: o for o, ds in enumerate(self.members) for d in ds}

    @cached_property
    def array(self) -> Numbers:
        """``members`` as int64 ``[owners, members of each]``: all owners have equally many."""
        return np.array(self.members, np.int64)

    def __len__(self) -> int:
        return len(self.members)


@dataclass(frozen=True, slots=True)
class Groups:
    """``everyone``: one owner, all data ranks that have the tensor. ``parts``: the owners that share one copy."""

    everyone: Group
    parts: Group

    @classmethod
    def of(cls, data: int, shard: int, ep: int = 1, expert_rank: int = 0) -> Groups:
        """Return the groups of ``data`` ranks of which ``shard`` neighbours share a copy.

        Of an expert's tensors every ``ep``-th rank holds any (expert rank = data index modulo ``ep``, as DeepSpeed
        and Megatron place them): the copy is shared within those.
        """
        everyone = tuple(range(expert_rank, data, ep))
        parts = tuple(tuple(range(s, data, shard)) for s in range(expert_rank, shard, ep))
        return cls(Group((everyone,)), Group(parts))


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Elements ``[bounds[i], bounds[i + 1])`` belong to owner ``owners[i]`` of ``group``.

    ``bounds``: int64 ``[k + 1]``, strictly ascending from 0 to the number of local elements; ``owners``: int64 ``[k]``.
    """

    group: Group
    bounds: Numbers
    owners: Numbers

    @classmethod
    def whole(cls, group: Group, numel: int, owner: int = 0) -> Cut:
        """Return the cut that gives everything to one owner."""
        return cls(group, np.array([0, numel], np.int64), np.array([owner], np.int64))

    @classmethod
    def slices(cls, group: Group, numel: int, size: int, offset: int = 0) -> Cut:
        """Return the cut of a tensor found at ``offset`` in a buffer of which each owner holds ``size`` elements."""
        first, last = offset // size, (offset + numel - 1) // size
        bounds = np.arange(first, last + 2, dtype=np.int64) * size - offset
        bounds[0], bounds[-1] = 0, numel
        return cls(group, bounds, np.arange(first, last + 1, dtype=np.int64))
