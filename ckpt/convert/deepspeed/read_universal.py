"""A universal checkpoint of DeepSpeed (``ds_to_universal``): one file for each parameter and state, put together.

What is not of the optimizer stands in copies of the model's files, which are read as those of a native checkpoint. A
universal checkpoint of a pipeline lacks its layers, so that buffers and frozen parameters are gone from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.convert.deepspeed.read_cuts import Cuts
from ckpt.convert.deepspeed.read_files import LATEST, Files, numel_of, pick_tag, plausible, tags_of
from ckpt.convert.deepspeed.read_job import Job
from ckpt.convert.deepspeed.read_model import Model
from ckpt.convert.deepspeed.read_objects import objects_of
from ckpt.convert.deepspeed.read_optim import NOT_STATE, Optimizer
from ckpt.convert.deepspeed.read_zero import is_zero3
from ckpt.convert.opened import Builder, Opened
from ckpt.convert.options import ReadOptions
from ckpt.convert.torchfile.file import read_tree
from ckpt.convert.torchfile.names import Stored, kind_of
from ckpt.errors import MalformedData, MissingChunk, UnsupportedFeature
from ckpt.layout.rules import Rules
from ckpt.layout.spec import MASTER, PARAM
from ckpt.store.open import url_below
from ckpt.words import some

if TYPE_CHECKING:
    from ckpt.store.base import Store

FOLDER = "zero"
STATE = "optimizer_state.pt"
_SUFFIX = ".pt"
_WEIGHT = "fp32"

Shape = tuple[int, ...]


def is_universal(store: Store) -> bool:
    """Is there a universal checkpoint at the root of ``store``, or in a folder below? Looks at names only."""
    return bool(_tags(store))


def _tags(store: Store) -> list[str]:
    return [tag for tag in tags_of(store) if FOLDER in store.children(tag)]


def open_universal(store: Store, where: str, *, step: int | None = None, options: ReadOptions | None = None) -> Opened:
    """Return a universal checkpoint as an index of its own files; their data is not read.

    Args:
        store: the folder that has ``latest_universal``, or the folder of one checkpoint in it.
        where: what messages call it.
        step: which one; default: the one that ``latest_universal`` names, or ``latest``.
        options: ``rules`` say how tensor parallelism cut the buffers, where the files do not.

    Raises:
        NoSuchCheckpoint, ConfigError: there is no such checkpoint, or nothing says which one is meant.
        MissingChunk: files of a parameter are missing, by name.
        MalformedData: a file is cut off or damaged, or is of another checkpoint.
        UnsupportedFeature: experts, which DeepSpeed does not convert to this format rightly.
    """
    options = options or ReadOptions()
    tag = pick_tag(store, where, _tags(store), step, options, ("latest_universal", LATEST))
    place = url_below(where, tag) if tag else where
    with plausible(place):
        job = Job.of(Files.of(store, tag, place, options), merged=True)
        if step is not None and job.step != step:
            raise MalformedData(f"{place}: expected step {step}, its files are of step {job.step}")
        return _Reader(job, f"{tag}/{FOLDER}" if tag else FOLDER).read()


class _Reader:
    """``folder``: the key below which the parameters are."""

    def __init__(self, job: Job, folder: str) -> None:
        self.job, self.folder = job, folder
        files = job.files
        self.builder = Builder("universal", files.where, files.store)
        self.builder.step, self.builder.world, self.builder.engine = job.step, job.world, "deepspeed"
        info = job.models[0].get("universal_checkpoint_info")
        cuts = Cuts(files.where, job.tp, files.options.rules or Rules(), info if isinstance(info, dict) else {})
        self.model = Model.of(job, cuts, self.builder)
        self.optimizer = Optimizer(self.model)

    def read(self) -> Opened:
        """Return the checkpoint."""
        stepped = {
            local: shape for groups in self.model.groups.values() for one in groups for local, shape in one.items()
        }
        self._check(stepped)
        self.model.add(elsewhere=frozenset(stepped))
        self.model.cuts.check()
        self.builder.splits.update(self.model.cuts.splits)
        state = self._state()
        for local, shape in stepped.items():
            self._add(local, shape)
        groups = self._groups(state)
        if is_zero3(state):
            self._add_steps(state)
        wrapper = "DeepSpeedZeroOptimizer" if "zero_stage" in state else "BF16_Optimizer"
        wrapper = "DeepSpeedZeroOptimizer_Stage3" if is_zero3(state) else wrapper
        job, builder = self.job, self.builder
        builder.degrees.update({"dp": job.dp, "tp": job.tp, "pp": job.pp, "ep": 1, "zero": job.zero})
        optimizers = dict.fromkeys(range(job.mp), state)
        builder.objects += objects_of(self.model, optimizers, groups, wrapper)
        builder.notes[:] = dict.fromkeys(builder.notes)
        return builder.build()

    def _check(self, stepped: dict[str, Shape]) -> None:
        experts = [local for local in stepped if "deepspeed_experts." in local]
        if experts:
            raise UnsupportedFeature(
                f"{self.job.files.where}: {experts[0]!r}: DeepSpeed mixes experts of several ranks up when "
                f"it converts; convert the checkpoint that this was made from"
            )
        present = set(self.job.files.store.children(self.folder))
        missing = sorted(stepped.keys() - present)
        if missing:
            raise MissingChunk(f"{self.job.files.where}: {FOLDER}/{some(missing)} missing")
        known = {name for held in self.model.modules.values() for name in held} | {
            name for shapes in self.model.shapes.values() for name in shapes
        }
        strays = sorted(present - stepped.keys() - known - {STATE})
        if strays and self.job.pp == 1:
            raise MalformedData(f"{self.job.files.where}: two checkpoints in one folder: {FOLDER}/{some(strays)}")
        lost = [
            name
            for mp, names in self.model.buffers.items()
            for name in sorted(names)
            if name not in self.model.modules[mp]
        ]
        if lost:
            self.builder.notes.append(f"a universal checkpoint of a pipeline has no buffers: {some(lost)} left out")

    def _tree(self, key: str) -> Any:
        files = self.job.files
        return read_tree(files.store, key, trust_pickle=files.options.trust_pickle, seen=files.options.seen)

    def _state(self) -> dict[str, Any]:
        key = f"{self.folder}/{STATE}"
        if self.job.files.store.size(key) is None:
            raise MissingChunk(f"{self.job.files.where}: {FOLDER}/{STATE} missing")
        state = self._tree(key)
        if not isinstance(state, dict) or not isinstance(state.get("param_groups"), list):
            raise MalformedData(f"{key}: no param_groups")
        return state

    # ------------------------------------------------------------------------------------------------------ parameters

    def _add(self, local: str, shape: Shape) -> None:
        """Add everything that the folder of one parameter has."""
        mp = next(m for m, groups in self.model.groups.items() if any(local in names for names in groups))
        fqn = self.model.name(mp, local)
        names = sorted(self.job.files.store.children(f"{self.folder}/{local}"))
        if f"{_WEIGHT}{_SUFFIX}" not in names:
            raise MissingChunk(f"{self.job.files.where}: {FOLDER}/{local}/{_WEIGHT}{_SUFFIX} missing")
        names.sort(key=lambda name: name != f"{_WEIGHT}{_SUFFIX}")
        whole = shape if self.job.tp == 1 else None
        for name in names:
            role = name.removesuffix(_SUFFIX)
            key = f"{self.folder}/{local}/{name}"
            value = self._tree(key)
            held = value.get("param") if isinstance(value, dict) else value
            if role != _WEIGHT and (role in NOT_STATE or not name.endswith(_SUFFIX)):
                raise MalformedData(f"{key}: a file that DeepSpeed does not write")
            if role == _WEIGHT:
                if not isinstance(held, Stored):
                    raise MalformedData(f"{key}: a {kind_of(held)}, expected a tensor")
                stripped = isinstance(value, dict) and bool(value.get("vocab_tensor"))
                whole = self._whole(held, None if stripped else whole, key)
                self._derive(fqn, mp, local, held.dtype, whole)
            if isinstance(held, Stored) and whole is not None and held.volume == numel_of(whole) and role != "step":
                if not held.is_contiguous:
                    raise UnsupportedFeature(f"{key}: strides {list(held.strides)}, expected row by row")
                spec = self.builder.spec(fqn, MASTER if role == _WEIGHT else role, held.dtype, whole)
                self.builder.add_range(spec, 0, held.volume, key, held.start)
            elif (isinstance(held, Stored) and held.volume == 1) or type(held) in (bool, int, float):
                self.optimizer.add_scalar(key, role, held, [fqn])
            else:
                found = list(held.shape) if isinstance(held, Stored) else kind_of(held)
                raise MalformedData(f"{key}: {found}, expected {list(whole or ())} or one number")

    @staticmethod
    def _whole(held: Stored, said: Shape | None, key: str) -> Shape:
        """Return the shape: of ZeRO-3 the files hold flat tensors. ``said``: by the model's file, if it knows."""
        if said is None:
            return held.shape
        if held.shape not in (said, (numel_of(said),)):
            raise MalformedData(f"{key}: shape {list(held.shape)}, the model's file says {list(said)}")
        return said

    def _derive(self, fqn: str, mp: int, local: str, master: str, shape: Shape) -> None:
        held = self.model.modules[mp].get(local)
        words = {"bf16": "bfloat16", "fp16": "float16", "fp32": master}
        self.builder.derived.add(fqn)
        self.builder.spec(fqn, PARAM, held.dtype if isinstance(held, Stored) else words[self.job.dtype], shape)

    # ---------------------------------------------------------------------------------------------- groups and scalars

    def _owner(self, state: dict[str, Any], count: int) -> list[int]:
        """Return the parameter group of each entry of ``param_shapes``."""
        groups = state["param_groups"]
        if not is_zero3(state):
            return [min(n, len(groups) - 1) for n in range(count)]
        owner = [g for g, group in enumerate(groups) for _ in group.get("params", ())]
        if len(owner) != count:
            raise MalformedData(f"{self.folder}/{STATE}: {len(owner)} sub-groups, the model's file has {count}")
        return owner

    def _groups(self, state: dict[str, Any]) -> dict[tuple[int, int | None], list[dict[str, Any]]]:
        found: dict[tuple[int, int | None], list[dict[str, Any]]] = {}
        for mp, shapes in self.model.groups.items():
            listed = state["param_groups"]
            members: list[list[str]] = [[] for _ in listed]
            for g, names in zip(self._owner(state, len(shapes)), shapes, strict=True):
                members[g] += [self.model.name(mp, local) for local in names]
            options = [{k: v for k, v in group.items() if k != "params"} for group in listed]
            found[mp, None] = [{"params": m, "options": o} for m, o in zip(members, options, strict=True)]
        return found

    def _add_steps(self, state: dict[str, Any]) -> None:
        """Add what is one number for a sub-group of ZeRO-3: it stands in the common file only."""
        inner = state.get("optimizer_state_dict")
        states = inner.get("state") if isinstance(inner, dict) else None
        order = [n for group in state["param_groups"] for n in group.get("params", ())]
        for number, names in zip(order, self.model.groups[0], strict=True):
            for role, value in ((states or {}).get(number) or {}).items():
                if (isinstance(value, Stored) and not value.shape) or type(value) in (bool, int, float):
                    fqns = [self.model.name(0, local) for local in names]
                    self.optimizer.add_scalar(f"{self.folder}/{STATE}", role, value, fqns)
