"""Rank functions of test_described.py: what a live engine of this rank declares, as plain data."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

import ckpt
from ckpt.engine.find import adapter_for
from tests.harness.models import make_engine, train


def deepspeed(rank: int, world: int, *, stage: int, dtype: str, **options: Any) -> dict[str, Any]:
    """Return the declarations of a DeepSpeed engine after one step."""
    engine = make_engine(stage, dtype, **options)
    train(engine, 1)
    return _declared(engine)


def torch_job(rank: int, world: int, *, layout: str, **options: Any) -> dict[str, Any]:
    """Return the declarations of a torch loop after one step."""
    from tests.harness.torch_jobs import make_job

    job = make_job(layout, **options)
    job.train(1)
    return _declared(job.engine)


def parallel(rank: int, world: int, *, layout: dict[str, Any]) -> dict[str, Any]:
    """Return the declarations of a DeepSpeed engine in model parallelism after one step."""
    from tests.harness.parallel_engines import build

    job = build(layout)
    job.train(1)
    return _declared(job.saved)


def _declared(engine: Any) -> dict[str, Any]:
    state = adapter_for(engine).describe()
    shards = [
        [s.spec.fqn, s.spec.role, s.spec.dtype, list(s.spec.shape), list(s.box.offsets), list(s.box.sizes)]
        for s in state.shards
    ]
    report = ckpt.analyze(engine, domains="rank", lose=[dist.get_world_size() - 1]).to_json().decode()
    return {"shards": shards, "aliases": state.aliases, "derived": sorted(state.derived), "report": report}


def megatron(rank: int, world: int, *, mesh: dict[str, int], **options: Any) -> dict[str, Any]:
    """Return the declarations of a Megatron-core job after one step."""
    from tests.harness import megatron_models

    megatron_models.start(**mesh)
    engine = megatron_models.make_engine(**options)
    megatron_models.train(engine, 1)
    return _declared(engine)
