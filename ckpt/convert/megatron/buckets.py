"""Where the parameters are in the buckets of Megatron's distributed optimizer. Pure, but for a comparison of contents.

Buckets record no names. Megatron fills them in the reverse order of the model's parameters, each at a multiple of
:data:`ALIGNMENT`, so that the last stage's last buffer comes first: what is behind the layers, then layer by layer
downwards, then the embeddings. Within a layer the order depends on how the model was built, and is found: at each place
stands the parameter whose weights are there.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ckpt.words import some

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ALIGNMENT = 64
"""Elements: in a bucket, parameters start at multiples of it."""
_ORDER = [
    re.compile(pattern)
    for pattern in (
        r"input_layernorm\.",
        r"self_attention\.linear_(?:proj|qkv\.layer_norm)",
        r"self_attention\.linear_qkv\.",
        r"self_attention\.q_layernorm\.",
        r"self_attention\.k_layernorm\.",
        r"pre_mlp_layernorm\.|mlp\.linear_fc1\.layer_norm_",
        r"mlp\.router\.",
        r"mlp\.linear_fc1\.",
        r"mlp\.linear_fc2\.",
    )
]
"""Modules of a layer as Megatron's layers of either kind (local, Transformer Engine) have them one behind the other.
The norm before the attention is in front of the projection in one kind and behind it in the other: not known."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter as the ranks of a stage have it.

    ``leaf``: what it is called within its layer. ``names``: its full name on each lane (tensor and expert ranks; they
    differ where ranks have experts of their own). ``numel``: of each lane's part. ``again``: it is a second copy, of an
    embedding that is tied across stages.
    """

    leaf: str
    names: tuple[str, ...]
    numel: int
    again: bool = False


@dataclass(frozen=True, slots=True)
class Bucket:
    """``label``: for messages. ``numel``: elements without what fills it up for the ranks. ``padded``: with it.
    ``cuts``: where one stored part ends and the next starts; None: unknown, and several buckets may be joined in it
    without what filled them up. ``ranks``: most ranks that it was cut for.
    """

    label: str
    numel: int
    padded: int = 0
    cuts: tuple[int, ...] | None = None
    ranks: int = 1

    def holds(self, start: int, numel: int) -> bool:
        """Can exactly one parameter be here, as far as the cuts tell?

        >>> bucket = Bucket("", 200, 256, (64, 128), ranks=2)
        >>> bucket.holds(64, 136), bucket.holds(0, 128), bucket.holds(128, 60)
        (True, False, False)
        >>> bucket.holds(0, 64), bucket.holds(64, 64), bucket.holds(128, 72), bucket.holds(0, 200)
        (True, True, True, False)
        """
        stop = start + numel
        if self.cuts is None or stop > self.numel:
            return stop <= self.numel
        first, last = bisect_right(self.cuts, start), bisect_left(self.cuts, stop)
        if start and self.cuts[first - 1 : first] != (start,):
            return False
        if stop != self.numel and self.cuts[last : last + 1] != (stop,):
            return False
        return all(cut * self.ranks % self.padded == 0 for cut in self.cuts[first:last])


@dataclass(frozen=True, slots=True)
class Spot:
    """A parameter's place: ``bucket`` is the number of it."""

    bucket: int
    start: int
    slot: Slot


@dataclass(slots=True)
class Placing:
    """``problem``: empty, or why not all could be placed. ``told``: leafs whose order no weights prove, and which are
    in the one that Megatron has.
    """

    spots: list[Spot] = field(default_factory=list)
    problem: str = ""
    told: set[str] = field(default_factory=set)


Same = Callable[[int, int, Slot], bool]
"""Has the bucket of this number, from this element on, the weights of this parameter, on all lanes?"""


def place(buckets: Sequence[Bucket], zones: Sequence[Sequence[Slot]], same: Same) -> Placing:
    """Find the place of each parameter.

    Args:
        buckets: those of one dtype, in the order in which Megatron fills them, last stage first.
        zones: parameters; of each zone all come before the first one of the next, in an order that is not known.
        same: compares contents.
    """
    zones = [zone for zone in zones if zone]
    found = Placing()
    sets: list[_Zone] = [_Zone(list(zone)) for zone in zones]
    waiting = iter(sets)
    zone = next(waiting, None)
    for number, bucket in enumerate(buckets):
        base = at = 0
        while (start := _aligned(at, base)) < bucket.numel or (bucket.cuts is None and at < bucket.numel):
            if zone is None:
                found.problem = f"{bucket.label} goes on at element {start}, and all parameters are placed"
                return found
            fits = _fits(zone.left, bucket, start, partial(same, number))
            if bucket.cuts is None and at != start:  # or another bucket starts here
                others = _fits(zone.left, bucket, at, partial(same, number))
                if fits and others:
                    found.problem = f"{bucket.label} goes on at element {at} or {start}, both have weights"
                    return found
                if others:
                    fits, start, base = others, at, at
            if not fits:
                leafs = some([slot.names[0] for slot in zone.left], 3)
                found.problem = f"at element {start} of {bucket.label} are the weights of none of {leafs}"
                return found
            spot = Spot(number, start, fits[0])
            found.spots.append(spot)
            zone.take(spot, fits)
            at = start + fits[0].numel
            zone = zone if zone.left else next(waiting, None)
    if zone is not None:
        found.problem = f"no bucket has {some([slot.names[0] for slot in zone.left], 3)}"
        return found
    found.problem = _settle(sets, found.told)
    found.spots = [spot for one in sets for spot in one.spots]
    return found


def _fits(slots: Sequence[Slot], bucket: Bucket, start: int, same: Callable[[int, Slot], bool]) -> list[Slot]:
    """Return which parameters can be there, by size and content."""
    return [slot for slot in slots if bucket.holds(start, slot.numel) and same(start, slot)]


class _Zone:
    """What is placed of a zone. Parameters with the same weights are alike: which is where is settled in the end."""

    def __init__(self, left: list[Slot]) -> None:
        self.left = left
        self.spots: list[Spot] = []
        self.alike: dict[str, int] = {}

    def take(self, spot: Spot, fits: list[Slot]) -> None:
        self.left.remove(spot.slot)
        self.spots.append(spot)
        kind = self.alike.get(spot.slot.leaf, len(self.spots))
        self.alike |= {slot.leaf: self.alike.get(slot.leaf, kind) for slot in fits}

    def tied(self) -> Iterator[list[int]]:
        """Yield the numbers of spots that parameters with the same weights have."""
        kinds: dict[int, list[int]] = defaultdict(list)
        for n, spot in enumerate(self.spots):
            kinds[self.alike[spot.slot.leaf]].append(n)
        yield from (one for one in kinds.values() if len(one) > 1)

    def order(self, leafs: set[str]) -> tuple[str, ...] | None:
        """Return the order that these leafs have here, if their weights tell them apart."""
        if len({self.alike[leaf] for leaf in leafs & self.alike.keys()}) != len(leafs):
            return None
        return tuple(spot.slot.leaf for spot in self.spots if spot.slot.leaf in leafs)


def _settle(zones: Sequence[_Zone], told: set[str]) -> str:
    """Give parameters with the same weights the order that they have in other layers, else Megatron's.

    Returns:
        empty, or what is not known.
    """
    proven = {}
    for zone in zones:
        for spots in zone.tied():
            slots = {zone.spots[n].slot.leaf: zone.spots[n].slot for n in spots}
            orders = {order for other in zones if (order := other.order(set(slots)))}
            order = orders.pop() if len(orders) == 1 else None
            if order is None:
                order = _by_rule(list(slots)) if not orders else None
                told |= set(slots)
            if order is None:
                return f"{some(sorted(slots))} have the same weights, and which of them is where is not known"
            proven[id(zone), tuple(spots)] = [slots[leaf] for leaf in order]
    for zone in zones:
        for spots in list(zone.tied()):
            for n, slot in zip(spots, proven[id(zone), tuple(spots)], strict=True):
                zone.spots[n] = Spot(zone.spots[n].bucket, zone.spots[n].start, slot)
    layers = defaultdict(set)
    for zone in zones:
        layers[frozenset(zone.alike)].add(tuple(spot.slot.leaf for spot in zone.spots))
    mixed = [orders for orders in layers.values() if len(orders) > 1]
    return f"layers have their parameters in different orders ({some(sorted(mixed[0]), 2)})" if mixed else ""


def _by_rule(leafs: list[str]) -> tuple[str, ...] | None:
    """Return the order in which Megatron has these leafs in a bucket, if that is known.

    >>> _by_rule(["mlp.linear_fc1.layer_norm_weight", "self_attention.linear_qkv.layer_norm_weight"])
    ('mlp.linear_fc1.layer_norm_weight', 'self_attention.linear_qkv.layer_norm_weight')
    >>> _by_rule(["self_attention.linear_qkv.layer_norm_bias", "self_attention.linear_proj.bias"])
    """
    ranks = {leaf: next((n for n, one in enumerate(_ORDER) if one.match(leaf)), None) for leaf in leafs}
    known = {leaf: rank for leaf, rank in ranks.items() if rank is not None}
    if len(set(known.values())) != len(leafs):
        return None
    return tuple(sorted(known, key=lambda leaf: known[leaf], reverse=True))


def _aligned(at: int, base: int) -> int:
    return base + -((base - at) // ALIGNMENT) * ALIGNMENT
