"""Chances of survival when every set of f failure domains is equally likely to be lost. Pure, exact integers.

All of it is one formula: by inclusion and exclusion over minimal kill sets, the sets of ``f`` domains that contain none
of them number ``sum c_s C(N - s, f - s)`` where ``c_s`` adds up the signs of the unions of ``s`` domains. For ``G``
disjoint groups of ``m`` copies this is ``sum_j (-1)^j C(G, j) C(N - m j, f - m j)``, the recovery probability of
group replication (GEMINI, SOSP'23).
"""

from __future__ import annotations

from collections import Counter
from math import comb
from typing import TYPE_CHECKING

from ckpt.analysis.kills import Family, components, minimal_of_all
from ckpt.analysis.sweep import none_lost

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpt.analysis.combination import Kill
    from ckpt.analysis.holdings import Numbers

NEVER = 1e-30
"""A chance below this is given as 0, and so is that of more losses, which is no greater."""

UNIONS = 2**12
"""Most distinct unions of overlapping kill sets that are added up."""

SWEPT = 2**25
"""Most coefficients that sweeping over all domains is worth; each part of the job has a share by its domains."""

PRODUCTS = 2**20
"""Most products of long integers that one chance is worth."""

Terms = tuple[tuple[int, int], ...]
"""(domains ``s``, coefficient ``c_s``), ascending, no coefficient 0."""


def union_terms(kills: Iterable[Kill], limit: int | None = None) -> Terms | None:
    """Return the coefficients of "none of these sets is lost", or None if more than ``limit`` unions occur."""
    signs: dict[Kill, int] = {frozenset(): 1}
    for kill in kills:
        for union, sign in list(signs.items()):
            signs[union | kill] = signs.get(union | kill, 0) - sign
        signs = {union: sign for union, sign in signs.items() if sign}
        if limit is not None and len(signs) > limit:
            return None
    by_size: Counter[int] = Counter()
    for union, sign in signs.items():
        by_size[len(union)] += sign
    return _terms(by_size)


def _terms(coefficients: Mapping[int, int]) -> Terms:
    return tuple(sorted((size, c) for size, c in coefficients.items() if c))


def count(terms: Iterable[tuple[int, int]], domains: int, lost: int) -> int:
    """Return ``sum c_s C(domains - s, lost - s)``."""
    total, size, ways = 0, 0, comb(domains, lost)
    for s, c in terms:  # each binomial from the one before: C(n - 1, k - 1) = C(n, k) k / n
        if s > lost:
            break
        while size < s:
            ways = ways * (lost - size) // (domains - size)
            size += 1
        total += c * ways
    return total


def lost_terms(families: Sequence[Family], weight: Numbers) -> list[Terms]:
    """Return, for each weight, the coefficients of the weight lost, summed over all sets of domains."""
    found: list[Counter[int]] = [Counter() for _ in range(weight.shape[1])]
    for family, own in zip(families, weight.tolist(), strict=True):
        if len(family) == 1:
            terms: Terms = ((0, 1), (len(family[0]), -1))  # also right for the empty set: 1 - 1
        else:
            terms = union_terms(family) or ()
        for total, amount in zip(found, own, strict=True):
            total[0] += amount
            for s, c in terms:
                total[s] -= amount * c
    return [_terms(total) for total in found]


def expected_share(terms: Terms, total: int, domains: int, lost: int) -> float:
    """Return the expected share of ``total`` that survives, 1 for nothing."""
    if not total:
        return 1.0
    all_ways = comb(domains, lost) * total
    return (all_ways - count(terms, domains, lost)) / all_ways


class NothingLost:
    """The chance that everything survives.

    Args:
        families: for each kind of state its minimal kill sets.
        domains: number of domains.
    """

    def __init__(self, families: Sequence[Family], domains: int) -> None:
        self.domains = domains
        kills = minimal_of_all(families)
        self._doomed = kills == [frozenset()]
        self._sizes = Counter(map(len, kills))
        self._parts: Counter[Terms] = Counter()  # alike parts of the job that share no domain
        self._upper: Counter[Terms] = Counter()  # the same with some kill sets left out: more survives
        self._last: tuple[int, float] = (0, 1.0)
        for part in [] if self._doomed else components([(kill,) for kill in kills]):
            own = [kills[i] for i in part]
            terms = union_terms(own, UNIONS) or self._swept(own)
            if terms is not None:
                self._parts[terms] += 1
            self._upper[terms or ((0, 1), (min(map(len, own)), -1))] += 1
        self.exact = self._parts == self._upper

    def bounds(self, lost: int) -> tuple[float, float]:
        """Return (lower, upper) of the chance at ``lost`` domains, equal where exact. Ask in ascending order."""
        if self._doomed:
            return 0.0, 0.0
        before, ceiling = self._last
        if before <= lost and ceiling < NEVER:
            return 0.0, 0.0
        upper = self._chance(self._upper, lost)
        if self.exact and upper is not None:
            chance = upper if upper >= NEVER else 0.0
            self._last = lost, chance
            return chance, chance
        fails = sum(n * (1 - self._one(size, lost)) for size, n in self._sizes.items())
        upper = ceiling if upper is None else min(upper, ceiling)
        self._last = lost, upper
        lower = 1 - fails
        return (lower if lower >= NEVER else 0.0), (upper if upper >= NEVER else 0.0)

    def _swept(self, kills: list[Kill]) -> Terms | None:
        coefficients = none_lost(kills, SWEPT * len(frozenset().union(*kills)) // self.domains)
        return None if coefficients is None else _terms(dict(enumerate(coefficients)))

    def _one(self, size: int, lost: int) -> float:
        ways = comb(self.domains, lost)
        return (ways - (comb(self.domains - size, lost - size) if lost >= size else 0)) / ways

    def _chance(self, parts: Counter[Terms], lost: int) -> float | None:
        product: dict[int, int] = {0: 1}
        work = 0
        for terms, number in sorted(parts.items(), key=lambda item: (len(item[0]) * item[1], item)):
            for factor in _power(terms, number, lost):
                work += len(product) * len(factor) if len(product) > 1 else 0
                if work > PRODUCTS:
                    return None
                wider: Counter[int] = Counter()
                for s, c in product.items():
                    for t, d in factor:
                        if s + t > lost:
                            break
                        wider[s + t] += c * d
                product = dict(wider)
        return count(_terms(product), self.domains, lost) / comb(self.domains, lost)


def _power(terms: Terms, number: int, degree: int) -> list[Terms]:
    """Return factors whose product is ``terms ** number`` up to this degree."""
    if len(terms) != 2:
        return [terms] * number
    (_, _), (size, sign) = terms  # 1 + sign * y**size
    return [tuple((size * j, sign**j * comb(number, j)) for j in range(min(number, degree // size) + 1))]
