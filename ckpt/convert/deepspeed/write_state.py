"""What of a source goes into DeepSpeed's files beside parameters: the optimizer's state and settings, counters, and
the scheduler.

DeepSpeed's flat buffers hold one ``step`` for all parameters of a group, so those must agree on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ckpt.convert.torchfile.pickle_write import Instance, Named, encode
from ckpt.errors import ConfigError, LayoutError, UnsupportedLayout
from ckpt.layout.box import Box
from ckpt.layout.spec import BUFFER, MASTER, PARAM, Shard, TensorSpec
from ckpt.runtime.staging import as_tensor

if TYPE_CHECKING:
    from ckpt.convert.assemble import Assembler
    from ckpt.convert.deepspeed.write_slice import Filling, Member
    from ckpt.convert.opened import Opened
    from ckpt.convert.target import Target

_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_PYTHON = {"int64": int, "float64": float, "bool": bool}
"""dtypes under which numbers that were Python's are saved, and become Python's again."""
RESERVED = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps",
    "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version",
    "num_experts", "model",
})  # fmt: skip
"""Names that an object of the user cannot have in DeepSpeed's client state."""


class Objects:
    """The source's objects by name. Of several that differ between ranks, the one of the lowest rank speaks for all."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._first: dict[str, Any] = {}
        self.lost: list[str] = []
        self.modules: dict[str, Any] = {}
        for loose in sorted((o for o in opened.objects if o.kind == "engine"), key=lambda o: o.ranks):
            self._first.setdefault(loose.name, loose.tree)
            if loose.name == "modules" and isinstance(loose.tree, Mapping):  # each rank has those of its own modules
                self.modules = {**loose.tree, **self.modules}

    def get(self, name: str) -> Mapping[str, Any]:
        """Return an object of the engine; empty if there is none."""
        found = self._first.get(name)
        return found if isinstance(found, Mapping) else {}

    def client_state(self) -> dict[str, Any]:
        """Return the user's objects that all ranks share, and say which could not be carried."""
        user = [o for o in self._opened.objects if o.kind in ("extra", "value")]
        many = Counter(o.name for o in user)
        found = {}
        for one in user:
            if many[one.name] == 1 and one.name not in RESERVED:
                try:
                    encode(one.tree)
                    found[one.name] = one.tree
                except ConfigError as error:
                    self.lost.append(f"extra {one.name!r}: {error}")
        differing = [n for n, k in many.items() if k > 1]
        self.lost += [f"extra {name!r}: ranks differ in it, and client state is one for all" for name in differing]
        self.lost += [f"extra {o.name!r}: DeepSpeed uses this name itself" for o in user if o.name in RESERVED]
        if self._first.get("schedulers"):
            self.lost.append("schedulers: the source has several, an engine of DeepSpeed has one: the first is carried")
        if any(o.kind == "rng" for o in self._opened.objects):
            self.lost.append("random generators: DeepSpeed's checkpoints have no place for them")
        return found


class OptimizerState:
    """What the optimizer keeps of each parameter, in the roles of the target.

    Args:
        opened: the source.
        target: which roles there are.
        cut: is state cut as its parameter is?

    Raises:
        UnsupportedLayout: ``cut``, and state of another shape; all of it by name.
    """

    def __init__(self, opened: Opened, target: Target, *, cut: bool) -> None:
        self.target = target
        self.specs = {spec.key: spec for spec in target.specs}
        self._roles: dict[str, dict[str, TensorSpec]] = {}
        self._values: dict[tuple[str, str], Any] = {}
        self._fillings: dict[tuple[str, ...], dict[str, list[Filling]]] = {}
        self._scalars: dict[tuple[str, ...], dict[str, Any]] = {}
        self.made: list[str] = []
        shapes = {t.fqn: t.shape for t in target.description.model.tensors}
        foreign = []
        for spec in target.specs:
            if spec.role not in (PARAM, MASTER, BUFFER) and spec.fqn in shapes:
                self._roles.setdefault(spec.fqn, {})[spec.role] = spec
                if spec.shape not in ((), shapes[spec.fqn]):
                    foreign.append(f"{spec}: its parameter has shape {list(shapes[spec.fqn])}")
        if foreign and cut:
            raise UnsupportedLayout(
                f"{opened.where}: DeepSpeed cuts optimizer state like its parameter, and this is shaped otherwise",
                tuple(foreign),
            )
        self._shapes = shapes

    def read_scalars(self, assembler: Assembler) -> None:
        """Read all numbers that count something (``step``), once."""
        wanted = [s for roles in self._roles.values() for s in roles.values() if not s.shape and self._is_scalar(s)]
        for piece in assembler.pieces(Shard(spec, Box((), ())) for spec in wanted):
            spec = wanted[piece.number]
            value = as_tensor(bytearray(piece.data), spec.dtype, ())
            self._values[spec.key] = _PYTHON[spec.dtype](value.item()) if spec.dtype in _PYTHON else value

    def _is_scalar(self, spec: TensorSpec) -> bool:
        # A parameter without dimensions has moments without dimensions too: those have the dtype of a weight and are
        # told from a count by the other parameters.
        return self._shapes[spec.fqn] != () or spec.role in self._counts()

    def _counts(self) -> set[str]:
        return {
            role
            for fqn, roles in self._roles.items()
            for role, spec in roles.items()
            if spec.shape == () and self._shapes[fqn] != ()
        } or {"step"}

    def master(self, member: Member) -> TensorSpec:
        """Return what a member's fp32 master is filled from: the source's, or its parameter."""
        return TensorSpec(member.fqn, MASTER, "float32", member.tiling.shape)

    def elementwise(self, members: Sequence[Member]) -> dict[str, list[Filling]]:
        """Return role -> for each member what it is filled from; zeros for a member that has nothing of a role.

        Raises:
            LayoutError: the members have it in different dtypes.
        """
        key = tuple(member.fqn for member in members)
        if key not in self._fillings:  # the same for all ranks' files
            self._fillings[key] = self._elementwise(members)
        return self._fillings[key]

    def _elementwise(self, members: Sequence[Member]) -> dict[str, list[Filling]]:
        found: dict[str, list[Filling]] = {}
        held = [self._whole(member) for member in members]
        for role in dict.fromkeys(role for one in held for role in one):
            dtypes = {one[role].dtype for one in held if role in one}
            if len(dtypes) > 1:
                raise LayoutError(f"optimizer state {role!r} of one group has dtypes {sorted(dtypes)}")
            (dtype,) = dtypes
            found[role] = [one.get(role, dtype) for one in held]
            lacking = [m.fqn for m, one in zip(members, held, strict=True) if role not in one]
            if lacking:
                self.made.append(f"{role} of {len(lacking)} parameters ({lacking[0]!r}, …): zeros, the source has none")
        return found

    def _whole(self, member: Member) -> dict[str, TensorSpec]:
        roles = self._roles.get(member.fqn, {})
        return {role: s for role, s in roles.items() if s.key not in self._values}

    def scalars(self, members: Iterable[Member]) -> dict[str, Any]:
        """Return role -> the value that all members share.

        Raises:
            LayoutError: they do not agree; names two of them.
        """
        members = tuple(members)
        key = tuple(member.fqn for member in members)
        if key not in self._scalars:
            self._scalars[key] = self._common(members)
        return self._scalars[key]

    def _common(self, members: Sequence[Member]) -> dict[str, Any]:
        found: dict[str, tuple[str, Any]] = {}
        for member in members:
            for role in self._roles.get(member.fqn, {}):
                if (member.fqn, role) not in self._values:
                    continue
                value = self._values[member.fqn, role]
                other, before = found.setdefault(role, (member.fqn, value))
                if before != value:
                    raise LayoutError(
                        f"optimizer state {role!r} is {_shown(before)} for {other!r} and {_shown(value)} for "
                        f"{member.fqn!r}: DeepSpeed keeps one for all parameters that it steps together"
                    )
        return {role: value for role, (_, value) in found.items()}

    def options(self, group: int) -> dict[str, Any]:
        """Return the settings of one of the source's groups."""
        return dict(self.target.groups[group].options) if self.target.groups else {}


def _shown(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def loss_scaler(objects: Objects, dtype: str, made: list[str]) -> Instance:
    """Return DeepSpeed's own object that holds the loss scale; one that scales nothing unless ``dtype`` is fp16."""
    saved = objects.get("loss_scaler")
    if dtype != "float16" or "cur_scale" not in saved:
        if dtype == "float16":
            made.append("loss scaler: the source has no dynamic loss scale: it is 1, and static")
        return Instance(Named(_SCALERS, "LossScaler"), {"cur_scale": 1.0, "dynamic": False})
    settings = {"scale_factor": 2.0, "scale_window": 1000, "min_scale": 1, **_known(saved.get("settings", {}))}
    hysteresis = {"delayed_shift": 2, "consecutive_hysteresis": False, "raise_error_at_min_scale": True}
    own = {name: saved[name] for name in hysteresis if name in saved}
    if len(own) < len(hysteresis):
        made.append("loss scaler: hysteresis 2, not consecutive, as is DeepSpeed's default: the source does not say it")
    moves = {name: saved[name] for name in ("cur_scale", "cur_iter", "last_overflow_iter") if name in saved}
    shift = {"cur_hysteresis": saved.get("cur_hysteresis", own.get("delayed_shift", 2))}
    values = {"cur_iter": 0, "last_overflow_iter": -1, **moves, **settings, **hysteresis, **own, **shift}
    return Instance(Named(_SCALERS, "DynamicLossScaler"), {**values, "dynamic": True, "dtype": torch.float16})


def _known(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}
