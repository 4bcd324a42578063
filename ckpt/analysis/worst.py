"""The worst that the loss of f failure domains can do. Pure.

Choosing the domains is a knapsack in which a thing is gained only with all of its parts. Over parts of the job that
share no domain it is solved exactly by dynamic programming. Inside one part: kill sets that are disjoint or nested
form a tree and are exact too, and so are those that a sweep over the domains can follow, intervals for one; few domains
are tried out, and the rest is bounded from both sides.
"""

from __future__ import annotations

from itertools import combinations
from math import comb
from typing import TYPE_CHECKING

import numpy as np

from ckpt.analysis.kills import Family, components
from ckpt.analysis.sweep import most_lost

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckpt.analysis.combination import Kill
    from ckpt.analysis.holdings import Numbers

TRIES = 2**20
"""Most (choice of domains x kill set) that one part of the job is worth."""

SWEPT = 2**30
"""Most entries of vectors that sweeping over all domains is worth; each part of the job has a share by its domains."""

Gains = tuple["Numbers", "Numbers"]
"""Lower and upper bound of the weight that 0, 1, 2, … lost domains can take, int64 ``[domains + 1, weights]``."""


def worst_losses(families: Sequence[Family], weight: Numbers, domains: int) -> Gains:
    """Return bounds of the greatest weight lost with any ``f`` domains, for every ``f`` from 0 to ``domains``.

    Args:
        families: for each kind of state its minimal kill sets.
        weight: int64 ``[families, weights]``; each weight is maximised for itself.
        domains: number of domains.

    Returns:
        (lower, upper), int64 ``[domains + 1, weights]``: equal where the answer is exact.
    """
    doomed = [i for i, family in enumerate(families) if not family[0]]
    alive = [i for i, family in enumerate(families) if family[0]]
    parts = components([families[i] for i in alive])
    bounds = []
    for part in parts:
        own = [alive[i] for i in part]
        bounds.append(_part([families[i] for i in own], weight[own], domains))
    lower = _padded(_joined((low for low, _ in bounds), weight.shape[1]), domains + 1)
    if all(high is low for low, high in bounds):
        upper = lower
    else:
        upper = _padded(_joined((high for _, high in bounds), weight.shape[1]), domains + 1)
    base = weight[doomed].sum(axis=0)
    return lower + base, upper + base


def _part(families: list[Family], weight: Numbers, domains: int) -> Gains:
    tree = _tree(families, weight)
    if tree is not None:
        return tree, tree
    names = {d: i for i, d in enumerate(sorted({d for family in families for kill in family for d in kill}))}
    swept = most_lost(families, weight, SWEPT * len(names) // domains)
    if swept is not None:
        return swept, swept
    local = [[np.array(sorted(names[d] for d in kill)) for kill in family] for family in families]
    return _tried(local, weight, len(names)) or _bounded(local, weight, len(names))


def _greatest_first(size: int, gains: Numbers) -> Numbers:
    """Gains of parts that are worth something only with all of their ``size`` domains."""
    best = np.cumsum(-np.sort(-gains, axis=0), axis=0)
    steps = np.concatenate([np.zeros((1, gains.shape[1]), np.int64), best])
    return np.repeat(steps, size, axis=0)[: len(gains) * size + 1]


def _padded(gains: Numbers, length: int) -> Numbers:
    return np.concatenate([gains, np.repeat(gains[-1:], length - len(gains), axis=0)])


def _joined(parts: Iterable[Numbers], columns: int) -> Numbers:
    """Gains of several parts without a common domain: how many domains to take in each?"""
    all_or_nothing: dict[int, list[Numbers]] = {}
    others = []
    for gains in parts:
        if len(gains) == 2 or not gains[:-1].any():
            all_or_nothing.setdefault(len(gains) - 1, []).append(gains[-1])
        else:
            others.append(gains)
    best = np.zeros((1, columns), np.int64)
    for gains in (*(_greatest_first(size, np.array(g)) for size, g in sorted(all_or_nothing.items())), *others):
        if len(best) == 1:
            best = gains
            continue
        wider = _padded(best, len(best) + len(gains) - 1)
        for taken in np.flatnonzero((gains[1:] > gains[:-1]).any(axis=1)) + 1:
            span = wider[taken : taken + len(best)]
            np.maximum(span, best + gains[taken], out=span)
        best = np.maximum.accumulate(wider, axis=0)
    return best


def _tree(families: list[Family], weight: Numbers) -> Numbers | None:
    """Gains where every family has one kill set and these are disjoint or nested, else None.

    From the smallest set to the largest: the gains of a set are those of the largest sets inside it, joined, and its
    own weight once all of its domains are taken.
    """
    if any(len(family) > 1 for family in families):
        return None
    own: dict[Kill, Numbers] = {}
    for family, gain in zip(families, weight, strict=True):
        own[family[0]] = own.get(family[0], 0) + gain
    outermost: dict[int, Kill] = {}
    gains: dict[Kill, Numbers] = {}
    for kill in sorted(own, key=len):
        inner = {outermost[d] for d in outermost.keys() & kill}
        if any(not one <= kill for one in inner):
            return None
        ones = [gains.pop(one) for one in inner]
        whole = _padded(_joined(ones, weight.shape[1]), len(kill) + 1)
        whole[-1] += own[kill]
        gains[kill] = whole
        outermost.update(dict.fromkeys(kill, kill))
    return _joined(gains.values(), weight.shape[1])


def _tried(families: list[list[Numbers]], weight: Numbers, domains: int) -> Gains | None:
    """Gains of every choice of domains, tried out."""
    if domains > 20 or 2**domains * sum(map(len, families)) > TRIES:
        return None
    choices = np.arange(2**domains)
    best = np.zeros((domains + 1, weight.shape[1]), np.int64)
    lost = np.zeros((len(choices), weight.shape[1]), np.int64)
    for family, gain in zip(families, weight, strict=True):
        masks = [int((1 << kill).sum()) for kill in family]
        dead = np.logical_or.reduce([(choices & mask) == mask for mask in masks])
        lost[dead] += gain
    taken = sum((choices >> d) & 1 for d in range(domains))
    np.maximum.at(best, taken, lost)
    best = np.maximum.accumulate(best, axis=0)
    return best, best


def _bounded(families: list[list[Numbers]], weight: Numbers, domains: int) -> Gains:
    """Bounds of the gains, exact as far as trying out is affordable.

    Above: a family is worth nothing before its smallest kill set is complete, and at most its weight spread evenly over
    the domains of each of its kill sets. Below: what one good order of taking domains brings.
    """
    columns = weight.shape[1]
    value = np.zeros((domains, columns), np.int64)
    by_size = np.zeros((domains + 1, columns), np.int64)
    for family, gain in zip(families, weight, strict=True):
        by_size[min(map(len, family))] += gain
        for kill in family:
            value[kill] += -(-gain // len(kill))
    upper = np.minimum(np.cumsum(by_size, axis=0), _greatest_first(1, value))
    lower = np.zeros_like(upper)
    for column in range(columns):
        lower[:, column] = _in_order(_greedy(families, weight[:, column], domains), families, weight[:, column])
    for lost in range(1, domains + 1):
        small = [(family, gain) for family, gain in zip(families, weight, strict=True) if min(map(len, family)) <= lost]
        if comb(domains, lost) * lost * max(1, len(small)) > TRIES:
            break
        gains = _all_choices(small, domains, lost, columns)
        lower[lost] = upper[lost] = np.maximum(gains, upper[lost - 1])
    return np.maximum.accumulate(lower, axis=0), upper


def _greedy(families: list[list[Numbers]], gain: Numbers, domains: int) -> Numbers:
    """Return the position at which each domain is taken: whole kill sets, the most weight per domain first."""
    ranked = sorted(
        ((-int(g) / len(kill), kill.tolist()) for family, g in zip(families, gain, strict=True) for kill in family)
    )
    order = dict.fromkeys(d for _, kill in ranked for d in kill)
    position = np.empty(domains, np.int64)
    position[list(order)] = np.arange(len(order))
    return position


def _in_order(position: Numbers, families: list[list[Numbers]], gain: Numbers) -> Numbers:
    gains = np.zeros(len(position) + 1, np.int64)
    lost_with = [min(int(position[kill].max()) for kill in family) + 1 for family in families]
    np.add.at(gains, lost_with, gain)
    return np.cumsum(gains)


def _all_choices(small: list[tuple[list[Numbers], Numbers]], domains: int, lost: int, columns: int) -> Numbers:
    chosen = np.array(list(combinations(range(domains), lost)), np.int64)
    member = np.zeros((len(chosen), domains), bool)
    member[np.arange(len(chosen))[:, None], chosen] = True
    gains = np.zeros((len(chosen), columns), np.int64)
    for family, gain in small:
        gains[np.logical_or.reduce([member[:, kill].all(axis=1) for kill in family])] += gain
    most: Numbers = gains.max(axis=0)
    return most
