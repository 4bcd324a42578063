"""Recoverable combinations: which roles together rebuild an element's whole training state at one step. Pure.

The rule that keeps redundancy honest (AdaCheck, FAST'26): a parameter that is everywhere is no help while its optimizer
slice is on one rank. So the roles of an element are looked at together, never one by one.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from ckpt.layout.spec import MASTER, PARAM

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckpt.analysis.holdings import RoleColumn

Combination = tuple[int, ...]
"""Numbers of columns."""

Kill = frozenset[int]
"""Domains (or ranks) whose loss destroys something."""


def is_derivable(columns: Sequence[RoleColumn], derived: bool) -> bool:
    """Can the param be rebuilt from a master?"""
    return derived and {PARAM, MASTER} <= {column.role for column in columns}


def needed_bytes(columns: Sequence[RoleColumn], derived: bool) -> int:
    """Return the bytes from which one element is rebuilt: those of all roles but a derivable param and scalars."""
    spared = is_derivable(columns, derived)
    return sum(c.itemsize for c in columns if not c.scalar and not (spared and c.role == PARAM))


def combinations_of(columns: Sequence[RoleColumn], derived: bool) -> tuple[Combination, ...]:
    """Return the sets of columns that each rebuild all of them, the preferred one first.

    Without a derived param nothing can be spared. A derived one is cast(master); where both have one dtype the cast is
    the identity, so that the param gives the master back as well.
    """
    everything = tuple(range(len(columns)))
    if not is_derivable(columns, derived):
        return (everything,)
    by_role = {column.role: c for c, column in enumerate(columns)}
    param, master = by_role[PARAM], by_role[MASTER]
    without_param = tuple(c for c in everything if c != param)
    if columns[param].dtype != columns[master].dtype:
        return (without_param,)
    return without_param, tuple(c for c in everything if c != master)


def minimal(sets: Iterable[Kill]) -> tuple[Kill, ...]:
    """Return the sets of which no other one is a part, ascending by size, then by content."""
    kept: list[Kill] = []
    for one in sorted(set(sets), key=len):
        if not any(smaller <= one for smaller in kept):
            kept.append(one)
    return tuple(kept) if len(kept) == 1 else tuple(sorted(kept, key=lambda s: (len(s), sorted(s))))


def kill_sets(holders: Sequence[Kill], combinations: Sequence[Combination]) -> tuple[Kill, ...]:
    """Return the minimal sets of domains whose loss destroys an element.

    Args:
        holders: for each column the domains in which it is held.
        combinations: of :func:`combinations_of`.

    A combination dies with any of its roles, an element with all of its combinations. An element of which some role is
    held nowhere is destroyed by the loss of nothing: its one kill set is empty.
    """
    each = [minimal(holders[c] for c in combination) for combination in combinations]
    if len(each) == 1:
        return each[0]
    return minimal(frozenset().union(*choice) for choice in product(*each))
