"""The table of a named loss: what is gone, and what each tensor can be rebuilt from."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt.cli.render import new_table, shown, size
from ckpt.cli.words import amount, count, ranks_in, some_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from ckpt.analysis.losing import Loss, TensorLoss


def print_loss(out: Console, loss: Loss, domain: str) -> None:
    """Print what the loss of some ranks does. Tensors that differ in numbers of their names only share a row."""
    whole = f" ({domain} {', '.join(loss.domains)})" if loss.domains and domain != "rank" else ""
    out.print()
    out.print(shown(f"Loss of rank {some_ranks(ranks_in(loss.ranks))}{whole}", "bold"))
    if not loss.tensors:
        out.print("they held nothing that is not held elsewhere as often")
        return
    verdict = (
        f"{size(loss.bytes)} of {count(loss.tensors_gone, 'tensor')} cannot be rebuilt, and must be read back"
        if loss.bytes
        else "everything can be rebuilt from the ranks that are left"
    )
    out.print(shown(verdict, "red" if loss.bytes else "green"))
    table = new_table(("tensor", "gone", "roles that nobody holds", "the rest is rebuilt from"), ("gone",))
    for group in groups_of(loss.tensors):
        gone = size(group.nbytes) if group.nbytes else "-"
        table.add_row(*map(shown, (group.label(), gone, group.roles_text(), group.sources_text())))
    out.print(table)


@dataclass
class LostGroup:
    """Tensors whose names differ in numbers only, and that lost the same roles. Sources: roles -> (elements, ranks)."""

    pattern: str
    tensors: list[TensorLoss] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes that are gone."""
        return sum(one.bytes for one in self.tensors)

    def label(self) -> str:
        """Return the name, and how many tensors it stands for."""
        if len(self.tensors) == 1:
            return self.tensors[0].fqn
        return f"{self.pattern} ({len(self.tensors):,})"

    def roles_text(self) -> str:
        """Say which roles nobody holds any longer, of how many elements."""
        gone: dict[str, int] = {}
        for one in self.tensors:
            for role, elements in one.roles_gone.items():
                gone[role] = gone.get(role, 0) + elements
        alike: dict[int, list[str]] = {}
        for role, elements in gone.items():
            alike.setdefault(elements, []).append(role)
        return "; ".join(f"{', '.join(roles)} of {amount(n)}" for n, roles in alike.items()) or "-"

    def sources_text(self) -> str:
        """Say from which roles, held by whom, the elements that lost a copy are rebuilt."""
        elements: dict[tuple[str, ...], int] = {}
        ranks: dict[tuple[str, ...], dict[str, set[int]]] = {}
        for one in self.tensors:
            for source in one.rebuild_from:
                roles = tuple(source.ranks)
                elements[roles] = elements.get(roles, 0) + source.elements
                held = ranks.setdefault(roles, {role: set() for role in roles})
                for role, text in source.ranks.items():
                    held[role].update(ranks_in(text))
        said = []
        for roles, held in ranks.items():
            alike: dict[frozenset[int], list[str]] = {}
            for role in roles:
                alike.setdefault(frozenset(held[role]), []).append(role)
            whom = " and ".join(f"{', '.join(names)} of rank {some_ranks(who)}" for who, names in alike.items())
            said.append(f"{amount(elements[roles])}: {whom}")
        return "; ".join(said) or "-"


def groups_of(tensors: Sequence[TensorLoss]) -> list[LostGroup]:
    """Return the groups, those that lost most first."""
    found: dict[tuple[object, ...], LostGroup] = {}
    for one in tensors:
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", one.fqn)
        key = (pattern, tuple(one.roles_gone), bool(one.bytes))
        found.setdefault(key, LostGroup(pattern)).tensors.append(one)
    return sorted(found.values(), key=lambda group: (-group.nbytes, group.pattern))
