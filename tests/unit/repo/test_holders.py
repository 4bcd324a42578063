"""A checkpoint tells who held what, exactly as the job itself would have."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from ckpt.analysis.refuting import left_of
from ckpt.errors import LayoutError, MalformedData
from ckpt.format.holders import HolderTable, check_holders
from ckpt.layout.box import Box
from ckpt.layout.graph import ShardGraph
from ckpt.layout.spec import BUFFER, MASTER, PARAM, RankLayout, Shard
from ckpt.repo.holders import graph_of_index, holder_table, hosts_of_index, refutations_of_index
from ckpt.repo.repository import Index, Repository
from ckpt.store.local import LocalStore
from ckpt.store.memory import MemoryStore
from tests.compat.golden import STEPS
from tests.compat.test_golden import HERE
from tests.property.fake import KINDS, FakeEngine, Model, cut, engines, save_all, small_model, weights


def graph_of(made: list[FakeEngine]) -> ShardGraph:
    """The graph of a live job, by itself."""
    layouts = []
    for rank, one in enumerate(made):
        state = one.describe()
        shards = tuple(Shard(s.spec, s.box) for s in state.shards)
        layouts.append(RankLayout(rank, shards, tuple(sorted(state.aliases.items())), tuple(sorted(state.derived))))
    graph = ShardGraph.build(layouts)
    graph.check()
    return graph


def saved(made: list[FakeEngine], **options: str) -> Index:
    store = MemoryStore()
    save_all(made, store, **options)
    return Repository(store).read_index(1)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_comes_back_whole(kind, world):
    """Scalars, a tensor without elements, aliases and derivations are in the model."""
    model = small_model()
    made = engines(model, {key: cut(kind, t.shape, world) for key, t in model.tensors.items()}, world, filled=True)
    index, graph = saved(made), graph_of(made)
    assert graph_of_index(index) == graph


def test_diverging_copies_do_not_change_who_holds_what():
    model = small_model()
    layout = {key: cut("replicated", t.shape, 3) for key, t in model.tensors.items()}
    made = engines(model, layout, 3, filled=True)
    graph = graph_of(made)
    next(s.tensor for s in made[1].shards if s.spec.key == ("mean", BUFFER)).zero_()
    assert graph_of_index(saved(made, on_divergence="keep-all")) == graph


def test_hosts_are_recorded_in_runs(monkeypatch):
    monkeypatch.setenv("CKPT_HOST", "node-7")
    model = small_model()
    index = saved(engines(model, {k: cut("flat", t.shape, 4) for k, t in model.tensors.items()}, 4, filled=True))
    assert hosts_of_index(index) == ("node-7",) * 4
    assert index.root.holders is not None
    assert index.root.holders.hosts == (("node-7", 4),)


def test_the_table_does_not_grow_with_the_replicas():
    def table(world: int) -> HolderTable:
        model = small_model()
        layout = {key: cut("replicated", t.shape, world) for key, t in model.tensors.items()}
        found = holder_table(graph_of(engines(model, layout, world, filled=False)), ["a"] * world)
        assert found is not None
        return found

    sizes = {len(msgspec.json.encode(table(world))) for world in (2, 4, 9)}
    assert len(sizes) == 1


@pytest.mark.parametrize("step", STEPS)
def test_a_checkpoint_of_an_earlier_release_says_that_it_does_not_tell(step):
    index = Repository(LocalStore(str(HERE / "v1"))).read_index(step)
    for ask in (graph_of_index, hosts_of_index):
        with pytest.raises(LayoutError, match=f"step {step}: layout not recorded"):
            ask(index)


def test_a_reader_that_does_not_know_the_table_ignores_it():
    """What makes an optional field possible without a new version."""

    class Earlier(msgspec.Struct, kw_only=True):
        format: int
        world: int

    model = small_model()
    made = engines(model, {key: cut("flat", t.shape, 2) for key, t in model.tensors.items()}, 2, filled=True)
    assert msgspec.json.decode(msgspec.json.encode(saved(made).root), type=Earlier).world == 2


WHOLE = [[0, 0], [5, 3], 0]
BAD = {
    "no sets": {"sets": []},
    "an empty set": {"sets": [[]]},
    "a set listed beyond the world": {"sets": [[[0, 3, 1]]]},
    "a run that goes back": {"sets": [[[1, 1, 1], [0, 1, 1]]]},
    "a run of nothing": {"sets": [[[0, 0, 1]]]},
    "a run that stands still": {"sets": [[[0, 2, 0]]]},
    "a huge run": {"sets": [[[0, 2**62, 1]]]},
    "a huge step": {"sets": [[[0, 2, 2**62]]]},
    "a negative rank": {"sets": [[[-1, 2, 1]]]},
    "an unknown set": {"cells": [[[[0, 0], [5, 3], 1]]]},
    "the set nobody": {"cells": [[[[0, 0], [5, 3], -1]]]},
    "a missing tensor": {"cells": []},
    "a tensor too many": {"cells": [[WHOLE], [WHOLE]]},
    "no cells": {"cells": [[]]},
    "a hole": {"cells": [[[[0, 0], [4, 3], 0]]]},
    "an overlap": {"cells": [[[[0, 0], [3, 3], 0], [[1, 0], [2, 3], 0]]]},
    "out of bounds": {"cells": [[[[1, 0], [5, 3], 0]]]},
    "other dimensions": {"cells": [[[[0], [15], 0]]]},
    "lengths that differ": {"cells": [[[[0, 0], [15], 0]]]},
    "negative sizes": {"cells": [[[[0, 0], [-5, -3], 0]]]},
    "hosts of other ranks": {"hosts": [["a", 1]]},
    "many hosts": {"hosts": [["a", 2**62]]},
    "hosts that cancel out": {"hosts": [["a", 3], ["b", -1]]},
    "a nameless host": {"hosts": [["", 2]]},
    "a host with a novel for a name": {"hosts": [["x" * 256, 2]]},
}


def table_with(change: dict) -> HolderTable:
    sound = {"sets": [[[0, 2, 1]]], "cells": [[WHOLE]], "hosts": [["a", 2]]}
    return msgspec.convert({**sound, **change}, HolderTable)


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_a_hostile_table_is_refused_before_it_is_expanded(change):
    specs = [engines(small_model(), {}, 1, filled=False)[0].model.spec(("w", PARAM))]
    check_holders(table_with({}), specs, 2, "root")
    with pytest.raises(MalformedData, match=r"^root: holders"):
        check_holders(table_with(change), specs, 2, "root")


def forged(index: Index, **change: object) -> Index:
    """The index of a save in which rank 1 had another ``emb``, with its divergence changed."""
    (one,) = index.root.divergences
    wrong = msgspec.structs.replace(one, **change)
    return replace(index, root=msgspec.structs.replace(index.root, divergences=(wrong,)))


WRONG = {
    "a tensor that is not there": {"fqn": "w2"},
    "a role that is not there": {"role": "exp_avg"},
    "out of bounds": {"offsets": (1, 0)},
    "other dimensions": {"offsets": (0,), "sizes": (24,)},
    "lengths that differ": {"sizes": (24,)},
    "negative offsets": {"offsets": (-1, 0)},
    "no elements": {"sizes": (0, 4)},
    "a rank that is none": {"copies": {"a": (0, 2), "b": (7,)}},
    "a rank on both sides": {"copies": {"a": (0, 1, 2), "b": (1,)}},
    "a holder without a side": {"copies": {"a": (0,), "b": (1,)}},
    "an empty side": {"copies": {"a": (0, 1, 2), "b": ()}},
    "no sides": {"copies": {}},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_divergence_that_cannot_be_is_refused(change):
    model = small_model()
    made = engines(model, {key: cut("replicated", t.shape, 3) for key, t in model.tensors.items()}, 3, filled=True)
    next(s.tensor for s in made[1].shards if s.spec.key == ("emb", PARAM))[2, 1] = 9.0
    index = saved(made)
    graph = graph_of_index(index)
    found = refutations_of_index(index, graph)
    assert found.copies == {("emb", PARAM): {Box((0, 0), (6, 4)): ((0, 2), (1,))}}
    with pytest.raises(MalformedData, match="divergence of"):
        refutations_of_index(forged(index, **change), graph)


def test_divergences_and_stored_params_that_overlap_are_refused():
    model = small_model()
    made = engines(model, {key: cut("replicated", t.shape, 3) for key, t in model.tensors.items()}, 3, filled=True)
    next(s.tensor for s in made[1].shards if s.spec.key == ("emb", PARAM))[2, 1] = 9.0
    for one in made:
        next(s.tensor for s in one.shards if s.spec.key == ("w", PARAM))[0, 0] += 1.0
    index = saved(made)
    graph = graph_of_index(index)
    assert refutations_of_index(index, graph).underived == {"w": [Box((0, 0), (5, 3))]}
    (one,) = index.root.divergences
    twice = (one, msgspec.structs.replace(one, sizes=(3, 4)))
    with pytest.raises(MalformedData, match=r"divergences of .* overlap"):
        refutations_of_index(replace(index, root=msgspec.structs.replace(index.root, divergences=twice)), graph)
    with pytest.raises(MalformedData, match=r"chunks .* overlap"):
        refutations_of_index(replace(index, parts=index.parts * 2), graph)


def test_a_param_that_nobody_could_prove_is_stored_and_not_refuted():
    """Rank 0 has the param, rank 1 its master: a claim that is neither."""
    model = Model(derived={"w"})
    model.tensors = {("w", MASTER): weights((5, 3), 1)}
    model.tensors["w", PARAM] = model.tensors["w", MASTER].bfloat16()
    whole = Box.whole((5, 3))
    index = saved(engines(model, {("w", PARAM): [[whole], []], ("w", MASTER): [[], [whole]]}, 2, filled=True))
    assert refutations_of_index(index, graph_of_index(index)).underived == {"w": []}


def test_a_master_of_another_shape_is_nobodys_master():
    """No save writes this; a file may say it."""
    model = Model()
    model.tensors = {("w", MASTER): weights((5, 3), 1), ("w", PARAM): weights((7,), 2)}
    made = engines(model, {key: cut("replicated", t.shape, 2) for key, t in model.tensors.items()}, 2, filled=True)
    next(s.tensor for s in made[1].shards if s.spec.role == MASTER)[2, 1] = 9.0
    index = saved(made)
    index = replace(index, root=msgspec.structs.replace(index.root, derived=("w",)))
    graph = graph_of_index(index)
    refuted = refutations_of_index(index, graph)
    assert refuted.underived == {}
    assert left_of(graph, refuted).redundancy.refuted == 60 + 28, "the master's other copy, and a param that has none"


def test_a_world_too_large_to_be_listed_is_refused():
    specs = [small_model().spec(("w", PARAM))]
    with pytest.raises(MalformedData, match="expected at most"):
        check_holders(table_with({"hosts": [["a", 2**40]]}), specs, 2**40, "root")


def test_too_large_a_table_is_not_written(monkeypatch):
    monkeypatch.setattr("ckpt.repo.holders.MAX_MEMBERS", 3)
    model = small_model()
    made = engines(model, {key: cut("replicated", t.shape, 4) for key, t in model.tensors.items()}, 4, filled=True)
    assert saved(made).root.holders is None
