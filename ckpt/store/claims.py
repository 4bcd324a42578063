"""Create-if-absent where a store has no conditional write: writers take turns (docs/adr/0006).

A writer puts a claim, an object whose name nobody else can have, and looks who else has one. Whoever sees no other
claim is alone: later ones see *its* claim, because each puts its own before it looks. It then checks that the key is
free, writes, and takes its claim back. Of several the one with the smallest name stays and the others step back.

What this needs: an object that was put is in every listing that begins afterwards. What it cannot give: a claim whose
writer died has to be removed at some time. It is, when another writer has seen it for ``PATIENCE`` seconds. So two
writers may both succeed if one was stopped for longer than that between its last look and the end of its write, and
then went on.
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
    mine, first_seen, began, pause = os.urandom(8).hex(), dict[str, float](), clock(), _SHORTEST
    try:
        door.claim(mine)
        held = True
        while True:
            looked = clock()
            others = door.claims() - {mine}
            if door.exists():  # after the look: whoever was there before it has written by now
                raise ObjectExists(f"{door.key!r} exists already in {door.url}", door.key)
            if held and not others:
                if clock() - looked < patience / 4:
                    door.write()
                    return
                continue  # the store was so slow that others may take this writer for dead: look again
            if looked - began > 4 * patience:
                text = f"create {door.key!r} in {door.url}: other writers hold claims on it"
                raise StoreUnavailable(text, door.key)
            first_seen = {name: first_seen.get(name, looked) for name in others}
            for name in [name for name, since in first_seen.items() if looked - since > patience]:
                door.withdraw(name)  # its writer is dead, or as good as dead
                others.discard(name)
            held = _step(door, mine, held, bool(others) and min(others) < mine)
            sleep(pause * (0.5 + os.urandom(1)[0] / 256))
            pause = min(2 * pause, _LONGEST)
    finally:
        with suppress(StoreError):  # what became of the object is the news; a claim that stays is found to be dead
            door.withdraw(mine)


def _step(door: Door, mine: str, held: bool, behind: bool) -> bool:
    """Step back if a smaller claim is there, forward if none is; return whether the claim is held now."""
    if behind and held:
        door.withdraw(mine)
    elif not behind and not held:
        door.claim(mine)
    return not behind
