"""ShardGraph: cells (elements of one tensor between all ranks' cuts) and the ranks that hold each.

Edges between cells: *replica* (same cell, other rank), *alias* (tied weights), *derivation* (param = cast(master)).
The graph validates itself and reports every problem at once, because a layout error found one at a time costs a job
start each.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING

from ckpt.errors import LayoutError
from ckpt.layout.box import Box, first_overlap, overlaps
from ckpt.layout.mesh import problems_of_claims
from ckpt.layout.spec import MASTER, PARAM, RankLayout, TensorSpec
from ckpt.words import count, some

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Cell:
    """A box of ``spec`` that the same ``ranks`` (ascending) hold as a whole."""

    spec: TensorSpec
    box: Box
    ranks: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one copy."""
        return self.box.volume * self.spec.itemsize


@dataclass(frozen=True, slots=True)
class ShardGraph:
    """What a job holds as a whole. ``cells``: spec -> disjoint cells that tile it, in row-major order.

    ``specs`` is sorted, so that every rank numbers tensors alike. ``aliases``: tied name -> listed name.
    ``derived``: FQNs whose param is claimed to be cast(master).
    """

    world: int
    specs: tuple[TensorSpec, ...]
    cells: dict[TensorSpec, tuple[Cell, ...]]
    aliases: dict[str, str]
    derived: frozenset[str]
    problems: tuple[str, ...]

    @classmethod
    def build(cls, layouts: Sequence[RankLayout]) -> ShardGraph:
        """Build from one layout per rank, in any order. Every rank computes the same graph."""
        problems: list[str] = []
        held: dict[tuple[str, str], dict[TensorSpec, dict[Box, list[int]]]] = {}
        aliases: dict[str, str] = {}
        derived: set[str] = set()
        for layout in sorted(layouts, key=lambda one: one.rank):
            for shard in layout.shards:
                boxes = held.setdefault(shard.spec.key, {}).setdefault(shard.spec, {})
                boxes.setdefault(shard.box, []).append(layout.rank)
            for name, target in layout.aliases:
                if aliases.setdefault(name, target) != target:
                    problems.append(
                        f"alias {name!r}: rank {layout.rank} ties it to {target!r}, another rank to {aliases[name]!r}"
                    )
            derived.update(layout.derived)
        cells: dict[TensorSpec, tuple[Cell, ...]] = {}
        for variants in held.values():
            if len(variants) > 1:
                problems.append(_disagreement(variants))
                continue
            spec, boxes = next(iter(variants.items()))
            cells[spec] = tuple(Cell(spec, box, ranks) for box, ranks in between_cuts(spec, boxes, problems))
        problems += _problems_of_names(set(held), aliases, derived)
        problems += _derived_shapes(derived, cells)
        problems += problems_of_claims(layouts)
        return cls.of(len(layouts), cells, aliases, derived, problems)

    @classmethod
    def described(
        cls,
        world: int,
        cells: dict[TensorSpec, tuple[Cell, ...]],
        aliases: dict[str, str],
        derived: set[str],
        problems: Sequence[str],
    ) -> ShardGraph:
        """Return the graph of cells that are known already (:func:`between_cuts`); ``problems``: found on the way."""
        held = {spec.key for spec in cells}
        found = [*problems, *_problems_of_names(held, aliases, derived), *_derived_shapes(derived, cells)]
        return cls.of(world, cells, aliases, derived, found)

    @classmethod
    def of(
        cls,
        world: int,
        cells: dict[TensorSpec, tuple[Cell, ...]],
        aliases: dict[str, str],
        derived: set[str],
        problems: Sequence[str],
    ) -> ShardGraph:
        """Return the graph, what has an order in it."""
        tied = dict(sorted(aliases.items()))
        return cls(world, tuple(sorted(cells)), cells, tied, frozenset(derived), tuple(problems))

    def check(self) -> None:
        """Raise :class:`LayoutError` with every problem, if there is any."""
        if self.problems:
            raise LayoutError(
                f"the ranks' shards do not form a whole ({count(len(self.problems), 'problem')})", self.problems
            )

    def bytes_held(self) -> int:
        """Bytes that all ranks hold together."""
        return sum(c.nbytes * len(c.ranks) for cells in self.cells.values() for c in cells)

    def bytes_unique(self) -> int:
        """Bytes of one copy of everything, derivable parameters not counted."""
        return sum(s.nbytes for s in self.specs if not (s.role == PARAM and s.fqn in self.derived))


def _problems_of_names(held: set[tuple[str, str]], aliases: dict[str, str], derived: set[str]) -> list[str]:
    names = {fqn for fqn, _ in held}
    found = [f"alias {a!r} points to {t!r}, which no rank holds" for a, t in aliases.items() if t not in names]
    return found + [
        f"tensor {fqn!r} is declared as derived but no rank holds its {role}"
        for fqn in sorted(derived)
        for role in (PARAM, MASTER)
        if (fqn, role) not in held
    ]


def _derived_shapes(derived: set[str], cells: Iterable[TensorSpec]) -> list[str]:
    shapes = {spec.key: list(spec.shape) for spec in cells}
    return [
        f"tensor {fqn!r} is declared as derived but its param has shape {shapes[fqn, PARAM]} and its master "
        f"{shapes[fqn, MASTER]}"
        for fqn in sorted(derived)
        if (fqn, PARAM) in shapes and (fqn, MASTER) in shapes and shapes[fqn, PARAM] != shapes[fqn, MASTER]
    ]


def _disagreement(variants: dict[TensorSpec, dict[Box, list[int]]]) -> str:
    sides = []
    for spec, boxes in sorted(variants.items()):
        ranks = sorted({r for ranks in boxes.values() for r in ranks})
        sides.append(f"{spec.dtype}{list(spec.shape)} on rank(s) {some(ranks)}")
    spec = next(iter(variants))
    return f"tensor {spec.fqn!r} ({spec.role}): ranks disagree on dtype or shape: " + ", ".join(sides)


def between_cuts(
    spec: TensorSpec, boxes: Mapping[Box, Sequence[int]], problems: list[str]
) -> list[tuple[Box, tuple[int, ...]]]:
    """Return the boxes between all ranks' cuts of a tensor, in row-major order, and who holds each, ascending.

    Args:
        spec: the tensor.
        boxes: box -> the ranks that list it.
        problems: what is wrong with them is added here.
    """
    inside = {}
    for box, ranks in boxes.items():
        if not box.within(spec.shape):
            problems.append(f"{spec}: rank(s) {some(sorted(ranks))} hold box {box}, which is out of bounds")
        else:
            inside[box] = ranks
    for box, ranks in inside.items():
        if len(set(ranks)) != len(ranks) and box.volume:
            twice = sorted({r for r in ranks if ranks.count(r) > 1})
            problems.append(f"{spec}: rank(s) {some(twice)} list box {box} twice")
    solid = {box: tuple(sorted(set(ranks))) for box, ranks in inside.items() if box.volume or not spec.nbytes}
    if first_overlap(list(solid)) is not None:  # else those of one rank do not overlap either
        _check_own_overlap(spec, solid, problems)
        solid = _refine(solid)
    missing = Box.whole(spec.shape).volume - sum(b.volume for b in solid)
    if missing > 0:
        gap = _first_gap(spec, list(solid))
        problems.append(f"{spec}: {missing} element(s) held by no rank, the first in box {gap}")
    return sorted(solid.items(), key=lambda one: (one[0].offsets, one[0].sizes))


def _check_own_overlap(spec: TensorSpec, boxes: dict[Box, tuple[int, ...]], problems: list[str]) -> None:
    """Different boxes of *one* rank must not share elements: which of the two copies would be the state?"""
    own: dict[int, list[Box]] = {}
    for box, ranks in boxes.items():
        for rank in ranks:
            own.setdefault(rank, []).append(box)
    for rank, mine in own.items():
        pair = first_overlap(mine) if len(mine) > 1 else None
        if pair is not None:
            problems.append(f"{spec}: rank {rank} holds overlapping boxes {pair[0]} and {pair[1]}")


def _grid(boxes: Iterable[Box], shape: Sequence[int] | None = None) -> list[Box]:
    """Return all boxes of the grid that the cuts of ``boxes`` (and the borders of ``shape``) draw."""
    cuts: list[set[int]] = []
    for box in boxes:
        cuts = cuts or [set() for _ in range(box.ndim)]
        for dim in range(box.ndim):
            cuts[dim].update((box.offsets[dim], box.ends[dim]))
    for dim, size in enumerate(shape or ()):
        cuts = cuts or [set() for _ in range(len(shape or ()))]
        cuts[dim].update((0, size))
    spans = [[(a, b - a) for a, b in pairwise(sorted(c))] for c in cuts]
    return [Box(tuple(o for o, _ in cell), tuple(s for _, s in cell)) for cell in product(*spans)]


def _refine(boxes: dict[Box, tuple[int, ...]]) -> dict[Box, tuple[int, ...]]:
    """Cut overlapping boxes at every rank's boundaries and collect the holders of each piece."""
    sources, holders = list(boxes), list(boxes.values())
    pieces = _grid(sources)
    found: dict[int, set[int]] = {}
    for source, piece, _ in overlaps(sources, pieces):
        found.setdefault(piece, set()).update(holders[source])
    return {pieces[p]: tuple(sorted(ranks)) for p, ranks in found.items()}


def _first_gap(spec: TensorSpec, boxes: list[Box]) -> Box:
    pieces = _grid(boxes, spec.shape)
    covered = {p for _, p, _ in overlaps(boxes, pieces)}
    return next(pieces[p] for p in range(len(pieces)) if p not in covered)
