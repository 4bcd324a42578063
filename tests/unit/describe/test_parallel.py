from __future__ import annotations

import numpy as np
import pytest

from ckpt.describe.parallel import Mesh, Parallel
from ckpt.errors import ConfigError


def test_all_problems_at_once() -> None:
    parallel = Parallel(
        engine="deepspeed", zero=3, dp=6, pp=2, ep=4, world=10, stages=(1, 2, 3), hosts=5, optimizer="x", dtype="y"
    )
    with pytest.raises(ConfigError) as caught:
        parallel.check()
    message = str(caught.value)
    for said in (
        "stages lists 3 pipeline stages, pp is 2",
        "is 12 ranks, the world has 10",
        "ep 4 does not divide the 6 ranks",
        "12 ranks do not fill 5 hosts",
        "DeepSpeed refuses ZeRO-3 with a pipeline",
        "DeepSpeed refuses ZeRO-3 with its expert parallelism",
        "optimizer 'x'",
        "dtype 'y'",
    ):
        assert said in message


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dp": 0}, "dp is 0, expected at least 1"),
        ({"zero": 4}, "zero is 4"),
        ({"engine": "horovod"}, "engine 'horovod', expected one of ddp"),
        ({"order": "pp,dp,dp"}, "order 'pp,dp,dp'"),
        ({"order": "pp,ep"}, "order 'pp,ep'"),
        ({"dp": 2**21}, "at most 1048576"),
        ({"engine": "fsdp2", "dp": 6, "shard": 4}, "groups would not tile"),
        ({"engine": "fsdp2", "dp": 8, "shard": 2, "ep": 4}, "ep 4 does not divide the 2 ranks that share one copy"),
        ({"engine": "ddp", "dp": 4, "shard": 2}, "shard is for fsdp2"),
        ({"engine": "ddp", "zero": 1}, "ddp has no ZeRO stage 1"),
        ({"hosts": 2, "ranks_per_host": 4, "dp": 4}, "2 hosts of 4 ranks are not 4 ranks"),
        ({"engine": "zero_redundancy_optimizer", "zero": 1, "dp": 2, "ep": 2}, "no expert parallelism"),
        ({"engine": "megatron", "tp": 2, "autotp": True}, "autotp is for deepspeed, the engine is megatron"),
        ({"engine": "deepspeed", "autotp": True, "vocabulary_multiple": 2}, "autotp pads no vocabulary"),
        ({"pp": 2, "stages": (3, -1)}, "a pipeline stage of -1 layers"),
    ],
)
def test_each_problem(fields, said) -> None:
    with pytest.raises(ConfigError) as caught:
        Parallel(**fields).check()
    assert said in str(caught.value)


@pytest.mark.parametrize("plain", [{"dq": 2}, {"dp": "2"}, {"dp": True}, {"stages": 3}])
def test_wrong_fields_are_refused(plain) -> None:
    with pytest.raises(ConfigError, match="parallel: "):
        Parallel.of(plain)


def test_the_engine_that_is_left_open() -> None:
    kinds = [Parallel(zero=z, pp=p).kind for z, p in ((0, 1), (1, 1), (2, 1), (3, 1), (3, 2), (1, 2))]
    assert kinds == ["ddp", "deepspeed", "deepspeed", "deepspeed", "fsdp2", "deepspeed"]


def test_tensor_ranks_are_neighbours_and_stages_are_far_apart() -> None:
    mesh = Mesh(Parallel(tp=2, cp=2, dp=3, pp=2))
    assert mesh.ranks[0, :, 0].tolist() == [0, 1]
    assert mesh.ranks[0, 0].tolist() == [0, 2, 4, 6, 8, 10], "context ranks lie inside data ranks"
    assert mesh.ranks[:, 0, 0].tolist() == [0, 12]
    assert mesh.place(15) == (1, 1, 1)


def test_any_order_places_each_rank_once() -> None:
    parallel = Parallel(tp=2, cp=2, dp=3, pp=2, order="tp,cp,pp,dp")
    mesh = Mesh(parallel)
    assert sorted(mesh.ranks.reshape(-1)) == list(range(24))
    assert mesh.ranks[0, :, 0].tolist() == [0, 12]
    assert mesh.ranks[0, 0].tolist() == [0, 1, 2, 6, 7, 8], "a data index counts in the order of the ranks"
    for rank in range(24):
        assert mesh.ranks[mesh.place(rank)] == rank
    with pytest.raises(ConfigError, match="rank 24 is not in a world of 24"):
        mesh.place(24)


def test_hosts() -> None:
    assert [Parallel(dp=6, hosts=3).host_of(r) for r in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [Parallel(dp=6, ranks_per_host=4).host_of(r) for r in range(6)] == [0, 0, 0, 0, 1, 1]
    assert np.unique([Parallel(dp=6).host_of(r) for r in range(6)]).tolist() == [0]


@pytest.mark.parametrize(
    ("fields", "masters"),
    [
        ({"engine": "deepspeed", "zero": 0, "dtype": "float32"}, False),
        ({"engine": "deepspeed", "zero": 0, "dtype": "bfloat16"}, True),
        ({"engine": "deepspeed", "zero": 1, "dtype": "float32"}, True),
        ({"engine": "megatron", "zero": 1, "dtype": "float32"}, False),
        ({"engine": "fsdp2", "dtype": "bfloat16"}, False),
        ({"engine": "ddp", "dtype": "bfloat16", "master": True}, True),
        ({"engine": "deepspeed", "zero": 1, "optimizer": "none"}, False),
    ],
)
def test_who_keeps_masters(fields, masters) -> None:
    assert Parallel(**fields).masters is masters
