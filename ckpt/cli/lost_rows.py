"""A named loss as rows for people: what is gone, and what each tensor can be rebuilt from."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt.analysis.losing import TensorLoss
from ckpt.cli.words import amount, ranks_in, some_ranks
from ckpt.words import count, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.analysis.losing import Loss


@dataclass
class LostGroup:
    """Tensors whose names differ in numbers only, and that lost the same roles."""

    pattern: str
    tensors: list[TensorLoss] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes that are gone."""
        return sum(one.bytes for one in self.tensors)

    def label(self) -> str:
        """Return the name, and how many tensors it stands for."""
        return self.tensors[0].fqn if len(self.tensors) == 1 else f"{self.pattern} ({len(self.tensors):,})"

    def roles_text(self) -> str:
        """Say which roles nobody holds any longer, and of how many elements."""
        gone: dict[str, int] = {}
        for one in self.tensors:
            for role, elements in one.roles_gone.items():
                gone[role] = gone.get(role, 0) + elements
        alike: dict[int, list[str]] = {}
        for role, elements in gone.items():
            alike.setdefault(elements, []).append(role)
        return "; ".join(f"{', '.join(roles)} of {amount(n)}" for n, roles in alike.items()) or "-"

    def sources_text(self) -> str:
        """Say from which roles, and from whom, the elements that lost a copy are rebuilt."""
        found: dict[tuple[str, ...], _Source] = {}
        for one in self.tensors:
            for source in one.rebuild_from:
                roles = tuple(source.ranks)
                mine = found.setdefault(roles, _Source({role: set() for role in roles}))
                mine.elements += source.elements
                for role, text in source.ranks.items():
                    mine.ranks[role].update(ranks_in(text))
        return "; ".join(one.text() for one in found.values()) or "-"


@dataclass
class _Source:
    ranks: dict[str, set[int]]
    elements: int = 0

    def text(self) -> str:
        alike: dict[frozenset[int], list[str]] = {}
        for role, ranks in self.ranks.items():
            alike.setdefault(frozenset(ranks), []).append(role)
        whom = " and ".join(f"{', '.join(roles)} of rank {some_ranks(ranks)}" for ranks, roles in alike.items())
        return f"{amount(self.elements)}: {whom}"


def groups_of(tensors: Sequence[TensorLoss]) -> list[LostGroup]:
    """Return the groups, those that lost most first."""
    found: dict[tuple[object, ...], LostGroup] = {}
    for one in tensors:
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", one.fqn)
        key = (pattern, tuple(one.roles_gone), bool(one.bytes))
        found.setdefault(key, LostGroup(pattern)).tensors.append(one)
    return sorted(found.values(), key=lambda group: (-group.nbytes, group.pattern))


def verdict(loss: Loss) -> str:
    """Say whether anything is gone."""
    if not loss.bytes:
        return "everything can be rebuilt from the ranks that are left"
    return f"{size(loss.bytes)} of {count(loss.tensors_gone, 'tensor')} cannot be rebuilt, and must be read back"
