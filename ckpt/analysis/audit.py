"""Replicas compared by digest: what every rank says it holds, and whether the bytes agree. Pure.

A declared replica is a claim; the digests of this very save prove or refute it. A refuted claim is a finding (silent
data corruption, an unsynchronised buffer), never a reason to lose the job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


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


def judge(digests: Mapping[int, bytes], planned_owner: int) -> Verdict:
    """Compare the digests of one chunk over its holders (rank -> raw digest).

    The majority's bytes are kept; without a majority of more than half, the lowest rank's. The planned owner writes
    them if it has them, otherwise the lowest rank that does.
    """
    copies: dict[bytes, list[int]] = {}
    for rank in sorted(digests):
        copies.setdefault(digests[rank], []).append(rank)
    kept = next((d for d, ranks in copies.items() if 2 * len(ranks) > len(digests)), digests[min(digests)])
    owner = planned_owner if planned_owner in copies[kept] else copies[kept][0]
    return Verdict(kept, owner, {d: tuple(ranks) for d, ranks in copies.items()})
