"""State beside tensors for another number of ranks: what is carried, derived, joined or lost, and that it is told."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ckpt.convert.loose import carry, derived_generators, merged_groups
from ckpt.convert.opened import Loose
from ckpt.errors import ConfigError
from ckpt.runtime.rng import capture_rng, restore_rng


def ranks_of(objects, name):
    return {one.ranks: one.tree for one in objects if one.name == name}


def test_as_many_ranks_get_all_as_it_was():
    objects = [Loose("rng", "rng", (r,), {"python": r}) for r in range(3)] + [Loose("loader", "extra", (0, 1), 5)]
    found = carry(objects, 3, 3)
    assert (found.objects, found.lost, found.made) == (objects, [], [])


def test_generators_are_carried_by_rank_and_new_ranks_get_seeds_of_their_own():
    objects = [Loose("rng", "rng", (rank,), capture_rng()) for rank in range(2)]
    fewer = carry(objects, 2, 1)
    assert ranks_of(fewer.objects, "rng").keys() == {(0,)}
    assert fewer.lost == ["generators of rank(s) 1: the target has no such ranks"]
    more = carry(objects, 2, 5)
    states = ranks_of(more.objects, "rng")
    assert states.keys() == {(rank,) for rank in range(5)}
    assert states[(0,)] is objects[0].tree
    new = [states[(rank,)] for rank in (2, 3, 4)]
    assert len({one["python"] for one in new}) == len({bytes(one["torch"].numpy()) for one in new}) == 3
    assert more.made == ["generators of rank(s) 2 to 4: seeded anew, each differently, from the saved state"]
    again = ranks_of(carry(objects, 2, 5).objects, "rng")
    assert again[(3,)]["python"] == states[(3,)]["python"], "the same each time"


def test_derived_generators_can_be_put_back():
    before = capture_rng()
    try:
        assert restore_rng(derived_generators(before, 3)) == []
        drawn = random.random(), np.random.rand(), torch.rand(1).item()
        restore_rng(derived_generators(before, 3))
        assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn
    finally:
        restore_rng(before)
    with_cuda = derived_generators({**before, "cuda": torch.zeros(16, dtype=torch.uint8)}, 3)
    assert (len(with_cuda["cuda"]), with_cuda["cuda"].dtype) == (16, torch.uint8)


def test_a_generator_that_nobody_knows_is_refused():
    with pytest.raises(ConfigError, match=r"rank 1 is new.*jax"):
        carry([Loose("rng", "rng", (0,), {"jax": 1})], 1, 2)
    with pytest.raises(ConfigError, match="list"):
        derived_generators([], 1)


def test_an_object_that_all_ranks_had_alike_goes_to_all_and_a_cursor_by_rank():
    objects = [Loose("config", "value", (0, 1, 2), 1), *(Loose("loader", "extra", (r,), r) for r in range(3))]
    fewer = carry(objects, 3, 2)
    assert ranks_of(fewer.objects, "config") == {(0, 1): 1}
    assert ranks_of(fewer.objects, "loader") == {(0,): 0, (1,): 1}
    assert fewer.lost == ["'loader' differed by rank: the state of rank(s) 2 has no rank to go to"]
    assert "rank r of 2 has the state of rank r of the 3" in fewer.made[0]
    more = carry(objects, 3, 5)
    assert ranks_of(more.objects, "loader") == {(0, 3): 0, (1, 4): 1, (2,): 2}
    assert "modulo 3" in more.made[0]


def groups(*names, lr=0.1):
    return {"class": "Adam", "groups": [{"params": list(names), "options": {"lr": lr}}]}


def test_every_variant_of_engine_objects_stays_somewhere():
    objects = [
        Loose("optimizer", "engine", (0, 1, 2, 3), groups("a")),
        Loose("optimizer", "engine", (4, 5, 6, 7), groups("b")),
        Loose("scheduler", "engine", tuple(range(8)), {"last": 3}),
    ]
    found = carry(objects, 8, 3)
    assert ranks_of(found.objects, "optimizer") == {(0, 1): groups("a"), (2,): groups("b")}
    assert ranks_of(found.objects, "scheduler") == {(0, 1, 2): {"last": 3}}
    assert (found.lost, found.made) == ([], [])


def test_more_variants_than_ranks_become_one():
    objects = [
        Loose("optimizer", "engine", (0,), groups("a")),
        Loose("optimizer", "engine", (1,), groups("b", "a")),
        Loose("optimizer", "engine", (2,), groups("c", lr=0.2)),
        Loose("modules", "engine", (0,), {"m": 1}),
        Loose("modules", "engine", (1, 2), {"n": 2}),
        Loose("generators", "engine", (0,), {"place": 0}),
        Loose("generators", "engine", (1, 2), {"place": 1}),
    ]
    found = carry(objects, 3, 1)
    (optimizer,) = ranks_of(found.objects, "optimizer").values()
    assert optimizer["class"] == "Adam"
    assert [(g["params"], g["options"]["lr"]) for g in optimizer["groups"]] == [(["a", "b"], 0.1), (["c"], 0.2)]
    assert ranks_of(found.objects, "modules") == {(0,): {"m": 1, "n": 2}}
    assert ranks_of(found.objects, "generators") == {(0,): {"place": 0}}
    assert found.lost == ["engine state 'generators' had 2 variants: that of rank 0 is kept"]


def test_groups_of_nobody_are_no_groups():
    assert merged_groups([]) == {"groups": []}
