"""Closed forms against the general path: every rank's exact layout, by itself and through the shard graph."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from ckpt.analysis.holdings import holdings_of
from ckpt.describe.closed import holdings
from ckpt.describe.exact import rank_layout
from ckpt.describe.model import Described, ModelSpec, Split, Tied
from ckpt.describe.parallel import STATE, Parallel
from ckpt.describe.placement import Description
from ckpt.describe.world import World
from ckpt.errors import ConfigError
from ckpt.layout.box import Box
from ckpt.layout.graph import ShardGraph
from ckpt.layout.spec import RankLayout, Shard, TensorSpec
from ckpt.plan.save_plan import build_save_plan
from ckpt.plan.wire import encode_layout, encode_rows
from tests.harness.descriptions import ENGINES_AND_STAGES, canonical

HEAD = 2


@st.composite
def models(draw) -> ModelSpec:
    """A small model with everything awkward: GQA, fused matrices, odd vocabulary, ties, experts, buffers, a scalar."""
    layers = draw(st.integers(1, 4))
    width = draw(st.sampled_from([4, 6, 8]))
    heads, kv = draw(st.sampled_from([(4, 1), (4, 2), (4, 4), (2, 1), (3, 1)]))
    qkv = ((heads * HEAD, heads), (kv * HEAD, kv), (kv * HEAD, kv))
    rows = sum(n for n, _ in qkv)
    experts = draw(st.sampled_from([0, 0, 2, 4]))
    tensors = [Described("embed.weight", (draw(st.integers(3, 11)), width), "embedding", split=Split(0, (), True))]
    if draw(st.booleans()):
        tensors.append(Described("scale", (), "norm", trainable=draw(st.booleans())))
    for i in range(layers):
        at = {"layer": i, "trainable": draw(st.integers(0, 5)) > 0}
        conv = draw(st.booleans())
        tensors += [
            Described(f"layers.{i}.norm", (width,), "norm", **at),
            Described(f"layers.{i}.qkv", (width, rows) if conv else (rows, width), split=Split(int(conv), qkv), **at),
            Described(f"layers.{i}.out", (width, heads * HEAD), split=Split(1, ((heads * HEAD, heads),)), **at),
            Described(f"layers.{i}.mask", (3,), "buffer", layer=i, dtype="int64", trainable=False),
        ]
        for e in range(experts):
            tensors.append(Described(f"layers.{i}.experts.{e}", (12, 3), "expert", split=Split(0), expert=e, **at))
    tensors.append(Described("norm", (draw(st.integers(1, 9)),), "norm", place="last"))
    if draw(st.booleans()):
        tensors.append(Described("count", (), "buffer", place="every", dtype="int64", trainable=False))
    tied = (Tied("head.weight", "embed.weight"),) if draw(st.booleans()) else ()
    return ModelSpec("random", tuple(tensors), tied)


@st.composite
def layouts(draw, model: ModelSpec) -> Parallel:
    pp = draw(st.integers(1, 3))
    cuts = sorted(draw(st.lists(st.integers(0, model.layers), min_size=pp - 1, max_size=pp - 1)))
    engine, zero = draw(st.sampled_from(ENGINES_AND_STAGES))
    dp, cp = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (6, 1)]))
    autotp = engine == "deepspeed" and draw(st.booleans())
    shards = [s for s in range(1, dp * cp + 1) if dp * cp % s == 0]
    return Parallel(
        engine=engine,
        zero=zero,
        dp=dp,
        cp=cp,
        tp=draw(st.sampled_from([1, 1, 2, 3, 4])),
        pp=pp,
        ep=draw(st.sampled_from([1, 1, 2])) if model.experts else 1,
        shard=draw(st.sampled_from(shards)) if engine == "fsdp2" else None,
        order=tuple(draw(st.permutations(["pp", "dp", "cp", "tp"]))),
        stages=tuple(b - a for a, b in zip([0, *cuts], [*cuts, model.layers], strict=True)),
        dtype=draw(st.sampled_from(["bfloat16", "float32"])),
        master=draw(st.sampled_from([None, None, True, False])),
        optimizer=draw(st.sampled_from(sorted(STATE))),
        decay_groups=draw(st.booleans()),
        vocabulary_multiple=None if autotp else draw(st.sampled_from([1, 2, 4])),
        autotp=autotp,
    )


@given(models(), st.data())
def test_closed_form_equals_the_graph_of_all_ranks(model, data):
    parallel = data.draw(layouts(model))
    try:
        description = Description(model, parallel)
    except ConfigError:
        assume(False)
        raise
    graph = ShardGraph.build([rank_layout(description, rank) for rank in range(parallel.ranks)])
    assert graph.problems == ()
    assert canonical(holdings(description)) == canonical(holdings_of(graph))


@given(models(), st.data())
def test_all_ranks_at_once_are_each_rank_by_itself(model, data):
    parallel = data.draw(layouts(model))
    everywhere = [TensorSpec("nothing", "param", "float32", (0, 3))][: data.draw(st.integers(0, 1))]
    try:
        description = Description(model, parallel)
    except ConfigError:
        assume(False)
        raise
    shards = tuple(Shard(spec, Box.whole(spec.shape)) for spec in everywhere)
    found = [rank_layout(description, rank) for rank in range(parallel.ranks)]
    alone = [RankLayout(one.rank, one.shards + shards, one.aliases, one.derived) for one in found]
    graph, world = ShardGraph.build(alone), World(description, everywhere)
    assert world.graph() == graph
    assert build_save_plan(world.graph()) == build_save_plan(graph)
    encoded = {one.rank: encode_rows(one.specs, one.shards, one.aliases, one.derived) for one in world.ranks()}
    assert [encoded[rank] for rank in range(parallel.ranks)] == [encode_layout(one) for one in alone]
