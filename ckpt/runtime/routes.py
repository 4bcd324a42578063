"""The way of a unit through one rank: from host to host along the chain, at once to all that share memory on a host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ckpt.plan.read_plan import Unit
    from ckpt.runtime.sharing import Sharing


@dataclass(frozen=True, slots=True)
class Route:
    """Where a unit comes from, and where it goes.

    ``source``: the rank that it comes from, None for its reader. ``near``: from that rank's shared memory. ``onward``:
    the rank that it is sent to. ``mates``: those who copy it from this rank's shared memory.
    """

    source: int | None
    near: bool
    onward: int | None
    mates: tuple[int, ...]


def route_of(chain: Sequence[int], rank: int, names: Sequence[str], sharing: Collection[str]) -> Route:
    """Return the route of a unit with this chain through ``rank``.

    Args:
        chain: the reader, then who gets it from whom; the ranks of one host are neighbours in it.
        rank: one of them.
        names: of each rank's host.
        sharing: hosts whose ranks share memory: there the first has it for all, and sends it on.
    """
    at = chain.index(rank)
    first = at
    while first and names[chain[first - 1]] == names[rank]:
        first -= 1
    stop = at + 1
    while stop < len(chain) and names[chain[stop]] == names[rank]:
        stop += 1
    if names[rank] in sharing:
        if at > first:
            return Route(chain[first], True, None, ())
        onward, mates = chain[stop : stop + 1], tuple(chain[at + 1 : stop])
    else:
        onward, mates = chain[at + 1 : at + 2], ()
    source = at - 1
    if source >= 0 and names[chain[source]] != names[rank] and names[chain[source]] in sharing:
        while source and names[chain[source - 1]] == names[chain[at - 1]]:
            source -= 1
    return Route(chain[source] if at else None, False, onward[0] if onward else None, mates)


class Routes:
    """Routes of units through one rank. Those that do not fit into shared memory take the chain as it is."""

    def __init__(self, rank: int, sharing: Sharing | None) -> None:
        self.rank, self.sharing = rank, sharing
        self._known: dict[tuple[tuple[int, ...], bool], Route] = {}

    def of(self, unit: Unit) -> Route:
        """Return the way of a unit through this rank, which is in its chain."""
        key = unit.chain, self.sharing is not None and self.sharing.fits(unit)
        if key not in self._known:
            at = unit.chain.index(self.rank)
            before, behind = unit.chain[:at][-1:], unit.chain[at + 1 :][:1]
            plain = Route(before[0] if before else None, False, behind[0] if behind else None, ())
            shared = self.sharing if key[1] else None
            found = route_of(unit.chain, self.rank, shared.names, shared.hosts) if shared is not None else plain
            self._known[key] = found
        return self._known[key]
