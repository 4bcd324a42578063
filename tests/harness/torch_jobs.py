"""Loops around :class:`TorchGPT` in every layout: ``make_job("fsdp2 x tp", seed)`` and ``job.train(3)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ckpt
from tests.harness.torch_models import (
    CONTEXT,
    FUSED_RULES,
    LAYERS,
    RULES,
    VOCAB,
    WIDTH,
    Tp,
    batch,
    global_name,
    groups_of,
    loss_of,
    part_of_model,
)

UNEVEN = (0, 1, LAYERS)
"""Where two stages of a pipeline begin and end."""


@dataclass
class Job:
    """What a script has in its local variables. ``engine`` is what it would pass to :func:`ckpt.save`."""

    engine: Any
    model: nn.Module
    optimizer: Any
    scheduler: Any
    dp_rank: int = 0
    schedule: Any = None
    after_backward: Callable[[], None] = lambda: None
    stage: int | None = None

    def train(self, steps: int, start: int = 0) -> list[float]:
        """Run optimizer steps and return this rank's losses; they depend on the state and the step numbers alone."""
        losses: list[float] = []
        for step in range(start, start + steps):
            tokens, targets = batch(step, self.dp_rank)
            self.optimizer.zero_grad()
            if self.schedule is not None:
                found: list[torch.Tensor] = []
                arguments = (tokens,) if self.stage == 0 else ()
                self.schedule.step(*arguments, **({"target": targets, "losses": found} if self.stage == 1 else {}))
                losses += [one.item() for one in found]
            else:
                loss = loss_of(self.model(tokens), targets)
                loss.backward()
                losses.append(loss.item())
            self.after_backward()
            self.optimizer.step()
            self.scheduler.step()
        return losses


def make_job(layout: str, seed: int = 0, *, optimizer: str = "AdamW", **options: Any) -> Any:
    """Return a job on this rank; a collective. Equal seeds give equal weights in all layouts."""
    job: Any = _LAYOUTS[layout](seed, optimizer=optimizer, **options)
    return job


def _finished(model: Any, optimizer: Any, wrap: Callable[[Any], Any] = lambda engine: engine, **rest: Any) -> Job:
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    return Job(wrap((rest.pop("shown", model), optimizer, scheduler)), model, optimizer, scheduler, **rest)


def _optimizer(name: str, model: Any, **options: Any) -> Any:
    defaults: dict[str, Any] = {"AdamW": {"lr": 1e-2}, "SGD": {"lr": 1e-1, "momentum": 0.9}, "Adagrad": {"lr": 1e-2}}
    return getattr(torch.optim, name)(groups_of(list(model.parameters())), **{**defaults[name], **options})


def _plain(seed: int, *, optimizer: str, fused: bool = False) -> Job:
    model = part_of_model(seed, fused=fused)
    return _finished(model, _optimizer(optimizer, model))


def _ddp(seed: int, *, optimizer: str) -> Job:
    model = part_of_model(seed)
    made = _optimizer(optimizer, model)
    return _finished(torch.nn.parallel.DistributedDataParallel(model), made, dp_rank=dist.get_rank())


def _zero1(seed: int, *, optimizer: str, bucket_view: bool = False) -> Job:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = torch.nn.parallel.DistributedDataParallel(part_of_model(seed))
    made = ZeroRedundancyOptimizer(
        groups_of(list(model.parameters())),
        optimizer_class=getattr(torch.optim, optimizer),
        parameters_as_bucket_view=bucket_view,
        lr=1e-2,
    )
    return _finished(model, made, dp_rank=dist.get_rank())


def _sharded(model: Any, mesh: Any, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _fsdp2(seed: int, *, optimizer: str, bf16: bool = False, narrow: bool = False) -> Job:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if bf16 else {}
    whole: Any = part_of_model(seed)
    if narrow:  # fewer rows than ranks, of a matrix and of a vector
        whole.gain = nn.Parameter(torch.ones(1))
        whole.shift = nn.Parameter(torch.zeros(1, VOCAB))
        whole.register_forward_hook(lambda model, _, out: out * model.gain + model.shift)
    model = _sharded(whole, mesh, **policy)
    return _finished(model, _optimizer(optimizer, model), dp_rank=dist.get_rank())


def _hsdp(seed: int, *, optimizer: str) -> Job:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replica", "shard"))
    model = _sharded(part_of_model(seed), mesh)
    return _finished(model, _optimizer(optimizer, model), dp_rank=dist.get_rank())


def _parallelized(model: Any, mesh: Any) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    column, row = ColwiseParallel(), RowwiseParallel()
    plan = {"q": column, "k": column, "v": column, "proj": row, "up": column, "down": row}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def _dtensor_tp(seed: int, *, optimizer: str) -> Job:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = _parallelized(part_of_model(seed), mesh)
    return _finished(model, _optimizer(optimizer, model))


def _fsdp2_tp(seed: int, *, optimizer: str) -> Job:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = _sharded(_parallelized(part_of_model(seed), mesh["tp"]), mesh["dp"])
    return _finished(model, _optimizer(optimizer, model), dp_rank=mesh["dp"].get_local_rank())


def _megatron(seed: int, *, optimizer: str, fused: bool = False, attributes: bool = False) -> Job:
    tp = Tp(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    model = part_of_model(seed, tp=tp, fused=fused)
    rules = FUSED_RULES if fused else RULES
    if attributes:  # as Megatron marks its parameters; the padded vocabulary needs a rule in any case
        for name, p in model.named_parameters():
            kind, what = name.split(".")[-2:] if "." in name else ("", name)
            p.tensor_model_parallel = kind in ("q", "k", "v", "up") or (kind in ("proj", "down") and what == "weight")
            p.partition_dim, p.partition_stride = int(kind in ("proj", "down")), 1
        rules = {"tensors": [RULES["tensors"][2], {"match": "tokens_seen|running"}]}
    groups = {"tp": tp.group}
    return _finished(model, _optimizer(optimizer, model), lambda e: ckpt.Parallel(e, rules=rules, groups=groups))


def _three_d(seed: int, *, optimizer: str, how: str = "rules", dp: str = "all-reduce") -> Job:
    """tp 2 x pp 2 x dp: ranks counted with tp fastest and pp slowest."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 4, 2), mesh_dim_names=("pp", "dp", "tp"))
    groups = {axis: mesh[axis].get_group() for axis in ("pp", "dp", "tp")}
    stage = mesh["pp"].get_local_rank()
    tp = Tp(groups["tp"], mesh["tp"].get_local_rank(), 2)
    first = UNEVEN[stage]
    model = part_of_model(seed, first, UNEVEN[stage + 1], tp=tp)
    if dp == "fsdp2":
        model = _sharded(model, mesh["dp"], reshard_after_forward=False)
    optim = _optimizer(optimizer, model)
    # Stated, not found out by a trial run of the module, which would count in its buffers.
    tokens, hidden, logits = (torch.empty(2, CONTEXT, *more, device="meta") for more in ((), (WIDTH,), (VOCAB,)))
    ends_of = [(tokens.long(), hidden.requires_grad_()), (hidden, logits.requires_grad_())][stage]
    shapes = {"input_args": (ends_of[0],), "output_args": (ends_of[1],)}
    runner = PipelineStage(model, stage, 2, torch.device("cpu"), group=groups["pp"], **shapes)
    schedule = ScheduleGPipe(runner, n_microbatches=2, loss_fn=loss_of)
    ends = model.embed.weight if stage == 0 else model.head.weight

    def after_backward() -> None:
        for p in model.parameters() if dp == "all-reduce" else ():
            dist.all_reduce(p.grad, group=groups["dp"])
        local = getattr(ends.grad, "_local_tensor", ends.grad)
        dist.all_reduce(local, group=groups["pp"])  # the tied weights are one

    named: dict[str, Any] = {"rules": RULES}
    if how == "rules":
        named["rules"] = {**RULES, "names": [{"match": r"stage1\.blocks\.(\d+)\.(.*)", "name": "blocks.{1+1}.{2}"}]}
    else:
        named["names"] = lambda name: global_name(name, first)
    shown = schedule if how == "rules" else runner
    return _finished(
        model,
        optim,
        lambda engine: ckpt.Parallel(engine, groups=groups, **named),
        shown=shown,
        dp_rank=mesh["dp"].get_local_rank(),
        schedule=schedule,
        after_backward=after_backward,
        stage=stage,
    )


class _DeepSpeedJob:
    """ZeRO-3 in fp32 around the same model."""

    def __init__(self, seed: int, *, optimizer: str, stage: int = 3, dtype: str = "fp32") -> None:
        import deepspeed

        from tests.harness.models import ds_config

        model = part_of_model(seed)
        config = ds_config(stage, dtype, clip=0.0, scheduler=False)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=_optimizer(optimizer, model), config=config)

    def train(self, steps: int, start: int = 0) -> list[float]:
        """Run optimizer steps."""
        losses = []
        for step in range(start, start + steps):
            tokens, targets = batch(step, dist.get_rank())
            loss = loss_of(self.engine(tokens).float(), targets)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.item())
        return losses


_LAYOUTS: dict[str, Any] = {
    "plain": _plain,
    "ddp": _ddp,
    "zero1": _zero1,
    "fsdp2": _fsdp2,
    "hsdp": _hsdp,
    "tp": _dtensor_tp,
    "fsdp2 x tp": _fsdp2_tp,
    "megatron": _megatron,
    "tp x pp x dp": _three_d,
    "deepspeed": _DeepSpeedJob,
}
