"""DeepSpeed engines around :mod:`tests.harness.parallel_models`, one function for every layout.

A layout is plain data: ``{"kind": "tp", "tp": 2, "stage": 1, "dtype": "bf16"}``. ``whole_state`` is the witness for all
of them: what the model is, read through DeepSpeed's own accessors and put together by hand.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist

import ckpt
from tests.harness.models import ds_config, make_optimizer, param_groups
from tests.harness.parallel_models import (
    VOCAB,
    Block,
    Embedding,
    Head,
    Mixture,
    Mpu,
    Net,
    Plain,
    batch,
    head_of,
    loss_of,
)

LAYERS = 3
EXPERTS = 4

CUT = [
    {"match": r"embed\.weight", "dim": 0, "size": VOCAB},
    {"match": r"blocks\.\d+\.gate_up\..*", "dim": 0, "stride": 2},
    {"match": r"blocks\.\d+\.down\.weight", "dim": 1},
    {"match": r"blocks\.\d+\.(down\.bias|calls)|.*norm\..*"},
]

STAGES = [
    {"match": r"tied_modules\.embed\.(.*)", "name": "embed.{1}"},
    {"match": rf"{LAYERS + 1}\.(.*)", "name": "norm.{1}"},
    {"match": r"(\d+)\.(.*)", "name": "blocks.{1-1}.{2}"},
]

AUTOTP = {
    "autotp_size": 2,
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*gate_up\.weight$"], "partition_type": "column", "shape": [2, -1], "partition_dim": 0},
            {"patterns": [r".*up\.weight$"], "partition_type": "column"},
            {"patterns": [r".*down2?\.weight$"], "partition_type": "row"},
            {"patterns": [r".*head\.weight$"], "partition_type": "column", "gather_output": True},
        ],
    },
}

_OWN = {
    "kind", "stage", "dtype", "tp", "pp", "ep", "gas", "rules", "optimizer", "split", "positions", "noisy", "untied",
}  # fmt: skip
"""What of a layout is not DeepSpeed's config."""


class Engine:
    """An engine, what to pass to ``ckpt``, and how to train it."""

    def __init__(self, engine: Any, rules: dict[str, Any], rank: int, noise: bool = False) -> None:
        self.engine, self.rank, self.noise = engine, rank, noise
        self.saved = ckpt.Parallel(engine, rules=rules) if rules else engine

    def train(self, steps: int, start: int = 0) -> list[float]:
        """Run optimizer steps and return the losses; the generator is drawn from and never seeded."""
        losses = []
        for step in range(start, start + steps):
            micros = self.engine.gradient_accumulation_steps()
            if hasattr(self.engine, "train_batch"):
                data = iter([batch(step, micro, self.rank) for micro in range(micros)])
                losses.append(float(self.engine.train_batch(data_iter=data)))
                continue
            for micro in range(micros):
                loss = self.engine(*batch(step, micro, self.rank))
                self.engine.backward(loss)
                self.engine.step()
                losses.append(float(loss))
        return losses


def build(layout: dict[str, Any], seed: int = 0) -> Engine:
    """Return an engine of this layout. A collective; ``seed`` gives other weights, the same on all ranks."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    known = {
        "kind",
        "stage",
        "dtype",
        "tp",
        "pp",
        "ep",
        "gas",
        "rules",
        "optimizer",
        "split",
        "positions",
        "noisy",
        "untied",
    }
    options = {k: v for k, v in layout.items() if k not in known}
    config = ds_config(layout["stage"], layout["dtype"], gas=layout.get("gas", 1), **options)
    del config["train_batch_size"]  # follows from the data-parallel size, which DeepSpeed knows
    torch.manual_seed(seed)
    made: Engine = _BUILDERS[layout["kind"]](layout, config)
    torch.manual_seed(100 * seed + dist.get_rank())
    return made


def _initialize(model: Any, layout: dict[str, Any], config: dict[str, Any], groups: Any = None, **more: Any) -> Any:
    import deepspeed

    optimizer = make_optimizer(layout.get("optimizer", "AdamW"), groups or param_groups(model))
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, **more)[0]


def _dp(layout: dict[str, Any], config: dict[str, Any]) -> Engine:
    model = Net(LAYERS, positions=layout.get("positions", False))
    return Engine(_initialize(model, layout, config), layout.get("rules", {}), dist.get_rank())


def _tp(layout: dict[str, Any], config: dict[str, Any]) -> Engine:
    mpu = Mpu(layout["tp"])
    engine = _initialize(Net(LAYERS, mpu.tp), layout, config, mpu=mpu)
    return Engine(engine, layout.get("rules", {"tensors": CUT}), mpu.get_data_parallel_rank())


def _pp(layout: dict[str, Any], config: dict[str, Any]) -> Engine:
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

    pp, tp = layout["pp"], layout.get("tp", 1)
    topology = PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=dist.get_world_size() // (pp * tp))
    group = PipelineParallelGrid(topology=topology).get_slice_parallel_group() if tp > 1 else None
    positions = layout.get("positions", False)
    specs = [
        TiedLayerSpec("embed", Embedding, group, positions),
        *(LayerSpec(Block, group) for _ in range(LAYERS)),
        LayerSpec(torch.nn.LayerNorm, 16),
        TiedLayerSpec("embed", Embedding, group, positions, forward_fn=head_of),
    ]
    if layout.get("untied"):
        specs[0], specs[-1] = LayerSpec(Embedding), LayerSpec(Head)
    split = layout.get("split", "uniform")
    model = PipelineModule(specs, topology=topology, loss_fn=loss_of, partition_method=split)
    engine = _initialize(model, layout, config)
    rules = {"names": STAGES, **({"tensors": CUT} if tp > 1 else {})}
    return Engine(engine, layout.get("rules", rules), engine.grid.get_data_parallel_rank())


def _moe(layout: dict[str, Any], config: dict[str, Any]) -> Engine:
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    model = Mixture(EXPERTS, layout["ep"], layout.get("noisy"))
    groups = split_params_into_different_moe_groups_for_optimizer([{"params": list(model.parameters()), "name": "all"}])
    return Engine(_initialize(model, layout, config, groups), {}, dist.get_rank())


def _autotp(layout: dict[str, Any], config: dict[str, Any]) -> Engine:
    model = Plain()
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    settings = {**config, "tensor_parallel": AUTOTP, "optimizer": optimizer}
    import deepspeed

    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]
    return Engine(engine, {}, dist.get_rank(engine.seq_data_parallel_group))


def _plain(layout: dict[str, Any], config: dict[str, Any]) -> Engine:
    model = Plain()
    return Engine(_initialize(model, layout, config, [{"params": list(model.parameters())}]), {}, dist.get_rank())


def _sp(layout: dict[str, Any], config: dict[str, Any]) -> Engine:
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:
        parallel_state_sp.initialize_sequence_parallel(2)
    model = Net(LAYERS, sequence=(dist.get_rank() % 2, 2))
    return Engine(_initialize(model, layout, config, mpu=parallel_state_sp), {}, dist.get_rank() // 2)


_BUILDERS: Any = {"dp": _dp, "tp": _tp, "pp": _pp, "moe": _moe, "autotp": _autotp, "plain": _plain, "sp": _sp}


# --------------------------------------------------------------------------------------------------------- the witness


def whole_state(job: Engine, layout: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return ``name/what`` -> whole tensor, the same on all ranks: weights in fp32 and both moments. A collective."""
    lists: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lists, _local_state(job.engine, layout))
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for rank, mine in enumerate(lists):
        tp = rank % layout.get("tp", 1)  # in all layouts here tensor-parallel ranks are neighbours
        for name, tensor in mine.items():
            present = parts.setdefault(name, {}).setdefault(tp, tensor)
            assert torch.equal(present, tensor), f"replicas of {name} differ"
    return {name: _joined(name, [p[i] for i in sorted(p)]) for name, p in parts.items()}


def _local_state(engine: Any, layout: dict[str, Any]) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    optimizer = engine.optimizer
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):  # DeepSpeed links the first group only
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    for name, p in engine.module.named_parameters():
        name = _whole_name(name, layout)
        shape = getattr(p, "ds_shape", p.shape)
        if layout["stage"] == 0 and not hasattr(optimizer, "optimizer"):
            state = {"weight": p, **{k: v for k, v in optimizer.state[p].items() if k != "step"}}
        elif layout["stage"] == 0:
            master = next(
                m
                for ps, ms in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
                for q, m in zip(ps, ms, strict=True)
                if q is p
            )
            state = {"weight": master, **{k: v for k, v in optimizer.optimizer.state[master].items() if k != "step"}}
        else:
            state = {"weight": safe_get_full_fp32_param(p)}
            state |= {k: safe_get_full_optimizer_state(p, k) for k in ("exp_avg", "exp_avg_sq")}
        found |= {f"{name}/{k}": v.detach().float().reshape(shape).clone() for k, v in state.items()}
    for name, module in engine.module.named_modules():
        if isinstance(module, Block):
            name = _whole_name(f"{name}.", layout)
            found |= {f"{name}calls": module.calls.clone(), f"{name}counted": torch.tensor(module.counted)}
    return found


def _whole_name(name: str, layout: dict[str, Any]) -> str:
    if layout["kind"] == "pp":
        name = re.sub(r"^tied_modules\.embed\.", "embed.", name)
        name = re.sub(rf"^{LAYERS + 1}\.", "norm.", name)
        name = re.sub(r"^(\d+)\.", lambda m: f"blocks.{int(m[1]) - 1}.", name)
    if layout["kind"] == "moe":
        first = dist.get_rank() % layout["ep"] * (EXPERTS // layout["ep"])
        name = re.sub(r"(deepspeed_experts)\.(\d+)", lambda m: f"{m[1]}.{first + int(m[2])}", name)
    return name


def _joined(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    name = name.split("/")[0]
    if name == "embed.weight" and parts[0].shape[0] < VOCAB:
        return torch.cat(parts)[:VOCAB]
    if ".gate_up." in f".{name}":
        return torch.cat([torch.cat([p.chunk(2)[i] for p in parts]) for i in range(2)])
    if re.search(r"(^|\.)down2?\.weight$", name):
        return torch.cat(parts, dim=1)
    if name in ("up.weight", "up.bias", "head.weight"):
        return torch.cat(parts)
    assert all(torch.equal(parts[0], p) for p in parts), f"replicas of {name} differ"
    return parts[0]
