from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ckpt.errors import ConfigError
from ckpt.runtime.objects import decode_object, encode_object
from ckpt.runtime.rng import capture_rng, derive_rng, restore_rng


@pytest.fixture(autouse=True)
def own_generators():
    before = capture_rng()
    yield
    restore_rng(before)


def draw() -> tuple[object, ...]:
    return (
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(70),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(3).tolist(),
        torch.randn(1).item(),
        torch.randperm(9).tolist(),
    )


def test_draws_go_on_where_they_were_after_a_round_trip_through_a_document():
    random.gauss(0, 1), np.random.randn()  # leaves a second value waiting in both
    document, tensors = encode_object(capture_rng(), "rng")
    expected = draw()
    derive_rng(5)
    assert draw() != expected
    assert restore_rng(decode_object(document, [t.clone() for t in tensors], "f")) == []
    assert draw() == expected


def test_capturing_draws_nothing():
    derive_rng(1)
    expected = draw()
    derive_rng(1)
    capture_rng()
    assert draw() == expected


def test_derived_seeds_differ_and_repeat():
    """New ranks that all start alike would draw the same dropout masks."""
    seen = set()
    for seed in (0, 1, 2, 2**32, 2**63, 2**64 - 1):
        derive_rng(seed)
        first = draw()
        derive_rng(seed)
        assert draw() == first
        seen.add(repr(first))
    assert len(seen) == 6


@pytest.mark.parametrize(
    "change",
    [
        {"python": None},
        {"python": (3, (1, 2), None)},
        {"python": (3, (2**70,) * 625, None)},
        {"python": (9, (), None)},
        {"numpy": ("MT19937", np.zeros(3, "u4"), 1, 0, 0.0)},
        {"numpy": 5},
        {"numpy": ("PCG64",)},
        {"torch": torch.zeros(3)},
        {"torch": "x"},
        {"torch": torch.zeros(16, dtype=torch.uint8)},
    ],
    ids=lambda c: repr(c)[:40],
)
def test_a_state_that_is_none_is_refused(change):
    with pytest.raises(ConfigError, match="random generator state"):
        restore_rng({**capture_rng(), **change})


def test_a_missing_generator_is_refused():
    with pytest.raises(ConfigError, match="torch"):
        restore_rng({k: v for k, v in capture_rng().items() if k != "torch"})
