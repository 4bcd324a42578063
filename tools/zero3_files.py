"""A checkpoint as DeepSpeed 0.19.8 writes it under ZeRO-3 (bf16, AdamW, two parameter groups), of any size, streamed.

``python tools/zero3_files.py FOLDER --params 1e9 --world 8``

Names, trees and order are those of a Llama that ``engine.save_checkpoint`` saved: fp32 masters and two moments of every
rank in ``bf16_zero_pp_rank_*_optim_states.pt``, everything else in ``zero_pp_rank_*_model_states.pt``. Only the numbers
are made up, and no two blocks of them are alike. None of it goes through the code that writes DeepSpeed's format for
``ckpt-reshard``, whose input this is: only the zip file and the pickle are made by the same module.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckpt.convert.torchfile.pickle_write import Call, Instance, Named, Planned
from ckpt.convert.torchfile.write import TorchFile
from ckpt.layout.box import Box
from ckpt.layout.spec import Shard, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt.store.base import Buffer

STEP = 1000
ROLES = ("fp32", "exp_avg", "exp_avg_sq")
SUB_GROUP = 10**9
"""DeepSpeed's default ``sub_group_size``, in elements of a rank."""
BLOCK = 1 << 20
"""elements made at a time"""
HOLE = 1 << 16
"""Bytes from which on it is a tensor's numbers that are written, and nothing else."""

Shapes = OrderedDict[str, tuple[int, ...]]


def model(params: float) -> Shapes:
    """Return name and shape of each parameter of a Llama of about so many, in the order of the module."""
    width = 16
    while embeddings(width + 16) + layer(width + 16) * max(1, (width + 16) // 128) <= params:
        width += 16
    layers = max(1, round((params - embeddings(width)) / layer(width)))
    hidden, ffn = (width, width), width * 11 // 4
    shapes: Shapes = OrderedDict({"model.embed_tokens.weight": (vocabulary(width), width)})
    for n in range(layers):
        at = f"model.layers.{n}."
        shapes |= {f"{at}self_attn.{name}_proj.weight": hidden for name in "qkvo"}
        shapes |= {f"{at}mlp.{name}_proj.weight": (ffn, width) for name in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (width, ffn)
        shapes |= {f"{at}{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (width,), "lm_head.weight": (vocabulary(width), width)}


def vocabulary(width: int) -> int:
    """Return how many rows the embeddings have; odd, as not to divide by the ranks."""
    return width * 125 // 8 + 3


def embeddings(width: int) -> int:
    """Return the parameters outside of layers."""
    return 2 * vocabulary(width) * width + width


def layer(width: int) -> int:
    """Return the parameters of a layer."""
    return 4 * width**2 + 3 * (width * 11 // 4) * width + 2 * width


def write(folder: Path, params: float, world: int, *, holes: bool = False) -> int:
    """Write the checkpoint; return how many parameters its model has. ``holes``: leave the tensors' bytes out, for who
    reads none of them.
    """
    shapes = model(params)
    groups = [OrderedDict((n, s) for n, s in shapes.items() if (len(s) > 1) is wide) for wide in (True, False)]
    sizes = [sum(-(-prod(shape) // world) for shape in group.values()) for group in groups]
    if max(sizes) > SUB_GROUP:
        raise SystemExit(
            f"{max(sizes):,} elements a rank: DeepSpeed would have cut them into sub-groups; not done here"
        )
    tag = folder / f"global_step{STEP}"
    tag.mkdir(parents=True)
    for rank in range(world):
        save(tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", model_states(shapes, groups, world), rank)
        tree = optim_states(sizes, world)
        save(tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", tree, rank, holes=holes)
    (folder / "latest").write_text(tag.name)
    return sum(map(prod, shapes.values()))


def config(world: int) -> dict[str, Any]:
    """Return what the user's DeepSpeed configuration was."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": world,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
    }


def model_states(shapes: Shapes, groups: Sequence[Shapes], world: int) -> dict[str, Any]:
    """Return the tree of a rank's ``*_model_states.pt``: ZeRO-3 leaves the parameters' places empty in it."""
    return {
        "module": OrderedDict((name, Planned("bfloat16", (0,))) for name in shapes),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedDict((n, torch.Size(s)) for n, s in group.items()) for group in groups],
        "frozen_param_shapes": OrderedDict(),
        "shared_params": {},
        "frozen_param_fragments": OrderedDict(),
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": STEP,
        "global_samples": STEP * world,
        "dp_world_size": world,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": config(world),
        "ds_version": "0.19.8",
    }


def optim_states(sizes: Sequence[int], world: int) -> dict[str, Any]:
    """Return the tree of a rank's ``*_optim_states.pt``; ``sizes``: elements of its flat tensors."""
    step = np.float32(STEP).tobytes()
    settings = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": False, "maximize": False, "foreach": None}
    settings |= {"capturable": False, "differentiable": False, "fused": None, "decoupled_weight_decay": True}
    inner = {
        "state": {
            n: {"step": Planned("float32", (), (step,)), **{role: flat(role, n, size) for role in ROLES[1:]}}
            for n, size in enumerate(sizes)
        },
        "param_groups": [{"weight_decay": decay, **settings, "params": [n]} for n, decay in enumerate((0.1, 0.0))],
    }
    scaler = Named("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
    return {
        "optimizer_state_dict": {
            "zero_stage": Call(Named("deepspeed.runtime.zero.config", "ZeroStageEnum"), (3,)),
            "loss_scaler": Instance(scaler, {"cur_scale": 1.0, "dynamic": False}),
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": world,
            "optimizer_state_dict": inner,
            "fp32_flat_groups": [flat(ROLES[0], n, size) for n, size in enumerate(sizes)],
        },
        "ds_config": config(world),
        "ds_version": "0.19.8",
    }


def flat(role: str, group: int, size: int) -> Planned:
    """Return a flat tensor of a rank, which :func:`numbers` fills."""
    spec = TensorSpec(f"group{group}", role, "float32", (size,))
    return Planned("float32", (size,), (Shard(spec, Box.whole((size,))),))


def numbers(wants: Sequence[Shard], rank: int) -> Iterator[memoryview]:
    """Yield the bytes of flat tensors, uniform in [0, 1): moments are not negative, and nothing compresses well."""
    generator = np.random.Generator(np.random.SFC64(rank))
    block = np.empty(BLOCK, np.float32)
    for want in wants:
        for at in range(0, want.box.volume, BLOCK):
            piece = block[: min(BLOCK, want.box.volume - at)]
            generator.random(dtype=np.float32, out=piece)
            yield memoryview(piece).cast("B")


def save(path: Path, tree: dict[str, Any], rank: int, *, holes: bool = False) -> None:
    """Write a file as ``torch.save`` would."""
    with open(path, "wb") as out:

        def write(data: Buffer) -> None:
            nbytes = memoryview(data).nbytes
            if holes and nbytes >= HOLE:
                out.seek(nbytes, 1)
            else:
                out.write(data)

        TorchFile(tree).write(write, lambda wants: numbers(wants, rank))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--params", type=float, default=1e9)
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--holes", action="store_true", help="leave the numbers out: a sparse file")
    options = parser.parse_args()
    print(write(options.folder, options.params, options.world, holes=options.holes))


if __name__ == "__main__":
    main()
