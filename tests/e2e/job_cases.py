"""What the ranks of the save/load tests do. Every function runs on all ranks, ``(rank, world, **kwargs)``."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ckpt
from ckpt.engine.deepspeed import DeepSpeedAdapter
from tests.harness.models import make_engine, train


def fingerprint(engine: Any) -> dict[str, str]:
    """Return a hash of every piece of this rank's state, optimizer scalars, counters and the scheduler included."""
    state = DeepSpeedAdapter(engine).describe()
    prints = {}
    for shard in state.shards:
        flat = shard.tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        prints[f"{shard.spec.fqn}/{shard.spec.role}/{shard.box}"] = hashlib.sha256(flat).hexdigest()
    prints["objects"] = repr(state.objects)
    return prints


def after_training(engine: Any, losses: list[float]) -> dict[str, Any]:
    """Return everything that must be equal between a job that was interrupted and one that was not."""
    return {
        "losses": losses,
        "lr": [group["lr"] for group in engine.optimizer.param_groups],
        "state": fingerprint(engine),
        "draws": [random.random(), float(np.random.rand()), float(torch.rand(()))],
    }


def seed_generators(rank: int) -> None:
    """Give every rank generators of its own, as data loading and dropout do."""
    random.seed(100 + rank)
    np.random.seed(200 + rank)
    torch.manual_seed(300 + rank)


class Loader:
    """A user's data loader: a cursor that differs by rank, and values that JSON has no word for."""

    def __init__(self, rank: int) -> None:
        self.state: dict[str, Any] = {"cursor": 10 * rank, "seen": (1, 2), "weights": torch.arange(3.0), "nan": None}

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        self.state = state


def unbroken(rank: int, world: int, *, steps: int, engine: dict[str, Any]) -> dict[str, Any]:
    """Train without a break."""
    job = make_engine(**engine)
    seed_generators(rank)
    return after_training(job, train_drawing(job, steps))


def train_drawing(engine: Any, steps: int, start: int = 0) -> list[float]:
    """Train and draw from all generators in between, so that their streams matter."""
    losses = []
    for step in range(start, start + steps):
        kept = torch.get_rng_state()  # `train` seeds torch for its dropout masks; keep the job's own stream
        losses += train(engine, 1, start=step)
        torch.set_rng_state(kept)
        losses += [random.random(), float(np.random.rand()), float(torch.rand(()))]
    return losses


def save_and_die(rank: int, world: int, *, root: str, steps: int, engine: dict[str, Any]) -> None:
    """Train, save, and be killed."""
    job = make_engine(**engine)
    seed_generators(rank)
    train_drawing(job, steps)
    loader = Loader(rank)
    loader.state["cursor"] += steps
    ckpt.save(job, root, extra={"loader": loader, "epoch": 3})
    torch.distributed.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def load_and_train(rank: int, world: int, *, root: str, steps: int, start: int, engine: dict[str, Any]) -> Any:
    """Load into a fresh engine with other weights and train on."""
    job = make_engine(**{**engine, "seed": 99})
    pointers = [p.data_ptr() for p in job.module.parameters()]
    loader = Loader(1000)
    report = ckpt.load(job, root, extra={"loader": loader, "epoch": 0})
    result = after_training(job, train_drawing(job, steps, start=start))
    return {
        **result,
        "step": report.step,
        "cursor": loader.state["cursor"],
        "seen": list(loader.state["seen"]),
        "epoch": report.extra["epoch"],
        "same_memory": pointers == [p.data_ptr() for p in job.module.parameters()],
        "strays": [*report.missing, *report.unexpected, *report.notes],
    }


# -- any layout to any layout -----------------------------------------------------------------------------------------

ROLES = {"param": 0, "master": 0, "exp_avg": 1, "exp_avg_sq": 2}


def _index_values(spec: Any, box: Any, order: dict[str, int]) -> torch.Tensor:
    """Return values that tell tensor, role and global position of every element of a box."""
    grid = torch.arange(int(np.prod(spec.shape)), dtype=torch.float64).reshape(spec.shape)
    part = grid[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
    return part + 1000.0 * order[spec.fqn] + 250_000.0 * ROLES[spec.role]


def _order(state: Any) -> dict[str, int]:
    return {fqn: i for i, fqn in enumerate(sorted({s.spec.fqn for s in state.shards}))}


def save_indexed(rank: int, world: int, *, root: str, engine: dict[str, Any]) -> dict[str, Any]:
    """Fill masters and moments with their global index, refresh the params, and save as step 1."""
    job = make_engine(**engine)
    train(job, 1)
    adapter = DeepSpeedAdapter(job)
    order: dict[str, int] = json.loads(Path(root, "order.json").read_text())
    for shard in adapter.describe().shards:
        if shard.spec.role in ROLES and (shard.spec.fqn, shard.spec.role) != ("", "param"):
            shard.tensor.copy_(_index_values(shard.spec, shard.box, order))
    from ckpt.engine.deepspeed_layout import rebuild_low_precision

    rebuild_low_precision(job.optimizer)
    report = ckpt.save(job, f"{root}/stage{engine['stage']}-{world}", step=1)
    return {"written": report.bytes_written, "unique": report.bytes_unique, "by_rank": list(report.written_by_rank)}


def load_all_indexed(rank: int, world: int, *, root: str, counts: dict[str, int], engine: dict[str, Any]) -> list[str]:
    """Load checkpoint after checkpoint into one engine; return what is misplaced.

    ``counts``: checkpoint -> optimizer steps that it holds.
    """
    job = make_engine(**{**engine, "seed": 7})
    order: dict[str, int] = json.loads(Path(root, "order.json").read_text())
    wrong = []
    for name in counts:
        report = ckpt.load(job, f"{root}/{name}", cast=True)
        wrong += [f"{name}: {n}" for n in (*report.missing, *report.unexpected)]
        for shard in DeepSpeedAdapter(job).describe().shards:
            if shard.spec.role in ROLES:
                expected = _index_values(shard.spec, shard.box, order).to(torch.float32).to(shard.tensor.dtype)
                if not torch.equal(shard.tensor, expected):
                    wrong.append(f"{name}: {shard.spec} {shard.box}")
            elif shard.spec.role == "step" and shard.tensor.item() != counts[name]:
                wrong.append(f"{name}: {shard.spec} is {shard.tensor.item()}")
    return wrong


def names_in_order(rank: int, world: int, *, root: str) -> None:
    """Write the numbering of parameters that all engines share."""
    job = make_engine(0, "fp32")
    if rank == 0:
        Path(root, "order.json").write_text(json.dumps(_order(DeepSpeedAdapter(job).describe())))
