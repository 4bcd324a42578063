from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.analysis.claims import (
    DERIVATION,
    PROVED,
    REFUTED,
    REPLICA,
    UNPROVED,
    AuditReport,
    Claim,
    Difference,
    Finding,
)
from ckpt.errors import ConfigError
from ckpt.layout.box import Box

STATES = st.sampled_from([UNPROVED, PROVED, REFUTED])


def report(states: list[int], findings: tuple[Finding, ...] = ()) -> AuditReport:
    nbytes = np.array([1 << i for i in range(len(states))], np.int64)
    claim = Claim(REPLICA, "w", "param", (0, 1), nbytes, np.array(states, np.uint8))
    return AuditReport("xxh3-128:00", 2, (claim,), findings)


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(STATES, min_size=n, max_size=n), min_size=1, max_size=5)))
def test_proved_is_equal_in_every_probe_and_not_constant_in_one(probes):
    combined = AuditReport.combine([report(states) for states in probes])
    for state in (UNPROVED, PROVED, REFUTED):
        expected = 0
        for piece, seen in enumerate(zip(*probes, strict=True)):
            verdict = REFUTED if REFUTED in seen else PROVED if PROVED in seen else UNPROVED
            expected += (1 << piece) if verdict == state else 0
        assert combined.total(state) == expected
    assert combined.probes == len(probes)


def test_the_order_of_probes_does_not_matter_and_findings_are_kept_once():
    one = Finding(REPLICA, "w", "param", Box((0,), (4,)), ((0,), (1,)), Difference(Box((2,), (1,)), 1, 0, 0.5))
    two = Finding(REPLICA, "w", "param", Box((0,), (4,)), ((0,), (1,)), Difference(Box((3,), (1,)), 1, 1))
    a, b = report([PROVED, REFUTED], (one,)), report([UNPROVED, PROVED], (one, two))
    assert (a & b).plain()["bytes"] == (b & a).plain()["bytes"] == {"proved": 1, "refuted": 2, "unproved": 0}
    assert (a & b).findings == (one, two)
    assert not (a & b).clean
    assert report([PROVED]).clean


def test_json_carries_the_tight_box_and_what_was_compared():
    exact = Finding(REPLICA, "w", "param", Box((0,), (4,)), ((0, 2), (1,)), Difference(Box((2,), (1,)), 1, 1))
    coarse = Finding(DERIVATION, "v", "param", Box((4,), (4,)), ((0,), (0, 1)))
    document = json.loads(report([REFUTED], (exact, coarse)).to_json())
    first, second = document["findings"]
    assert (first["box"], first["compared"]) == ({"offsets": [2], "sizes": [1]}, {"offsets": [0], "sizes": [4]})
    assert (first["elements"], first["unordered"], first["max_abs"]) == (1, 1, None)
    assert (second["box"], second["elements"], second["max_abs"]) == ({"offsets": [4], "sizes": [4]}, None, None)
    assert document["claims"][0] == {
        "kind": "replica", "fqn": "w", "role": "param", "ranks": [0, 1], "proved": 0, "refuted": 1, "unproved": 0,
    }  # fmt: skip


def test_texts_name_the_tensor_the_elements_and_the_ranks():
    exact = Finding(REPLICA, "w", "param", Box((0,), (4,)), ((0, 2), (1,)), Difference(Box((2,), (2,)), 2, 1, 0.25))
    assert str(exact) == (
        "tensor 'w' (param): replica copies differ: 2 elements in [2:4], by at most 0.25, 1 of them NaN or infinite: "
        "rank(s) 0, 2; rank(s) 1"
    )
    coarse = Finding(DERIVATION, "w", "param", Box((0,), (4,)), ((0,), tuple(range(20))))
    assert "param is not cast(master): box [0:4]: rank(s) 0; rank(s) 0, 1, 2" in str(coarse)
    assert "… (20 in all)" in str(coarse)
    many = report([REFUTED], (exact,) * 20)
    assert str(many).count("\n") == 9
    assert "… and 12 more findings" in str(many)


def test_only_one_layout_can_be_combined():
    with pytest.raises(ConfigError, match="found 0"):
        AuditReport.combine([])
    other = AuditReport("xxh3-128:11", 2, (), ())
    with pytest.raises(ConfigError, match="of one layout, found 2: xxh3-128:00 of 2"):
        report([PROVED]) & other


def test_an_audit_is_neither_true_nor_false() -> None:
    clean = AuditReport("00", 2, (), ())
    assert clean.clean
    with pytest.raises(TypeError, match=r"ask report\.clean"):
        bool(clean)


def test_reports_are_equal_if_their_states_are():
    assert report([PROVED, UNPROVED]) == report([PROVED, UNPROVED])
    assert report([PROVED, UNPROVED]) != report([UNPROVED, UNPROVED])
    assert hash(report([PROVED])) == hash(report([PROVED]))
    assert report([PROVED]).claims[0] != "a claim"
