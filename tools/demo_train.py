"""The training job of the demo: a small GPT under DeepSpeed ZeRO, as torchrun starts it on every rank.

It is an ordinary training script. What ``ckpt`` asks of it is two lines, marked below. The rest of the file is the
witness: digests of the whole logical state, computed with DeepSpeed's and torch's own means, without any of ``ckpt``'s
code, and written down before the job is killed so that the restored job can be held against them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import sysconfig
import time
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.utils import logger, safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

import ckpt

CONTEXT, BATCH = 64, 16  # bytes a sequence, sequences a step over all ranks
WIDTH, LAYERS, HEADS = 256, 4, 4


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """Map (batch, time, width) to the same."""
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(WIDTH, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A byte-level language model with tied embeddings and one persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for table in (self.bytes, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.bytes.weight
        self.register_buffer("steps_seen", torch.zeros((), dtype=torch.long))

    def forward(self, x, y):
        """Return the mean loss of predicting ``y`` from ``x``."""
        self.steps_seen += 1
        hidden = self.blocks(self.bytes(x) + self.places(torch.arange(x.shape[1])))
        return F.cross_entropy(self.head(self.norm(hidden)).float().flatten(0, 1), y.flatten())


class Loader:
    """Deals every rank its share of the step's batch; its position is state, like the model's."""

    def __init__(self, text: bytes) -> None:
        self.text, self.position = torch.frombuffer(bytearray(text), dtype=torch.uint8), 0

    def next_batch(self, rank: int, world: int):
        """Return this rank's inputs and targets, whatever the number of ranks: the step's batch is the same."""
        draw = torch.Generator().manual_seed(self.position)
        starts = torch.randint(0, len(self.text) - CONTEXT - 1, (BATCH,), generator=draw)
        self.position += 1
        rows = torch.stack([self.text[s : s + CONTEXT + 1] for s in starts[rank::world].tolist()]).long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def state_dict(self):
        """Return what a restored job needs to go on with the next batch."""
        return {"position": self.position}

    def load_state_dict(self, state) -> None:
        """Go on where ``state`` stood."""
        self.position = state["position"]


def standard_library(limit: int = 4 << 20) -> bytes:
    """Return the source text of Python's standard library: a text that every machine with Python has."""
    found, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found.append(path.read_bytes())
        size += len(found[-1])
        if size > limit:
            break
    return b"".join(found)


def build(stage: int, seed: int):
    """Return a DeepSpeed engine: bf16, AdamW with two parameter groups, a learning-rate schedule."""
    logger.setLevel(logging.ERROR)
    # DeepSpeed would compile this operator with g++ at start; it serves inference only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    torch.manual_seed(seed)
    model = GPT()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    config = {
        "train_batch_size": BATCH,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        # Sizes in elements; the defaults are made for GPUs and would be allocated.
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 500_000,
            "allgather_bucket_size": 500_000,
            "stage3_prefetch_bucket_size": 500_000,
            "stage3_param_persistence_threshold": 1000,
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 1000, "warmup_num_steps": 10, "warmup_max_lr": 1e-3},
        },
    }
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train_step(engine, loader) -> float:
    """Do one optimizer step; return the loss of the whole batch."""
    x, y = loader.next_batch(dist.get_rank(), dist.get_world_size())
    loss = engine(x, y)
    engine.backward(loss)
    engine.step()
    mean = loss.detach().double()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


# ------------------------------------------------------------------------------------------------------ the witness


def whole(engine, param, role: str):
    """Return the full logical tensor behind ``param`` (a collective). Uses nothing of ``ckpt``."""
    if role == "param":
        with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            return param.detach().clone()
    if hasattr(param, "ds_id"):  # ZeRO-3
        return safe_get_full_fp32_param(param) if role == "master" else safe_get_full_optimizer_state(param, role)
    # ZeRO-1/2: what the same two functions do, except that the pieces are added up as integers. Their sum of floats
    # turns -0.0 into 0.0, and this comparison is about bits.
    full, mine = torch.zeros(param.numel(), dtype=torch.int32), param._hp_mapping
    if mine is not None:
        piece = mine.get_hp_fragment() if role == "master" else mine.get_optim_state_fragment(role)
        place = mine.lp_fragment_address
        full[place.start : place.start + place.numel] = piece.view(torch.int32)
    dist.all_reduce(full)
    return full.view(torch.float32).view(param.shape)


def testify(engine, loader) -> dict[str, str]:
    """Return a digest of every full logical tensor, and every counter, of the engine as it stands."""
    relink = getattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
    if relink is not None:  # DeepSpeed links the moments of the first parameter group only
        engine.optimizer._hp_optimizer_states_linked = False
        relink()
    inner = engine.optimizer.optimizer
    facts = {
        "optimizer steps": sorted({float(state["step"]) for state in inner.state.values()}),
        "learning rates": [group["lr"] for group in inner.param_groups],
        "weight decays": [group["weight_decay"] for group in inner.param_groups],
        "schedule": engine.lr_scheduler.state_dict(),
        "step": engine.global_steps,
        "samples": engine.global_samples,
        "position of the loader": loader.position,
    }
    seen = {name: repr(value) for name, value in facts.items()}
    for name, param in engine.module.named_parameters():
        for role in ("param", "master", "exp_avg", "exp_avg_sq"):
            seen[f"{name} ({role})"] = fingerprint(whole(engine, param, role))
    for name, buffer in engine.module.named_buffers():
        seen[f"{name} (buffer)"] = fingerprint(buffer)
    return seen


def fingerprint(tensor) -> str:
    """Return dtype, shape and SHA-256 of the bytes."""
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(raw).hexdigest()}"


# ---------------------------------------------------------------------------------------------------------- the job


def publish(path: Path, value) -> None:
    """Write JSON under its final name at once, so that a reader never sees half of it."""
    if dist.get_rank() == 0:
        path.with_suffix(".tmp").write_text(json.dumps(value))
        path.with_suffix(".tmp").replace(path)


def numbers(report, names: str) -> dict[str, float]:
    """Return some fields of a report."""
    return {name: getattr(report, name) for name in names.split()}


def main() -> None:
    """Run one of the two jobs: the one that will be killed, or the one that brings it back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", required=True)
    parser.add_argument("--work", required=True, type=Path, help="where the two jobs leave notes for the conductor")
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--every", type=int, default=20, help="save every so many steps")
    parser.add_argument("--resume", type=int, metavar="STEPS", help="load, compare, and train so many steps")
    args = parser.parse_args()

    (args.work / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    loader = Loader(standard_library())
    engine = build(args.stage, seed=1 if args.resume is None else 2)  # another start: nothing may come from the seed
    losses = {}

    if args.resume is not None:
        report = ckpt.load(engine, args.root, extra={"loader": loader})  # <------------------------- the load
        publish(args.work / "restored.json", testify(engine, loader))
        publish(args.work / "load.json", numbers(report, "step seconds bytes_read"))
        last = engine.global_steps + args.resume
    else:
        publish(args.work / "model.json", {"parameters": sum(p.numel() for p in engine.module.parameters())})
        last = 10_000  # it will not come to that

    while engine.global_steps < last:
        started = time.perf_counter()
        loss = train_step(engine, loader)
        step = engine.global_steps
        losses[step] = loss
        if dist.get_rank() == 0 and (step % 10 == 0 or args.resume is not None):
            print(f"  step {step:3d}  loss {loss:.4f}  {time.perf_counter() - started:.2f} s", flush=True)
        if args.resume is None and step % args.every == 0:
            report = ckpt.save(engine, args.root, extra={"loader": loader})  # <--------------------- the save
            publish(args.work / f"saved-{step}.json", testify(engine, loader))
            fields = "step seconds bytes_held bytes_unique bytes_written bytes_stored largest_writer"
            publish(args.work / "save.json", numbers(report, fields))
        publish(args.work / f"losses-{'killed' if args.resume is None else 'restored'}.json", losses)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
