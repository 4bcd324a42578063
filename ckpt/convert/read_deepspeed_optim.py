"""Masters and optimizer state of a ZeRO job, from the files of all ranks into an index."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ckpt.convert.read_deepspeed_files import attributes, differing
from ckpt.convert.read_deepspeed_model import Model
from ckpt.convert.read_deepspeed_pieces import add_flat
from ckpt.convert.read_deepspeed_zero import Cut, Partition, base_of, is_zero3, optimizer_of, part_sizes, zero3, zero12
from ckpt.convert.stored import load_stored
from ckpt.convert.torch_names import Stored
from ckpt.errors import MalformedData, UnsupportedFeature
from ckpt.layout.box import Box
from ckpt.layout.spec import BUFFER, ITEMSIZE, MASTER, PARAM
from ckpt.runtime.staging import as_tensor

if TYPE_CHECKING:
    from ckpt.store.base import Store

_SAMPLE = 64
"""Elements of a partition that are compared with the model's."""
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
        return key, optimizer_of(self.model.job.files.read(key), key)

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
        self._check_cast(mp, one, scalars.get("step"))
        for role, value in scalars.items():
            self.add_scalar(one.key, role, value, [members[piece.name] for piece in one.slices])

    def _check_cast(self, mp: int, one: Partition, step: Any) -> None:
        """Compare a few elements of the first parameter with their masters, which DeepSpeed rounds it from.

        Raises:
            MalformedData: they differ, and the optimizer's count of steps is not that of the model's file either. By
                itself each may be as it was saved: weights were edited, or an optimizer was started anew.
        """
        piece = next(iter(one.slices), None)
        held = self.model.modules[mp].get(piece.name) if piece is not None and one.expert is None else None
        if (
            piece is None
            or not isinstance(held, Stored)
            or held.volume < piece.start + piece.numel
            or not held.is_contiguous
        ):
            return
        store, count = self.model.job.files.store, min(piece.numel, _SAMPLE)
        if torch.equal(
            sample(store, one.flat, piece.offset, count).to(getattr(torch, held.dtype)),
            sample(store, held, piece.start, count),
        ):
            return
        key, job = self.model.job.files.model[mp, 0], self.model.job
        taken = job.step - (job.models[mp].get("skipped_steps") or 0)
        number = load_stored(store, step).item() if isinstance(step, Stored) else step
        if number is not None and number != taken:
            raise MalformedData(
                f"{job.files.where}: files of several steps: {key} is of {taken} optimizer steps, {one.key} of "
                f"{number:g}, and {piece.name!r} is not the cast of its master"
            )
        self.model.builder.notes.append(f"{piece.name!r} in {key} is not the cast of its master in {one.key}")

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
