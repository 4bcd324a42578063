"""Masters and optimizer state of a ZeRO job, from the files of all ranks into an index."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ckpt.convert.deepspeed.read_files import attributes, differing
from ckpt.convert.deepspeed.read_model import Model
from ckpt.convert.deepspeed.read_pieces import add_flat
from ckpt.convert.deepspeed.read_steps import differs_alike, number_of, taken_by
from ckpt.convert.deepspeed.read_zero import Cut, Partition, base_of, is_zero3, optimizer_of, part_sizes, zero3, zero12
from ckpt.convert.torchfile.names import Stored
from ckpt.errors import ConfigError, MalformedData, UnsupportedFeature
from ckpt.layout.box import Box
from ckpt.layout.spec import BUFFER, ITEMSIZE, MASTER, PARAM
from ckpt.runtime.staging import as_tensor

if TYPE_CHECKING:
    from ckpt.store.base import Store

_SAMPLE = 64
"""Elements of a partition that are compared with the model's."""
_LONG_SAMPLE = 1 << 16
"""As many if the counts of steps differ: in low precision few elements change in a step."""
_EXACT = (0, 19)
"""Release of DeepSpeed from which on the optimizers of ZeRO count nothing but steps; older ones take one to begin."""
WRITTEN_FOR = "ckpt_reshard_steps"
"""Beside the optimizer in files that we wrote: the number of optimizer steps that the model's files are of."""
NOT_STATE = frozenset({PARAM, MASTER, BUFFER, "grad"})


@dataclass(slots=True)
class Optimizer:
    """What is gathered while the files are read. ``groups``: (model-parallel rank, expert-parallel rank or None) ->
    parameter groups with their options and the names of their members. ``first``: the optimizer part of the first file
    of each model-parallel rank.
    """

    model: Model
    groups: dict[tuple[int, int | None], list[dict[str, Any]]] = field(default_factory=dict)
    first: dict[int, dict[str, Any]] = field(default_factory=dict)
    _declared: set[tuple[int, int, int | None, str]] = field(default_factory=set)
    _scalars: dict[tuple[str, str], tuple[bytes, str]] = field(default_factory=dict)
    _options: dict[int, tuple[str, list[str]]] = field(default_factory=dict)
    _written_for: dict[str, Any] = field(default_factory=dict)
    _alike: dict[float, str] = field(default_factory=dict)

    def add(self) -> None:
        """Read the optimizer files one by one and add what they hold.

        Raises:
            MalformedData: files that do not belong together.
            UnsupportedFeature: state that is neither like its parameters nor one number, by name.
        """
        for mp in range(self.model.job.mp):
            sizes: list[int] = []
            for dp in range(self.model.job.dp):
                key, optimizer = self.read(mp, dp)
                if dp == 0:
                    self.first[mp] = optimizer
                    if not is_zero3(optimizer):
                        sizes = part_sizes(optimizer, len(self.model.groups[mp]), key)
                self._check_options(mp, key, optimizer)
                for partition in self.partitions(mp, dp, key, optimizer, sizes):
                    self._add_partition(mp, partition)
                self._add_groups(mp, dp, optimizer)

    def read(self, mp: int, dp: int) -> tuple[str, dict[str, Any]]:
        """Return the name of one rank's file and what it holds of the optimizer."""
        key = self.model.job.files.optim[mp, dp]
        tree = self.model.job.files.read(key)
        self._written_for[key] = tree.get(WRITTEN_FOR)
        return key, optimizer_of(tree, key)

    def partitions(self, mp: int, dp: int, key: str, optimizer: dict[str, Any], sizes: list[int]) -> list[Partition]:
        """Return what one rank's file holds; ``sizes`` of :func:`part_sizes`."""
        shapes, job = self.model.groups[mp], self.model.job
        try:
            if is_zero3(optimizer):
                return zero3(key, optimizer, shapes, job.dp, dp)
            section = job.config.get("zero_optimization")
            shuffled = isinstance(section, dict) and bool(section.get("round_robin_gradients"))
            cuts = self._cuts(optimizer, len(shapes), dp, key)
            return zero12(key, optimizer, shapes, cuts, sizes, round_robin=shuffled)
        except MalformedData as error:
            raise MalformedData(f"{job.files.where}: {error}") from error

    def _cuts(self, optimizer: dict[str, Any], groups: int, dp: int, key: str) -> list[Cut]:
        """Return how each group is cut: one of experts over the ranks that have the same experts."""
        job = self.model.job
        said = optimizer.get("partition_count", job.dp)
        counts = list(said) if isinstance(said, list | tuple) else [said] * groups
        if len(counts) != groups or any(not isinstance(n, int) or n < 1 or job.dp % n for n in counts):
            raise MalformedData(f"{key}: partition_count is {said!r:.80}, the job had {job.dp} data-parallel ranks")
        degrees = sorted({job.dp // count for count in counts} - {1})
        if len(degrees) > 1:
            raise UnsupportedFeature(f"{key}: experts of several expert-parallel sizes ({degrees}) in one job")
        cuts = []
        for count in counts:
            ep = job.dp // count
            inner = not job.config.get("use_data_before_expert_parallelism", False)
            expert, index = (dp % ep, dp // ep) if inner else (dp // count, dp % count)
            cuts.append(Cut(count, index, expert if ep > 1 else None) if ep > 1 else Cut(count, dp))
        return cuts

    # -------------------------------------------------------------------------------------------------- one partition

    def _add_partition(self, mp: int, one: Partition) -> None:
        roles: dict[str, Stored] = {MASTER: one.flat}
        scalars: dict[str, Any] = {}
        for role, value in one.state.items():
            if value is None:
                continue
            if role in NOT_STATE or not isinstance(role, str):
                raise UnsupportedFeature(f"{one.key}: optimizer state with the key {role!r:.80}")
            if isinstance(value, Stored) and len(value.shape) == 1 and self._like(one, value):
                roles[role] = value
            elif (isinstance(value, Stored) and value.volume == 1) or type(value) in (bool, int, float):
                scalars[role] = value
            else:
                found = f"of shape {list(value.shape)}" if isinstance(value, Stored) else f"a {type(value).__name__}"
                raise UnsupportedFeature(
                    f"{one.key}: optimizer state {role!r} of {one.members[:1]} is {found}, expected one element for "
                    f"each of the {one.size} of its partition, or one number"
                )
        members = {local: self.model.name(mp, local, one.expert) for local in one.members}
        known = (mp, one.group, one.expert, one.members[0] if one.members else "")
        for local, fqn in members.items() if known not in self._declared else ():
            self.model.builder.derived.add(fqn)
            self.model.low_precision(mp, local, fqn, one.flat.dtype)
            tiling = self.model.tiling(mp, local, fqn)
            self.model.builder.spec(fqn, MASTER, one.flat.dtype, tiling.shape)
        self._declared.add(known)
        for piece in one.slices:
            fqn = members[piece.name]
            tiling = self.model.tiling(mp, piece.name, fqn)
            own = self.model.claims.own(fqn, mp, tiling)
            for role, stored in roles.items():
                spec = self.model.builder.spec(fqn, role, stored.dtype, tiling.shape)
                at = stored.start + piece.offset * spec.itemsize
                stop = piece.start + piece.numel
                add_flat(self.model.builder, spec, tiling, piece.start, stop, one.key, at, own)
        self._check_step(mp, one, scalars.get("step"))
        for role, value in scalars.items():
            self.add_scalar(one.key, role, value, [members[piece.name] for piece in one.slices])

    def _check_step(self, mp: int, one: Partition, step: Any) -> None:
        """See that an optimizer's file and the model's are of one step: by the optimizer's count of steps and the
        engine's, and by a few elements, which DeepSpeed rounds from their masters.

        Raises:
            MalformedData: the counts differ, and the elements do too, or there are none to compare (ZeRO-3). Of what
                can be compared each alone may be as it was saved: weights were edited, or an optimizer was started
                anew. That the user says that this is its count is enough too.
            ConfigError: the user says another count than the file.
        """
        job, key = self.model.job, self.model.job.files.model[mp, 0]
        taken, number = taken_by(job.models[mp]), number_of(job.files.store, step)
        told = self._written_for.get(one.key)
        differ = number is not None and number != taken if told is None else told != taken
        problem = f"{job.files.where}: files of several steps: {key} is of {taken} optimizer steps, {one.key} of "
        problem += f"{number if told is None else told:g}" if differ else ""
        said = job.files.options.optimizer_step
        if said is not None and number is not None and number != said:
            raise ConfigError(
                f"{job.files.where}: the optimizer is said to have taken {said} steps (--optimizer-step), "
                f"{one.key} counts {number:g}"
            )
        if differ and told is not None:
            raise MalformedData(problem)
        if differ and number == said:
            self.model.builder.notes.append(f"the optimizer counts {number:g} steps, the engine {taken}, as you say")
            differ = False
        if differ and job.files.partitioned:
            if number - taken not in self._alike:
                self._alike[number - taken] = differs_alike(job.files, key.rpartition("/")[0], number - taken)
            other = self._alike[number - taken]
            if not other and not self._may_count_otherwise(mp, number - taken):
                raise MalformedData(
                    f"{problem} (an optimizer that was started anew looks alike where no other checkpoint of its job "
                    f"is beside it: if it has taken {number:g} steps indeed, say so with --optimizer-step {number:g})"
                )
            alike = f", as in {other}" if other else ""
            self.model.builder.notes.append(f"the optimizer counts {number:g} steps, the engine {taken}{alike}")
        same = self._same_elements(mp, one, _LONG_SAMPLE if differ else _SAMPLE)
        if same is not False:
            return
        name = one.slices[0].name
        if differ:
            raise MalformedData(f"{problem}, and {name!r} is not the cast of its master")
        self.model.builder.notes.append(f"{name!r} in {key} is not the cast of its master in {one.key}")

    def _may_count_otherwise(self, mp: int, more: float) -> bool:
        """May an optimizer of ZeRO-3 have counted so many more steps than its engine?"""
        scaled = self.model.job.config.get("torch_autocast")
        if isinstance(scaled, dict) and scaled.get("enabled"):
            return True  # its gradient scaler skips steps by itself
        said = re.match(r"(\d+)\.(\d+)", str(self.model.job.models[mp].get("ds_version", "")))
        return more == 1 and (said is None or (int(said[1]), int(said[2])) < _EXACT)

    def _same_elements(self, mp: int, one: Partition, most: int) -> bool | None:
        """Is the first parameter of a partition the cast of its master? None: there is nothing to look at."""
        piece = next(iter(one.slices), None)
        held = self.model.modules[mp].get(piece.name) if piece is not None and one.expert is None else None
        if (
            piece is None
            or not isinstance(held, Stored)
            or held.volume < piece.start + piece.numel
            or not held.is_contiguous
        ):
            return None
        store, count = self.model.job.files.store, min(piece.numel, most)
        master = sample(store, one.flat, piece.offset, count)
        return torch.equal(master.to(getattr(torch, held.dtype)), sample(store, held, piece.start, count))

    @staticmethod
    def _like(one: Partition, value: Stored) -> bool:
        """Has it an element for each of the partition? ``elastic_checkpoint`` leaves out the padding at its end."""
        need = max((piece.offset + piece.numel for piece in one.slices), default=0)
        return value.is_contiguous and value.volume in {one.size, one.flat.volume} and value.volume >= need

    def add_scalar(self, key: str, role: str, value: Any, fqns: list[str]) -> None:
        """Add one number of the optimizer's (``step``) for each of these parameters.

        Raises:
            MalformedData: another file has another number for one of them.
        """
        builder = self.model.builder
        dtype, data = scalar_bytes(self.model, value)
        for fqn in dict.fromkeys(fqns):
            before, where = self._scalars.setdefault((fqn, role), (data, key))
            if before != data:
                raise MalformedData(
                    f"{builder.where}: files of several steps: {role} of {fqn!r} differs between {where} and {key}"
                )
            spec = builder.spec(fqn, role, dtype, ())
            if isinstance(value, Stored):
                builder.add(spec, Box((), ()), value.key, value.start)
            elif where == key:
                builder.add_value(spec, data)

    # --------------------------------------------------------------------------------------------------------- groups

    def _add_groups(self, mp: int, dp: int, optimizer: dict[str, Any]) -> None:
        key = self.model.job.files.optim[mp, dp]
        _, groups = base_of(optimizer)
        if is_zero3(optimizer):
            cuts = [Cut(self.model.job.dp, dp)] * len(self.model.groups[mp])
            owner = [g for g, group in enumerate(groups) for _ in group.get("params", ())]
        else:
            cuts = self._cuts(optimizer, len(self.model.groups[mp]), dp, key)
            owner = list(range(len(groups)))
        expert = next((cut.expert for cut in cuts if cut.expert is not None), None)
        if (mp, expert) in self.groups:
            return
        members: list[list[str]] = [[] for _ in groups]
        for g, names, cut in zip(owner, self.model.groups[mp], cuts, strict=False):
            members[g] += [self.model.name(mp, local, cut.expert) for local in names]
        self.groups[mp, expert] = [
            {"params": names, "options": {k: v for k, v in group.items() if k != "params"}}
            for group, names in zip(groups, members, strict=True)
        ]

    def _check_options(self, mp: int, key: str, optimizer: dict[str, Any]) -> None:
        """Compare learning rates and what else moves: all data-parallel ranks step alike."""
        _, groups = base_of(optimizer)
        options = [{k: v for k, v in g.items() if k not in ("params", "name", "moe")} for g in groups]
        plain = repr([{k: v for k, v in one.items() if not isinstance(v, Stored)} for one in options])
        scaler = attributes(optimizer.get("loss_scaler"))
        plain += repr({k: scaler.get(k) for k in ("cur_scale", "cur_iter", "last_overflow_iter")})
        first, keys = self._options.setdefault(mp, (plain, []))
        keys.append(key)
        if differing({keys[0]: first, key: plain}):
            raise MalformedData(
                f"{self.model.job.files.where}: files of several steps: the optimizer's groups and loss scale differ "
                f"between {keys[0]} and {key}"
            )


def sample(store: Store, stored: Stored, start: int, count: int) -> torch.Tensor:
    """Return a few elements of a contiguous tensor."""
    width = ITEMSIZE[stored.dtype]
    data = bytearray(store.get(stored.key, stored.start + start * width, count * width))
    return as_tensor(data, stored.dtype, (count,))


def scalar_bytes(model: Model, value: Any) -> tuple[str, bytes]:
    """Return dtype and bytes of one number, as the adapters of live engines store it."""
    if isinstance(value, Stored):
        return value.dtype, bytes(model.job.files.store.get(value.key, value.start, ITEMSIZE[value.dtype]))
    if isinstance(value, bool):
        return "bool", struct.pack("<?", value)
    if isinstance(value, int):
        return "int64", value.to_bytes(8, "little", signed=True)
    return "float64", struct.pack("<d", value)
