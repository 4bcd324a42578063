"""The job that wrote a DeepSpeed checkpoint, from the files of its model: sizes, step, stage, config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckpt.convert.deepspeed.read_files import Files, differing, whole
from ckpt.convert.deepspeed.read_zero import is_zero3, optimizer_of
from ckpt.convert.torchfile.names import Stored
from ckpt.errors import MalformedData, MissingChunk, UnsupportedFeature
from ckpt.words import some

MAX_EXPERTS = 65_536
MODEL_KEYS = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
    "checkpoint_parallel_dimensions", "num_experts", "ds_autoep_layers", "autoep_layers", "universal_checkpoint_info",
    "ds_folding_metadata",
})  # fmt: skip
"""What DeepSpeed itself writes into a file of the model; everything else there is the user's ``client_state``."""


@dataclass(slots=True)
class Job:
    """``models``: model-parallel rank -> what its (first) file holds. ``tp``, ``pp``, ``dp``: how many ranks; a
    model-parallel rank is ``stage of the pipeline * tp + tensor-parallel rank``.
    """

    files: Files
    models: dict[int, dict[str, Any]]
    step: int
    dp: int
    tp: int
    pp: int
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def mp(self) -> int:
        """Number of model-parallel ranks."""
        return self.tp * self.pp

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.mp * self.dp

    def rank(self, mp: int, dp: int) -> int:
        """Return the number of a rank in the job, as DeepSpeed's own topologies count."""
        return (mp // self.tp * self.dp + dp) * self.tp + mp % self.tp

    @property
    def zero(self) -> int:
        """The stage that the config asked for; 3 where the files say it themselves."""
        section = self.config.get("zero_optimization")
        said = section.get("stage", 0) if isinstance(section, dict) else int(bool(section))
        return 3 if self.files.partitioned else said if isinstance(said, int) else 0

    @property
    def without_optimizer(self) -> bool:
        """Is this a job of ZeRO of whose optimizer no file is there, though all of its parameters are?"""
        stepped = self.models[0].get("param_shapes") is not None
        return stepped and not (self.files.optim or self.files.expert_optim or self.files.partitioned)

    @property
    def dtype(self) -> str:
        """What the parameters are kept in: ``bf16``, ``fp16`` or ``fp32``."""
        for name, short in (("fp16", "fp16"), ("bf16", "bf16"), ("bfloat16", "bf16")):
            section = self.config.get(name)
            if isinstance(section, dict) and section.get("enabled"):
                return short
        if self.config:
            return "fp32"
        tensors = (self.models[0].get("module") or {}).values()
        dtypes = {t.dtype for t in tensors if isinstance(t, Stored)}
        return "bf16" if "bfloat16" in dtypes else "fp16" if "float16" in dtypes else "fp32"

    @property
    def accumulation(self) -> int:
        """Micro-steps in a step."""
        said, total, micro = (
            self.config.get(name)
            for name in ("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu")
        )
        if isinstance(said, int):
            return said
        if isinstance(total, int) and isinstance(micro, int) and micro * self.dp:
            return max(1, total // (micro * self.dp))
        return 1

    @property
    def batch(self) -> int:
        """Samples in a step; 0 if the config does not say it."""
        said, micro = self.config.get("train_batch_size"), self.config.get("train_micro_batch_size_per_gpu")
        if isinstance(said, int):
            return said
        if not isinstance(micro, int):
            return 0
        # With tensor or sequence parallelism it need not be that of all data-parallel ranks: the engine counted.
        one, seen = micro * self.accumulation, self.models[0].get("global_samples")
        if self.step and isinstance(seen, int | float) and seen and one and seen % (self.step * one) == 0:
            return int(seen) // self.step
        return one * self.dp

    @classmethod
    def of(cls, files: Files, *, merged: bool = False) -> Job:
        """Read the files of the model.

        Args:
            files: of the checkpoint.
            merged: the optimizer's state is not in files of ranks (a universal checkpoint).

        Raises:
            MissingChunk: a file is missing, by name.
            MalformedData: files of several checkpoints, or one that is not what DeepSpeed writes.
        """
        if (0, 0) not in files.model:
            cut = files.partitioned or (not files.model and _of_zero3(files))
            name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if cut else "mp_rank_00_model_states.pt"
            raise MissingChunk(f"{files.where}: {name} missing")
        key = files.model[0, 0]
        first = files.read(key)
        step = whole(first.get("global_steps"), f"{files.where}: global_steps in {key}")
        dp = whole(first.get("dp_world_size", 1), f"{files.where}: dp_world_size in {key}", least=1)
        mp = whole(first.get("mp_world_size", 1), f"{files.where}: mp_world_size in {key}", least=1)
        pattern = "zero_pp_rank_{dp}_mp_rank_{mp:02d}" if files.partitioned else "mp_rank_{mp:02d}"
        parted = dp if files.partitioned else 1
        what = f"{mp} model-parallel and {dp} data-parallel rank(s)"
        files.expect(files.model, mp, parted, f"{pattern}_model_states.pt", what)
        models = {0: first, **{m: files.read(files.model[m, 0]) for m in range(1, mp)}}
        config = first.get("ds_config")
        tp, pp = _degrees(files, first, mp)
        job = cls(files, models, step, dp, tp, pp, config if isinstance(config, dict) else {})
        _check_alike(files, {files.model[m, 0]: model for m, model in models.items()})
        if merged:
            return job
        _check_experts(files, models)
        # Without param_shapes, though cut: BF16_Optimizer in a job without ZeRO, such as a pipeline.
        inner = first.get("optimizer")
        flat = inner is None or (isinstance(inner, dict) and "base_optimizer_state" in inner)
        if job.without_optimizer:
            return job
        if first.get("param_shapes") is not None or (files.optim and flat):
            files.expect(files.optim, mp, dp, _optim_pattern(files, job), what)
        elif files.optim:
            raise MalformedData(
                f"{files.where}: two checkpoints in one folder: {min(files.optim.values())} beside {key}, which is of "
                f"a job without ZeRO"
            )
        return job


def _of_zero3(files: Files) -> bool:
    """Of which stage is the optimizer? Asked only where no file of the model tells it."""
    key = min(files.optim.values(), default=None)
    return key is not None and is_zero3(optimizer_of(files.read(key), key))


def _optim_pattern(files: Files, job: Job) -> str:
    names = [key.rpartition("/")[2] for key in files.optim.values()]
    prefix = "bf16_" if (names and names[0].startswith("bf16_")) or (not names and job.dtype == "bf16") else ""
    return prefix + "zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"


def _degrees(files: Files, first: dict[str, Any], mp: int) -> tuple[int, int]:
    """Return (tensor-parallel, pipeline-parallel) ranks; older releases tell it by the names of layers alone."""
    said = first.get("checkpoint_parallel_dimensions")
    tp = said.get("tp_degree") if isinstance(said, dict) else None
    pp = said.get("pp_degree") if isinstance(said, dict) else None
    if not isinstance(tp, int) or not isinstance(pp, int) or tp * pp != mp or tp < 1:
        tp = 1 + max((t for _, t in files.layers), default=0) if files.layers else mp
        pp = mp // tp
    if tp * pp != mp:
        raise MalformedData(f"{files.where}: layers of {tp} tensor-parallel ranks, mp_world_size is {mp}")
    layers = sorted({layer for layer, _ in files.layers})
    missing = [
        f"layer_{n:02d}-model_{t:02d}-model_states.pt" for n in layers for t in range(tp) if (n, t) not in files.layers
    ]
    if missing:
        raise MissingChunk(f"{files.where}: {missing[0]} missing, of {tp} tensor-parallel rank(s)")
    return tp, pp


def _check_experts(files: Files, models: dict[int, dict[str, Any]]) -> None:
    """Check that there is a file for every expert that the model's files count."""
    for mp, model in models.items():
        if model.get("ds_autoep_layers") or model.get("autoep_layers"):
            raise UnsupportedFeature(
                f"{files.where}: {files.model[mp, 0]}: experts of AutoEP, in place of the model's own"
            )
        counts = model.get("num_experts")
        if not isinstance(counts, list) or not all(type(n) is int and 0 < n <= MAX_EXPERTS for n in counts):
            continue
        wanted = {(layer, n, mp) for layer, count in enumerate(counts) for n in range(count)}
        missing = sorted(wanted - files.experts.keys())
        if missing:
            names = [f"layer_{a}_expert_{b}_mp_rank_{c:02d}_model_states.pt" for a, b, c in missing]
            raise MissingChunk(
                f"{files.where}: {some(names)} missing, of {sum(counts)} experts in {len(counts)} layer(s)"
            )


def _check_alike(files: Files, models: dict[str, dict[str, Any]]) -> None:
    for name in ("global_steps", "dp_world_size", "mp_world_size", "skipped_steps"):
        found = differing({key: model.get(name) for key, model in models.items()})
        if found:
            shown = "; ".join(f"{value} in {keys[0]}" for value, keys in found.items())
            raise MalformedData(f"{files.where}: files of several checkpoints: {name} is {shown}")


def check_ranks(job: Job, first: dict[str, Any], other: dict[str, Any], mp: int, dp: int) -> None:
    """Check that the model file of a further data-parallel rank (ZeRO-3) belongs to the first one.

    Raises:
        MalformedData: it is of another step or job; names both files.
    """
    files = job.files
    _check_alike(files, {files.model[mp, 0]: first, files.model[mp, dp]: other})
