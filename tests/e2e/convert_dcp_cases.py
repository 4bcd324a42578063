"""What the ranks of test_convert_dcp.py do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import ckpt
from ckpt.engine.find import adapter_for
from tests.e2e.torch_cases import digests
from tests.harness.torch_jobs import make_job


def state_of(job: Any, style: str) -> dict[str, Any]:
    """Return what a script would hand to ``dcp.save``."""
    more = {"scheduler": job.scheduler.state_dict(), "epoch": 3}
    if style == "state_dict()":
        return {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict(), **more}
    options = StateDictOptions(flatten_optimizer_state_dict=style != "get_state_dict")
    model, optim = get_state_dict(job.model, job.optimizer, options=options)
    if style == "model at the top":
        return {**model, "optimizer": optim, "lr_scheduler": job.scheduler.state_dict(), "train_state": {"epoch": 3}}
    return {"app": {"model": model, "optim": optim}, **more}


def save_both(rank: int, world: int, *, root: str, layout: str, style: str, **options: Any) -> dict[str, Any]:
    """Train; save with DCP and with ``ckpt.save``; train on."""
    job = make_job(layout, **options)
    job.train(2)
    report = ckpt.save(job.engine, f"{root}/ours", step=2)
    dcp.save(state_of(job, style), checkpoint_id=f"{root}/theirs")
    state = digests(adapter_for(job.engine))
    return {"divergences": list(report.divergences), "state": state, "losses": job.train(2, start=2)}


def load_imported(rank: int, world: int, *, root: str, layout: str, **options: Any) -> dict[str, Any]:
    """Load what was converted to our format, and train on."""
    job = make_job(layout, seed=7, **options)
    report = ckpt.load(job.engine, root)
    strays = [*report.missing, *report.unexpected, *report.casts]
    state = digests(adapter_for(job.engine))
    return {"strays": strays, "notes": list(report.notes), "state": state, "losses": job.train(2, start=2)}


def load_theirs(rank: int, world: int, *, root: str, layout: str, flat: bool = False, **options: Any) -> dict[str, Any]:
    """Load a checkpoint with ``dcp.load``, as plain scripts do, and train on."""
    job = make_job(layout, seed=7, **options)
    ways = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optim = get_state_dict(job.model, job.optimizer, options=ways)
    state = {"model": model, "optim": optim, "scheduler": job.scheduler.state_dict()}
    dcp.load(state, checkpoint_id=root)
    set_state_dict(
        job.model, job.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=ways
    )
    job.scheduler.load_state_dict(state["scheduler"])
    return {"state": digests(adapter_for(job.engine)), "losses": job.train(2, start=2)}


def save_megatron(
    rank: int, world: int, *, root: str, layout: dict[str, Any], engine: dict[str, Any], metadata: dict[str, Any]
) -> dict[str, Any]:
    """Train; save with Megatron's own format, as its training script does, and with ``ckpt.save``."""
    from megatron.core import dist_checkpointing

    from tests.harness.megatron_models import make_engine, start, train

    start(**layout)
    job = make_engine(**engine)
    train(job, 2)
    chunks, optimizer, scheduler = job
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:  # left to the next forward pass
            chunk.start_param_sync(force_sync=True)
    report = ckpt.save(job, f"{root}/ours")
    state: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 2, "opt_param_scheduler": scheduler.state_dict()}
    for i, chunk in enumerate(chunks):
        name = f"model{i}" if len(chunks) > 1 else "model"
        state[name] = chunk.module.sharded_state_dict(metadata=metadata)
    models = {name: part for name, part in state.items() if name.startswith("model")}
    state["optimizer"] = optimizer.sharded_state_dict(models, metadata=metadata)
    folder = Path(root) / "theirs" / "iter_0000002"
    if rank == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(folder), ("torch_dist", 1))
    return {"divergences": list(report.divergences), "losses": train(job, 2, first=2)}


def load_megatron(
    rank: int, world: int, *, root: str, layout: dict[str, Any], engine: dict[str, Any]
) -> dict[str, Any]:
    """Load what was converted to our format into a Megatron job, and train on."""
    from tests.harness.megatron_models import make_engine, start, train

    start(**layout)
    job = make_engine(seed=7, **engine)
    report = ckpt.load(job, root)
    strays = [*report.missing, *report.unexpected, *report.casts]
    return {"strays": strays, "notes": list(report.notes), "losses": train(job, 2, first=2)}
