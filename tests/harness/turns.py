"""Races without luck: writers run in threads, one at a time, and at each touch of the store a seeded choice says whose
turn it is. So a thousand orders of events are tried in seconds.
"""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

from ckpt.errors import ObjectExists

if TYPE_CHECKING:
    from collections.abc import Callable


class Killed(BaseException):
    """The process of this writer is gone: nothing that it would still do is done."""


class Turns:
    """Takes turns. ``steps``: touches of each writer so far; ``kill``: writer -> touch at which it dies; ``slow``: how
    many times slower than the others writer 0 is.
    """

    def __init__(self, seed: int, kill: dict[int, int] | None = None, slow: int = 1) -> None:
        self.random, self.kill, self.slow = random.Random(seed), kill or {}, slow
        self.steps: list[int] = []
        self._waiting: dict[int, threading.Event] = {}
        self._alive = 0
        self._changed = threading.Condition()

    def step(self, who: int) -> None:
        """Wait for the turn of ``who``."""
        self.steps[who] += 1
        if self.steps[who] >= self.kill.get(who, 1 << 60):
            raise Killed
        turn = threading.Event()
        with self._changed:
            self._waiting[who] = turn
            self._changed.notify()
        turn.wait()

    def run(self, writers: list[Callable[[int], Any]]) -> list[Any]:
        """Run all to their end; return what each returned or raised."""
        results: list[Any] = [None] * len(writers)
        self.steps, self._alive = [0] * len(writers), len(writers)

        def one(who: int) -> None:
            try:
                results[who] = writers[who](who)
            except BaseException as error:
                results[who] = error
            with self._changed:
                self._alive -= 1
                self._changed.notify()

        for who in range(len(writers)):
            threading.Thread(target=one, args=(who,), daemon=True).start()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._waiting) == self._alive, timeout=60)
                if not self._alive:
                    return results
                ready = sorted(self._waiting)
                who = self.random.choices(ready, [1 / self.slow if who == 0 else 1 for who in ready])[0]
                turn = self._waiting.pop(who)
            turn.set()


class TurnDoor:
    """A :class:`~ckpt.store.claims.Door` to one key of a store in a dict; each call is one touch, as a whole."""

    key, url = "commit", "dict"

    def __init__(self, store: dict[str, Any], turns: Turns, who: int) -> None:
        self.store, self.turns, self.who = store, turns, who

    def exists(self) -> bool:
        self.turns.step(self.who)
        return "commit" in self.store

    def claims(self) -> set[str]:
        self.turns.step(self.who)
        return {name.removeprefix("claim-") for name in self.store if name.startswith("claim-")}

    def claim(self, name: str) -> None:
        self.turns.step(self.who)
        self.store[f"claim-{name}"] = self.who

    def withdraw(self, name: str) -> None:
        self.turns.step(self.who)
        self.store.pop(f"claim-{name}", None)

    def write(self) -> None:
        self.turns.step(self.who)
        self.store["commit"] = self.who
        if self.read() != self.who:
            raise ObjectExists("another writer's", self.key)

    def read(self) -> Any:
        self.turns.step(self.who)
        return self.store.get("commit")
