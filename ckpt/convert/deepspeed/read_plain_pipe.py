"""The numbered optimizers of a pipeline without ZeRO: which stage has which layers is in no file either.

All stages are dealt out together. Each has layers of its own, those of the next one behind them, and anything may be
frozen. A module that stages share comes first in each of them; it is told by its state, which is the same on all of
them, bit for bit, and of nothing else. Only if one naming of all stages is left it is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpt.convert.deepspeed.read_files import numel_of
from ckpt.convert.deepspeed.read_optim import sample
from ckpt.convert.deepspeed.read_plain import MAX_STATES, Candidate, Fits, Group, Taken, places
from ckpt.convert.torchfile.names import Stored

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt.store.base import Store

Naming = list[list[Taken]]
"""For each stage what its optimizer steps."""
MANY = 10**9
"""Namings, from which on they are not counted."""
_Node = tuple[int, tuple[int, ...], bool]
"""Stage, position in each of its groups, and whether it has taken something of the layer that is being dealt out."""


@dataclass(frozen=True, slots=True)
class Layer:
    """``stage``: that has it, as far as a file says so."""

    stage: int | None
    candidates: tuple[Candidate, ...]


@dataclass(slots=True)
class _Way:
    """How many namings lead somewhere, and the last step of one of them: the stage, and what it has taken there."""

    count: int
    stage: int
    taken: tuple[Taken, ...] = ()
    before: _Way | None = None


def deal_stages(store: Store, stages: Sequence[Sequence[Group]], layers: Sequence[Layer]) -> Naming | None:
    """Return which parameter each item of each stage is; None if there is no naming, or more than one."""
    twins = Twins(store, stages)
    fits = [Fits(store, groups) for groups in stages]
    found: Naming | None = None
    for order, tied in _orders(layers, twins):
        count, naming = _Dealing(stages, fits, twins, tied).deal(order)
        if tied and not twins.proven:  # in this order only if it is shared
            alone = _Dealing(stages, fits, twins, None).deal(order)[0]
            if count == alone < MANY:
                continue
        if count > 1 or (naming is not None and found is not None and _names(naming) != _names(found)):
            return None
        found = naming or found
    return found


def _orders(layers: Sequence[Layer], twins: Twins) -> Iterator[tuple[Sequence[Layer], Layer | None]]:
    """Yield the orders in which modules may come: any layer of the first stage may be shared, and so the first one."""
    if not twins.proven:
        yield layers, None
    for k, layer in enumerate(layers) if twins.possible else ():
        before, behind = [replace(one, stage=0) for one in layers[:k]], layers[k + 1 :]
        if all(one.stage in (None, 0) for one in layers[: k + 1]):
            first = replace(layer, stage=0)
            yield [first, *before, *behind], first


def _names(naming: Naming) -> list[set[tuple[int, int, str]]]:
    return [{(one.group, one.at, one.candidate.local) for one in stage} for stage in naming]


class Twins:
    """Which items of later stages have the state of one of the first stage, at all places that are looked at.

    ``possible``: are there any? ``proven``: some that are not constant, which no two parameters have by chance?
    """

    def __init__(self, store: Store, stages: Sequence[Sequence[Group]]) -> None:
        self._store = store
        self._prints: dict[tuple[int, int, int], tuple[bytes, bool]] = {}
        self.flat = any(group.flat for groups in stages for group in groups)
        if len(stages) > 1 and not self.flat:
            for s, groups in enumerate(stages):
                for g, group in enumerate(groups):
                    for n in range(len(group.items)):
                        self._prints[s, g, n] = self._print(group, n)
        first = {key: one for key, one in self._prints.items() if key[0] == 0}
        self._first = {one: key for key, one in first.items()}
        self._later = {key for key, one in self._prints.items() if key[0] and one in self._first}
        self.proven = any(self._prints[key][1] for key in self._later)
        self.possible = bool(self._later) or (self.flat and len(stages) > 1)

    def may_be_shared(self, stage: int, group: int, at: int) -> bool:
        """May it be of a module that the first stage has too?"""
        return self.flat or (stage, group, at) in self._later

    def may_be_own(self, stage: int, group: int, at: int) -> bool:
        """May it be of a layer that this stage alone has?"""
        return self.flat or (stage, group, at) not in self._later or not self._prints[stage, group, at][1]

    def count(self, stage: int) -> int:
        """Return how many items of a stage may be shared."""
        return sum(1 for key in self._later if key[0] == stage)

    def agree(self, naming: Naming) -> bool:
        """Is what is called alike on two stages the same?"""
        prints: dict[str, tuple[bytes, bool]] = {}
        for s, taken in enumerate(naming if self._prints else ()):
            for one in taken:
                mine = self._prints[s, one.group, one.at]
                if prints.setdefault(one.candidate.local, mine) != mine:
                    return False
        return True

    def _print(self, group: Group, number: int) -> tuple[bytes, bool]:
        item = group.items[number]
        found, varied = [], False
        for role, value in sorted({"": item.master, **item.state}.items(), key=lambda one: str(one[0])):
            if not isinstance(value, Stored):
                continue
            parts = [b""]
            if value.is_contiguous and value.volume:
                tensors = [sample(self._store, value, low, high - low) for low, high in places(value.volume)]
                parts = [tensor.numpy().tobytes() for tensor in tensors]
                varied |= any(bool((tensor != tensor[0]).any()) for tensor in tensors)
            found.append(f"{role} {value.dtype} {value.shape} ".encode() + b"".join(parts))
        return b"\0".join(found), varied


class _Dealing:
    """Deals layers out in one order. ``tied``: the layer that later stages may share."""

    def __init__(
        self, stages: Sequence[Sequence[Group]], fits: Sequence[Fits], twins: Twins, tied: Layer | None
    ) -> None:
        self._stages, self._fits, self._twins, self._tied = stages, fits, twins, tied
        self._ends = [tuple(group.end for group in groups) for groups in stages]
        self._flat = twins.flat
        needed = [0 if self._flat else sum(end) - twins.count(s) for s, end in enumerate(self._ends)]
        self._later = [sum(needed[s + 1 :]) for s in range(len(stages))]
        self._entries: dict[int, list[tuple[tuple[int, ...], int, tuple[Taken, ...]]]] = {}

    def deal(self, order: Sequence[Layer]) -> tuple[int, Naming | None]:
        """Return how many namings there are (:data:`MANY`: or too many to follow), and the one if it is one."""
        left = sum(self._size(c) for layer in order for c in layer.candidates)
        nodes: dict[_Node, _Way] = {(0, (0,) * len(self._ends[0]), False): _Way(1, 0)}
        for layer in order:
            fresh: dict[_Node, _Way] = {}
            for (s, at, _), way in nodes.items():
                _put(fresh, (s, at, False), way)
            nodes = fresh
            for candidate in layer.candidates:
                left -= self._size(candidate)
                nodes = self._step(nodes, layer, candidate, left)
                if len(nodes) > MAX_STATES:
                    return MANY, None
        last: dict[_Node, _Way] = {}
        for node, way in nodes.items():
            for (s, at, _), reached in self._here((*node[:2], False), way):
                if s == len(self._stages) - 1 and at == self._ends[s]:
                    _put(last, (s, at, False), reached)
        only = last.get((len(self._stages) - 1, self._ends[-1], False))
        if only is None:
            return 0, None
        if only.count > 1:
            return min(MANY, only.count), None
        naming = self._naming(only)
        return (1, naming) if self._twins.agree(naming) else (0, None)

    def _step(self, nodes: dict[_Node, _Way], layer: Layer, candidate: Candidate, left: int) -> dict[_Node, _Way]:
        found: dict[_Node, _Way] = {}
        for node, way in nodes.items():
            if self._missing(node) <= left:
                _put(found, node, way)  # frozen
            for (s, at, _), here in self._here(node, way):
                if layer.stage not in (None, s):
                    continue
                for g, one in enumerate(at):
                    after = self._fits[s].after(g, one, candidate)
                    behind = (s, (*at[:g], after or 0, *at[g + 1 :]), True)
                    if after is not None and self._twins.may_be_own(s, g, one) and self._missing(behind) <= left:
                        _put(found, behind, _Way(here.count, s, (Taken(g, one, candidate),), here))
        return found

    def _here(self, node: _Node, way: _Way) -> Iterator[tuple[_Node, _Way]]:
        """Yield a node, and how the next stages begin if it is the end of its own."""
        yield node, way
        s, at, touched = node
        if touched or at != self._ends[s] or s + 1 == len(self._stages):
            return
        for begun, count, taken in self._entry(s + 1):
            yield from self._here((s + 1, begun, False), _Way(min(MANY, way.count * count), s + 1, taken, way))

    def _entry(self, stage: int) -> list[tuple[tuple[int, ...], int, tuple[Taken, ...]]]:
        """Return where a stage can be behind the module that it may share: positions, ways to them, and what it is."""
        if stage not in self._entries:
            start: tuple[int, ...] = (0,) * len(self._ends[stage])
            found: dict[tuple[int, ...], tuple[int, tuple[Taken, ...]]] = {start: (1, ())}
            for candidate in self._tied.candidates if self._tied else ():
                for at, (count, taken) in list(found.items()):
                    for g, one in enumerate(at):
                        after = self._fits[stage].after(g, one, candidate)
                        if after is None or not self._twins.may_be_shared(stage, g, one):
                            continue
                        behind = (*at[:g], after, *at[g + 1 :])
                        more = (count + found[behind][0]) if behind in found else count
                        found[behind] = (min(MANY, more), (*taken, Taken(g, one, candidate, shared=True)))
            self._entries[stage] = [(at, count, taken) for at, (count, taken) in found.items()]
        return self._entries[stage]

    def _missing(self, node: _Node) -> int:
        """Return how many elements or items are needed behind a node at least."""
        s, at, _ = node
        return self._later[s] + sum(self._ends[s]) - sum(at)

    def _size(self, candidate: Candidate) -> int:
        return numel_of(candidate.shape) if self._flat else 1

    def _naming(self, way: _Way | None) -> Naming:
        found: Naming = [[] for _ in self._stages]
        while way is not None:
            found[way.stage] = [*way.taken, *found[way.stage]]
            way = way.before
        return found


def _put(nodes: dict[_Node, _Way], node: _Node, way: _Way) -> None:
    known = nodes.get(node)
    if known is None:
        nodes[node] = way
    else:
        nodes[node] = replace(known, count=min(MANY, known.count + way.count))
