"""How often two writers both create one object where the store has no conditional write, and what avoiding it costs.

The measurement behind docs/adr/0006-put-if-absent-on-fsspec.md:
``tools/setup && .venv/bin/python tools/bench_absent.py``

Every touch of the store is one step, and a seeded choice says who makes the next one: as often each, or one writer more
seldom than the others. No time passes, so nobody is taken for dead.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ckpt.errors import ObjectExists
from ckpt.store.claims import put_if_absent
from tests.harness.turns import TurnDoor, Turns

if TYPE_CHECKING:
    from collections.abc import Callable


def look_and_write(door: TurnDoor) -> None:
    """What fsspec's own ``mode="create"`` does."""
    if door.exists():
        raise ObjectExists("exists", door.key)
    door.turns.step(door.who)
    door.store["commit"] = door.who


def read_back(door: TurnDoor, pauses: int = 0) -> None:
    """Look, write, wait a while, and see whose bytes are there."""
    if door.exists():
        raise ObjectExists("exists", door.key)
    door.turns.step(door.who)
    door.store["commit"] = door.who
    for _ in range(pauses):
        door.turns.step(door.who)
    if door.read() != door.who:
        raise ObjectExists("another writer's", door.key)


def claims(door: TurnDoor) -> None:
    """What ckpt does."""
    put_if_absent(door, clock=lambda: 0.0, sleep=lambda _: None)


WAYS: dict[str, Callable[[TurnDoor], None]] = {
    "look, write": look_and_write,
    "look, write, read back": read_back,
    "look, write, wait 10 steps, read back": lambda door: read_back(door, 10),
    "claims": claims,
}


def race(way: Callable[[TurnDoor], None], seed: int, writers: int, slow: int) -> tuple[int, int]:
    """Return how many writers succeeded, and the touches of them all."""
    store: dict[str, object] = {}
    turns = Turns(seed, slow=slow)
    results = turns.run([lambda who: way(TurnDoor(store, turns, who))] * writers)
    odd = [result for result in results if result is not None and not isinstance(result, ObjectExists)]
    if odd:
        raise odd[0]
    return sum(result is None for result in results), sum(turns.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--races", type=int, default=1000, help="for each line")
    races = parser.parse_args().races
    table = Table("way", "writers", "slower", "several succeed", "nobody", "touches", title=f"{races} races a line")
    for name, way in WAYS.items():
        for writers, slow in ((1, 1), (2, 1), (8, 1), (2, 30), (8, 30)):
            found = [race(way, seed, writers, slow) for seed in range(races)]
            several, nobody = (sum(map(odd, (won for won, _ in found))) / races for odd in ((1).__lt__, (0).__eq__))
            touches = sum(steps for _, steps in found) / races / writers
            table.add_row(name, str(writers), f"{slow} x", f"{several:.1%}", f"{nobody:.1%}", f"{touches:.1f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
