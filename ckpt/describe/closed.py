"""Holdings of a described job in closed form: no rank's layout is built, no cell is intersected. Pure.

Along the dimension that tensor parallelism cuts, a tensor falls into *segments* that the same tensor ranks hold. Of a
segment every copy (one for each stage and tensor rank that has it) is cut into ranges by the engine; flat positions of
the copy's local tensor map to flat positions of the segment by a formula (:meth:`_Segment.position`), in the same
order, so ranges stay ranges. What is left is to merge the bounds and to name the owners. The cost is the number of
ranges: tensors x tensor ranks x data-parallel ranks at most.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ckpt.analysis.holdings import NOBODY, Holdings, RankSets, RoleColumn, TensorRows, merged_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.describe.cuts import Cut, Group
    from ckpt.describe.engines import Cuts
    from ckpt.describe.model import Described
    from ckpt.describe.placement import Description, Geometry

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Segment:
    """``size`` indexes of the dimension that is cut. ``copies``: (tensor rank, first local index, local length)."""

    size: int
    copies: tuple[tuple[int, int, int], ...]
    inner: int

    def position(self, flat: Numbers, first: int, width: int) -> Numbers:
        """Return how many elements of the segment lie before flat positions of a copy's local tensor."""
        if width == self.size:
            return flat
        row, rest = np.divmod(flat, width * self.inner)
        found: Numbers = row * (self.size * self.inner) + np.clip(rest - first * self.inner, 0, self.size * self.inner)
        return found


Copy = tuple[int, int, int, int, "Cuts"]
"""(stage, tensor rank, first local index, local length, cuts)"""


def holdings(description: Description) -> Holdings:
    """Return who holds how much of what, equal to what ``holdings_of`` makes of all ranks' layouts."""
    return _Builder(description).build()


class _Builder:
    def __init__(self, description: Description) -> None:
        self._of = description
        self._ranks = description.mesh.ranks
        self._sets = RankSets()
        self._segments: dict[tuple[object, ...], list[_Segment]] = {}
        self._cuts: dict[tuple[int, int, int | None], dict[str, Cuts]] = {}
        self._tables: dict[tuple[object, ...], Numbers] = {}

    def build(self) -> Holdings:
        tensors = [self._tensor(t) for t in sorted(self._of.model.tensors, key=lambda t: t.fqn)]
        return Holdings(self._ranks.size, self._sets, tuple(tensors), self._of.aliases)

    def _tensor(self, tensor: Described) -> TensorRows:
        columns = self._of.columns(tensor)
        roles = tuple(RoleColumn(c.role, c.dtype, c.scalar) for c in columns)
        if tensor.kind == "buffer":
            number = self._number([self._ranks[stage].reshape(-1) for stage in self._of.stages[tensor.fqn]])
            return TensorRows(tensor.fqn, tensor.shape, roles, False, np.array([tensor.numel]), np.array([[number]]))
        rows: list[tuple[Numbers, Numbers, Numbers]] = []
        for segment in self._segments_of(tensor):
            copies = self._copies(tensor, segment)
            if len({copy[2:] for copy in copies}) == 1:
                rows.append(self._alike(segment, copies))
            else:
                rows.append(self._different(segment, copies))
        volume, param, state = (np.concatenate(parts) for parts in zip(*rows, strict=True))
        step = self._number(self._scalar_ranks(tensor)) if any(c.scalar for c in columns) else NOBODY
        holders = np.empty((len(volume), len(columns)), np.int64)
        for i, column in enumerate(columns):
            holders[:, i] = step if column.scalar else param if column.of_param else state
        volume, holders = merged_rows(volume, holders)
        return TensorRows(tensor.fqn, tensor.shape, roles, self._of.derived(tensor), volume, holders)

    def _segments_of(self, tensor: Described) -> list[_Segment]:
        key = (tensor.shape, tensor.split)
        if key not in self._segments:
            dim = tensor.split.dim if tensor.split is not None else 0
            self._segments[key] = _segments(self._of.geometry(tensor), prod(tensor.shape[dim + 1 :]))
        return self._segments[key]

    def _copies(self, tensor: Described, segment: _Segment) -> list[Copy]:
        found = []
        for stage in self._of.stages[tensor.fqn]:
            for rank, first, width in segment.copies:
                cuts = self._cuts_of(stage, rank, tensor)
                if cuts is not None:
                    found.append((stage, rank, first, width, cuts))
        return found

    # ------------------------------------------------------------------------- rows of a segment, and who holds them

    def _alike(self, segment: _Segment, copies: Sequence[Copy]) -> tuple[Numbers, Numbers, Numbers]:
        """Return (volume, number of the param's holders, of the state's) where all copies are cut alike."""
        *_, first, width, cuts = copies[0]
        places = [(stage, rank) for stage, rank, *_ in copies]
        state = cuts.state or cuts.param
        edges = segment.position(state.bounds, first, width)
        if state is not cuts.param and len(cuts.param.owners) > 1:
            edges = np.unique(np.concatenate([edges, segment.position(cuts.param.bounds, first, width)]))
        volume = np.diff(edges)
        solid = volume > 0
        volume, low = volume[solid], edges[:-1][solid]
        owners = _owners(segment, state, low, first, width)
        held = self._held(state.group, places, owners)
        if cuts.state is None:
            return volume, held, np.full_like(held, NOBODY)
        if state is cuts.param:
            return volume, held, held
        return volume, self._held(cuts.param.group, places, _owners(segment, cuts.param, low, first, width)), held

    def _different(self, segment: _Segment, copies: Sequence[Copy]) -> tuple[Numbers, Numbers, Numbers]:
        """Return the same where copies differ: the holders of a range are those of all copies together."""
        bounds = [
            segment.position(cut.bounds, first, width)
            for *_, first, width, cuts in copies
            for cut in (cuts.param, cuts.state or cuts.param)
        ]
        edges = np.unique(np.concatenate(bounds))
        low = edges[:-1]
        param, state = np.full((2, len(low)), NOBODY, np.int64)
        for out, of_param in ((param, True), (state, False)):
            parts: list[tuple[Copy, Group, Numbers]] = []
            for copy in copies:
                _, _, first, width, cuts = copy
                cut = cuts.param if of_param else cuts.state
                if cut is not None:
                    parts.append((copy, cut.group, _owners(segment, cut, low, first, width)))
            for i in range(len(low) if parts else 0):
                out[i] = self._number([self._ranks[c[0], c[1]][group.array[owners[i]]] for c, group, owners in parts])
        return np.diff(edges), param, state

    def _held(self, group: Group, places: list[tuple[int, int]], owners: Numbers) -> Numbers:
        """Return the numbers of the sets of ranks that hold what these owners hold at all these places."""
        key = (group, *places)
        if key not in self._tables:
            self._tables[key] = np.full(len(group), NOBODY, np.int64)
        table = self._tables[key]
        unknown = owners[table[owners] == NOBODY]
        if len(unknown):  # all at once: ZeRO-3 has as many owners as data ranks
            fresh = np.unique(unknown)
            stage, rank = np.array(places, np.int64).T[:, :, None]
            held = self._ranks[stage, rank, group.array[fresh, None, :]].reshape(len(fresh), -1)
            table[fresh] = [self._sets.number(ranks) for ranks in np.sort(held, axis=1).tolist()]
        return table[owners]

    def _scalar_ranks(self, tensor: Described) -> list[Numbers]:
        """Return the ranks that have the optimizer's scalars: those that step a part of it, be it only padding."""
        found = []
        for stage in self._of.stages[tensor.fqn]:
            for rank in range(self._of.parallel.tp):
                cuts = self._cuts_of(stage, rank, tensor)
                if cuts is not None and cuts.state is not None:
                    members = cuts.state.group.array
                    held = members if cuts.scalars_everywhere else members[cuts.state.owners]
                    found.append(self._ranks[stage, rank][held.reshape(-1)])
        return found

    def _cuts_of(self, stage: int, rank: int, tensor: Described) -> Cuts | None:
        key = (stage, rank, self._of.expert_rank(tensor))
        if key not in self._cuts:
            self._cuts[key] = self._of.cuts(*key)
        return self._cuts[key].get(tensor.fqn)

    def _number(self, ranks: list[Numbers]) -> int:
        return self._sets.number(np.unique(np.concatenate(ranks)).tolist()) if ranks else NOBODY


def _owners(segment: _Segment, cut: Cut, low: Numbers, first: int, width: int) -> Numbers:
    """Return the owner of each range of the segment that begins at ``low``."""
    if len(cut.owners) == 1:
        return np.full(len(low), cut.owners[0])
    starts = segment.position(cut.bounds[:-1], first, width)
    return cut.owners[np.searchsorted(starts, low, side="right") - 1]


def _segments(geometry: Geometry, inner: int) -> list[_Segment]:
    """Return the segments between the borders of all ranks' runs."""
    held = []
    for rank, (runs, width) in enumerate(geometry):
        at = 0
        for start, count in runs:
            held.append((start, start + count, rank, at, width))
            at += count
    borders = sorted({edge for start, stop, *_ in held for edge in (start, stop)})
    found = []
    for low, high in itertools.pairwise(borders):
        copies = tuple((rank, at + low - start, width) for start, stop, rank, at, width in held if start <= low < stop)
        found.append(_Segment(high - low, copies, inner))
    return found
