"""What becomes of state beside tensors when the number of ranks changes: one policy for each kind, all of it told.

The policies are those of a load (:mod:`ckpt.runtime.revive`), made lasting.

*Engine objects* (groups, scheduler, counters): every variant stays, each on at least one rank; where there are more
variants than ranks, those of one name become one. *Generators*: carried to the rank of the same number; a rank that the
source did not have gets a seed of its own, derived from the saved state and different from all others; generators that
nobody knows how to seed are refused. *Objects of the user*: what all ranks had alike, all ranks get; what differed by
rank (a data loader's cursor) is carried where the number of ranks is the same, else given by rank number, and told.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckpt.convert.opened import Loose
from ckpt.errors import ConfigError
from ckpt.format.digest import raw_digest
from ckpt.runtime.extras import ENGINE, RNG
from ckpt.words import listed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Carried:
    """``objects``: of the target. ``lost``, ``made``: a line for each thing that is left out or made up."""

    def __init__(self) -> None:
        self.objects: list[Loose] = []
        self.lost: list[str] = []
        self.made: list[str] = []


def carry(objects: Sequence[Loose], saved_world: int, world: int) -> Carried:
    """Return what a target of ``world`` ranks gets of the objects of a job of ``saved_world``.

    Raises:
        ConfigError: a generator state that cannot be seeded for the ranks that are new.
    """
    found = Carried()
    named: dict[tuple[str, str], list[Loose]] = {}
    for one in objects:
        named.setdefault((one.kind, one.name), []).append(one)
    engine = {name: variants for (kind, name), variants in sorted(named.items()) if kind == ENGINE}
    if world == saved_world:
        found.objects += objects
        return found
    _carry_engine(engine, saved_world, world, found)
    for (kind, name), variants in sorted(named.items()):
        if kind == RNG:
            _carry_generators(name, variants, saved_world, world, found)
        elif kind != ENGINE:
            _carry_by_rank(name, variants, saved_world, world, found)
    return found


def _of_rank(variants: Sequence[Loose], rank: int, saved_world: int) -> int:
    """Return which variant a rank gets: that of the rank of its number, modulo the saved world; else the first."""
    wanted = rank % saved_world
    return next((n for n, one in enumerate(variants) if wanted in one.ranks), 0)


def _spread(variants: Sequence[Loose], chosen: Sequence[int]) -> list[Loose]:
    """Return the variants with the ranks that have chosen them; those that nobody chose are left out."""
    ranks = [tuple(rank for rank, n in enumerate(chosen) if n == k) for k in range(len(variants))]
    return [replace(one, ranks=mine) for one, mine in zip(variants, ranks, strict=True) if mine]


# ------------------------------------------------------------------------------------------------------- engine objects


def _carry_engine(engine: Mapping[str, list[Loose]], saved_world: int, world: int, found: Carried) -> None:
    ways = [tuple(_of_rank(v, rank, saved_world) for v in engine.values()) for rank in range(saved_world)]
    distinct = list(dict.fromkeys(ways))
    if len(distinct) > world:
        for name, variants in engine.items():
            found.objects.append(Loose(name, ENGINE, tuple(range(world)), _merged(name, variants, engine, found)))
        return
    chosen = [ways[rank % saved_world] for rank in range(world)]
    for way in distinct:
        if way not in chosen:  # a rank whose variant others have too takes it, so that none is lost
            twice = next(rank for rank in reversed(range(world)) if chosen.count(chosen[rank]) > 1)
            chosen[twice] = way
    for n, variants in enumerate(engine.values()):
        found.objects += _spread(variants, [way[n] for way in chosen])


def _merged(name: str, variants: Sequence[Loose], engine: Mapping[str, list[Loose]], found: Carried) -> Any:
    """Return one tree for several variants: groups and modules are joined, of the rest the lowest rank's stays."""
    first, *others = trees = [one.tree for one in sorted(variants, key=lambda one: one.ranks)]
    if not others:
        return first
    if name == "optimizer" and all(isinstance(tree, dict) or tree is None for tree in trees):
        return merged_groups([tree for tree in trees if tree])
    if name == "modules" and all(isinstance(tree, dict) for tree in trees):
        return {key: value for tree in reversed(trees) for key, value in tree.items()}
    ranks = min(variants, key=lambda one: one.ranks).ranks
    found.lost.append(f"engine state {name!r} had {len(trees)} variants: that of rank {min(ranks, default=0)} is kept")
    return first


def names_of(objects: Sequence[Loose]) -> list[str]:
    """Return what objects there are: a line for each kind."""
    kinds: dict[str, list[str]] = {}
    for one in objects:
        kinds.setdefault(one.kind, []).append(repr(one.name))
    return [f"{kind} state {', '.join(dict.fromkeys(names))}" for kind, names in kinds.items()]


def merged_groups(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the optimizer's groups of several ranks as one list: groups with the same place and options are one group.

    ``trees``: ``{"class": …, "groups": [{"params": names, "options": {…}}, …]}``, as engines keep them.
    """
    groups: dict[tuple[int, str], dict[str, Any]] = {}
    for tree in trees:
        for place, group in enumerate(tree.get("groups", ())):
            key = place, repr(sorted(group["options"].items()))
            one = groups.setdefault(key, {**group, "params": []})
            one["params"] += [fqn for fqn in group["params"] if fqn not in one["params"]]
    first: dict[str, Any] = dict(trees[0]) if trees else {}
    return {**first, "groups": [groups[key] for key in sorted(groups, key=lambda key: key[0])]}


# --------------------------------------------------------------------------------------- generators and user's objects


def _carry_generators(name: str, variants: Sequence[Loose], saved_world: int, world: int, found: Carried) -> None:
    kept = [replace(one, ranks=tuple(rank for rank in one.ranks if rank < world)) for one in variants]
    found.objects += [one for one in kept if one.ranks]
    if world < saved_world:
        found.lost.append(f"generators of rank(s) {_span(world, saved_world)}: the target has no such ranks")
    for rank in range(saved_world, world):
        base = variants[_of_rank(variants, rank, saved_world)].tree
        found.objects.append(Loose(name, RNG, (rank,), derived_generators(base, rank)))
    if world > saved_world:
        found.made.append(
            f"generators of rank(s) {_span(saved_world, world)}: seeded anew, each differently, from the saved state"
        )


def derived_generators(base: Any, rank: int) -> dict[str, Any]:
    """Return generator states for a rank that the source did not have, like those of :mod:`ckpt.runtime.rng`.

    Raises:
        ConfigError: ``base`` has a generator that this release does not know: it cannot be seeded.
    """
    known = {"python", "numpy", "torch", "cuda"}
    if not isinstance(base, dict) or not base.keys() <= known:
        names = sorted(map(str, base.keys() - known)) if isinstance(base, dict) else [type(base).__name__]
        raise ConfigError(f"rank {rank} is new, and these generators cannot be seeded for it: {', '.join(names)}")
    seed = int.from_bytes(raw_digest(f"{rank}:{base!r}".encode())[:8], "little")
    states: dict[str, Any] = {
        "python": random.Random(seed).getstate(),  # noqa: S311 - the generator that training uses
        "numpy": np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32]).get_state(legacy=True),
        "torch": torch.Generator().manual_seed(seed).get_state(),
    }
    if "cuda" in base:  # Philox: the seed and how many numbers were drawn
        states["cuda"] = torch.frombuffer(bytearray(seed.to_bytes(8, "little") + bytes(8)), dtype=torch.uint8)
    return {key: states[key] for key in base}


def _carry_by_rank(name: str, variants: Sequence[Loose], saved_world: int, world: int, found: Carried) -> None:
    if len(variants) == 1 and len(variants[0].ranks) == saved_world:
        found.objects.append(replace(variants[0], ranks=tuple(range(world))))
        return
    chosen = [_of_rank(variants, rank, saved_world) for rank in range(world)]
    found.objects += _spread(variants, chosen)
    left = [one for n, one in enumerate(variants) if n not in chosen]
    if left:
        ranks = sorted(rank for one in left for rank in one.ranks)
        found.lost.append(f"{name!r} differed by rank: the state of rank(s) {listed(ranks, 8)} has no rank to go to")
    found.made.append(
        f"{name!r} differed by rank: rank r of {world} has the state of rank r"
        + (f" modulo {saved_world}" if world > saved_world else "")
        + f" of the {saved_world} that saved it"
    )


def _span(first: int, stop: int) -> str:
    return str(first) if stop == first + 1 else f"{first} to {stop - 1}"
