"""State of Megatron's distributed optimizer that is stored as its buckets: given to the parameters it belongs to.

Which parameter is where is derived from names and sizes and proved by the weights: each element of the optimizer's copy
has to be that of the model, cast. What cannot be proved is refused.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt.convert.megatron.bucket_files import Flat
from ckpt.convert.megatron.buckets import Bucket, Placing, Slot, place
from ckpt.convert.megatron.names import OUTPUT, ROLES, WORDS
from ckpt.convert.naming import layer_of, place_of, stack_of
from ckpt.convert.torchfile.stored import Gathered
from ckpt.layout.box import Box, boxes_of_range
from ckpt.layout.spec import ITEMSIZE, MASTER
from ckpt.runtime.staging import as_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from ckpt.convert.megatron.bucket_files import Buffer, Chain
    from ckpt.convert.opened import Builder
    from ckpt.convert.torchfile.file import Stored
    from ckpt.store.base import Store

SAMPLE = 64
"""Elements of each parameter that are kept, so that most wrong places need no reading."""
BLOCK = 1 << 20
"""Elements that are compared at once."""
COPY = "param"
"""Role of the optimizer's copy of the weights."""
_EXPERT = re.compile(r"(?<=\.experts\.experts\.)(\d+)(?=\.)")

Parts = tuple[tuple[Box, "Stored"], ...]
"""Boxes of a parameter that lie one behind the other in a rank's part of it."""


@dataclass(slots=True)
class Found:
    """``chains``: which optimizer has the state of which parameter. ``problem``: empty, or why they are not known."""

    chains: dict[str, int] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    problem: str = ""


@dataclass(slots=True)
class _Solved:
    """One dtype of one optimizer. ``lanes``: flat tensors by bucket and lane."""

    chain: int
    placing: Placing
    lanes: list[list[dict[str, Flat]]]
    tp: int


class BucketState:
    """The parameters of a checkpoint, for finding which state in its buckets is theirs.

    Args:
        store: where the files are.
        parameters: name -> boxes of it as they are stored.
        shapes: of each parameter.
    """

    def __init__(
        self,
        store: Store,
        parameters: Mapping[str, Sequence[tuple[Box, Stored]]],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._store, self._shapes = store, shapes
        self._pieces = {name: tuple(sorted(parts, key=lambda one: one[0])) for name, parts in parameters.items()}
        self._dtypes = {name: parts[0][1].dtype for name, parts in self._pieces.items() if parts}
        self._stack = stack_of(self._pieces)
        self._samples: dict[Stored, torch.Tensor] = {}
        self._begun: dict[int, torch.Tensor] = {}
        self._begun_at = -1

    def add(self, chains: Sequence[Chain], builder: Builder) -> Found:
        """Find the place of each parameter, and tell the builder where its state is."""
        dense, experts = ([c for c in chains if c.experts is kind] for kind in (False, True))
        if len(dense) != 1 or len(experts) > 1:
            return Found(
                problem=f"{len(dense)} optimizers of layers and {len(experts)} of experts, expected one of each"
            )
        solved = self._solve(dense[0], experts)
        found = Found(problem=next((one.placing.problem for one in solved if one.placing.problem), ""))
        if not found.problem:
            for one in solved:
                found.told |= one.placing.told
                found.chains |= self._give(one, builder)
        return found

    # -------------------------------------------------------------------------------------------------------- layouts

    def _solve(self, dense: Chain, experts: Sequence[Chain]) -> list[_Solved]:
        """Try each degree of tensor parallelism; return the attempt that has placed all, or most."""
        best: list[_Solved] = []
        for tp in _divisors(len(dense.groups)):
            stages = len(dense.groups) // tp
            names = [name for name in self._dtypes if not _EXPERT.search(name)]
            solved = self._of_chain(dense, names, stages, tp, 1)
            if not any(one.placing.problem for one in solved):
                for chain in experts:
                    solved += self._of_experts(chain, stages)
                if not experts and len(names) != len(self._dtypes):
                    solved[0].placing.problem = "experts that no optimizer has"
            if not any(one.placing.problem for one in solved):
                return solved
            if sum(len(one.placing.spots) for one in solved) >= sum(len(one.placing.spots) for one in best):
                best = solved
        return best

    def _of_experts(self, chain: Chain, stages: int) -> list[_Solved]:
        names = [name for name in self._dtypes if _EXPERT.search(name)]
        lanes = len(chain.groups) // stages
        best = [_Solved(chain.number, Placing(problem="experts are in groups of another number of stages"), [], 1)]
        for tp in _divisors(lanes) if lanes * stages == len(chain.groups) else ():
            solved = self._of_chain(chain, names, stages, tp, lanes // tp)
            best = solved
            if not any(one.placing.problem for one in solved):
                break
        return best

    def _of_chain(self, chain: Chain, names: Sequence[str], stages: int, tp: int, ep: int) -> list[_Solved]:
        """Solve each dtype of an optimizer whose stages have ``tp`` times ``ep`` groups each."""
        found = []
        dtypes = {self._dtypes[name] for name in names} | {b.dtype for group in chain.groups for b in group}
        for dtype in sorted(dtypes):
            buckets, lanes, problem = _lanes(chain.groups, dtype, stages)
            zones, unfit = self._zones([name for name in names if self._dtypes[name] == dtype], tp, ep, stages)
            problem = problem or unfit
            placing = Placing(problem=problem) if problem else self._place(buckets, lanes, zones, tp)
            found.append(_Solved(chain.number, placing, lanes, tp))
        return found

    def _zones(self, names: Sequence[str], tp: int, ep: int, stages: int) -> tuple[list[list[Slot]], str]:
        """Return the parameters behind the layers, of each layer from the last one on, and before the layers."""
        zones: dict[int, list[Slot]] = defaultdict(list)
        experts = 1 + max((int(m[1]) for m in map(_EXPERT.search, names) if m), default=-1)
        if experts % ep:
            return [], f"{experts} experts on {ep} ranks"
        each = experts // ep
        top, bottom = 1 << 62, -1
        for name in sorted(names):
            expert = _EXPERT.search(name)
            if expert and int(expert[1]) >= each:
                continue
            lanes = [name]
            if expert:
                lanes = [_EXPERT.sub(str(int(expert[1]) + e * each), name) for e in range(ep)]
            if any(one not in self._pieces for one in lanes):
                return [], f"{name} has no counterpart on other ranks of experts"
            numels = {_numel(self._part(one, t, tp)) for one in lanes for t in range(tp)}
            if len(numels) != 1 or 0 in numels:
                return [], f"{name} is not cut into {tp} equal parts"
            layer = layer_of(name, self._stack)
            leaf = name if layer is None else name[len(self._stack or "") :].partition(".")[2]
            slot = Slot(leaf, tuple(one for one in lanes for _ in range(tp)), numels.pop())
            outside = bottom if place_of(name) == "first" else top
            zones[outside if layer is None else layer].append(slot)
            if name == WORDS and OUTPUT not in self._pieces and stages > 1:
                zones[top].append(Slot(leaf, slot.names, slot.numel, again=True))
        return [zones[number] for number in sorted(zones, reverse=True)], ""

    def _part(self, name: str, rank: int, tp: int) -> Parts:
        """Return a tensor rank's part of a parameter; empty if it has none that lies row by row."""
        pieces = self._pieces[name]
        if len(pieces) == 1:
            return pieces
        mine = pieces[rank::tp]
        rows = all(box.sizes[1:] == self._shapes[name][1:] for box, _ in mine)
        return mine if len(pieces) % tp == 0 and (len(mine) == 1 or rows) else ()

    # ---------------------------------------------------------------------------------------------------------- proof

    def _place(
        self, buckets: Sequence[Bucket], lanes: list[list[dict[str, Flat]]], zones: list[list[Slot]], tp: int
    ) -> Placing:
        if any(COPY not in flats for bucket in lanes for flats in bucket):
            return Placing(problem="buckets without a copy of the weights")

        def same(number: int, start: int, slot: Slot) -> bool:
            flats = [flats[COPY] for flats in lanes[number]]
            each = [(flat, name, lane % tp) for lane, (flat, name) in enumerate(zip(flats, slot.names, strict=True))]
            begun = all(self._begins(flat, start, self._part(name, rank, tp)) for flat, name, rank in each)
            return begun and all(self._equal(flat, start, self._part(name, rank, tp)) for flat, name, rank in each)

        return place(buckets, zones, same)

    def _begins(self, flat: Flat, start: int, parts: Parts) -> bool:
        box, stored = parts[0]
        count = min(SAMPLE, box.volume)
        if stored not in self._samples:
            self._samples[stored] = self._weights(stored, 0, count)
        if self._begun_at != start:
            self._begun_at = start
            self._begun.clear()
        if id(flat) not in self._begun:
            self._begun[id(flat)] = self._flat(flat, start, min(start + SAMPLE, flat.numel))
        return _cast_is(self._begun[id(flat)][:count], self._samples[stored])

    def _equal(self, flat: Flat, start: int, parts: Parts) -> bool:
        for box, stored in parts:
            for at in range(0, box.volume, BLOCK):
                stop = min(at + BLOCK, box.volume)
                if not _cast_is(self._flat(flat, start + at, start + stop), self._weights(stored, at, stop)):
                    return False
            start += box.volume
        return True

    def _flat(self, flat: Flat, start: int, stop: int) -> torch.Tensor:
        return as_tensor(bytearray(flat.read(self._store, start, stop)), flat.dtype, (stop - start,))

    def _weights(self, stored: Stored, start: int, stop: int) -> torch.Tensor:
        width = ITEMSIZE[stored.dtype]
        data = bytearray(Gathered(self._store, stored)[start * width : stop * width])
        return as_tensor(data, stored.dtype, (stop - start,))

    # ---------------------------------------------------------------------------------------------------------- state

    def _give(self, solved: _Solved, builder: Builder) -> dict[str, int]:
        done: set[tuple[str, Box]] = set()
        for spot in solved.placing.spots:
            if spot.slot.again:  # the first stage's counts
                continue
            for lane, name in enumerate(spot.slot.names):
                at = spot.start
                for box, _ in self._part(name, lane % solved.tp, solved.tp):
                    if (name, box) not in done:  # what ranks have alike is there on each of them
                        done.add((name, box))
                        for role, flat in solved.lanes[spot.bucket][lane].items():
                            self._give_box(builder, name, ROLES.get(role, role), box, flat, at)
                    at += box.volume
        return dict.fromkeys((name for name, _ in done), solved.chain)

    def _give_box(self, builder: Builder, name: str, role: str, box: Box, flat: Flat, at: int) -> None:
        if role == MASTER and flat.dtype == self._dtypes[name]:  # a second copy
            return
        spec = builder.spec(name, role, flat.dtype, self._shapes[name])
        if role == MASTER:
            builder.derived.add(name)
        for low, high, stored in flat.ranges(at, at + box.volume):
            start = stored.start
            for inner in boxes_of_range(box.sizes, low - at, high - at):
                offsets = tuple(a + b for a, b in zip(box.offsets, inner.offsets, strict=True))
                builder.add(spec, Box(offsets, inner.sizes), stored.key, start)
                start += inner.volume * spec.itemsize


def _lanes(
    groups: Sequence[Sequence[Buffer]], dtype: str, stages: int
) -> tuple[list[Bucket], list[list[dict[str, Flat]]], str]:
    """Return the buckets of a dtype from the last stage on, and the flat tensors of each by lane."""
    buckets: list[Bucket] = []
    flats: list[list[dict[str, Flat]]] = []
    lanes = len(groups) // stages
    mine = [[buffer for buffer in group if buffer.dtype == dtype] for group in groups]
    rounds = max(len(group) for group in mine)
    for number, stage in ((n, s) for n in reversed(range(rounds)) for s in reversed(range(stages))):
        found = [group[number] for group in mine[stage * lanes : (stage + 1) * lanes] if number < len(group)]
        if not found:
            continue
        sizes = [[(bucket.numel, bucket.padded) for bucket in buffer.buckets] for buffer in found]
        if len(found) != lanes or any(one != sizes[0] for one in sizes):
            return [], [], f"groups of one of {stages} stages have different buckets"
        buckets += found[0].buckets
        flats += [[buffer.flats[n] for buffer in found] for n in range(len(sizes[0]))]
    return buckets, flats, ""


def _cast_is(copy: torch.Tensor, weights: torch.Tensor) -> bool:
    cast = copy.to(weights.dtype)
    return bool(((cast == weights) | (cast.isnan() & weights.isnan())).all())


def _numel(parts: Parts) -> int:
    return sum(box.volume for box, _ in parts)


def _divisors(number: int) -> Iterator[int]:
    yield from (n for n in range(number, 0, -1) if number % n == 0)
