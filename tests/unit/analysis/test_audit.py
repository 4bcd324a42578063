from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.analysis.audit import find_diverging, judge

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


@pytest.mark.parametrize(
    ("digests", "planned", "kept", "owner"),
    [
        ({0: A, 1: A, 2: A}, 2, A, 2),  # agree: as planned
        ({0: B, 1: A, 2: A}, 1, A, 1),  # the majority's
        ({0: B, 1: A, 2: A}, 0, A, 1),  # … and the planned owner does not have it
        ({0: A, 1: B}, 1, A, 0),  # no majority: the lowest rank's
        ({3: B, 5: A}, 5, B, 3),
        ({0: A, 1: B, 2: C, 3: B}, 0, A, 0),  # two of four are not more than half
        ({0: A, 1: B, 2: B, 3: B}, 3, B, 3),
        ({4: A}, 4, A, 4),
    ],
)
def test_what_is_kept_and_who_writes_it(digests, planned, kept, owner):
    verdict = judge(digests, planned)
    assert (verdict.kept, verdict.owner) == (kept, owner)
    assert verdict.agrees == (len(set(digests.values())) == 1)
    assert digests[verdict.owner] == verdict.kept, "the writer has what it writes"


def test_the_verdict_does_not_depend_on_the_order_of_the_answers():
    """Ranks that came to different verdicts would write a chunk twice, or not at all."""
    digests = {0: A, 1: B, 2: C, 3: B, 4: C}
    first = judge(digests, 2)
    second = judge(dict(reversed(digests.items())), 2)
    assert (first.kept, first.owner, list(first.copies.items())) == (
        second.kept,
        second.owner,
        list(second.copies.items()),
    )
    assert first.copies == {A: (0,), B: (1, 3), C: (2, 4)}


@given(st.data())
def test_divergence_is_found_exactly_where_holders_differ(data):
    """The fast comparison against the plain one: a replica that differs must never be passed over."""
    world, count = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 6))
    held = [sorted(data.draw(st.sets(st.integers(0, count - 1)) if count else st.just(set()))) for _ in range(world)]
    # Digests that differ in one half only: half of a digest must not stand for all of it.
    values = st.sampled_from([b"\0" * 16, b"\0" * 8 + b"\1" * 8, b"\1" * 8 + b"\0" * 8])
    sent = [[data.draw(values) for _ in own] for own in held]
    found = find_diverging(count, [np.array(own, np.int64) for own in held], [b"".join(one) for one in sent])
    by_chunk: dict[int, dict[int, bytes]] = {}
    for rank, (own, digests) in enumerate(zip(held, sent, strict=True)):
        for i, value in zip(own, digests, strict=True):
            by_chunk.setdefault(i, {})[rank] = value
    assert found == {i: digests for i, digests in sorted(by_chunk.items()) if len(set(digests.values())) > 1}
