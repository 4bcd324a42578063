from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt.layout.box import Box, boxes_of_range
from ckpt.layout.graph import ShardGraph
from ckpt.layout.spec import MASTER, PARAM, RankLayout, Shard, TensorSpec
from ckpt.plan.save_plan import SavePlan, build_save_plan
from ckpt.plan.wire import decode_layouts, encode_layout

REPO = Path(__file__).resolve().parents[3]
SHAPES = {"emb": (5000, 64), "fc1": (256, 64), "fc2": (64, 256), "bias": (257,), "norm": (64,), "scale": ()}


def zero1(world: int, moments: tuple[str, ...] = (MASTER, "exp_avg", "exp_avg_sq")) -> list[RankLayout]:
    """bf16 params everywhere, fp32 masters and moments in flat partitions over the concatenation of all params."""
    shards: list[list[Shard]] = [[] for _ in range(world)]
    sizes = {fqn: Box.whole(shape).volume for fqn, shape in SHAPES.items()}
    part = -(-sum(sizes.values()) // world)
    at = 0
    for fqn, shape in SHAPES.items():
        for rank in range(world):
            shards[rank].append(Shard(TensorSpec(fqn, PARAM, "bfloat16", shape), Box.whole(shape)))
            low, high = max(at, rank * part) - at, min(at + sizes[fqn], (rank + 1) * part) - at
            for role in moments if high > low else ():
                spec = TensorSpec(fqn, role, "float32", shape)
                shards[rank] += [Shard(spec, box) for box in boxes_of_range(shape, low, high)]
        at += sizes[fqn]
    return [RankLayout(r, tuple(own), (), tuple(SHAPES)) for r, own in enumerate(shards)]


def replicated(world: int, shapes: dict[str, tuple[int, ...]]) -> list[RankLayout]:
    specs = [TensorSpec(fqn, PARAM, "float32", shape) for fqn, shape in shapes.items()]
    return [RankLayout(r, tuple(Shard(s, Box.whole(s.shape)) for s in specs)) for r in range(world)]


def plan_of(layouts: list[RankLayout]) -> SavePlan:
    graph = ShardGraph.build(layouts)
    graph.check()
    return build_save_plan(graph)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_what_is_replicated_is_shared_out_evenly(world):
    """Largest writer at most 1.25 times the mean, one huge embedding included (it is cut among its holders)."""
    loads = plan_of(replicated(world, {"huge": (40_000, 64), "a": (64, 64), "b": (300, 7), "c": (64,)})).loads()
    assert len(loads) == world
    assert max(loads) <= 1.25 * sum(loads) / world


def test_an_embedding_of_one_row_is_cut_too():
    """The balance must not depend on the first dimension: load was once weighed by whole tensors."""
    loads = plan_of(replicated(4, {"one_row": (1, 1, 600_000)})).loads()
    assert max(loads) <= 1.25 * sum(loads) / 4


def test_what_only_one_rank_holds_is_counted_before_the_rest_is_shared_out():
    private = [TensorSpec(f"p{r}", PARAM, "float32", (r * 40_000,)) for r in range(4)]
    shared = replicated(4, {"huge": (8000, 64)})
    layouts = [
        RankLayout(r, (*one.shards, Shard(private[r], Box.whole(private[r].shape)))) for r, one in enumerate(shared)
    ]
    loads = plan_of(layouts).loads()
    assert max(loads) <= 1.25 * sum(loads) / 4


def test_a_rank_that_another_group_has_loaded_meanwhile_gets_less():
    """Groups of holders share one count of loads: each balanced for itself would overload who is in several."""
    everywhere = {"big": (4096,), **{f"small{k:03}": (1024,) for k in range(100)}}
    layouts = replicated(4, everywhere)
    pair = [TensorSpec(f"pair{k:03}", PARAM, "float32", (2048,)) for k in range(50)]
    own = tuple(Shard(s, Box.whole(s.shape)) for s in pair)
    loads = plan_of([RankLayout(r, one.shards + (own if r < 2 else ())) for r, one in enumerate(layouts)]).loads()
    assert max(loads) <= 1.25 * sum(loads) / 4


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_zero1_writes_12_bytes_a_parameter_and_evenly(world):
    plan = plan_of(zero1(world))
    numel = sum(Box.whole(shape).volume for shape in SHAPES.values())
    assert sum(plan.loads()) == 12 * numel
    assert max(plan.loads()) <= 1.25 * sum(plan.loads()) / world
    assert all(plan.chunks[i].spec.role == PARAM for i in plan.proofs)
    assert sum(plan.chunks[i].nbytes for i in plan.proofs) == 2 * numel, "every param element can be proved"


def test_a_derived_param_is_cut_along_its_masters_chunks():
    plan = plan_of(zero1(3))
    for param, master in plan.proofs.items():
        assert plan.chunks[master].box.contains(plan.chunks[param].box)
        assert plan.owners[param] == plan.owners[master]


def test_no_chunk_is_larger_than_asked_but_one_element_is_never_cut():
    graph = ShardGraph.build(replicated(1, {"a": (100, 3)}))
    plan = build_save_plan(graph, chunk_bytes=8)
    assert {c.nbytes for c in plan.chunks} == {8, 4}
    assert all(c.nbytes == 4 for c in build_save_plan(graph, chunk_bytes=1).chunks)


def test_the_plan_is_the_same_under_every_hash_seed():
    """Iteration over a set would give each process its own owners, and chunks that nobody writes."""
    code = (
        "from tests.unit.plan.test_save_plan import *\n"
        "from ckpt.format.digest import digest\n"
        "plan = plan_of(decode_layouts([encode_layout(one) for one in zero1(4)]))\n"
        "print(digest(repr(plan).encode()))"
    )
    found = set()
    for seed in ("0", "1", "4711"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=env, cwd=REPO, capture_output=True, text=True, check=True)
        found.add(done.stdout)
    assert len(found) == 1


def test_wire_round_trip_gives_every_rank_its_number():
    layouts = zero1(3)
    decoded = decode_layouts([encode_layout(one) for one in layouts])
    assert [one.rank for one in decoded] == [0, 1, 2]
    for before, after in zip(layouts, decoded, strict=True):
        assert sorted(before.shards) == sorted(after.shards)
        assert sorted(before.derived) == sorted(after.derived)


def test_no_two_chunks_share_a_name_whatever_their_tensors_are_called():
    """A pack is a table by name: two chunks of one name would make the save impossible."""
    specs = [
        TensorSpec("a|b", "c", "float32", (2,)),
        TensorSpec("a", "b|c", "float32", (2,)),
        TensorSpec("a%7Cb", "c", "float32", (2,)),
    ]
    plan = plan_of([RankLayout(0, tuple(Shard(s, Box.whole(s.shape)) for s in specs))])
    assert len({chunk.name for chunk in plan.chunks}) == 3
