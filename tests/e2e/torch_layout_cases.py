"""Rank functions of test_torch_layouts.py: places that no training loop comes to by itself, and bad input."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckpt
from ckpt.engine.find import adapter_for
from tests.e2e.adapter_cases import collect, equal, held, same
from tests.harness.torch_jobs import make_job
from tests.harness.torch_models import (
    FUSED_RULES,
    RULES,
    TorchGPT,
    Tp,
    batch,
    groups_of,
    loss_of,
    part_of_model,
    slice_of,
)


def numbered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Give every parameter values that tell its elements apart; return them in full."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.arange(float(p.numel())).view(p.shape) + 1000 * i)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def stepped(model: nn.Module) -> Any:
    """Return an optimizer with state, moved by gradients that are each parameter's own values."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    for p in model.parameters():
        p.grad = p.detach().clone()
    optimizer.step()
    return optimizer


def uneven(rank: int, world: int) -> list[str]:
    """FSDP2 inside of DTensor tensor parallelism, with sizes that nothing divides: return what is misplaced."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    layers = {"up": nn.Linear(5, 7), "down": nn.Linear(7, 5), "alone": nn.Linear(2, 1)}
    model = nn.Sequential(OrderedDict(layers))
    full = numbered(model)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = stepped(model)
    whole = collect(adapter_for((model, optimizer)))  # type: ignore[arg-type]
    wrong = [name for name, t in full.items() if not torch.equal(whole[name, "param"], t)]
    wrong += [f"{n} exp_avg" for n, t in full.items() if not torch.allclose(whole[n, "exp_avg"], 0.1 * t)]
    return wrong


def columns_and_sub_meshes(rank: int, world: int, *, root: str) -> Any:
    """FSDP2 on dimension 1, and a module that only ranks 0 and 1 have a part of."""

    def build(first: bool) -> Any:
        model = nn.ModuleDict({"wide": nn.Linear(8, 3, bias=False), "few": nn.Linear(3, 5)})
        full = numbered(model)
        if not first:
            for p in model.parameters():
                nn.init.zeros_(p)
        half = DeviceMesh("cpu", [0, 1])
        fully_shard(model["wide"], shard_placement_fn=lambda p: Shard(1), mesh=init_device_mesh("cpu", (world,)))
        for name, p in list(model["few"].named_parameters()):
            setattr(model["few"], name, nn.Parameter(distribute_tensor(p.detach(), half, [Shard(0)])))
        return model, full

    model, full = build(True)
    optimizer = stepped(model)
    engine = (model, optimizer)
    state = adapter_for(engine).describe()
    whole = collect(adapter_for(engine))  # type: ignore[arg-type]
    ckpt.save(engine, root)
    other, _ = build(False)
    again = (other, torch.optim.Adam(other.parameters()))
    report = ckpt.load(again, root)
    return {
        "wrong": [name for name, t in full.items() if not torch.equal(whole[name, "param"], t)],
        "few": sum(s.spec.fqn.startswith("few") for s in state.shards),
        "columns": [list(s.box.sizes) for s in state.shards if s.spec.key == ("wide.weight", "param")],
        "loaded": same(held(adapter_for(engine)), held(adapter_for(again))),  # type: ignore[arg-type]
        "strays": [*report.missing, *report.unexpected, *report.notes],
    }


def unsharded(rank: int, world: int, *, root: str) -> Any:
    """Save and load while FSDP2 has left gathered parameters behind an evaluation."""
    job = make_job("fsdp2")
    job.train(2)
    expected = held(adapter_for(job.engine))  # type: ignore[arg-type]
    with torch.no_grad():
        job.model(batch(9, rank)[0])
    gathered = not isinstance(job.model.positions, DTensor)
    wrong = same(expected, held(adapter_for(job.engine)))  # type: ignore[arg-type]
    ckpt.save(job.engine, root, step=2)
    other = make_job("fsdp2", seed=5)
    with torch.no_grad():
        other.model(batch(9, rank)[0])
    ckpt.load(other.engine, root)
    losses = []
    for one in (job, other):
        with torch.no_grad():
            losses.append(loss_of(one.model(batch(3, rank)[0]), batch(3, rank)[1]).item())
    return {
        "gathered": gathered,
        "wrong": [k for k in wrong if "tokens_seen" not in k and "running" not in k],
        "losses": losses,
    }


def shared_heads(rank: int, world: int, *, root: str) -> list[str]:
    """Load fused weights that one rank trained into more ranks than there are key heads; return what is wrong."""
    tp = Tp(dist.group.WORLD, rank, world)
    whole = part_of_model(3, fused=True)
    full = dict(whole.named_parameters())
    optimizer = torch.optim.Adam(groups_of(list(whole.parameters())))
    for p in whole.parameters():
        p.grad = torch.arange(1.0, p.numel() + 1).view(p.shape)
    optimizer.step()
    part = part_of_model(4, tp=tp, fused=True)
    mine = torch.optim.Adam(groups_of(list(part.parameters())))
    for p in part.parameters():  # so that padding has moments too
        p.grad = torch.ones_like(p)
    mine.step()
    if rank == 0:
        torch.save({n: (p.detach(), optimizer.state[p]["exp_avg"]) for n, p in full.items()}, f"{root}/full.pt")
    engine = ckpt.Parallel((part, mine), rules=FUSED_RULES, groups={"tp": dist.group.WORLD})
    ckpt.save((whole, optimizer), f"{root}/whole", step=1)
    ckpt.load(engine, f"{root}/whole")
    wrong = []
    for name, p in part.named_parameters():
        for label, found, source in (
            ("param", p, full[name]),
            ("exp_avg", mine.state[p]["exp_avg"], optimizer.state[full[name]]["exp_avg"]),
        ):
            expected = slice_of(name, source.detach(), tp)
            expected = torch.where(expected == 7.0, 0.0, expected) if name == "embed.weight" else expected
            if not equal(found.detach(), expected):
                wrong.append(f"{name} {label}")
    report = ckpt.save(engine, f"{root}/parts", step=1)
    if report.divergences:
        wrong.append(str(report.divergences))
    plain = part_of_model(5, fused=True)
    last = torch.optim.Adam(groups_of(list(plain.parameters())))
    ckpt.load((plain, last), f"{root}/parts")
    return wrong + same(held(adapter_for((whole, optimizer))), held(adapter_for((plain, last))))  # type: ignore[arg-type]


def interleaved(rank: int, world: int, *, root: str) -> Any:
    """Two stages on each of two ranks, local names, one optimizer for each stage; load into the whole model."""
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

    cuts = [(0, 1), (1, 2), (2, 2), (2, 3)]  # one is empty
    parts = [(i, TorchGPT(*cuts[i])) for i in (rank, rank + 2)]
    stages = [PipelineStage(part, i, 4, torch.device("cpu")) for i, part in parts]
    optimizers = [torch.optim.Adam(part.parameters()) for _, part in parts if list(part.parameters())]
    for _, part in parts:
        for p in part.parameters():
            p.data.copy_(torch.full(p.shape, 0.5))
            p.grad = torch.full_like(p, 0.25)
    for optimizer in optimizers:
        optimizer.step()
    names = [
        {"match": rf"stage{i}\.blocks\.0\.(.*)", "name": f"blocks.{layer}.{{1}}"}
        for i, layer in ((0, 0), (1, 1), (3, 2))
    ]
    rules = {"names": names, "tied": {"head.weight": "embed.weight"}}
    shown = ScheduleInterleaved1F1B(stages, 2, loss_fn=loss_of) if rank == 0 else stages
    engine = ckpt.Parallel((optimizers, shown), rules=rules)
    state = adapter_for(engine).describe()
    ckpt.save(engine, root, step=1)
    model = part_of_model(1)
    optimizer = torch.optim.Adam(model.parameters())
    report = ckpt.load((model, optimizer), root)
    ckpt.save((model, optimizer), f"{root}/whole", step=1)
    back = ckpt.load(engine, f"{root}/whole")
    return {
        "groups": {k: list(v) for k, v in state.groups.items()},
        "strays": [text for one in (report, back) for text in (*one.missing, *one.unexpected)] + list(back.notes),
        "wrong": [n for n, p in model.named_parameters() if not bool((p == p.flatten()[0]).all())],
        "steps": sorted({float(s["step"]) for s in optimizer.state.values()}),
    }


def attempt(engine: object, root: str) -> str:
    """Return the error of a save."""
    try:
        ckpt.save(engine, root, step=1)
    except ckpt.CkptError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def refused(rank: int, world: int, *, root: str) -> dict[str, str]:
    """Return the errors of engines that cannot be saved."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    tp = Tp(dist.group.WORLD, rank, world)
    found = {}

    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sums = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Partial()]))
            self.short = nn.Parameter(
                DTensor.from_local(torch.ones(2), mesh, [Shard(0)], shape=torch.Size([9]), stride=(1,), run_check=False)
            )
            self.fine = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))

    found["placements"] = attempt(Strange(), root)
    model = part_of_model(1, tp=tp)
    everything = {"match": "nothing.like.this", "dim": 0}
    tensors = [everything, *RULES["tensors"][1:3], {"match": "blocks.*norm.*", "dim": 3}]
    group = {"tp": dist.group.WORLD}
    found["unexplained"] = attempt(ckpt.Parallel(model, rules={"tensors": tensors}, groups=group), root)
    found["no rules"] = attempt(ckpt.Parallel(model, groups=group), root)
    idle = {"tensors": [everything, *RULES["tensors"]], "tied": {"tail.weight": "embed.weight"}}
    groups = {"dp": [0, 1, 2] if rank < 2 else [0, 2]}
    found["groups"] = attempt(ckpt.Parallel(nn.Linear(2, 2), rules=idle, groups=groups), root)
    marked = nn.Linear(4, 3)
    marked.weight.tensor_model_parallel, marked.weight.partition_dim = True, 0  # type: ignore[assignment]
    found["with whom"] = attempt(marked, root)
    cut = {"tensors": [{"match": "weight", "dim": 0}, {"match": "bias"}]}
    found["with whom, by rule"] = attempt(ckpt.Parallel(nn.Linear(4, 3), rules=cut), root)
    alone = init_device_mesh("cpu", (world, 1), mesh_dim_names=("tp", "dp"))["dp"]
    inside = fully_shard(nn.Linear(4, 3), mesh=alone)  # of a slice; its mesh cannot know of the others
    found["with whom, inside of a mesh"] = attempt(ckpt.Parallel(inside, rules=cut), root)
    other = nn.Linear(4 + rank, 3)
    found["shapes"] = attempt(other, root)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    with_ddp = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.Adam, overlap_with_ddp=True, lr=0.1
    )
    found["overlap"] = attempt((model, with_ddp), root)
    model = fully_shard(nn.Linear(3, 3), mesh=mesh)
    optimizer = stepped(model)
    for p in model.parameters():
        optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].redistribute(placements=[Replicate()])
    found["state"] = attempt((model, optimizer), root)
    return found
