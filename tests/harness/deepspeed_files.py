"""Checkpoints in DeepSpeed's own layout, written without DeepSpeed and without any code of ours: for many ranks, and
for what its releases did before.

Each function lays the values out by the plainest means there are (concatenate, pad, chunk).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

Tensors = dict[str, torch.Tensor]


def numbered(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of which each element tells where it belongs."""
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (1000.0 * seed + count / 16).to(dtype).reshape(shape)


@dataclass
class Model:
    """``groups``: the optimizer's, name -> master. ``buffers``, ``frozen``: beside them. ``tied``: other -> name."""

    groups: list[Tensors]
    buffers: Tensors = field(default_factory=dict)
    frozen: Tensors = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    step: float | None = 5.0
    low: torch.dtype = torch.bfloat16

    def state(self, name: str, role: str) -> torch.Tensor:
        """The optimizer's state of a parameter, unlike its master and any other."""
        master = next(group[name] for group in self.groups if name in group)
        return master + 0.25 * (1 + self.states.index(role))

    def module(self, *, cut: bool = False) -> dict[str, Any]:
        """The state dict; ``cut``: as ZeRO-3 leaves it."""
        trained = {n: m.to(self.low) for group in self.groups for n, m in group.items()}
        held = {**trained, **{n: t.to(self.low) for n, t in self.frozen.items()}}
        held.update({other: held[name] for other, name in self.tied.items()})
        if cut:
            held = {n: torch.empty(0, dtype=self.low) for n in held}
        return {**self.buffers, **held}

    def common(self, dp: int, stage: int, **more: Any) -> dict[str, Any]:
        """What stands in every file of the model."""
        return {
            "buffer_names": list(self.buffers),
            "optimizer": None,
            "param_shapes": [{n: m.shape for n, m in group.items()} for group in self.groups],
            "frozen_param_shapes": None,
            "shared_params": dict(self.tied),
            "frozen_param_fragments": None,
            "lr_scheduler": {"last_batch_iteration": 4},
            "skipped_steps": 0,
            "global_steps": 5,
            "global_samples": 5 * 2 * dp,
            "dp_world_size": dp,
            "mp_world_size": 1,
            "ds_config": {
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 1,
                "zero_optimization": {"stage": stage},
                "bf16": {"enabled": True},
                "scheduler": {"type": "WarmupLR", "params": {}},
            },
            "ds_version": "0.19.8",
            **more,
        }

    def scalars(self) -> dict[str, Any]:
        """The numbers of a partition's state."""
        return {} if self.step is None else {"step": torch.tensor(self.step)}


def options(weight_decay: float, numbers: list[int]) -> dict[str, Any]:
    """A parameter group of torch's AdamW."""
    return {
        "lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay, "amsgrad": False,
        "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
        "decoupled_weight_decay": True, "params": numbers,
    }  # fmt: skip


def write_zero12(
    folder: Path,
    model: Model,
    dp: int,
    *,
    stage: int = 1,
    align: int = 2,
    lean: str = "each",
    books: bool = True,
    mp: int = 0,
    **more: Any,
) -> None:
    """Write a checkpoint of ZeRO-1 or 2.

    Args:
        folder: of the tag.
        model: what it holds.
        dp: ranks.
        stage: 1 or 2.
        align: a group is padded to a multiple of ``align * dp``.
        lean: which ranks leave the padding out: ``each``, ``last`` (older releases, which wrote it down for the last
            rank alone) or ``none`` (``BF16_Optimizer``).
        books: do the files say themselves which parameters they hold, as newer releases write it?
        mp: number of the model-parallel rank.
        more: entries of the model's file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(
        {"module": model.module(), **model.common(dp, stage, **more)}, folder / f"mp_rank_{mp:02d}_model_states.pt"
    )
    flats = [_padded(list(group.values()), align * dp) for group in model.groups]
    sizes = [flat.numel() // dp for flat in flats]
    counts = [sum(m.numel() for m in group.values()) for group in model.groups]
    roles = {
        role: [_padded([model.state(n, role).reshape(-1) for n in group], align * dp) for group in model.groups]
        for role in model.states
    }
    for rank in range(dp):
        parts = [slice(rank * size, (rank + 1) * size) for size in sizes]
        padding = [max(0, min(size, (rank + 1) * size - count)) for size, count in zip(sizes, counts, strict=True)]
        if lean == "last":
            padding = [size * dp - n if rank == dp - 1 else 0 for size, n in zip(sizes, counts, strict=True)]
        masters = [flat[part].clone() for flat, part in zip(flats, parts, strict=True)]
        if lean != "none":
            masters = [m[: max(0, m.numel() - pad)].clone() for m, pad in zip(masters, padding, strict=True)]
        state = {
            g: {**{role: flat[g][part].clone() for role, flat in roles.items()}, **model.scalars()}
            for g, part in enumerate(parts)
        }
        inner = {"state": state, "param_groups": [options(0.1 * g, [g]) for g in range(len(model.groups))]}
        held: dict[str, Any] = {
            "base_optimizer_state": inner,
            "single_partition_of_fp32_groups": masters,
            "group_paddings": padding,
            "partition_count": [dp] * len(model.groups),
            "clip_grad": 1.0,
        }
        if lean != "none":
            held |= {"zero_stage": stage, "overflow": False}
        if books:
            held["param_slice_mappings"] = [_book(group, part) for group, part in zip(model.groups, parts, strict=True)]
        _save_optimizer(folder, rank, mp, held)


def write_zero3(
    folder: Path, model: Model, dp: int, *, owners: list[int] | None = None, mp: int = 0, **more: Any
) -> None:
    """Write a checkpoint of ZeRO-3. ``model.groups`` are its sub-groups, ``owners`` the parameter group of each."""
    folder.mkdir(parents=True, exist_ok=True)
    owners = owners or list(range(len(model.groups)))
    for rank in range(dp):
        frozen = {n: _part(t.to(model.low), dp, rank) for n, t in model.frozen.items()}
        shapes = {n: t.shape for n, t in model.frozen.items()}
        common = model.common(dp, 3, frozen_param_shapes=shapes, frozen_param_fragments=frozen, **more)
        common["shared_params"] = dict(model.tied) if rank == 0 else {}
        torch.save(
            {"module": model.module(cut=True), **common},
            folder / f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_model_states.pt",
        )
        state = {
            g: {
                **{r: torch.cat([_part(model.state(n, r), dp, rank) for n in group]) for r in model.states},
                **model.scalars(),
            }
            for g, group in enumerate(model.groups)
        }
        groups = [options(0.1 * g, [n for n, owner in enumerate(owners) if owner == g]) for g in range(max(owners) + 1)]
        held = {
            "zero_stage": 3,
            "overflow": False,
            "partition_count": dp,
            "optimizer_state_dict": {"state": state, "param_groups": groups},
            "fp32_flat_groups": [torch.cat([_part(m, dp, rank) for m in g.values()]) for g in model.groups],
        }
        _save_optimizer(folder, rank, mp, held)


def write_plain(folder: Path, model: Model, dp: int, optimizer: dict[str, Any], **more: Any) -> None:
    """Write a checkpoint of a job without ZeRO."""
    folder.mkdir(parents=True, exist_ok=True)
    common = model.common(dp, 0, param_shapes=None, shared_params=None, **more)
    torch.save({"module": model.module(), **common, "optimizer": optimizer}, folder / "mp_rank_00_model_states.pt")


def write_plain_pipeline(
    folder: Path, layers: dict[int, Tensors], optimizers: list[dict[str, Any]], **more: Any
) -> None:
    """Write a checkpoint of a pipeline without ZeRO: number -> what the file of a layer holds, an optimizer a stage."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, held in layers.items():
        torch.save(held, folder / f"layer_{number:02d}-model_00-model_states.pt")
    size = {
        "mp_world_size": len(optimizers),
        "checkpoint_parallel_dimensions": {"pp_degree": len(optimizers), "tp_degree": 1},
    }
    for stage, optimizer in enumerate(optimizers):
        common = Model([]).common(
            1, 0, **{"param_shapes": None, "shared_params": None, "ds_config": {}, **size, **more}
        )
        torch.save({"module": None, **common, "optimizer": optimizer}, folder / f"mp_rank_{stage:02d}_model_states.pt")


def _save_optimizer(folder: Path, rank: int, mp: int, held: dict[str, Any]) -> None:
    name = f"bf16_zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"
    torch.save({"optimizer_state_dict": held, "ds_config": {}, "ds_version": "0.19.8"}, folder / name)


def _padded(tensors: list[torch.Tensor], multiple: int) -> torch.Tensor:
    flat = torch.cat([t.reshape(-1) for t in tensors]) if tensors else torch.empty(0)
    return torch.cat([flat, torch.full((-flat.numel() % multiple,), -7.0)])


def _part(tensor: torch.Tensor, dp: int, rank: int) -> torch.Tensor:
    flat = _padded([tensor], dp).to(tensor.dtype)
    return flat.chunk(dp)[rank].clone() if flat.numel() else flat.clone()


def _book(group: Tensors, part: slice) -> dict[str, dict[str, int]]:
    found, at = {}, 0
    for name, master in group.items():
        low, high = max(at, part.start), min(at + master.numel(), part.stop)
        if low < high:
            found[name] = {"numel": high - low, "start": low - part.start}
        at += master.numel()
    return found
