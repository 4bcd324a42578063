"""Declared replicas whose bytes differ: found, named, recorded, and never silently averaged away."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import torch

import ckpt
from ckpt.engine.base import LiveShard
from ckpt.layout.spec import BUFFER, MASTER, PARAM
from ckpt.repo.repository import Repository
from ckpt.repo.verify import verify
from ckpt.runtime.staging import tensor_bytes
from ckpt.store.memory import MemoryStore
from tests.property.fake import FakeEngine, Model, comms, cut, engines, load_all, numbered, run_ranks, save_all, weights

if TYPE_CHECKING:
    from ckpt.layout.box import Box


def replicated(model: Model, world: int) -> dict[tuple[str, str], list[list[Box]]]:
    return {key: cut("replicated", t.shape, world) for key, t in model.tensors.items()}


def job(world: int, *, filled: bool = True) -> list[FakeEngine]:
    model = Model(derived={"w"})
    model.tensors = {("w", MASTER): weights((40,), 1), ("mean", BUFFER): numbered("float32", (8,), 1)}
    model.tensors["w", PARAM] = model.tensors["w", MASTER].bfloat16()
    return engines(model, replicated(model, world), world, filled=filled)


def live(engine: FakeEngine, fqn: str, role: str) -> torch.Tensor:
    return next(s.tensor for s in engine.shards if s.spec.key == (fqn, role))


def test_one_bit_on_one_rank_is_named_and_the_majority_is_kept():
    made = job(3)
    live(made[2], "w", MASTER).view(torch.int32)[7] ^= 1
    store = MemoryStore()
    report = save_all(made, store)[1]
    (line,) = report.divergences
    assert "replicas differ in 1 element in [7:8], by at most" in line
    assert "tensor 'w' (master) box [0:40]" in line
    assert "on rank(s) 0, 1;" in line
    assert line.endswith("on rank(s) 2")
    index = Repository(store).read_index(1)
    (found,) = index.root.divergences
    assert sorted(found.copies.values()) == [(0, 1), (2,)]
    assert found.copies[found.kept] == (0, 1)
    assert found.differing is not None
    assert (found.differing.offsets, found.differing.sizes, found.differing.elements) == ((7,), (1,), 1)
    assert found.differing.max_abs == abs(live(made[2], "w", MASTER)[7] - live(made[0], "w", MASTER)[7]).item()
    assert index.commit.totals["divergences"] == 1
    assert not verify(Repository(store)).damaged
    target = job(3, filled=False)
    load_all(target, store)
    assert [line for one in target for line in one.differences()] == []


@pytest.mark.parametrize("rank", [0, 1])
def test_without_a_majority_the_lowest_ranks_copy_is_kept(rank):
    made = job(2)
    live(made[rank], "w", MASTER)[3] = -5.0
    live(made[rank], "w", PARAM)[3] = -5.0
    store = MemoryStore()
    save_all(made, store)
    target = job(2, filled=False)
    load_all(target, store)
    for one in target:
        assert torch.equal(live(one, "w", MASTER), live(made[0], "w", MASTER))
        assert torch.equal(live(one, "w", PARAM), live(made[0], "w", PARAM))


def test_error_refuses_and_leaves_nothing():
    made = job(3)
    live(made[1], "w", MASTER)[0] = 9.0
    store = MemoryStore()
    for result in run_ranks(comms(3), lambda r: ckpt.save(made[r], store, on_divergence="error")):
        assert isinstance(result, ckpt.ReplicaDivergence)
        assert "tensor 'w' (master)" in str(result)
    assert set(store.objects) == {"ckpt.json"}


@pytest.mark.parametrize(("policy", "tensor"), [("warn", ("mean", BUFFER)), ("keep-all", ("w", MASTER))])
def test_each_rank_gets_its_own_copy_back_where_all_are_kept(policy, tensor):
    made = job(3)
    for rank in (1, 2):
        live(made[rank], *tensor)[2] = 100.0 + rank
    if tensor[1] == MASTER:
        for one in made:
            live(one, "w", PARAM).copy_(live(one, "w", MASTER))
    store = MemoryStore()
    save_all(made, store, on_divergence=policy)
    assert not verify(Repository(store)).findings
    target = job(3, filled=False)
    load_all(target, store)
    for before, after in zip(made, target, strict=True):
        for shard, other in zip(before.shards, after.shards, strict=True):
            if shard.spec.role != PARAM:  # the fake's ranks rebuild params from any rank's master
                assert bytes(tensor_bytes(shard.tensor)) == bytes(tensor_bytes(other.tensor)), shard.spec
    fewer = job(2, filled=False)
    load_all(fewer, store)
    assert torch.equal(live(fewer[1], *tensor), live(made[0], *tensor)), "another world: everybody's copy"


def test_a_param_that_is_not_the_cast_of_the_kept_master_is_stored():
    """The planned owner's master proves the cast, and then is outvoted: the proof says nothing any more."""
    for owner in range(3):
        made = job(3)
        live(made[owner], "w", MASTER).add_(64.0)
        store = MemoryStore()
        save_all(made, store)
        target = job(3, filled=False)
        load_all(target, store)
        assert [line for one in target for line in one.differences()] == []


def test_a_proof_by_an_outvoted_master_that_is_not_the_planned_owners_says_nothing():
    """Only rank 2 holds the param, so it proves the cast, with a master of its own; the kept master is another."""
    model = job(1)[0].model
    layout = {**replicated(model, 3), ("w", PARAM): cut("one", (40,), 3, 2)}
    made = engines(model, layout, 3, filled=True)
    live(made[2], "w", MASTER).add_(64.0)
    live(made[2], "w", PARAM).copy_(live(made[2], "w", MASTER))
    store = MemoryStore()
    report = save_all(made, store)[0]
    assert report.bytes_derived == 0
    target = engines(model, layout, 3, filled=False)
    load_all(target, store)
    assert torch.equal(live(target[0], "w", MASTER), model.tensors["w", MASTER])
    assert torch.equal(live(target[2], "w", PARAM), live(made[2], "w", PARAM))


def test_a_derivation_that_fails_in_one_element_costs_only_its_chunk():
    made = job(2)
    for one in made:
        live(one, "w", PARAM)[0] = 3.0
        one.model.tensors["w", PARAM][0] = 3.0
    store = MemoryStore()
    report = save_all(made, store)[0]
    assert report.bytes_derived == 0, "40 elements are one chunk"
    assert report.divergences == ()
    assert report.bytes_underived == 80
    (line,) = report.underived
    assert line.startswith("tensor 'w' (param): param is not cast(master): 1 element in [0:1], by at most ")
    assert Repository(store).read_index(1).root.divergences == ()
    target = engines(made[0].model, replicated(made[0].model, 3), 3, filled=False)
    load_all(target, store)
    assert [line for one in target for line in one.differences()] == []


def test_the_kept_copy_of_a_buffer_is_one_ranks_not_a_mixture():
    """Rank 0 filled the first chunks, ranks 1 and 2 the last ones: a majority for each chunk is a state of nobody."""
    model = Model()
    model.tensors = {("queue", BUFFER): torch.zeros(8, 1024)}
    made = engines(model, replicated(model, 3), 3, filled=True)
    for rank, rows, value in ((0, slice(0, 4), 7.0), (1, slice(4, 8), 1.0), (2, slice(4, 8), 2.0)):
        live(made[rank], "queue", BUFFER)[rows] = value
    store = MemoryStore()
    assert save_all(made, store)[0].divergences
    other = engines(model, replicated(model, 2), 2, filled=False)
    for report in load_all(other, store):
        assert any("queue (buffer)" in note for note in report.notes)
    for engine in other:
        assert torch.equal(live(engine, "queue", BUFFER), live(made[0], "queue", BUFFER))
    same = engines(model, replicated(model, 3), 3, filled=False)
    assert [report.notes for report in load_all(same, store)] == [()] * 3
    for engine, old in zip(same, made, strict=True):
        assert torch.equal(live(engine, "queue", BUFFER), live(old, "queue", BUFFER))


def test_an_expanded_tensor_comes_back_through_the_memory_that_it_has():
    """Stride 0: 'more than one element of the written-to tensor refers to a single memory location'."""
    base = torch.arange(5.0).reshape(1, 5, 1)
    model = Model()
    model.tensors = {("mask", BUFFER): base.expand(4, 5, 3).clone()}
    whole = cut("replicated", (4, 5, 3), 1)[0][0]
    made, into = engines(model, {}, 1, filled=True), engines(model, {}, 1, filled=False)
    memory = torch.zeros(1, 5, 1)
    made[0].shards = [LiveShard(model.spec(("mask", BUFFER)), whole, base.expand(4, 5, 3))]
    into[0].shards = [LiveShard(model.spec(("mask", BUFFER)), whole, memory.expand(4, 5, 3))]
    store = MemoryStore()
    save_all(made, store)
    load_all(into, store)
    assert torch.equal(memory, base)


def test_what_only_later_ranks_count_as_whole_is_warned_of_as_well(caplog):
    made = job(4)
    whole = cut("replicated", (3,), 2)
    model = Model()
    model.tensors = {("late", PARAM): torch.zeros(3)}
    layout = {("late", PARAM): [[], [], *whole]}
    for one, other in zip(made, engines(model, layout, 4, filled=True), strict=True):
        one.shards += other.shards
    live(made[3], "late", PARAM)[1] = 5.0
    for one in made[2:]:
        one.assumed = {"late", "w"}
    with caplog.at_level(logging.WARNING, "ckpt"):
        save_all(made, MemoryStore())
    (line,) = [record.getMessage() for record in caplog.records if "docs/rules.md" in record.getMessage()]
    assert "as no framework says otherwise: late; every rank's copy is kept" in line


def test_a_save_looks_at_few_sides_and_says_so():
    made = job(4)
    for rank, one in enumerate(made):
        live(one, "mean", BUFFER)[0] = 10.0 * rank
    store = MemoryStore()
    (line,) = save_all(made, store)[0].divergences
    assert "replicas differ in 1 element in [0:1], by at most 10 (2 of 4 copies compared)" in line
    (found,) = Repository(store).read_index(1).root.divergences
    assert found.differing is not None
    assert (found.differing.compared, found.differing.max_abs) == (2, 10.0)
