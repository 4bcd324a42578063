from __future__ import annotations

import pytest

from ckpt.errors import ObjectExists, StoreError, StoreUnavailable
from ckpt.store.claims import put_if_absent
from tests.harness.turns import Killed, TurnDoor, Turns


def race(seed: int, writers: int, kill: dict[int, int] | None = None, patience: float = 60.0):
    store, turns, now = {}, Turns(seed, kill), [0.0]

    def sleep_of(who: int):
        def sleep(seconds: float) -> None:
            now[0] += seconds if kill else 0.0  # all alive: no time passes, so nobody is ever taken for dead
            turns.step(who)

        return sleep

    def one(who: int) -> str:
        put_if_absent(TurnDoor(store, turns, who), patience, lambda: now[0], sleep_of(who))
        return "won"

    return store, turns.run([one] * writers)


@pytest.mark.parametrize("writers", [1, 2, 3, 8])
def test_in_any_order_of_events_exactly_one_wins(writers):
    for seed in range(300 if writers < 8 else 60):
        store, results = race(seed, writers)
        winners = [who for who, result in enumerate(results) if result == "won"]
        assert len(winners) == 1, (seed, results)
        assert all(isinstance(result, ObjectExists) for result in results if result != "won"), (seed, results)
        assert store == {"commit": winners[0]}, "and no claim is left"


@pytest.mark.parametrize("at", range(1, 9))
def test_a_writer_that_dies_at_any_point_stops_the_others_for_a_time_only(at):
    for seed in range(30):
        store, results = race(seed, 3, kill={0: at})
        winners = [who for who, result in enumerate(results) if result == "won"]
        assert len(winners) <= 1, (seed, results)
        assert isinstance(results[0], Killed) or "commit" in store
        assert store["commit"] in (winners or [0]), "whoever is stored has won, or died before it could say so"
        assert all(isinstance(result, ObjectExists) for result in results[1:] if result != "won"), (seed, results)


class Door(TurnDoor):
    """Without turns: one writer, alone."""

    def __init__(self, **store: object) -> None:
        self.store, self.who, self.log = store, 0, []
        self.turns = self  # type: ignore[assignment]

    def step(self, who: int) -> None:
        self.log.append(who)


def test_a_claim_that_never_goes_is_removed_but_one_that_changes_hands_is_waited_for_only_so_long():
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    door = Door(**{"claim-0000": "dead"})
    put_if_absent(door, 60.0, lambda: now[0], sleep)
    assert door.store == {"commit": 0}
    assert 60 <= now[0] <= 62

    class Busy(Door):
        number = 0

        def claims(self) -> set[str]:
            self.number += 1
            return {f"{self.number:04}"}

    began, busy = now[0], Busy()
    with pytest.raises(StoreUnavailable, match="'commit' in dict: other writers hold claims"):
        put_if_absent(busy, 60.0, lambda: now[0], sleep)
    assert 240 <= now[0] - began <= 242
    assert busy.store == {}


def test_a_store_too_slow_for_the_look_to_count_is_looked_at_again():
    """Between its last look and its write another could have taken this writer for dead."""
    now = [0.0]

    class Slow(Door):
        looks = 0

        def exists(self) -> bool:
            self.looks += 1
            now[0] += 30 if self.looks < 3 else 0
            return super().exists()

    door = Slow()
    put_if_absent(door, 60.0, lambda: now[0], lambda _: None)
    assert door.looks == 3
    assert door.store == {"commit": 0}


def test_a_claim_that_cannot_be_taken_back_does_not_undo_the_put():
    class Sticky(Door):
        def withdraw(self, name: str) -> None:
            raise StoreUnavailable("lost")

    door = Sticky()
    put_if_absent(door)
    assert door.store["commit"] == 0
    with pytest.raises(ObjectExists):
        put_if_absent(Sticky(commit=1))


def test_an_error_of_the_store_passes():
    class Broken(Door):
        def claims(self) -> set[str]:
            raise StoreError("lost")

    door = Broken()
    with pytest.raises(StoreError, match="lost"):
        put_if_absent(door)
    assert door.store == {}
