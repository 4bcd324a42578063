"""Where ranks' records stop being of the same steps, told by what was skipped."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from ckpt.repo.log_joint import Taking, behind_others, first_parted
from ckpt.repo.log_words import Whose

if TYPE_CHECKING:
    from collections.abc import Sequence


def taking(text: str, first: int = 1) -> Taking:
    """Return what a rank did: ``t`` took a step, ``s`` skipped one, ``i`` called without one."""
    found, counted = Taking(), 0
    for step, what in enumerate(text, first):
        counted += what != "i"
        found.add(step, Whose(what == "t", True, b"%d" % counted))
    return found


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (["tttt", "tttt"], None),
        (["tsttst", "tsttst"], None),
        (["ttt"], None),
        (["tttt", "ttit"], (3, [0], [1], 2)),  # called twice: the step before is sound
        (["tttt", "itit"], (1, [0], [1], 0)),
        (["tsst", "tsit", "tstt"], (3, [2], [0, 1], 0)),
        (["ttstt", "ttttt"], (3, [1], [0], 1)),  # forgotten: the step before may have been written behind this one
        (["tstst", "tsist"], (3, [0], [1], 1)),  # of several skipped ones in a row nothing says which is which
        (["tsstt", "tsist"], (4, [0], [1], 0)),
        (["ssst", "sstt"], (3, [1], [0], 0)),
        (["tttts", "ttttt"], (5, [1], [0], 3)),
    ],
)
def test_the_first_step_that_some_took_and_some_skipped(ranks: Sequence[str], expected: object) -> None:
    found = first_parted(dict(enumerate(map(taking, ranks))), 1, len(ranks[0]))
    assert (None if found is None else tuple(found)) == expected


def test_what_is_not_looked_at_does_not_count() -> None:
    ranks = {0: taking("tttttttt"), 1: taking("titttitt")}
    assert first_parted(ranks, 3, 5) is None
    found = first_parted(ranks, 3, 8)
    assert found is not None
    assert (found.step, found.end) == (6, 5)
    assert first_parted({**ranks, 2: Taking(skipped=[(1, 8)])}, 3, 5) is None  # it steps nothing


def test_any_lists_of_runs_are_told_apart() -> None:
    drawn = random.Random(3)
    for _ in range(300):
        texts = ["".join(drawn.choices("ts", (6, 1), k=12)) for _ in range(drawn.randint(2, 4))]
        found = first_parted({rank: taking(text) for rank, text in enumerate(texts)}, 1, 12)
        expected = next((i + 1 for i in range(12) if len({text[i] for text in texts}) > 1), None)
        assert (None if found is None else found.step) == expected
        if found is not None:
            assert {texts[rank][found.step - 1] for rank in found.took} == {"t"}
            assert {texts[rank][found.step - 1] for rank in found.skipped} == {"s"}


def test_a_rank_that_is_far_behind_others_is_named() -> None:
    assert behind_others(1, 1, {0: 7, 1: 6}) == ""
    assert "records of rank 1 end behind step 5, those of rank 0, 2 go on to step 7" in behind_others(
        1, 1, {0: 7, 1: 5, 2: 7}
    )
    assert "records of rank 1 of step 4 and later are not there, those of rank 0 go on" in behind_others(
        1, 4, {0: 7, 1: 3}
    )
    assert behind_others(1, 4, {}) == ""
