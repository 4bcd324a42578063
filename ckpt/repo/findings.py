"""What a check of a repository finds."""

from __future__ import annotations

from dataclasses import dataclass

DAMAGE, GARBAGE = "damage", "garbage"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. ``step``: the committed step that it harms; None for garbage. ``key``: the file."""

    severity: str
    key: str
    message: str
    step: int | None = None
