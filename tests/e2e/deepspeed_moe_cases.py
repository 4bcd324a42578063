"""Rank functions of test_convert_deepspeed_moe.py: a job with experts, and DeepSpeed loading what was written for it.

The gates draw no random numbers and drop no tokens, so that a step does not depend on how the batch is dealt to ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ckpt
from ckpt.engine.deepspeed import DeepSpeedAdapter
from tests.e2e.deepspeed_out_cases import settings, wholes
from tests.harness.models import ds_config, make_optimizer
from tests.harness.parallel_models import LENGTH, VOCAB, WIDTH, Embedding, Head, batch, loss_of

GLOBAL_BATCH = 8


class Expert(nn.Module):
    """A bottleneck with a buffer, whose values no two experts share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH, bias=False)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) * self.scale


def vary(layer: Any) -> None:
    """Give each expert values of its own, the same wherever it is: DeepSpeed begins with equal ones."""
    experts = layer.deepspeed_moe.experts.deepspeed_experts
    first = dist.get_rank() % layer.ep_size * len(experts)
    for i, one in enumerate(experts):
        generator = torch.Generator().manual_seed(first + i)
        for tensor in (*one.parameters(), *one.buffers()):
            tensor.data += 0.1 * torch.randn(tensor.shape, generator=generator)


class Once(nn.Module):
    """A layer of a pipeline with experts."""

    def __init__(self, ep: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = MoE(WIDTH, Expert(6), 4, ep, k=1, drop_tokens=False, use_rts=False)
        vary(self.moe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(self.norm(x))[0].to(x.dtype)


class Twice(nn.Module):
    """Two layers of experts, whose names are in another order than the modules, one of them with a dense twin."""

    def __init__(self, ep: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        options: Any = {"k": 1, "drop_tokens": False, "use_rts": False}
        self.embed = Embedding()
        self.norm = nn.LayerNorm(WIDTH)
        self.second = MoE(WIDTH, Expert(6), 8, ep, use_residual=True, **options)
        self.first = MoE(WIDTH, Expert(5), 4, ep, **options)
        vary(self.second)
        vary(self.first)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in (self.second, self.first):
            x = x + layer(self.norm(x))[0].to(x.dtype)
        return loss_of(self.embed.logits(x), targets)


def make(
    ep: int, stage: int, dtype: str, seed: int = 0, *, groups: bool = True, pipeline: bool = False, **options: Any
) -> Any:
    """Return an engine, a collective. ``groups``: with DeepSpeed's groups of experts, which it needs with ZeRO.
    ``pipeline``: of two stages, the first of which has two layers of experts.
    """
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    deepspeed.init_distributed("gloo")
    torch.manual_seed(seed)
    model = stages(ep) if pipeline else Twice(ep)
    plain: Any = [{"params": [p for p in model.parameters() if p.dim() > 1], "name": "matrices", "weight_decay": 0.1}]
    plain.append({"params": [p for p in model.parameters() if p.dim() < 2], "name": "vectors", "weight_decay": 0.0})
    optimizer = make_optimizer("AdamW", split(plain) if groups else plain)
    config = ds_config(stage, dtype, **options)
    del config["train_batch_size"]  # follows from the data-parallel size, which DeepSpeed knows
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def stages(ep: int) -> Any:
    """Return a pipeline of two stages."""
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=dist.get_world_size() // 2)
    specs = [LayerSpec(Embedding), *(LayerSpec(Once, ep) for _ in range(3)), LayerSpec(Head)]
    return PipelineModule(specs, topology=topology, loss_fn=loss_of, partition_method="uniform")


def train(engine: Any, steps: int, start: int, rank: int, world: int) -> list[float]:
    """Run steps on this rank's part of one global batch; return the loss over all of it."""
    if hasattr(engine, "train_batch"):
        data = engine.grid.get_data_parallel_rank()
        return [float(engine.train_batch(data_iter=iter([batch(n, 0, data)]))) for n in range(start, start + steps)]
    losses = []
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCAB, (GLOBAL_BATCH, LENGTH + 1), generator=generator)
        part = tokens[rank * GLOBAL_BATCH // world : (rank + 1) * GLOBAL_BATCH // world]
        loss = engine(part[:, :-1].contiguous(), part[:, 1:].contiguous())
        engine.backward(loss)
        engine.step()
        whole = loss.detach().double()
        dist.all_reduce(whole)
        losses.append(float(whole) / world)
    return losses


def save(rank: int, world: int, root: str, steps: int, more: int, engine: dict[str, Any]) -> dict[str, Any]:
    """Train, save with this library and with DeepSpeed, keep what was there, and train on."""
    job = make(**engine)
    train(job, steps, 0, rank, world)
    ckpt.save(job, f"{root}/ours")
    job.save_checkpoint(f"{root}/theirs")
    whole = wholes(job)
    if rank == 0:
        torch.save(whole, f"{root}/state.pt")
    return {"settings": settings(job), "losses": train(job, more, steps, rank, world)}


def load(rank: int, world: int, root: str, start: int, more: int, cases: list[dict[str, Any]]) -> list[Any]:
    """Let DeepSpeed load each of the cases into a fresh engine; return what differs, and the losses afterwards."""
    reference = torch.load(f"{root}/state.pt", weights_only=False)
    found = []
    for case in cases:
        job = make(**case["engine"], seed=7)
        where, _ = job.load_checkpoint(case["path"])
        assert where is not None
        wrong = []
        for shard in DeepSpeedAdapter(job).describe().shards:
            spec, box = shard.spec, shard.box
            key = spec.key if spec.key in reference else (spec.fqn, {"master": "param"}.get(spec.role, spec.role))
            part = reference[key][tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))]
            if part.dtype != shard.tensor.dtype or not torch.equal(part, shard.tensor):
                wrong.append(f"{spec} {box}")
        labels = [[str(g.get("name")), bool(g.get("moe"))] for g in job.optimizer.param_groups]
        report = {"wrong": wrong, "labels": labels, "settings": settings(job)}
        found.append({**report, "losses": train(job, more, start, rank, world)})
    return found
