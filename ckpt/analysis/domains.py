"""Failure domains: ranks that fail together (a rank, a host, a rack, whatever the user names). Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np

from ckpt.errors import ConfigError
from ckpt.words import count, some

if TYPE_CHECKING:
    from ckpt.analysis.holdings import Numbers

RANK, HOST = "rank", "host"

SHOWN = 6
"""Names, or runs of ranks, that a text lists."""


def spans(ranks: Iterable[int]) -> str:
    """Return ascending numbers as text, runs as ranges.

    >>> spans([0, 1, 2, 3, 9])
    '0-3,9'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


@dataclass(frozen=True)
class Domains:
    """Which failure domain each rank belongs to.

    ``kind``: what the domains are, in one word (``"host"``). ``of_rank[r]``: name of the domain of rank ``r``.
    """

    kind: str
    of_rank: tuple[str, ...]

    @classmethod
    def by_rank(cls, world: int) -> Domains:
        """Every rank fails alone."""
        return cls(RANK, tuple(map(str, range(world))))

    @classmethod
    def by_host(cls, world: int, hosts: int | Sequence[str]) -> Domains:
        """Ranks of one host fail together.

        Args:
            world: number of ranks.
            hosts: ranks per host, consecutive ranks together and the hosts numbered from 0; or each rank's host name.
        """
        if isinstance(hosts, int | np.integer):
            if hosts < 1:
                raise ConfigError(f"ranks per host: expected at least 1, found {hosts}")
            return cls(HOST, tuple(str(rank // hosts) for rank in range(world)))
        return cls.of(HOST, world, dict(enumerate(hosts)))

    @classmethod
    def of(
        cls,
        kind: str,
        world: int,
        mapping: Callable[[int], object] | Mapping[int, object] | Mapping[str, Iterable[int]],
    ) -> Domains:
        """Return the domains that a user describes: a function of the rank, rank -> name, or name -> its ranks.

        Raises:
            ConfigError: with every rank that has no domain, has two, or does not exist.
        """
        problems: list[str] = []
        found: dict[int, list[str]] = {}
        nameless: dict[str, list[int]] = {}
        for given, value in _pairs(kind, world, mapping, problems):
            rank, number = whole_number(given), whole_number(value)
            if rank is None or rank not in range(world):
                problems.append(f"rank {given!r}: not in this job of {count(world, RANK)}")
            elif isinstance(value, str) or number is not None:
                found.setdefault(rank, []).append(str(value))
            else:
                nameless.setdefault(repr(value), []).append(rank)
        problems += [f"rank(s) {spans(r)}: expected the name of a {kind}, found {v}" for v, r in nameless.items()]
        unknown = {rank for ranks in nameless.values() for rank in ranks}
        lacking = [rank for rank in range(world) if rank not in found and rank not in unknown]
        if lacking:
            problems.append(f"no {kind} is given for {'ranks' if len(lacking) > 1 else 'rank'} {spans(lacking)}")
        problems += [f"rank {r}: in several {kind}s: {', '.join(n)}" for r, n in found.items() if len(set(n)) > 1]
        problems += [f"rank {r}: its {kind} has an empty name" for r, n in found.items() if not n[0].strip()]
        _complain(f"{kind} domains", problems)
        return cls(kind, tuple(found[rank][0] for rank in range(world)))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of all domains, in the order of their lowest ranks."""
        return tuple(dict.fromkeys(self.of_rank))

    @cached_property
    def number(self) -> Numbers:
        """Number (in :attr:`names`) of each rank's domain, int64 ``[world]``."""
        numbers = {name: i for i, name in enumerate(self.names)}
        return np.array([numbers[name] for name in self.of_rank], np.int64)

    def check(self, world: int) -> None:
        """Raise :class:`ConfigError` unless these are the domains of a job of ``world`` ranks."""
        if len(self.of_rank) != world:
            raise ConfigError(f"{self.kind} domains: expected one for each of {world} ranks, found {len(self.of_rank)}")

    def parse(self, text: str) -> tuple[int, ...]:
        """Return the ranks, ascending, that a list such as ``host:3,host:7`` or ``rank:0-3,9`` names.

        A part is ``kind:name``, ``rank:number`` (whatever the domains are), or a name; names that are numbers may be
        given as a range. A part without a kind has that of the part before it.

        Raises:
            ConfigError: with every part that names nothing.
        """
        ranks: set[int] = set()
        problems: list[str] = []
        kind = ""
        for part in filter(None, map(str.strip, text.split(","))):
            if part in self.members or ":" not in part:  # the kind before it, or else a name
                found = self._named(kind, part) or self.members.get(part)
            else:
                kind, _, name = part.partition(":")
                found = self._named(kind, name.strip())
            if not found:
                problems.append(self._unknown(part, kind or self.kind))
            ranks.update(found or ())
        if not ranks and not problems:
            problems.append("the list is empty")
        _complain(f"lost domains {text!r}", problems)
        return tuple(sorted(ranks))

    @cached_property
    def members(self) -> dict[str, list[int]]:
        """Ranks, ascending, of each domain."""
        members: dict[str, list[int]] = {}
        for rank, name in enumerate(self.of_rank):
            members.setdefault(name, []).append(rank)
        return members

    def _unknown(self, part: str, kind: str) -> str:
        ranks = f"ranks are 0 to {len(self.of_rank) - 1}" if len(self.of_rank) > 1 else "the only rank is 0"
        known = ranks if self.kind == RANK else f"{self.kind}s are {some(self.names)}; {ranks}"
        if kind not in (RANK, self.kind):
            return f"{part!r}: {kind}s are not known here; {known}"
        return f"{part!r} names no {kind} of this job: {known}"

    def _named(self, kind: str, name: str) -> list[int]:
        """Return the ranks of one domain or of a range of numbered ones, nothing if any of them does not exist."""
        if kind == RANK:
            members = {str(rank): [rank] for rank in range(len(self.of_rank))}
        elif kind in ("", self.kind):
            members = self.members
        else:
            return []
        if name in members:
            return members[name]
        first, dash, last = name.partition("-")
        if not (dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last) < 10**7):
            return []
        wanted = [str(i) for i in range(int(first), int(last) + 1)]
        return [rank for one in wanted for rank in members[one]] if all(one in members for one in wanted) else []


def _pairs(kind: str, world: int, mapping: object, problems: list[str]) -> Iterator[tuple[object, object]]:
    """Yield (rank, name of its domain) as the user gives them; append what cannot be read to ``problems``."""
    if callable(mapping):
        yield from ((rank, mapping(rank)) for rank in range(world))
    elif isinstance(mapping, Mapping):
        for key, value in mapping.items():
            if whole_number(key) is not None:
                yield key, value
            elif not isinstance(key, str):
                problems.append(f"key {key!r}: expected a rank, or the name of a {kind}")
            elif isinstance(value, Iterable) and not isinstance(value, str):
                yield from ((rank, key) for rank in value)
            else:
                problems.append(f"{kind} domain {key!r}: expected the list of its ranks, found {value!r}")
    else:
        problems.append(f"expected a mapping, or a function of the rank, found {mapping!r}")


def whole_number(value: object) -> int | None:
    """Return an integer of any type (numpy has its own) as ``int``; None of anything else, truth values included."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def _complain(what: str, problems: list[str]) -> None:
    if problems:
        raise ConfigError("\n  - ".join([f"{what}: {count(len(problems), 'problem')}", *problems]))
