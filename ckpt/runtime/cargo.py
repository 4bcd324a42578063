"""What is carried between ranks, and how it ended on each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ckpt.errors import from_wire, to_wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.plan.read_plan import Unit


class Cargo(Protocol):
    """What the bytes of units are, and what is to be done with them. ``read`` and ``check`` run in several threads."""

    def read(self, unit: Unit, into: memoryview) -> None:
        """Fill ``into`` with the unit's bytes, verified."""

    def check(self, unit: Unit, data: memoryview) -> None:
        """Verify bytes that came from another rank."""

    def live(self, unit: Unit) -> memoryview | None:
        """Return the memory where the bytes are to be in the end, if it is one piece."""

    def put(self, unit: Unit, data: memoryview) -> None:
        """Bring verified bytes to where they are to be."""


class Outcome(msgspec.Struct, array_like=True):
    """How one rank's part ended."""

    read: int = 0
    """bytes read from packs"""
    received: int = 0
    """bytes that came from other ranks"""
    failed: int = -1
    """first unit that failed by a cause of this rank's own"""
    error: dict[str, Any] | None = None
    """that cause"""
    spoilt: dict[str, Any] | None = None
    """what is wrong with a unit that came from another rank"""

    def spoils(self, error: Exception) -> None:
        """Note what is wrong with a unit that came, unless that is known of another."""
        self.spoilt = self.spoilt or to_wire(error)


def settle(outcomes: Sequence[Outcome]) -> None:
    """Raise, on all ranks alike, what made the transfer fail: the error of the first unit that could not be read.

    Raises:
        CkptError: of the class and with the message that its reader had.
    """
    failed = [(one.failed, rank) for rank, one in enumerate(outcomes) if one.error is not None]
    if failed:
        raise from_wire(outcomes[min(failed)[1]].error or {})
    for rank, one in enumerate(outcomes):
        if one.spoilt is not None:
            error = from_wire(one.spoilt)
            raise type(error)(f"{error} (on its way to rank {rank}: its reader had found it whole)")
