"""Create-if-absent where a store has no conditional write: writers take turns (docs/adr/0006).

A writer puts a claim, an object whose name nobody else can have, and looks who else has one. Whoever sees no other
claim is alone: later ones see *its* claim, because each puts its own before it looks. It then checks that the key is
free, writes, and takes its claim back. Of several the one with the smallest name stays and the others step back.

What this needs: an object that was put is in every listing that begins afterwards. What it cannot give: a claim whose
writer died has to be removed at some time. It is, when another writer has seen it for ``PATIENCE`` seconds (a living
writer that waits renames its claim much sooner). So two writers may both succeed if one was stopped, or its write was
under way, for half of that between its last look and the end of its write, and it then went on.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from ckpt.errors import ObjectExists, StoreError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

CLAIM = ".tmp-claim-"
"""Prefix of a claim's name: garbage if its writer is dead, like all that begins with ``.tmp-``."""

PATIENCE = 60.0
_SHORTEST, _LONGEST = 0.01, 0.5


class Door(Protocol):
    """One key of a store, and the claims on it."""

    key: str
    url: str

    def exists(self) -> bool:
        """Is there an object under the key now?"""

    def claims(self) -> set[str]:
        """Return the names of all claims on the key, as they are now."""

    def claim(self, name: str) -> None:
        """Put a claim."""

    def withdraw(self, name: str) -> None:
        """Remove a claim; no error if it is gone."""

    def write(self) -> None:
        """Put the object, whatever is there."""


def put_if_absent(
    door: Door,
    patience: float = PATIENCE,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Write the object of ``door`` unless it exists.

    Raises:
        ObjectExists: it does, or another writer came first.
        StoreUnavailable: others were in the way for four times ``patience``.
    """
    claim, seen, began, pause = _Claim(door, patience, clock), dict[str, float](), clock(), _SHORTEST
    try:
        claim.take()
        while True:
            listed = door.claims()
            looked, others = clock(), listed - {claim.name}
            if door.exists():  # after the look: whoever was there before it has written by now
                raise ObjectExists(f"{door.key!r} exists already in {door.url}", door.key)
            if not others and claim.held and claim.name in listed and claim.age() < patience / 2:
                door.write()
                return
            if looked - began > 4 * patience:
                text = f"create {door.key!r} in {door.url}: other writers hold claims on it"
                raise StoreUnavailable(text, door.key)
            seen = {name: seen.get(name, looked) for name in others}
            for name in [name for name, since in seen.items() if looked - since > patience]:
                door.withdraw(name)  # its writer is dead, or as good as dead
                others.discard(name)
            if others and min(others) < claim.name:
                claim.drop()
            else:
                claim.keep()
            if others or not claim.held:
                sleep(pause * (0.5 + os.urandom(1)[0] / 256))
                pause = min(2 * pause, _LONGEST)
    finally:
        with suppress(StoreError):  # what became of the object is the news; a claim that stays is found to be dead
            claim.drop()


class _Claim:
    """This writer's claim. It gets a new name while its writer waits: one that stays the same is a dead writer's."""

    def __init__(self, door: Door, patience: float, clock: Callable[[], float]) -> None:
        self.door, self.patience, self.clock = door, patience, clock
        self.name, self.held, self.since = os.urandom(8).hex(), False, 0.0

    def age(self) -> float:
        """Return the seconds since nobody can have seen it yet."""
        return self.clock() - self.since

    def take(self) -> None:
        self.since, self.held = self.clock(), True  # from before: the put itself may be slow, or fail half way
        self.door.claim(self.name)

    def drop(self) -> None:
        if self.held:
            self.door.withdraw(self.name)
        self.held = False

    def keep(self) -> None:
        """Hold it, under a name that others have not seen for long."""
        if self.held and self.age() > self.patience / 4:
            self.drop()
            self.name = os.urandom(8).hex()
        if not self.held:
            self.take()
