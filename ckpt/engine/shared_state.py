"""Optimizer state as data: whatever keys ``inner.state`` has, they become roles, and roles become state again.

A state entry is *elementwise* (shaped like its partition: moments) or a *scalar* of its partition (Adam's ``step``).
A scalar is declared once for every parameter of the partition, as a 0-d tensor, so that it follows the parameter into
any other partitioning; on a load, parameters that meet in one partition must agree on it.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ckpt.engine.base import LiveShard, SavedSpecs, dtype_name, torch_dtype
from ckpt.engine.shared_check import check_tensor, class_names, local_tensor
from ckpt.engine.shared_partition import Partition
from ckpt.errors import LayoutError, UnsupportedLayout
from ckpt.layout.box import Box
from ckpt.layout.spec import BUFFER, MASTER, PARAM, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

NOT_OPTIMIZER_STATE = frozenset({PARAM, MASTER, BUFFER, "grad"})

_SCALAR_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}

_DEEPSPEED_KEYS = {
    "FusedAdam": ("exp_avg", "exp_avg_sq"),
    "DeepSpeedCPUAdam": ("exp_avg", "exp_avg_sq"),
    "FusedLion": ("exp_avg",),
    "DeepSpeedCPULion": ("exp_avg",),
    "DeepSpeedCPUAdagrad": ("exp_avg_sq",),
}
"""DeepSpeed's own optimizers: their moments; beside them a ``step`` that is a Python int. They are not asked by a trial
step because their C++ side counts steps too, and its running ``beta ** step`` would change in the last bits."""


@dataclass(frozen=True, slots=True)
class Elementwise:
    """State that lies like its partition. ``dtype``: what the optimizer keeps it in, None if that is not known."""

    dtype: torch.dtype | None = None


Kinds = dict[str, Any]
"""State key -> :class:`Elementwise`, or an example of the scalar (0-d tensor, int, float, bool)."""


def kinds_of(state: dict[Any, Any], partition: Partition) -> Kinds:
    """Classify the entries of one partition's live state.

    Raises:
        UnsupportedLayout: an entry that is neither elementwise nor a scalar, or whose key is a role of another meaning.
    """
    kinds: Kinds = {}
    for key, value in state.items():
        if not isinstance(key, str) or key in NOT_OPTIMIZER_STATE:
            raise UnsupportedLayout(
                f"optimizer state {key!r} of {partition.members[0]!r}: expected a key that is a name and none of "
                f"{sorted(NOT_OPTIMIZER_STATE)}"
            )
        if value is None:
            continue
        if isinstance(value, torch.Tensor):
            check_tensor(partition.members[0], key, value)
            if lies_like(value, partition.key):
                kinds[key] = Elementwise(value.dtype)
                continue
            if value.numel() == 1:
                kinds[key] = value
                continue
        elif type(value) in _SCALAR_DTYPES:
            kinds[key] = value
            continue
        found = f"tensor of shape {_shown(value)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise UnsupportedLayout(
            f"optimizer state {key!r} of {partition.members[0]!r} is a {found}: expected shape "
            f"{_shown(partition.key)} or a scalar"
        )
    return kinds


def _shown(tensor: torch.Tensor) -> str:
    placements = getattr(tensor, "placements", None)
    return f"{list(tensor.shape)}" + (f" placed {tuple(placements)}" if placements is not None else "")


def lies_like(value: torch.Tensor, key: torch.Tensor) -> bool:
    """Is every element of a state tensor where the optimizer's key has the element that it belongs to?"""
    if value.shape != key.shape:
        return False
    cut = (getattr(value, "placements", None), getattr(key, "placements", None))  # of a DTensor
    if cut == (None, None):
        return True
    local = (getattr(value, "_local_tensor", value), getattr(key, "_local_tensor", key))
    return local[0].shape == local[1].shape and (cut[0] is cut[1] or cut[0] == cut[1] or None in cut)


def kinds_of_fresh(inner: Any, partition: Partition) -> Kinds | None:
    """Return what the optimizer is going to keep for a partition that it has not stepped yet; None if unknown.

    Learnt from a trial step of a copy of the optimizer on a tensor of two zeros: the only description of an optimizer's
    state that exists is its ``step()``. In the copy that tensor stands for every parameter, so that nothing large is
    copied and nothing of the user's is stepped.
    """
    for name, moments in _DEEPSPEED_KEYS.items():
        if name in class_names(inner):
            return {**dict.fromkeys(moments, Elementwise()), "step": 0}
    probe = torch.zeros(2, dtype=partition.key.dtype, device=partition.key.device, requires_grad=True)
    probe.grad = torch.zeros_like(probe)
    trial = object.__new__(type(inner))
    trial.state, trial.param_groups = defaultdict(dict), []
    keys = [partition.key, *inner.state, *(p for group in inner.param_groups for p in group["params"])]
    memo = {id(inner): trial, id(inner.state): trial.state, id(inner.param_groups): trial.param_groups}
    memo |= {id(key): probe for key in keys}
    # No hooks; and an LR scheduler wraps `step` on the instance, bound to the real optimizer.
    replaced = ("step", "state", "param_groups")
    own = {k: v for k, v in vars(inner).items() if k not in replaced and not k.startswith("_optimizer_")}
    step = type(inner).step
    if getattr(step, "hooked", False):  # by torch, to run hooks around it: they are not to see this one
        step = step.__wrapped__
    try:
        group = {k: v for k, v in inner.param_groups[partition.group].items() if k != "params"}
        trial.param_groups.append({**copy.deepcopy(group, memo), "params": [probe]})
        vars(trial).update(copy.deepcopy(own, memo))
        trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        # Named: else all GPUs of the host are forked, which starts CUDA even for an engine on the CPU.
        devices = [probe.device] if probe.is_cuda else []
        with torch.random.fork_rng(devices), torch.no_grad():
            step(trial)
        return kinds_of(trial.state[probe], _like(partition, probe))
    except Exception:  # whatever a foreign optimizer's step() may raise; the checkpoint's roles then decide
        return None


def _like(partition: Partition, key: torch.Tensor) -> Partition:
    return type(partition)(key, partition.group, partition.separate, partition.members)


def state_shards(inner: Any, partition: Partition) -> Iterator[LiveShard]:
    """Yield this partition's optimizer state as it is."""
    state = inner.state.get(partition.key) or {}
    for role, kind in kinds_of(state, partition).items():
        scalar = not isinstance(kind, Elementwise)
        value = _scalar_tensor(_effective(inner, partition, role, state[role])) if scalar else None
        for piece in partition.pieces:
            if value is not None:
                yield LiveShard(TensorSpec(piece.fqn, role, dtype_name(value.dtype), ()), Box((), ()), value)
                continue
            spec = TensorSpec(piece.fqn, role, dtype_name(state[role].dtype), piece.shape)
            for box, view in partition.views(state[role], piece):
                yield LiveShard(spec, box, view, state[role])


def _scalar_tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return local_tensor(value).reshape(())
    return torch.tensor(value, dtype=_SCALAR_DTYPES[type(value)])


def _effective(inner: Any, partition: Partition, role: str, value: Any) -> Any:
    # FusedAdam and FusedLion count in the state of the *last* tensor of a group alone; with one tensor a group (all
    # ZeRO stages) nobody notices, in a plain ZeRO-0 engine the others stay at 0 for ever.
    if role != "step" or not {"FusedAdam", "FusedLion"} & class_names(inner):
        return value
    group = inner.param_groups[partition.group]["params"]
    return max((inner.state[p]["step"] for p in group if "step" in inner.state.get(p, {})), default=value)


# ------------------------------------------------------------------------------------------------------------- loading


@dataclass(slots=True)
class StateLoad:
    """One load of the optimizer state: :meth:`prepare`; then tensors are written; :meth:`attach`; :meth:`finish`."""

    inner: Any
    saved: SavedSpecs
    _scalars: list[tuple[Partition, str, Any, dict[str, torch.Tensor]]] = field(default_factory=list)
    _unstated: list[tuple[Partition, list[str]]] = field(default_factory=list)
    _fresh: dict[tuple[int, torch.dtype], Kinds | None] = field(default_factory=dict)
    _new: list[tuple[Partition, str, torch.Tensor]] = field(default_factory=list)

    def prepare(self, partition: Partition) -> Iterator[LiveShard]:
        """Yield what is to be written for this partition; what the engine does not have yet is allocated beside it."""
        stated = {p.fqn for p in partition.pieces if self.saved.get(p.fqn, {}).keys() - NOT_OPTIMIZER_STATE}
        self._unstated.append((partition, [p.fqn for p in partition.pieces if p.fqn not in stated]))
        if not stated:
            return
        state = self.inner.state.get(partition.key) or {}
        kinds = self._kinds(state, partition, stated)
        for role, kind in kinds.items():
            specs = {f: self.saved[f][role] for f in sorted(stated) if role in self.saved.get(f, {})}
            if isinstance(kind, Elementwise):
                tensor = state.get(role)
                if not isinstance(tensor, torch.Tensor):
                    stored = torch_dtype(next(iter(specs.values())).dtype) if specs else partition.key.dtype
                    dtype = kind.dtype or stored
                    tensor = torch.zeros_like(partition.key, dtype=dtype, requires_grad=False)
                    self._new.append((partition, role, tensor))
                yield from self._elementwise(partition, role, tensor, stated)
            else:
                yield from self._scalar(partition, role, kind, specs, stated)

    def _kinds(self, state: dict[str, Any], partition: Partition, stated: set[str]) -> Kinds:
        if state:
            return kinds_of(state, partition)
        alike = (partition.group, partition.key.dtype)
        if alike not in self._fresh:
            self._fresh[alike] = kinds_of_fresh(self.inner, partition)
        kinds = self._fresh[alike]
        if kinds is not None:
            return kinds
        kinds = {}
        for fqn in sorted(stated):
            for role, spec in self.saved[fqn].items():
                if role not in NOT_OPTIMIZER_STATE:
                    shape = next(p.shape for p in partition.pieces if p.fqn == fqn)
                    scalar = spec.shape == () and (shape != () or role == "step")
                    kinds[role] = _example(spec.dtype) if scalar else Elementwise()
        return kinds

    def _elementwise(
        self, partition: Partition, role: str, tensor: torch.Tensor, stated: set[str]
    ) -> Iterator[LiveShard]:
        for piece in partition.pieces:
            if piece.fqn in stated:
                spec = TensorSpec(piece.fqn, role, dtype_name(tensor.dtype), piece.shape)
                for box, view in partition.views(tensor, piece):
                    yield LiveShard(spec, box, view)

    def _scalar(
        self, partition: Partition, role: str, example: Any, specs: dict[str, TensorSpec], stated: set[str]
    ) -> Iterator[LiveShard]:
        # One temporary each, in the stored dtype: float32 of torch's Adam and int of DeepSpeed's are the same count,
        # and parameters that disagree must be seen to.
        present = _scalar_tensor(example)
        temporary: dict[str, torch.Tensor] = {}
        for fqn in sorted(stated):
            dtype = torch_dtype(specs[fqn].dtype) if fqn in specs else present.dtype
            temporary[fqn] = present.to(dtype=dtype, device="cpu", copy=True)
            yield LiveShard(TensorSpec(fqn, role, dtype_name(dtype), ()), Box((), ()), temporary[fqn])
        self._scalars.append((partition, role, example, temporary))

    def attach(self) -> None:
        """Make what :meth:`prepare` allocated the engine's own: from here on the load cannot be refused any more.

        Clears the padding of masters and moments, so that a loaded engine does not depend on what it was before.
        """
        for partition, role, tensor in self._new:
            self.inner.state[partition.key][role] = tensor
        self._new.clear()
        for partition, _ in self._unstated:
            state = (self.inner.state.get(partition.key) or {}).values()
            like = (v for v in state if isinstance(v, torch.Tensor) and lies_like(v, partition.key))
            for tensor in (partition.key, *like):
                for hole in (hole for piece in partition.pieces for hole in partition.padding(tensor, piece)):
                    hole.zero_()

    def finish(self) -> list[str]:
        """Put scalars back, clear what the checkpoint has no state for, and return notes.

        Raises:
            LayoutError: parameters that share a partition of this engine were saved with different scalars.
        """
        problems = []
        for partition, role, example, temporary in self._scalars:
            values = {fqn: t.item() for fqn, t in temporary.items()}
            if len(set(map(_representation, values.values()))) > 1:
                shown = ", ".join(f"{fqn}: {value:g}" for fqn, value in values.items())
                problems.append(f"{role}: {shown}")
            else:
                state = self.inner.state[partition.key]
                state[role] = _as_live(state.get(role), example, next(iter(values.values())))
        if problems:
            raise LayoutError("parameters that share a partition of this engine were saved apart", tuple(problems))
        cleared = {fqn for partition, names in self._unstated for fqn in self._clear(partition, names)}
        if not cleared or not any(specs.keys() - NOT_OPTIMIZER_STATE for specs in self.saved.values()):
            return []  # a checkpoint from before the first step: nothing is missing, nothing was there
        return [f"no optimizer state was saved for {', '.join(sorted(cleared))}: it starts from zero"]

    def _clear(self, partition: Partition, names: list[str]) -> list[str]:
        """Remove state that the saved job did not have; return whose could only be set to zero.

        An optimizer has none for a parameter that never had a gradient. Where it shares a flat partition with others
        it gets their state and their count of steps.
        """
        state = self.inner.state.get(partition.key)
        if not names or state is None:
            return []
        if len(names) == len(partition.pieces):
            del self.inner.state[partition.key]
            return []
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.shape == partition.key.shape:
                for piece in partition.pieces:
                    if piece.fqn in names:
                        for _, view in partition.views(value, piece):
                            view.zero_()
        return names


def _example(dtype: str) -> Any:
    """Return an example of a scalar that was saved in ``dtype``: the dtypes of Python's numbers stand for these."""
    tensor = torch.zeros((), dtype=torch_dtype(dtype))
    return tensor.item() if tensor.dtype in _SCALAR_DTYPES.values() else tensor


def _representation(value: Any) -> Any:
    """Return what is equal for equal values: 3 is 3.0 here, and NaN is NaN."""
    return repr(value) if isinstance(value, float) and not value.is_integer() else value


def _as_live(present: Any, example: Any, value: Any) -> Any:
    """Return ``value`` in the representation that the optimizer keeps: in place if there is a tensor already."""
    if isinstance(present, torch.Tensor):
        return present.fill_(value)
    if isinstance(example, torch.Tensor):
        return torch.full_like(example, value)
    return type(example)(value)
