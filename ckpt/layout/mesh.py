"""Process groups as claims: each rank says with whom it shares an axis, and together the groups must tile the world."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt.layout.spec import RankLayout

AXES = ("dp", "cp", "tp", "pp")
"""Axes whose product is the world; expert parallelism (``ep``) lies inside of them."""


def mesh_problems(layouts: Sequence[RankLayout]) -> list[str]:
    """Return what is wrong with the groups that the ranks name; ``layouts[r]`` is rank ``r``'s."""
    world, problems = len(layouts), []
    named = {one.rank: dict(one.groups) for one in layouts}
    for axis in sorted({axis for groups in named.values() for axis in groups}):
        without = [rank for rank, groups in named.items() if axis not in groups]
        if without:
            problems.append(f"axis {axis!r}: rank(s) {_some(without)} name no group, the others do")
        problems += _axis_problems(axis, {r: groups[axis] for r, groups in named.items() if axis in groups}, world)
    for check in (_product, _clash):
        problems += islice((found for rank, groups in named.items() if (found := check(rank, groups, world))), 1)
    return problems


def problems_of_rank(rank: int, groups: Mapping[str, tuple[int, ...]], world: int) -> list[str]:
    """Return what is wrong with the groups of one rank, as far as it can tell without the others."""
    return [found for check in (_product, _clash) if (found := check(rank, groups, world))]


def problems_of_claims(layouts: Sequence[RankLayout]) -> list[str]:
    """Return what is wrong with all that ranks claim beside their shards: groups, and rules that fit nothing."""
    idle = set.intersection(*(set(one.unused) for one in layouts)) if layouts else set()
    return [*mesh_problems(layouts), *(f"rule {rule!r} fits nothing on any rank" for rule in sorted(idle))]


def _axis_problems(axis: str, groups: dict[int, tuple[int, ...]], world: int) -> list[str]:
    problems = []
    outside = [r for r, ranks in groups.items() if r not in ranks or min(ranks) < 0 or max(ranks) >= world]
    if outside:
        problems.append(
            f"axis {axis!r}: the group(s) of rank(s) {_some(outside)} lack their own rank or leave the world"
        )
    named = {rank: tuple(sorted(ranks)) for rank, ranks in groups.items()}
    by_group: dict[tuple[int, ...], list[int]] = {}
    for rank, ranks in named.items():
        by_group.setdefault(ranks, []).append(rank)
    for ranks, members in sorted(by_group.items()):
        strangers = [r for r in ranks if named.get(r, ranks) != ranks]
        if strangers:
            problems.append(
                f"axis {axis!r}: rank(s) {_some(members)} name the group ({_some(ranks)}), of which rank(s) "
                f"{_some(strangers)} name another"
            )
        if not strangers and len({groups[r] for r in members}) > 1:
            problems.append(f"axis {axis!r}: ranks {_some(members)} name their group in different orders")
    sizes = Counter(len(ranks) for ranks in groups.values())
    if len(sizes) > 1:
        problems.append(f"axis {axis!r}: groups of different sizes: {', '.join(map(str, sorted(sizes)))}")
    return problems


def _product(rank: int, groups: Mapping[str, tuple[int, ...]], world: int) -> str:
    sizes = {axis: len(groups[axis]) for axis in AXES if axis in groups}
    if not {"dp", "tp"} <= sizes.keys() or prod(sizes.values()) == world:
        return ""
    shown = " x ".join(f"{axis} {n}" for axis, n in sizes.items())
    return f"rank {rank}: its groups have {shown} = {prod(sizes.values())} ranks, the world has {world}"


def _clash(rank: int, groups: Mapping[str, tuple[int, ...]], world: int) -> str:
    seen: dict[int, str] = {}
    for axis in (axis for axis in AXES if axis in groups):
        for other in groups[axis]:
            if other != rank and seen.setdefault(other, axis) != axis:
                return (
                    f"ranks {rank} and {other} share both the {seen[other]} and the {axis} group: the axes do not cross"
                )
    return ""


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:6])) + (f", … ({len(ranks)} in all)" if len(ranks) > 6 else "")
