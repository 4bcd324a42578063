"""Replicas compared by digest: what every rank says it holds, and whether the bytes agree. Pure.

A declared replica is a claim; the digests of this very save prove or refute it. A refuted claim is a finding (silent
data corruption, an unsynchronised buffer), never a reason to lose the job.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

Content = TypeVar("Content", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to keep of one chunk. ``copies``: raw digest -> holders that have it (one entry if all agree)."""

    kept: bytes
    owner: int
    copies: dict[bytes, tuple[int, ...]]

    @property
    def agrees(self) -> bool:
        """Do all holders have the same bytes?"""
        return len(self.copies) == 1


def sides_of(contents: Mapping[int, Content]) -> dict[Content, tuple[int, ...]]:
    """Return content -> the ranks that have it, ascending; contents in the order of their lowest rank."""
    sides: dict[Content, list[int]] = {}
    for rank in sorted(contents):
        sides.setdefault(contents[rank], []).append(rank)
    return {content: tuple(ranks) for content, ranks in sides.items()}


def elect(contents: Mapping[int, Hashable]) -> int:
    """Return the rank whose content is kept: the lowest of a majority of more than half, else the lowest of all."""
    sides = sides_of(contents).values()
    return next((ranks[0] for ranks in sides if 2 * len(ranks) > len(contents)), min(contents))


def judge(digests: Mapping[int, bytes], planned_owner: int, keep: int | None = None) -> Verdict:
    """Compare the digests of one chunk over its holders (rank -> raw digest).

    The bytes of rank ``keep`` are kept, by default those of the rank that :func:`elect` names. The planned owner writes
    them if it has them, otherwise the lowest rank that does.
    """
    copies = sides_of(digests)
    kept = digests[elect(digests) if keep is None else keep]
    owner = planned_owner if planned_owner in copies[kept] else copies[kept][0]
    return Verdict(kept, owner, copies)


def find_diverging(
    count: int, shared: Sequence[npt.NDArray[np.int64]], digests: Sequence[bytes]
) -> dict[int, dict[int, bytes]]:
    """Return, for every chunk whose holders do not all agree, rank -> raw digest of all its holders.

    Args:
        count: number of chunks.
        shared: for each rank the numbers of the chunks that it has sent digests of.
        digests: for each rank those digests, 16 bytes each. That all agree is the common case, so it is the one that
            costs no Python per chunk.
    """
    first = np.zeros((count, 2), np.uint64)
    seen = np.zeros(count, bool)
    diverging: set[int] = set()
    values = [np.frombuffer(d, np.uint64).reshape(-1, 2) for d in digests]
    for numbers, mine in zip(shared, values, strict=True):
        new = ~seen[numbers]
        first[numbers[new]] = mine[new]
        seen[numbers] = True
        diverging.update(numbers[(first[numbers] != mine).any(axis=1)].tolist())
    found: dict[int, dict[int, bytes]] = {i: {} for i in sorted(diverging)}
    for rank, (numbers, mine) in enumerate(zip(shared, values, strict=True) if found else ()):
        for k in np.flatnonzero(np.isin(numbers, list(found))):
            found[int(numbers[k])][rank] = mine[k].tobytes()
    return found
