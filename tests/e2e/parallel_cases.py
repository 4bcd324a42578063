"""Rank functions of test_deepspeed_parallel.py: model-parallel engines through ``save`` and ``load``."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckpt
from ckpt.engine.find import adapter_for
from tests.e2e.adapter_fault_cases import error_of
from tests.harness.parallel_engines import CUT, STAGES, Engine, build, whole_state


def content(job: Engine) -> dict[str, Any]:
    """Return a hash of every tensor that this rank holds, and its plain state."""
    state = adapter_for(job.saved).describe()
    found: dict[str, Any] = {"objects": repr(state.objects)}
    for shard in state.shards:
        raw = shard.tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[f"{shard.spec} {shard.box}"] = hashlib.sha256(raw).hexdigest()
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [k for k in sorted(one.keys() | other.keys()) if one.get(k) != other.get(k)]


def continue_bitwise(rank: int, world: int, root: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Train, save and train on; load into a fresh engine of other weights and train that on."""
    first = build(layout)
    first.train(3)
    report = ckpt.save(first.saved, root, on_divergence="error")
    before = content(first)
    groups = adapter_for(first.saved).describe().groups
    losses = first.train(3, start=3)
    second = build(layout, seed=7)
    loaded = ckpt.load(second.saved, root)
    return {
        "groups": groups,
        "wrapper": type(first.engine.optimizer).__name__,
        "strays": [*loaded.missing, *loaded.unexpected, *loaded.notes],
        "state": differences(before, content(second)),
        "losses": [losses, second.train(3, start=3)],
        "final": differences(content(first), content(second)),
        "written": [report.bytes_written, report.bytes_unique],
    }


def save_with_witness(rank: int, world: int, root: str, layout: dict[str, Any]) -> list[int]:
    """Train and save; leave beside the checkpoint what DeepSpeed itself says that the model is."""
    job = build(layout)
    job.train(2)
    report = ckpt.save(job.saved, f"{root}/ckpt", on_divergence="error")
    whole = whole_state(job, layout)
    if rank == 0:
        torch.save(whole, Path(root) / "whole.pt")
    dist.barrier()
    return [report.bytes_written, report.bytes_unique]


def load_and_compare(rank: int, world: int, root: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Load into another layout and compare with the witness, by the witness' own means."""
    job = build(layout, seed=7)
    report = ckpt.load(job.saved, f"{root}/ckpt")
    expected = torch.load(Path(root) / "whole.pt")
    found = whole_state(job, layout)
    return {
        "strays": [*report.missing, *report.unexpected],
        "notes": list(report.notes),
        "names": sorted(expected.keys() ^ found.keys()),
        "differ": [k for k in sorted(expected.keys() & found.keys()) if not torch.equal(expected[k], found[k])],
        "trains": bool(torch.isfinite(torch.tensor(job.train(2, start=2))).all()),
    }


def padding_is_cleared(rank: int, world: int, root: str, layout: dict[str, Any]) -> list[float]:
    """Save and load; return the largest value in the row that pads the vocabulary, before and after (last rank)."""
    first = build(layout)
    first.train(2)
    ckpt.save(first.saved, root)
    second = build(layout, seed=7)
    second.train(1)
    before = _padding(second)
    ckpt.load(second.saved, root)
    return [before, _padding(second)]


def _padding(job: Engine) -> float:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    p = job.engine.module.embed.weight
    with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
        found = [p.detach().float().clone()]
    if hasattr(job.engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        found.append(safe_get_full_fp32_param(p))
        found.append(safe_get_full_optimizer_state(p, "exp_avg_sq"))
    return max(float(t[-1].abs().max()) for t in found)


def gate_noise(rank: int, world: int, root: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Do the losses of a mixture of experts depend on the generator, which DeepSpeed itself does not save?"""
    first = build(layout)
    first.train(2)
    ckpt.save(first.saved, root)
    losses = first.train(2, start=2)
    second = build(layout, seed=7)
    ckpt.load(second.saved, root)
    torch.manual_seed(4711 + rank)
    return {"reseeded": second.train(2, start=2) == losses}


def not_tied(rank: int, world: int, root: str, layout: dict[str, Any]) -> dict[str, Any]:
    """A module that a pipeline shares between stages has a parameter which it does not share."""
    first = build(layout)
    first.train(2)
    state = adapter_for(first.saved).describe()
    ckpt.save(first.saved, f"{root}/ckpt", on_divergence="error")
    merged = [{"match": r"tied_modules\.embed@\d+\.(.*)", "name": "embed.{1}"}, *STAGES]
    as_one = ckpt.Parallel(first.engine, rules={"names": merged})
    return {
        "names": sorted({s.spec.fqn for s in state.shards if "embed" in s.spec.fqn}),
        "merged": error_of(lambda: ckpt.save(as_one, f"{root}/merged", on_divergence="error")),
    }


def tied_by_rule(rank: int, world: int, root: str) -> dict[str, Any]:
    """Save a pipeline whose stages have an embedding each, equal by the user's doing."""
    names = [{"match": r"0\.(.*)", "name": "embed.{1}"}, {"match": r"5\.(.*)", "name": "head.{1}"}]
    rules = {"names": [*names, *STAGES[1:]], "tied": {"head.weight": "embed.weight"}}
    job = build({"kind": "pp", "pp": 2, "stage": 0, "dtype": "fp32", "gas": 2, "untied": True, "rules": rules})
    weight = next(p for n, p in job.engine.module.named_parameters() if n in ("0.weight", "5.weight"))
    dist.broadcast(weight.data, src=0)
    report = ckpt.save(job.saved, f"{root}/ckpt", on_divergence="error")
    if rank == 0:
        torch.save(weight.detach(), Path(root) / "embedding.pt")
    return {
        "aliases": adapter_for(job.saved).describe().aliases,
        "written": [report.bytes_written, report.bytes_unique],
    }


def has_embedding(rank: int, world: int, root: str, layout: dict[str, Any]) -> bool:
    """Load it; DeepSpeed cannot have an engine with stages and one without in one process."""
    job = build(layout, seed=7)
    ckpt.load(job.saved, f"{root}/ckpt")
    return torch.equal(job.engine.module.embed.weight, torch.load(Path(root) / "embedding.pt"))


def strays_of(rank: int, world: int, root: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Load what another case saved, strictly and not."""
    job = build(layout, seed=7)
    strict = error_of(lambda: ckpt.load(job.saved, f"{root}/ckpt"))
    report = ckpt.load(job.saved, f"{root}/ckpt", strict=False)
    return {"strict": strict, "strays": [*report.missing, *report.unexpected]}


def half_loaded(rank: int, world: int, layout: dict[str, Any]) -> None:
    """Train a pipeline whose load has failed midway."""
    from ckpt.runtime.guard import mark_half_loaded

    job = build(layout)
    mark_half_loaded(adapter_for(job.saved).module())
    job.train(1)


def refusals(rank: int, world: int, root: str) -> dict[str, str]:
    """Return the error of everything that a user can get wrong about tensor parallelism, by what is wrong."""
    job = build({"kind": "tp", "tp": 2, "stage": 1, "dtype": "bf16"})
    engine, mpu = job.engine, job.engine.mpu
    named = dict(engine.module.named_parameters())
    errors: dict[str, str] = {}

    ckpt.save(job.saved, f"{root}/sound")

    def attempt(label: str, *, load: bool = False, **parallel: Any) -> None:
        wrapped = ckpt.Parallel(engine, **parallel)
        errors[label] = error_of(lambda: ckpt.save(wrapped, f"{root}/{label}"))
        if load:
            errors[f"{label}, load"] = error_of(lambda: ckpt.load(wrapped, f"{root}/sound", strict=False))

    idle = {"tensors": [*CUT, {"match": "encoder.*", "dim": 0}], "names": [{"match": "a", "name": "b"}]}
    attempt("idle", load=True, rules=idle)
    attempt("unexplained", rules={"tensors": CUT[:1]})
    attempt("disagree", rules={"tensors": [{**CUT[0], "size": 61 - rank % 2}, *CUT[1:]]})
    attempt("groups", load=True, groups={"tp": [[0, 1], [0, 1], [0, 2], [1, 3]][rank]})
    attempt("orders", load=True, rules={"tensors": CUT}, groups={"tp": [[0, 1], [1, 0], [2, 3], [3, 2]][rank]})
    wide = {"tensors": [{"match": r".*gate_up\..*", "dim": 0, "fused": [20, 20]}, *idle["tensors"]]}
    attempt("uneven", load=True, rules=wide, groups={"tp": [0, 1, 2] if rank < 3 else [3]})
    wrong = [{"match": r"embed\.weight", "dim": 2}, {"match": r".*gate_up\.weight", "dim": 0, "size": 99}, *CUT]
    attempt("unfit", rules={"tensors": wrong})
    embed = named["embed.weight"]
    for name in ("embed.weight", "blocks.0.down.weight"):
        del named[name].partition_dim
    engine.zero_hpz_partition_size = lambda: 2
    attempt("no dimension, and hpz")
    del engine.zero_hpz_partition_size
    for p in named.values():
        p.tensor_model_parallel = False
    attempt("all whole")
    for p in named.values():
        del p.tensor_model_parallel
    attempt("nothing said")
    embed.tensor_model_parallel = True
    mpu.get_data_parallel_world_size = lambda: 3
    mpu.get_tensor_model_parallel_rank = lambda: 1 - dist.get_rank(mpu.tp)
    attempt("liar", rules={"tensors": CUT})
    del mpu.get_data_parallel_world_size, mpu.get_tensor_model_parallel_rank
    attempt("fine", rules={"tensors": CUT})
    return errors
