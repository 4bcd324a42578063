"""Random plans by collective broadcasts, over gloo between real processes, with hardly any memory to do it in."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.harness.pool import ranks

CASES = "tests.e2e.collective_cases"
WORLD = 4
SPAN = 64


@st.composite
def jobs(draw: st.DrawFn, *, failing: bool) -> dict[str, Any]:
    """Units of random sizes (some larger than the span) with random chains; ``live``: those that need no buffer."""
    chains = st.permutations(range(WORLD)).flatmap(lambda p: st.integers(1, WORLD).map(lambda n: p[:n]))
    sizes = st.one_of(st.integers(1, SPAN), st.integers(SPAN + 1, 3 * SPAN))
    units = draw(st.lists(st.tuples(sizes, chains), min_size=1, max_size=24))
    numbers = st.integers(0, len(units) - 1)
    fail = [] if not failing else draw(st.lists(st.tuples(numbers, st.sampled_from(["refuse", "twist"])), min_size=1))
    return {
        "units": units,
        "seed": draw(st.integers(0, 99)),
        "live": sorted(draw(st.sets(numbers))),
        "span": SPAN,
        "budget": draw(st.sampled_from([4 * SPAN, 7 * SPAN, 100 * SPAN])),
        "fail": list(dict(fail).items()),
        "late": draw(st.booleans()),
    }


def run(made: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """All jobs in one set of processes; job -> rank -> what it tells."""
    found = ranks(WORLD, f"{CASES}:many", jobs=made).values()
    return [list(of_job) for of_job in zip(*found, strict=True)]


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(jobs(failing=False), min_size=6, max_size=10))
def test_every_rank_gets_every_byte_that_it_needs(made):
    for job, told in zip(made, run(made), strict=True):
        for rank, one in enumerate(told):
            assert (one["error"], one["wrong"]) == ("", []), (job, one)
            assert one["broken"] == 0
            assert one["read"] == sum(size for size, chain in job["units"] if chain[0] == rank)
            assert one["received"] == sum(size for size, chain in job["units"] if rank in chain[1:])
            largest = 2 * max(0, *(size for size, _ in job["units"])) if one["buffers"] > job["budget"] else 0
            assert one["buffers"] <= max(job["budget"], largest)  # a unit that is larger comes alone


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.one_of(jobs(failing=True), jobs(failing=False)), min_size=6, max_size=10))
def test_what_a_reader_cannot_read_is_one_error_on_all_and_the_next_job_is_whole(made):
    for job, told in zip(made, run(made), strict=True):
        assert len({(one["error"], one["text"]) for one in told}) == 1, told
        refused = [number for number, how in job["fail"] if how == "refuse"]
        twisted = [n for n, how in job["fail"] if how == "twist" and len(job["units"][n][1]) > 1]
        if job["late"]:  # nobody looks at what came, but where it cannot be placed
            twisted = [number for number in twisted if number not in job["live"]]
        error, text = told[0]["error"], told[0]["text"]
        if refused:
            # Readers stop after the first failure that they hear of, so it need not be the first of the plan.
            assert error == "StoreError"
            assert any(text.startswith(f"unit {number} on rank {job['units'][number][1][0]}:") for number in refused)
        elif twisted:
            assert error == "DigestMismatch"
            assert any(text.startswith(f"unit {number} (on its way to rank") for number in twisted)
        else:
            assert error == ""


@pytest.mark.parametrize("sets", [16, 17])
def test_resharding_into_too_many_sets_goes_by_messages(sets: int) -> None:
    chains = [[0, 1], [0, 2], [0, 3], [0, 1, 2], [0, 1, 3], [0, 2, 3], [0, 1, 2, 3], [0, 4], [0, 1, 4], [0, 2, 4]]
    chains += [[0, 3, 4], [0, 1, 2, 4], [0, 1, 3, 4], [0, 2, 3, 4], [0, 1, 2, 3, 4], [0, 5], [0, 1, 5]]
    job = {"units": [(32, chain) for chain in chains[:sets]], "seed": 1, "live": [], "span": SPAN, "budget": 4 * SPAN}
    found = ranks(6, f"{CASES}:many", jobs=[{**job, "fail": []}]).values()
    assert {one["error"] for (one,) in found} == ({""} if sets == 16 else {"messages"})
