"""Live equals described: what a training engine's ranks declare, and the same from its file of shapes."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from ckpt.analysis.domains import Domains
from ckpt.analysis.holdings import Holdings, holdings_of, pieces_of
from ckpt.analysis.report import analyze
from ckpt.describe.closed import holdings
from ckpt.describe.exact import exact_graph
from ckpt.layout.box import Box
from ckpt.layout.graph import ShardGraph
from ckpt.layout.spec import RankLayout, Shard, TensorSpec
from tests.harness.descriptions import MEGATRON_GPT, MIXTURE, NET, PLAIN, TINY_GPT, TORCH_GPT, canonical, described
from tests.harness.megatron_shim import PRELOAD
from tests.harness.pool import ranks

if TYPE_CHECKING:
    from ckpt.describe.placement import Description


class Live(NamedTuple):
    """``report``: what ``ckpt.analyze(engine)`` returned, the same on all ranks; with the loss of the last rank."""

    held: Holdings
    report: bytes


def live(world: int, case: str, **options: Any) -> Live:
    layouts, reports = [], set()
    for rank, found in enumerate(ranks(world, f"tests.e2e.describe_cases:{case}", timeout=120, **options).values()):
        shards = tuple(
            Shard(TensorSpec(fqn, role, dtype, tuple(shape)), Box(tuple(offsets), tuple(sizes)))
            for fqn, role, dtype, shape, offsets, sizes in found["shards"]
        )
        reports.add(found["report"].encode())
        layouts.append(RankLayout(rank, shards, tuple(found["aliases"].items()), tuple(found["derived"])))
    graph = ShardGraph.build(layouts)
    graph.check()
    assert len(reports) == 1
    return Live(holdings_of(graph), *reports)


def check(found: Live, description: Description) -> None:
    expected, graph = holdings(description), exact_graph(description)
    assert graph is not None
    (world, tensors, aliases), (n, wanted, tied) = canonical(found.held), canonical(expected)
    assert {fqn: t for fqn, t in tensors.items() if t != wanted.get(fqn)} == {
        fqn: t for fqn, t in wanted.items() if t != tensors.get(fqn)
    }
    assert (world, aliases) == (n, tied)
    report = analyze(expected, Domains.by_rank(world), lost=[world - 1], pieces=pieces_of(graph))
    assert found.report == report.to_json()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("dtype", "full"), [("bf16", "bfloat16"), ("fp32", "float32")])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed(stage: int, dtype: str, full: str, world: int) -> None:
    found = live(world, "deepspeed", stage=stage, dtype=dtype)
    expected = described(TINY_GPT, engine="deepspeed", zero=stage, dp=world, dtype=full, decay_groups=True)
    check(found, expected)


@pytest.mark.parametrize(
    ("stage", "options", "parallel"),
    [
        (1, {"groups": 1}, {"decay_groups": False}),
        (2, {"optimizer": "SGD"}, {"optimizer": "sgd"}),
        (3, {"optimizer": "SGD", "optimizer_options": {"momentum": 0.9}}, {"optimizer": "sgd"}),
        (1, {"grad_accum_dtype": "fp32"}, {}),
        (3, {"zero": {"sub_group_size": 2000}}, {}),
        (1, {"dtype": "fp16"}, {"dtype": "float16"}),
    ],
    ids=["one group", "SGD", "SGD, zero 3", "BF16_Optimizer", "sub-groups", "fp16"],
)
def test_deepspeed_options(stage: int, options: dict[str, Any], parallel: dict[str, Any]) -> None:
    found = live(3, "deepspeed", stage=stage, **{"dtype": "bf16", **options})
    said = {"engine": "deepspeed", "zero": stage, "dp": 3, "decay_groups": True} | parallel
    check(found, described(TINY_GPT, **said))


@pytest.mark.parametrize(
    ("layout", "world", "parallel"),
    [
        ("ddp", 2, {"engine": "ddp", "dp": 2}),
        ("zero1", 3, {"engine": "zero_redundancy_optimizer", "zero": 1, "dp": 3}),
        ("fsdp2", 3, {"engine": "fsdp2", "zero": 3, "dp": 3}),
        ("hsdp", 4, {"engine": "fsdp2", "zero": 3, "dp": 4, "shard": 2}),
        ("tp", 2, {"engine": "ddp", "tp": 2}),
        ("fsdp2 x tp", 4, {"engine": "fsdp2", "zero": 3, "dp": 2, "tp": 2}),
    ],
)
def test_torch(layout: str, world: int, parallel: dict[str, Any]) -> None:
    found = live(world, "torch_job", layout=layout)
    expected = described(TORCH_GPT, dtype="float32", decay_groups=True, **parallel)
    check(found, expected)


@pytest.mark.parametrize(
    ("layout", "world", "parallel"),
    [
        ("megatron", 2, {"tp": 2}),
        ("tp x pp x dp", 8, {"tp": 2, "pp": 2, "dp": 2, "stages": (1, 2)}),
    ],
)
def test_torch_with_a_padded_vocabulary(layout: str, world: int, parallel: dict[str, Any]) -> None:
    file = TORCH_GPT.replace("kind: embedding}", "kind: embedding, tp: {dim: 0, size: 61}}")
    found = live(world, "torch_job", layout=layout)
    check(found, described(file, engine="ddp", dtype="float32", **parallel))


TWO_GROUPS = {"decay_groups": True}


@pytest.mark.parametrize(
    ("world", "file", "layout", "parallel"),
    [
        (4, NET, {"kind": "tp", "tp": 2, "stage": 1, "dtype": "bf16"}, {"tp": 2, "dp": 2, **TWO_GROUPS}),
        (4, NET, {"kind": "tp", "tp": 2, "stage": 3, "dtype": "bf16"}, {"tp": 2, "dp": 2, **TWO_GROUPS}),
        (4, NET, {"kind": "pp", "pp": 2, "stage": 1, "dtype": "bf16"}, {"pp": 2, "dp": 2, **TWO_GROUPS}),
        (4, NET, {"kind": "pp", "pp": 2, "tp": 2, "stage": 0, "dtype": "fp32"}, {"pp": 2, "tp": 2, **TWO_GROUPS}),
        (
            8,
            NET,
            {"kind": "pp", "pp": 2, "tp": 2, "stage": 1, "dtype": "bf16"},
            {"pp": 2, "tp": 2, "dp": 2, **TWO_GROUPS},
        ),
        (4, MIXTURE, {"kind": "moe", "ep": 2, "stage": 1, "dtype": "bf16"}, {"ep": 2, "dp": 4}),
        (4, MIXTURE, {"kind": "moe", "ep": 2, "stage": 2, "dtype": "bf16"}, {"ep": 2, "dp": 4}),
        (4, PLAIN, {"kind": "autotp", "tp": 2, "stage": 1, "dtype": "bf16"}, {"tp": 2, "dp": 2, "autotp": True}),
        (4, PLAIN, {"kind": "autotp", "tp": 2, "stage": 3, "dtype": "bf16"}, {"tp": 2, "dp": 2, "autotp": True}),
        (4, NET, {"kind": "sp", "stage": 1, "dtype": "bf16"}, {"cp": 2, "dp": 2, **TWO_GROUPS}),
    ],
    ids=[
        "tp",
        "tp, zero 3",
        "pp",
        "pp x tp, zero 0",
        "pp x tp x dp",
        "moe",
        "moe, zero 2",
        "AutoTP",
        "AutoTP, zero 3",
        "sp",
    ],
)
def test_deepspeed_in_model_parallelism(
    world: int, file: str, layout: dict[str, Any], parallel: dict[str, Any]
) -> None:
    found = live(world, "parallel", layout=layout)
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[layout["dtype"]]
    stages = {"stages": (2, 1)} if layout["kind"] == "pp" else {}
    check(found, described(file, engine="deepspeed", zero=layout["stage"], dtype=dtype, **stages, **parallel))


@pytest.mark.parametrize(
    ("world", "dtype", "distributed", "mesh"),
    [
        (2, "bfloat16", True, {}),
        (2, "float32", True, {}),
        (4, "bfloat16", True, {"tp": 2}),
        (4, "bfloat16", False, {"tp": 2}),
        (4, "bfloat16", True, {"pp": 2}),
    ],
)
def test_megatron(world: int, dtype: str, distributed: bool, mesh: dict[str, int]) -> None:
    pytest.importorskip("megatron.core")
    found = live(world, "megatron", mesh=mesh, dtype=dtype, distributed=distributed, preload=PRELOAD)
    dp = world // prod(mesh.values())
    expected = described(MEGATRON_GPT, engine="megatron", zero=int(distributed), dtype=dtype, dp=dp, **mesh)
    check(found, expected)
