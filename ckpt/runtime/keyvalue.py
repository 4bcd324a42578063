"""The key-value store that ranks meet at, as little of it as is needed."""

from __future__ import annotations

from typing import Protocol

import msgspec


class KeyValue(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def set(self, key: str, value: bytes, /) -> object:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Return the value; blocks until there is one."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, atomically; return the sum."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set the key if it is absent (``expected`` empty); return what it holds then. Of several, one succeeds."""

    def check(self, keys: list[str], /) -> bool:
        """Are all these keys there?"""

    def delete_key(self, key: str, /) -> bool:
        """Remove a key."""


class StepOutcome(msgspec.Struct):
    """How a step ended, as it stands in the store: complete, or failed, with the ranks that are to blame."""

    complete: bool
    step: str = ""
    failures: dict[int, str] = {}
