"""All ranks of a described job at once: who holds which boxes, without the layout of every rank. Pure.

Equal to what :func:`ckpt.describe.exact.rank_layout` says of each rank, turned inside out. Ranks that hold the same are
looked at once, and so are tensors and roles that are cut alike: the cost is that of the boxes, and of what differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ckpt.layout.box import Box
from ckpt.layout.graph import Cell, ShardGraph, between_cuts
from ckpt.layout.spec import TensorSpec

if TYPE_CHECKING:
    from ckpt.describe.cuts import Cut
    from ckpt.describe.engines import Cuts
    from ckpt.describe.model import Described
    from ckpt.describe.placement import Column, Description
    from ckpt.layout.tiling import Tiling

Held = list[tuple[Box, tuple[int, ...]]]
Row = tuple[tuple[int, ...], tuple[int, ...]]
"""offsets and sizes of a box"""
Rows = Mapping[int, Sequence[Row]]
"""Owner of a cut -> its boxes, ascending."""
Named = tuple[str, str, str, tuple[int, ...]]
"""fqn, role, dtype and shape of a tensor"""
Place = tuple[int, int]
"""(stage, tensor rank)"""


@dataclass(frozen=True, slots=True)
class RankRows:
    """What a rank holds, as plain rows in ascending order: ``specs``, ``shards`` (number of the spec, offsets, sizes),
    ``aliases`` and ``derived`` of :class:`~ckpt.layout.spec.RankLayout`.
    """

    rank: int
    specs: list[Named]
    shards: list[tuple[int, tuple[int, ...], tuple[int, ...]]]
    aliases: list[tuple[str, str]]
    derived: list[str]


@dataclass(frozen=True, slots=True)
class _Alike:
    """The ranks of one place and one expert rank. ``entries``: of each tensor data index -> owner -> boxes."""

    entries: list[tuple[Named, Mapping[int, int], Rows]]
    aliases: list[tuple[str, str]]
    derived: list[str]


class World:
    """The ranks of a described job.

    Args:
        description: the model on its mesh.
        everywhere: tensors that every rank holds whole, beside those of the description.
    """

    def __init__(self, description: Description, everywhere: Sequence[TensorSpec] = ()) -> None:
        self._of, self._everywhere = description, everywhere
        self._ranks = description.mesh.ranks
        self._cuts: dict[tuple[int, int, int | None], dict[str, Cuts]] = {}
        self._held: dict[tuple[object, ...], Held] = {}
        self._rows: dict[tuple[object, ...], dict[int, list[Row]]] = {}
        self._sets: dict[tuple[int, ...], tuple[int, ...]] = {}

    # ------------------------------------------------------------------------------------------------------- the graph

    def graph(self) -> ShardGraph:
        """Return the graph of all ranks, equal to that of their layouts."""
        problems: list[str] = []
        cells: dict[TensorSpec, tuple[Cell, ...]] = {}
        derived: set[str] = set()
        for tensor in self._of.model.tensors:
            parts = [*self._parts(tensor)]
            if parts and tensor.kind != "buffer" and self._of.derived(tensor):
                derived.add(tensor.fqn)
            for column in self._of.columns(tensor):
                spec = _spec(tensor, column)
                held = self._cells_of(tensor, column, parts, partial(between_cuts, spec, problems=problems))
                if held:
                    cells[spec] = tuple(Cell(spec, box, ranks) for box, ranks in held)
        everybody = tuple(range(self._ranks.size))
        cells |= {spec: (Cell(spec, Box.whole(spec.shape), everybody),) for spec in self._everywhere}
        aliases = {alias: name for alias, name in self._of.aliases.items() if name in self._of.stages}
        return ShardGraph.described(self._ranks.size, cells, aliases, derived, problems)

    def _parts(self, tensor: Described) -> Iterator[tuple[Place, Cuts | None]]:
        """Yield every place that holds the tensor, with its cuts there; a buffer has none."""
        for stage in self._of.stages[tensor.fqn]:
            for rank in range(self._of.parallel.tp):
                if tensor.kind == "buffer":
                    yield (stage, rank), None
                    continue
                cuts = self._cuts_of(stage, rank, tensor)
                if cuts is not None:
                    yield (stage, rank), cuts

    def _cells_of(
        self, tensor: Described, column: Column, parts: Sequence[tuple[Place, Cuts | None]], between: partial[Held]
    ) -> Held:
        """Return the cells of one role. Those of roles and tensors that are cut alike are the same objects."""
        if tensor.kind == "buffer" or column.scalar:
            shape = _spec(tensor, column).shape
            ranks = sorted({r for place, cuts in parts for r in self._whole_on(place, cuts)})
            return between({Box.whole(shape): ranks}) if ranks else []
        cut = [(place, _cut(cuts, column)) for place, cuts in parts if cuts is not None]
        key = (tensor.shape, tensor.split, *((place, *_identity(one)) for place, one in cut))
        if key not in self._held:
            self._held[key] = [(box, self._one(ranks)) for box, ranks in self._between(tensor, cut, between)]
        return self._held[key]

    def _between(self, tensor: Described, cut: Sequence[tuple[Place, Cut]], between: partial[Held]) -> Held:
        found: dict[Box, list[int]] = {}
        tilings: dict[int, Tiling] = {}
        for (stage, rank), one in cut:
            tiling = tilings.setdefault(rank, self._of.tiling(tensor, rank))
            members = self._ranks[stage, rank][one.group.array].tolist()
            bounds = one.bounds.tolist()
            for owner, low, high in zip(one.owners.tolist(), bounds, bounds[1:], strict=False):
                for box in tiling.boxes(low, high):
                    found.setdefault(box, []).extend(members[owner])
        return between(found) if found else []

    def _whole_on(self, place: Place, cuts: Cuts | None) -> list[int]:
        """Return the ranks of a place that have a buffer, or what the optimizer counts for a tensor."""
        ranks: list[int] = self._ranks[place].tolist()
        return ranks if cuts is None else [ranks[d] for d in _stepping(cuts)]

    def _cuts_of(self, stage: int, rank: int, tensor: Described) -> Cuts | None:
        key = (stage, rank, self._of.expert_rank(tensor))
        if key not in self._cuts:
            self._cuts[key] = self._of.cuts(*key)
        return self._cuts[key].get(tensor.fqn)

    def _one(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return self._sets.setdefault(ranks, ranks)

    # ------------------------------------------------------------------------------------------------- rank after rank

    def ranks(self) -> Iterator[RankRows]:
        """Yield what each rank holds, in any order of the ranks."""
        for stage, rank in ((p, t) for p in range(self._ranks.shape[0]) for t in range(self._ranks.shape[1])):
            alike: dict[int, _Alike] = {}
            for data, number in enumerate(self._ranks[stage, rank].tolist()):
                expert = data % self._of.parallel.ep
                if expert not in alike:
                    alike[expert] = self._alike(stage, rank, expert)
                specs: list[Named] = []
                shards: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
                for spec, owner_of, rows in alike[expert].entries:
                    mine = rows.get(owner_of.get(data, -1))
                    if mine:
                        at = len(specs)
                        shards += [(at, offsets, sizes) for offsets, sizes in mine]
                        specs.append(spec)
                yield RankRows(number, specs, shards, alike[expert].aliases, alike[expert].derived)

    def _alike(self, stage: int, rank: int, expert: int) -> _Alike:
        tensors = self._of.on_stage[stage]
        names = {t.fqn for t in tensors}
        found = _Alike([], sorted((a, t) for a, t in self._of.aliases.items() if t in names), [])
        always = dict.fromkeys(range(self._ranks.shape[2]), 0)
        whole = [*self._everywhere]
        for tensor in tensors:
            of_expert = self._of.expert_rank(tensor)
            if tensor.kind == "buffer":
                whole += [_spec(tensor, column) for column in self._of.columns(tensor)]
                continue
            cuts = self._cuts_of(stage, rank, tensor) if of_expert in (None, expert) else None
            if cuts is None:
                continue
            if self._of.derived(tensor):
                found.derived.append(tensor.fqn)
            for column in self._of.columns(tensor):
                named, cut = _named(_spec(tensor, column)), _cut(cuts, column)
                if column.scalar:
                    found.entries.append((named, dict.fromkeys(_stepping(cuts), 0), _whole(column.shape)))
                else:
                    found.entries.append((named, cut.group.owner_of, self._rows_of(tensor, rank, cut)))
        found.entries.extend((_named(spec), always, _whole(spec.shape)) for spec in whole)
        found.entries.sort(key=lambda one: one[0])
        found.derived.sort()
        return found

    def _rows_of(self, tensor: Described, rank: int, cut: Cut) -> Rows:
        key = (tensor.shape, tensor.split, rank, *_identity(cut))
        if key not in self._rows:
            tiling, bounds = self._of.tiling(tensor, rank), cut.bounds.tolist()
            found: dict[int, list[Row]] = {}
            for owner, low, high in zip(cut.owners.tolist(), bounds, bounds[1:], strict=False):
                rows = found.setdefault(owner, [])
                rows += [(box.offsets, box.sizes) for box in tiling.boxes(low, high)]
            self._rows[key] = {owner: sorted(rows) for owner, rows in found.items()}
        return self._rows[key]


def _spec(tensor: Described, column: Column) -> TensorSpec:
    whole = column.scalar and tensor.kind != "buffer"
    return TensorSpec(tensor.fqn, column.role, column.dtype, column.shape if whole else tensor.shape)


def _named(spec: TensorSpec) -> Named:
    return spec.fqn, spec.role, spec.dtype, spec.shape


def _whole(shape: tuple[int, ...]) -> Rows:
    return {0: [((0,) * len(shape), shape)]}


def _cut(cuts: Cuts, column: Column) -> Cut:
    return cuts.param if column.of_param or cuts.state is None else cuts.state


def _stepping(cuts: Cuts) -> list[int]:
    """Return the data indexes whose optimizer steps a part of the tensor, be it nothing but padding."""
    if cuts.state is None:
        return []
    members = cuts.state.group.array
    held: list[int] = (members if cuts.scalars_everywhere else members[cuts.state.owners]).reshape(-1).tolist()
    return sorted(set(held))


def _identity(cut: Cut) -> tuple[int, bytes, bytes]:
    return id(cut.group), cut.bounds.tobytes(), cut.owners.tobytes()
