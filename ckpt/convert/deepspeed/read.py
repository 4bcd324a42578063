"""A checkpoint that ``engine.save_checkpoint`` of DeepSpeed wrote: ZeRO 0 to 3, pipelines, experts, tensor parallel.

DeepSpeed itself is never imported. Who is who among the files is in ``read_files`` and ``read_job``; names and
tensors of the model in ``_model``, ``_pipe`` and ``_cuts``; the flat state of ZeRO in ``_zero`` and ``_optim``, that of
jobs without ZeRO in ``_plain``, ``_plain_pipe`` and ``_plain_state``; everything else in ``_objects``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.convert.deepspeed.read_cuts import Cuts
from ckpt.convert.deepspeed.read_files import Files, pick_tag, plausible, tags_of
from ckpt.convert.deepspeed.read_job import Job
from ckpt.convert.deepspeed.read_model import Model
from ckpt.convert.deepspeed.read_objects import objects_of
from ckpt.convert.deepspeed.read_optim import Optimizer
from ckpt.convert.deepspeed.read_pipe import gather_layers
from ckpt.convert.deepspeed.read_plain_state import PlainOptimizer
from ckpt.convert.deepspeed.read_zero import is_zero3
from ckpt.convert.opened import Builder, Opened
from ckpt.convert.options import ReadOptions
from ckpt.errors import ConfigError, MalformedData
from ckpt.layout.rules import Rules
from ckpt.store.open import url_below

if TYPE_CHECKING:
    from ckpt.store.base import Store

UNIVERSAL = "zero"
"""Folder inside of a tag that only DeepSpeed's universal checkpoints have."""


def is_deepspeed(store: Store) -> bool:
    """Is there a checkpoint of DeepSpeed at the root of ``store``, or in a folder below? Looks at names only."""
    return bool(native_tags(store))


def native_tags(store: Store) -> list[str]:
    """Return the folders of a root that hold checkpoints as ``save_checkpoint`` writes them."""
    return [tag for tag in tags_of(store) if UNIVERSAL not in store.children(tag)]


def open_deepspeed(store: Store, where: str, *, step: int | None = None, options: ReadOptions | None = None) -> Opened:
    """Return a checkpoint of DeepSpeed as an index of its own files; their data is not read.

    Args:
        store: the folder that was given to ``save_checkpoint``, or the folder of one tag in it.
        where: what messages call it.
        step: which one, by its number; default: the one that the file ``latest`` names.
        options: ``rules`` say how tensor parallelism cut its tensors, where the files do not.

    Raises:
        NoSuchCheckpoint, ConfigError: there is no such checkpoint, or nothing says which one is meant.
        MissingChunk: a rank's file is missing, by name.
        MalformedData: a file is cut off or damaged, or the files are of several checkpoints.
        UnsupportedLayout: nothing says how a tensor was cut; all of them by name.
        UnsupportedFeature: state that cannot be expressed, or a class that is not loaded; by name.
    """
    options = options or ReadOptions()
    tag = pick_tag(store, where, native_tags(store), step, options)
    place = url_below(where, tag) if tag else where
    with plausible(place):
        job = Job.of(Files.of(store, tag, place, options))
        if step is not None and job.step != step:
            raise MalformedData(f"{place}: expected step {step}, its files are of step {job.step}")
        return _read(job)


def _read(job: Job) -> Opened:
    files = job.files
    builder = Builder("deepspeed", files.where, files.store)
    builder.step, builder.world, builder.engine = job.step, job.world, "deepspeed"
    info = job.models[0].get("universal_checkpoint_info")
    cuts = Cuts(files.where, job.tp, files.options.rules or Rules(), info if isinstance(info, dict) else {})
    model = Model.of(job, cuts, builder)
    if files.layers:
        gather_layers(model)
    else:
        model.shape_groups()
    model.add()
    optimizer = Optimizer(model)
    wrapper = ""
    if files.options.optimizer_step is not None and not files.optim:
        raise ConfigError(f"{files.where}: no file *_optim_states.pt of ZeRO whose count of steps there is to say")
    if files.optim:
        optimizer.add()
        wrapper = _wrapper(optimizer.first[0])
    elif job.without_optimizer:
        optimizer.groups.update({(mp, None): [] for mp in range(job.mp)})
        builder.notes.append(
            "no file *_optim_states.pt: weights alone, without masters and optimizer state; they were saved so, or all "
            "of these files are lost"
        )
    else:
        plain = PlainOptimizer(model, optimizer)
        plain.add()
        wrapper = plain.wrapper
    cuts.check()
    builder.splits.update(cuts.splits)
    builder.degrees.update({"dp": job.dp, "tp": job.tp, "pp": job.pp, "ep": _experts(optimizer), "zero": job.zero})
    builder.objects += objects_of(model, optimizer.first, optimizer.groups, wrapper)
    builder.notes[:] = dict.fromkeys(builder.notes)
    return builder.build()


def _experts(optimizer: Optimizer) -> int:
    return max(1, *(1 + (expert or 0) for _, expert in optimizer.groups)) if optimizer.groups else 1


def _wrapper(first: dict[str, Any]) -> str:
    """Return which of DeepSpeed's classes wrote this optimizer state."""
    if is_zero3(first):
        return "DeepSpeedZeroOptimizer_Stage3"
    return "DeepSpeedZeroOptimizer" if "zero_stage" in first else "BF16_Optimizer"
