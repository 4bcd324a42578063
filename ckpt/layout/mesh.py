"""Process groups as claims: each rank says with whom it shares an axis, and together the groups must tile the world."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, islice
from math import prod
from typing import TYPE_CHECKING

from ckpt.words import some

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpt.layout.spec import RankLayout

AXES = ("pp", "dp", "cp", "tp")
"""Axes whose product is the world, from the slowest to the fastest rank number as launchers mostly count; expert
parallelism (``ep``) lies inside of them, and only where there are experts."""

UNEXPLAINED = (
    "there is a tensor-parallel group, but on no rank does a rule, a DTensor or an attribute of a parameter say how "
    "any tensor is cut for it"
)
"""What a rank claims as unused if all its tensors count as whole: a stage of norms may, not all stages."""


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """One object for all ranks that name the same group in the same order: compared by identity, looked at once."""

    ranks: tuple[int, ...]
    members: frozenset[int]

    @classmethod
    def of(cls, ranks: tuple[int, ...]) -> _Group:
        return cls(ranks, frozenset(ranks))


def mesh_problems(layouts: Sequence[RankLayout]) -> list[str]:
    """Return what is wrong with the groups that the ranks name; ``layouts[r]`` is rank ``r``'s.

    The cost is that of the different groups and of where two of them cross, not that of every rank's groups.
    """
    world, problems = len(layouts), []
    named = _shared(layouts)
    for axis in sorted({axis for groups in named.values() for axis in groups}):
        without = [rank for rank, groups in named.items() if axis not in groups]
        if without and axis in AXES:
            problems.append(f"axis {axis!r}: rank(s) {some(without)} name no group, the others do")
        problems += _axis_problems(axis, {r: groups[axis] for r, groups in named.items() if axis in groups}, world)
    for check in (_product, _clash):
        problems += islice((found for rank, groups in named.items() if (found := check(rank, groups, world))), 1)
    return problems


def problems_of_rank(rank: int, groups: Mapping[str, tuple[int, ...]], world: int) -> list[str]:
    """Return what is wrong with the groups of one rank, as far as it can tell without the others."""
    own = {axis: _Group.of(ranks) for axis, ranks in groups.items()}
    return [found for check in (_product, _clash) if (found := check(rank, own, world))]


def problems_of_claims(layouts: Sequence[RankLayout]) -> list[str]:
    """Return what is wrong with all that ranks claim beside their shards: groups, and rules that fit nothing."""
    idle = set.intersection(*(set(one.unused) for one in layouts)) if layouts else set()
    return [*mesh_problems(layouts), *idle_problems(idle)]


def idle_problems(unused: Iterable[str]) -> list[str]:
    """Return what is wrong with claims (``RankLayout.unused``) that every rank has made."""
    return [claim if claim == UNEXPLAINED else f"rule '{claim}' fits nothing on any rank" for claim in sorted(unused)]


def _shared(layouts: Sequence[RankLayout]) -> dict[int, dict[str, _Group]]:
    """Return each rank's groups, equal ones as one object. Those from other ranks are one tuple already if they are
    equal (``plan/wire.py``), found by its identity: to hash it again for every rank would cost the world squared.
    """
    by_ranks: dict[tuple[int, ...], _Group] = {}
    by_id: dict[int, _Group] = {}

    def group(ranks: tuple[int, ...]) -> _Group:
        if id(ranks) not in by_id:
            if ranks not in by_ranks:
                by_ranks[ranks] = _Group.of(ranks)
            by_id[id(ranks)] = by_ranks[ranks]
        return by_id[id(ranks)]

    return {one.rank: {axis: group(ranks) for axis, ranks in one.groups} for one in layouts}


def _axis_problems(axis: str, named: dict[int, _Group], world: int) -> list[str]:
    problems = []
    by_order: dict[_Group, list[int]] = {}
    for rank, group in named.items():
        by_order.setdefault(group, []).append(rank)
    beyond = {group for group in by_order if min(group.ranks, default=-1) < 0 or max(group.ranks) >= world}
    outside = [rank for rank, group in named.items() if group in beyond or rank not in group.members]
    if outside:
        problems.append(
            f"axis {axis!r}: the group(s) of rank(s) {some(outside)} lack their own rank or leave the world"
        )
    by_ranks: dict[tuple[int, ...], list[_Group]] = {}
    for group in by_order:
        by_ranks.setdefault(tuple(sorted(group.ranks)), []).append(group)
    for ranks, orders in sorted(by_ranks.items()):
        members = sorted(rank for group in orders for rank in by_order[group])
        strangers = [r for r in ranks if r in named and named[r] not in orders]
        if strangers:
            problems.append(
                f"axis {axis!r}: rank(s) {some(members)} name the group ({some(ranks)}), of which rank(s) "
                f"{some(strangers)} name another"
            )
        elif len(orders) > 1:
            problems.append(f"axis {axis!r}: ranks {some(members)} name their group in different orders")
    sizes = sorted({len(group.ranks) for group in by_order})
    if len(sizes) > 1:
        problems.append(f"axis {axis!r}: groups of different sizes: {', '.join(map(str, sizes))}")
    return problems


def _product(rank: int, groups: Mapping[str, _Group], world: int) -> str:
    sizes = {axis: len(groups[axis].ranks) for axis in AXES if axis in groups}
    if "dp" not in sizes or prod(sizes.values()) == world:  # without dp there is nothing to tell what is left to it
        return ""
    hint = " (name every axis of several ranks)" if prod(sizes.values()) < world else ""
    shown = " x ".join(f"{axis} {n}" for axis, n in sizes.items())
    return f"rank {rank}: its groups have {shown} = {prod(sizes.values())} ranks, the world has {world}{hint}"


def _clash(rank: int, groups: Mapping[str, _Group], world: int) -> str:
    for one, two in combinations((axis for axis in AXES if axis in groups), 2):
        others = (groups[one].members & groups[two].members) - {rank}
        if others:
            return f"ranks {rank} and {min(others)} share both the {one} and the {two} group: the axes do not cross"
    return ""
