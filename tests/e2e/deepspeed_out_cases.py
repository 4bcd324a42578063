"""Rank functions of test_convert_deepspeed_out.py: a source, and DeepSpeed loading what was written."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import ckpt
from ckpt.engine.deepspeed import DeepSpeedAdapter
from tests.harness.models import batch, make_engine
from tests.harness.parallel_engines import build, whole_state

GLOBAL_BATCH = 12


def train(engine: Any, steps: int, start: int, rank: int, world: int) -> list[float]:
    """Run steps on this rank's part of one global batch; return the loss over all of it."""
    losses = []
    for step in range(start, start + steps):
        tokens, targets = batch(step, 0, 0, GLOBAL_BATCH)
        part = slice(rank * GLOBAL_BATCH // world, (rank + 1) * GLOBAL_BATCH // world)
        loss = engine(tokens[part], targets[part])
        engine.backward(loss)
        engine.step()
        whole = loss.detach().double()
        dist.all_reduce(whole)
        losses.append(float(whole) / world)
    return losses


def synced(engine: Any) -> None:
    """Make buffers equal on all ranks, which the model leaves different."""
    for buffer in engine.module.buffers():
        dist.broadcast(buffer, 0)


def wholes(engine: Any) -> dict[tuple[str, str], torch.Tensor]:
    """Return all state of the job, put together from all ranks' pieces."""
    pieces = [(s.spec, s.box, s.tensor.detach().clone()) for s in DeepSpeedAdapter(engine).describe().shards]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, pieces)
    found: dict[tuple[str, str], torch.Tensor] = {}
    for spec, box, tensor in (piece for rank in gathered for piece in rank):
        whole = found.setdefault(spec.key, torch.zeros(spec.shape, dtype=tensor.dtype))
        whole[tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))] = tensor
    return found


def settings(engine: Any) -> list[Any]:
    """Return everything beside tensors that training depends on."""
    kept = ("lr", "weight_decay", "betas", "eps")
    groups = [{k: v for k, v in g.items() if k in kept} for g in engine.optimizer.param_groups]
    scheduler = None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()
    scale = getattr(engine.optimizer, "cur_scale", None) if engine.fp16_enabled() else None
    return [repr(groups), repr(scheduler), engine.global_steps, engine.global_samples, engine.skipped_steps, scale]


def save_source(rank: int, world: int, root: str, steps: int, more: int, engine: dict[str, Any]) -> dict[str, Any]:
    """Train, save with this library and with DeepSpeed, keep what was there, and train on."""
    job = make_engine(**engine)
    train(job, steps, 0, rank, world)
    synced(job)
    ckpt.save(job, f"{root}/ours", extra={"note": {"tokens": 5}})
    job.save_checkpoint(f"{root}/theirs", client_state={"note": {"tokens": 5}})
    whole = wholes(job)
    if rank == 0:
        torch.save(whole, f"{root}/state.pt")
    return {"settings": settings(job), "losses": train(job, more, steps, rank, world)}


def load_targets(rank: int, world: int, root: str, start: int, more: int, cases: list[dict[str, Any]]) -> list[Any]:
    """Let DeepSpeed load each of the cases into a fresh engine; return what differs, and the losses afterwards."""
    reference = torch.load(f"{root}/state.pt", weights_only=False)
    found = []
    for case in cases:
        job = make_engine(seed=7, **case["engine"])
        where, client = job.load_checkpoint(case["path"])
        assert where is not None
        wrong, seen = [], set()
        for shard in DeepSpeedAdapter(job).describe().shards:
            spec, box = shard.spec, shard.box
            key = spec.key if spec.key in reference else (spec.fqn, {"master": "param"}.get(spec.role, spec.role))
            seen.add(spec.key)
            if key not in reference:
                wrong.append(f"{spec} is new")
                continue
            part = reference[key][tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))]
            if part.dtype != shard.tensor.dtype or not torch.equal(part, shard.tensor):
                wrong.append(f"{spec} {box}")
        synced(job)
        report = {"wrong": wrong, "seen": sorted(map(list, seen)), "settings": settings(job)}
        report["client"] = client.get("note")
        found.append({**report, "losses": train(job, more, start, rank, world)})
    return found


def load_weights(rank: int, world: int, root: str, cases: list[dict[str, Any]]) -> list[list[str]]:
    """Let DeepSpeed load weights alone, and its script for fp32 weights read the files; return what differs."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    reference = torch.load(f"{root}/state.pt", weights_only=False)
    wrong: list[list[str]] = []
    for case in cases:
        job = make_engine(seed=7, **case["engine"])
        flags = {case.get("flag", "load_optimizer_states=False").partition("=")[0]: "flag" in case}
        where, _ = job.load_checkpoint(case["path"], **flags, load_lr_scheduler_states=False)
        assert where is not None
        found = wholes(job)
        params = {key: tensor for key, tensor in reference.items() if key[1] in ("param", "buffer")}
        wrong.append([str(key) for key, tensor in params.items() if not torch.equal(found[key], tensor)])
        if case.get("masters"):  # what the next step makes the weights from
            made = {fqn: tensor for (fqn, role), tensor in found.items() if role == "master"}
            assert made
            wrong[-1] += [fqn for fqn, tensor in made.items() if not torch.equal(tensor, found[fqn, "param"].float())]
        if case["script"] and rank == 0:
            whole = get_fp32_state_dict_from_zero_checkpoint(case["path"])
            masters = {fqn: tensor for (fqn, role), tensor in reference.items() if role in ("param", "master")}
            wrong[-1] += [fqn for fqn, tensor in masters.items() if not torch.equal(whole[fqn], tensor.float())]
    return wrong


def save_parallel(rank: int, world: int, root: str, layout: dict[str, Any]) -> None:
    """Train, save with this library and with DeepSpeed, and leave the witness beside them."""
    job = build(layout)
    job.train(2)
    ckpt.save(job.saved, f"{root}/ours", on_divergence="error")
    job.engine.save_checkpoint(f"{root}/theirs")
    whole = whole_state(job, layout)
    if rank == 0:
        torch.save(whole, f"{root}/whole.pt")


def load_parallel(rank: int, world: int, root: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Let DeepSpeed load into engines with model parallelism; compare with the witness of the job that was saved."""
    found = []
    for case in cases:
        job = build(case["layout"], seed=7)
        where, _ = job.engine.load_checkpoint(case["path"])
        assert where is not None
        expected, state = torch.load(f"{root}/whole.pt"), whole_state(job, case["layout"])
        found.append({
            "names": sorted(expected.keys() ^ state.keys()),
            "differ": [k for k in sorted(expected.keys() & state.keys()) if not torch.equal(expected[k], state[k])],
            "trains": bool(torch.isfinite(torch.tensor(job.train(2, start=2))).all()),
        })  # fmt: skip
    return found
