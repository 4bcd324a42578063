"""The model in a DeepSpeed checkpoint: names as the whole model has them, parameters and buffers, ties.

Names are those that a save of the live engine gives (:mod:`ckpt.engine.deepspeed_naming`): experts are numbered through
all expert-parallel ranks, layers of a pipeline carry their number, what its stages share is ``tied_modules.<key>.…``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt.convert.deepspeed.read_cuts import Cuts
from ckpt.convert.deepspeed.read_files import attributes, numel_of, shapes_of, whole
from ckpt.convert.deepspeed.read_job import Job, check_ranks
from ckpt.convert.deepspeed.read_pieces import Claims, add_flat, add_stored
from ckpt.convert.deepspeed.read_zero import optimizer_of
from ckpt.convert.opened import Builder
from ckpt.convert.torchfile.names import Stored, kind_of
from ckpt.engine.shared_partition import clean_name
from ckpt.errors import MalformedData
from ckpt.layout.spec import BUFFER, PARAM

if TYPE_CHECKING:
    from ckpt.layout.spec import TensorSpec
    from ckpt.layout.tiling import Tiling

EXTRA = "_extra_state"
_EXPERT = re.compile(r"(.*(?:^|\.)deepspeed_experts\.)(\d+)(\..*)")

Shape = tuple[int, ...]


@dataclass(slots=True)
class Model:
    """``modules``: model-parallel rank -> local name -> what its state dict holds. ``groups``: ``param_shapes`` of each
    model-parallel rank; of those in ``unshaped`` only the numbers of elements are known at first. ``apart``:
    (model-parallel rank, local name) -> global name, of what a pipeline's stage has of a shared module without sharing
    it. ``extra``: global module name -> state beside its tensors.
    """

    job: Job
    cuts: Cuts
    builder: Builder
    modules: dict[int, dict[str, Any]] = field(default_factory=dict)
    groups: dict[int, list[dict[str, Shape]]] = field(default_factory=dict)
    buffers: dict[int, set[str]] = field(default_factory=dict)
    shapes: dict[int, dict[str, Shape]] = field(default_factory=dict)
    unshaped: set[int] = field(default_factory=set)
    apart: dict[tuple[int, str], str] = field(default_factory=dict)
    extra: dict[str, dict[int, Any]] = field(default_factory=dict)
    claims: Claims = field(default_factory=Claims)
    local_experts: dict[str, int] = field(default_factory=dict)
    """what stands before the number of an expert -> how many there are on each expert-parallel rank"""

    @classmethod
    def of(cls, job: Job, cuts: Cuts, builder: Builder) -> Model:
        """Gather names and shapes; nothing is added to the builder yet."""
        model = cls(job, cuts, builder)
        for mp, tree in job.models.items():
            where = job.files.model[mp, 0]
            model.groups[mp] = shapes_of(tree.get("param_shapes") or [], where)
            model.buffers[mp] = set(_strings(tree.get("buffer_names"), where))
            held = {} if tree.get("module") is None else tree["module"]
            if not isinstance(held, dict):
                raise MalformedData(f"{where}: the module is a {kind_of(held)}, expected a dictionary")
            model.modules[mp] = dict(held)
            model.shapes[mp] = {n: t.shape for n, t in held.items() if isinstance(t, Stored)}
            if tree.get("param_shapes") is None and (mp, 0) in job.files.optim:
                model.groups[mp] = model.from_books(mp)
                model.unshaped.add(mp)
                continue
            for names in (*model.groups[mp], *shapes_of(tree.get("frozen_param_shapes") or {}, where)):
                model.shapes[mp].update(names)
        for shapes in model.shapes.values():
            for m in filter(None, map(_EXPERT.fullmatch, shapes)):
                model.local_experts[m[1]] = max(model.local_experts.get(m[1], 0), int(m[2]) + 1)
        return model

    # ---------------------------------------------------------------------------------------------------------- names

    def name(self, mp: int, local: str, expert: int | None = None) -> str:
        """Return the name that a tensor is listed under.

        Args:
            mp: model-parallel rank.
            local: its name there.
            expert: expert-parallel rank, if experts are numbered from 0 on each.
        """
        fqn = self.apart.get((mp, local))
        if fqn is None:
            fqn = clean_name(local)
            found = _EXPERT.fullmatch(fqn)
            if found and expert is not None:
                fqn = f"{found[1]}{int(found[2]) + expert * self.local_experts.get(found[1], 0)}{found[3]}"
        fqn = self.cuts.rules.rename(fqn)
        listed = self.cuts.rules.tied.get(fqn, fqn)
        if listed != fqn:
            self.builder.aliases[fqn] = listed
        return listed

    def tiling(self, mp: int, local: str, fqn: str) -> Tiling:
        """Return which part of the global tensor a model-parallel rank's is."""
        tp = self.job.tp
        first = mp // tp * tp
        shapes = [self.shapes[m].get(local) for m in range(first, first + tp)]
        buffer = local in self.buffers[mp]
        return self.cuts.tiling(fqn, clean_name(local), shapes, mp - first, buffer=buffer)

    def from_books(self, mp: int) -> list[dict[str, Shape]]:
        """Return name -> (elements,) of each group, from what the ranks say that they have of it."""
        found: list[dict[str, Shape]] = []
        for dp in range(self.job.dp):
            key = self.job.files.optim[mp, dp]
            books = optimizer_of(self.job.files.read(key), key).get("param_slice_mappings")
            if not isinstance(books, list) or not all(isinstance(one, dict) for one in books):
                raise MalformedData(f"{key}: neither it nor the model's file names the parameters of its groups")
            found += [{} for _ in books[len(found) :]]
            for group, names in zip(found, books, strict=False):
                for name, at in names.items():
                    numel = whole(attributes(at).get("numel"), f"{key}: elements of {name!r}")
                    group[name] = (numel + group.get(name, (0,))[0],)
        return found

    def shape_groups(self) -> None:
        """Give the parameters of :meth:`from_books` the shapes that they have in the module."""
        for mp in self.unshaped:
            for group in self.groups[mp]:
                for name, (numel,) in list(group.items()):
                    held = [shapes[name] for shapes in (self.shapes[mp], *self.shapes.values()) if name in shapes]
                    if not held or numel_of(held[0]) != numel:
                        shown = list(held[0]) if held else "nothing"
                        raise MalformedData(f"{self.builder.where}: {name!r} has {numel} elements, the module: {shown}")
                    group[name] = self.shapes[mp][name] = held[0]

    # -------------------------------------------------------------------------------------------------------- tensors

    def add(self, *, elsewhere: frozenset[str] = frozenset()) -> None:
        """Add parameters and buffers as far as they stand in files of the model; of ZeRO-3 the buffers and the frozen.

        Args:
            elsewhere: local names of parameters that are taken from other files.

        Raises:
            MalformedData: something stands where DeepSpeed writes something else.
        """
        for mp, held in self.modules.items():
            self._add_module(mp, held, elsewhere)
        if self.job.files.partitioned:
            for mp, tree in self.job.models.items():
                for dp in range(self.job.dp):
                    self._add_frozen(mp, dp, tree)
        self._add_experts()

    def _add_module(self, mp: int, held: dict[str, Any], elsewhere: frozenset[str]) -> None:
        """Add what stands in a module; equal places are one tensor under two names."""
        seen: dict[tuple[Stored, bool], str] = {}
        shared = self._shared(mp)
        for local, value in held.items():
            if local.rpartition(".")[2] == EXTRA:
                module = self.name(mp, local).removesuffix(EXTRA).removesuffix(".")
                self.extra.setdefault(module, {})[mp] = value
                continue
            if not isinstance(value, Stored):
                self.builder.lost.append(f"module entry {local!r} is a {kind_of(value)}, no tensor: left out")
                continue
            buffer = local in self.buffers[mp]
            fqn = self.name(mp, local)
            first = seen.setdefault((value, buffer), local) if value.volume else local
            tied = first if first != local else shared.get(local)
            if tied is not None and not (buffer and local in shared):
                listed = self.name(mp, tied)
                if fqn != listed:
                    self.builder.aliases[fqn] = listed
                continue
            if self.job.files.partitioned and not buffer and not value.volume:
                self._check_placeholder(mp, local)
                continue
            if not buffer and local in elsewhere:
                continue
            self.add_tensor(mp, local, fqn, BUFFER if buffer else PARAM, value)

    def _check_placeholder(self, mp: int, local: str) -> None:
        """Check that what ZeRO-3 has cut is somewhere."""
        tree = self.job.models[mp]
        if local in (tree.get("frozen_param_shapes") or {}) or any(local in names for names in self.groups[mp]):
            return
        if "shared_params" in tree:
            raise MalformedData(f"{self.builder.where}: {local!r} is cut, and in no partition")
        self.builder.notes.append(
            f"{local!r} has no values of its own: this release of DeepSpeed did not write down ties"
        )

    def add_tensor(self, mp: int, local: str, fqn: str, role: str, value: Stored) -> None:
        """Add a tensor that a model-parallel rank holds whole."""
        tiling = self.tiling(mp, local, fqn)
        spec = self.builder.spec(fqn, role, value.dtype, tiling.shape)
        own = self.claims.own(fqn, mp, tiling)
        add_stored(self.builder, self.job.files.store, spec, tiling, value, own)

    def _shared(self, mp: int) -> dict[str, str]:
        """Return other name -> name under which DeepSpeed keeps the tensor: rank 0 of the job alone writes it down."""
        found = self.job.models[mp].get("shared_params") or self.job.models[0].get("shared_params") or {}
        if not isinstance(found, dict):
            raise MalformedData(f"{self.job.files.model[mp, 0]}: shared_params is a {kind_of(found)}")
        kept = {name for names in self.groups[mp] for name in names}
        # By address below ZeRO-3, where all empty tensors have the same.
        return {
            str(other): str(name)
            for other, name in found.items()
            if other in self.modules[mp] and name in self.modules[mp] and other not in kept and self._solid(mp, name)
        }

    def _solid(self, mp: int, name: str) -> bool:
        return bool(numel_of(self.shapes[mp].get(name, (0,))))

    def _add_frozen(self, mp: int, dp: int, first: dict[str, Any]) -> None:
        """Add a rank's slices of parameters that ZeRO-3 has cut and no optimizer steps."""
        key = self.job.files.model[mp, dp]
        tree = first if dp == 0 else self.job.files.read(key)
        if dp:
            check_ranks(self.job, first, tree, mp, dp)
        shapes = {n: s for one in shapes_of(tree.get("frozen_param_shapes") or {}, key) for n, s in one.items()}
        slices = tree.get("frozen_param_fragments") or {}
        for local, shape in shapes.items():
            stored = slices.get(local) if isinstance(slices, dict) else None
            part = -(-numel_of(shape) // self.job.dp)
            if not isinstance(stored, Stored) or not stored.is_contiguous or (part and stored.volume != part):
                found = f"{stored.volume} elements" if isinstance(stored, Stored) else "nothing"
                raise MalformedData(f"{key}: frozen parameter {local!r}: expected {part} elements of it, found {found}")
            fqn = self.name(mp, local)
            tiling = self.tiling(mp, local, fqn)
            spec = self.builder.spec(fqn, PARAM, stored.dtype, tiling.shape)
            start, stop = (min(n * part, numel_of(shape)) for n in (dp, dp + 1))
            add_flat(self.builder, spec, tiling, start, stop, key, stored.start, self.claims.own(fqn, mp, tiling))

    def _add_experts(self) -> None:
        """Add what is in the files of experts, whose names are those of the whole model already."""
        for (_, _, mp), key in sorted(self.job.files.experts.items()):
            for local, value in self.job.files.read(key).items():
                if not isinstance(value, Stored):
                    self.builder.lost.append(f"{key}: {local!r} is a {kind_of(value)}, no tensor: left out")
                    continue
                for m in range(self.job.mp):
                    self.shapes[m].setdefault(local, value.shape)
                self.shapes[mp][local] = value.shape
                role = BUFFER if self.is_buffer(local) else PARAM
                self.add_tensor(mp, local, self.name(mp, local), role, value)

    def is_buffer(self, expert: str) -> bool:
        """Is something of an expert a buffer? Of the experts of one rank their names are known."""
        return _unnumbered(expert) in {_unnumbered(n) for names in self.buffers.values() for n in names}

    # ------------------------------------------------------------------------------------------------- derived params

    def low_precision(self, mp: int, local: str, fqn: str, master: str) -> TensorSpec:
        """Return the parameter that belongs to a master; it need not stand in any file, since it is the cast of it."""
        tiling = self.tiling(mp, local, fqn)
        held = self.modules[mp].get(local)
        words = {"bf16": "bfloat16", "fp16": "float16", "fp32": master}
        dtype = held.dtype if isinstance(held, Stored) else words[self.job.dtype]
        return self.builder.known(fqn, PARAM) or self.builder.spec(fqn, PARAM, dtype, tiling.shape)


def prefix_of(expert: str) -> tuple[str, int]:
    """Return what stands before the number of an expert in a name, and the number; empty if it is none."""
    found = _EXPERT.fullmatch(expert)
    return (found[1], int(found[2])) if found else ("", 0)


def numbered_expert(name: str, number: int) -> str:
    """Return the name of something of an expert, with another number of the expert."""
    return _EXPERT.sub(rf"\g<1>{number}\g<3>", name)


def _unnumbered(name: str) -> str:
    return _EXPERT.sub(r"\1#\3", name)


def _strings(values: Any, where: str) -> list[str]:
    if values is None:
        return []
    if not isinstance(values, list | tuple) or not all(isinstance(v, str) for v in values):
        raise MalformedData(f"{where}: buffer_names is {values!r:.80}, expected names")
    return list(values)
