"""Description: a model on a mesh. Which model slice holds which tensors, and how each is cut. Pure.

A *slice* is what one (pipeline stage, tensor rank) pair holds of the model; its data-parallel copies differ only in the
optimizer's cuts and in which experts they hold. Slices with equal local tensors share one computation.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ckpt.describe.cuts import Groups
from ckpt.describe.engines import Cuts, Local, cuts_of
from ckpt.describe.model import Described, ModelSpec, refuse
from ckpt.describe.parallel import STATE, Mesh, Parallel
from ckpt.errors import LayoutError
from ckpt.layout.spec import BUFFER, ITEMSIZE, MASTER, PARAM
from ckpt.layout.tiling import Runs, Tiling

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_HELD = 2**60
"""Bytes that all ranks may hold together, copies counted: an int64, with room to tell more than there is from it."""

Geometry = tuple[tuple[Runs, int], ...]
"""For each tensor rank (runs, length of the local dimension) along the dimension that is cut."""


@dataclass(frozen=True, slots=True)
class Column:
    """One role of a tensor. ``of_param``: it lies where the parameter does, not where the optimizer state does.

    ``scalar``: it is no cut of the parameter but whole on every rank that steps a part of it; ``shape``: of such a one.
    """

    role: str
    dtype: str
    of_param: bool = False
    scalar: bool = False
    shape: tuple[int, ...] = ()


class Description:
    """A model, a parallel layout, and everything that follows.

    Raises:
        ConfigError: every reason at once why the two do not fit together.
    """

    def __init__(self, model: ModelSpec, parallel: Parallel) -> None:
        parallel.check()
        model.check()
        self.model, self.parallel = model, parallel
        self._stage_of_layer = _stages(model, parallel)
        self._experts = model.experts
        self._geometry: dict[tuple[object, ...], Geometry] = {}
        self._cuts: dict[tuple[object, ...], list[Cuts]] = {}
        self._groups: dict[int | None, Groups] = {}
        problems = [*self._problems()]
        if problems:
            refuse(f"model {model.name!r} cannot be laid out like this", problems)
        self.mesh = Mesh(parallel)

    # ------------------------------------------------------------------------------------------------- who has what

    @cached_property
    def stages(self) -> dict[str, tuple[int, ...]]:
        """FQN -> pipeline stages that hold it, ascending: more than one for ties across stages."""
        last = self.parallel.pp - 1
        found: dict[str, set[int]] = {}
        for t in self.model.tensors:
            if t.layer is not None:
                found[t.fqn] = {self._stage_of_layer[t.layer]}
            else:
                found[t.fqn] = {"first": {0}, "last": {last}, "ends": {0, last}, "every": set(range(last + 1))}[t.place]
        for tie in self.model.tied:
            found[tie.target].add(0 if tie.place == "first" else last)
        return {fqn: tuple(sorted(stages)) for fqn, stages in found.items()}

    @cached_property
    def on_stage(self) -> list[list[Described]]:
        """Tensors of each stage in module order.

        A weight that is tied across stages comes first in DeepSpeed's modules (``PipelineModule.tied_modules``), else
        where it is used.
        """
        held: list[list[Described]] = [[] for _ in range(self.parallel.pp)]
        for t in self.model.tensors:
            for stage in self.stages[t.fqn]:
                held[stage].append(t)
        for stage, tensors in enumerate(held):
            if self.parallel.kind == "deepspeed":
                tensors.sort(key=lambda t: not self.is_shared(t))
            elif stage:
                tensors.sort(key=self.is_shared)
        return held

    def is_shared(self, tensor: Described) -> bool:
        """Do several pipeline stages hold it, each with an optimizer state of its own?"""
        return len(self.stages[tensor.fqn]) > 1 and tensor.place != "every"

    def expert_rank(self, tensor: Described) -> int | None:
        """Return the expert-parallel rank that holds it, None for what is no routed expert's."""
        if tensor.expert is None or self.parallel.ep == 1:
            return None
        return tensor.expert // (self._experts // self.parallel.ep)

    def groups(self, expert_rank: int | None) -> Groups:
        """Return the data-parallel groups of dense tensors (None) or of one expert rank's."""
        if expert_rank not in self._groups:
            p = self.parallel
            shard = p.shard or p.data
            self._groups[expert_rank] = Groups.of(
                p.data, shard, *((1, 0) if expert_rank is None else (p.ep, expert_rank))
            )
        return self._groups[expert_rank]

    # ----------------------------------------------------------------------------------------------- how it is cut

    def geometry(self, tensor: Described) -> Geometry:
        """Return what each tensor rank holds along the dimension that is cut; of a whole tensor, of its first one.

        Raises:
            LayoutError: the tensor cannot be cut for this many ranks.
        """
        key = (tensor.shape, tensor.split)
        if key not in self._geometry:
            p, split = self.parallel, tensor.split
            if split is None:
                n = tensor.shape[0] if tensor.shape else 1
                self._geometry[key] = ((((0, n),), n),) * p.tp
            else:
                uneven = p.kind in ("ddp", "fsdp2", "zero_redundancy_optimizer")
                size, multiple = tensor.shape[split.dim], p.vocabulary_padding
                self._geometry[key] = tuple(
                    split.runs(size, p.tp, t, uneven=uneven, multiple=multiple, autotp=p.autotp) for t in range(p.tp)
                )
        return self._geometry[key]

    def local_shape(self, tensor: Described, tensor_rank: int) -> tuple[int, ...]:
        """Return the shape of what a tensor rank holds, padding included."""
        if tensor.split is None:
            return tensor.shape
        dim = tensor.split.dim
        return (*tensor.shape[:dim], self.geometry(tensor)[tensor_rank][1], *tensor.shape[dim + 1 :])

    def tiling(self, tensor: Described, tensor_rank: int) -> Tiling:
        """Return which elements of the global tensor lie where in the local one."""
        if tensor.split is None:
            return Tiling.whole(tensor.shape)
        runs, _ = self.geometry(tensor)[tensor_rank]
        return Tiling.of_runs(tensor.shape, {tensor.split.dim: runs}, self.local_shape(tensor, tensor_rank))

    def cuts(self, stage: int, tensor_rank: int, expert_rank: int | None) -> dict[str, Cuts]:
        """Return FQN -> cuts of the parameters of one model slice: its dense ones (None) or those of one expert rank.

        An empty local tensor (more ranks than rows) has no cuts.
        """
        tensors = self._steppable[stage].get(expert_rank, [])
        shapes = [self.local_shape(t, tensor_rank) for t in tensors]
        held = [(t, s) for t, s in zip(tensors, shapes, strict=True) if 0 not in s]
        locals_ = tuple(
            Local(s, t.trainable, len(t.shape) > 1, self.is_shared(t), t.expert is not None, t.group) for t, s in held
        )
        key = (expert_rank, locals_)
        if key not in self._cuts:
            self._cuts[key] = cuts_of(locals_, self.groups(expert_rank), self.parallel)
        return {t.fqn: cut for (t, _), cut in zip(held, self._cuts[key], strict=True)}

    @cached_property
    def _steppable(self) -> list[dict[int | None, list[Described]]]:
        found: list[dict[int | None, list[Described]]] = []
        for tensors in self.on_stage:
            by_expert: dict[int | None, list[Described]] = defaultdict(list)
            for t in tensors:
                if t.kind != "buffer":
                    by_expert[self.expert_rank(t)].append(t)
            found.append(dict(by_expert))
        return found

    def columns(self, tensor: Described) -> tuple[Column, ...]:
        """Return the roles of a tensor, ascending by name."""
        p = self.parallel
        if tensor.kind == "buffer":  # engines cast parameters only
            return (Column(BUFFER, tensor.dtype or "float32", of_param=True),)
        dtype = tensor.dtype or p.precision
        found = [Column(PARAM, dtype, of_param=True)]
        moments, step = STATE[p.optimizer]
        if tensor.trainable and p.optimizer != "none":
            found += [Column(MASTER, "float32")] if p.masters else []
            found += [Column(role, "float32" if p.masters else dtype) for role in moments]
            found += [Column("step", step, scalar=tensor.shape != ())] if step else []
        return tuple(sorted(found, key=lambda c: c.role))

    def derived(self, tensor: Described) -> bool:
        """Is the parameter claimed to be the cast of a master?"""
        return any(c.role == MASTER for c in self.columns(tensor))

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Tied name -> listed name, ascending."""
        return dict(sorted((tie.alias, tie.target) for tie in self.model.tied))

    # ---------------------------------------------------------------------------------------------------- problems

    def _problems(self) -> Iterator[str]:
        p, seen = self.parallel, set()
        for t in self.model.tensors:
            if t.split is not None and (t.shape, t.split) not in seen:
                seen.add((t.shape, t.split))
                try:
                    self.geometry(t)
                except LayoutError as error:
                    yield f"{t.fqn!r} {list(t.shape)}: {error}"
            if p.kind == "fsdp2" and t.shape == () and t.kind != "buffer":
                yield f"{t.fqn!r} has no dimension, FSDP cannot cut it"
        if p.ep > 1 and (not self._experts or self._experts % p.ep):
            yield f"ep {p.ep} does not divide the {self._experts} experts of the model"
        held = sum(self._bytes(t) * len(self.stages[t.fqn]) for t in self.model.tensors) * p.ranks // p.pp
        if held >= MAX_HELD:
            yield f"its ranks could hold {held} bytes in all (each stage on each of its ranks), expected < {MAX_HELD}"

    def _bytes(self, tensor: Described) -> int:
        """Return the bytes of a tensor with all of its roles, without scalars."""
        return tensor.numel * sum(ITEMSIZE[column.dtype] for column in self.columns(tensor) if not column.scalar)


def _stages(model: ModelSpec, parallel: Parallel) -> list[int]:
    """Return layer -> stage."""
    counts = list(parallel.stages)
    problems = []
    if not counts:
        if model.layers % parallel.pp:
            problems.append(
                f"pp {parallel.pp} does not divide the {model.layers} layers: give those of each stage "
                "(--stages, in a file stages)"
            )
        counts = [model.layers // parallel.pp] * parallel.pp
    elif sum(counts) != model.layers:
        problems.append(f"the stages hold {sum(counts)} layers, the model has {model.layers}")
    if problems:
        refuse(f"model {model.name!r} cannot be laid out like this", problems)
    return [stage for stage, n in enumerate(counts) for _ in range(n)]
