"""One bundle: its state out of the base, step by step through the logs, into a pack of the new base."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from ckpt.compact.cuts import Bundle, Run, Slice, runs_of
from ckpt.compact.feeding import Feed, Logged, own_feed
from ckpt.compact.kernels import Kernel
from ckpt.compact.objects import tensors_in_groups
from ckpt.compact.records import records_of
from ckpt.compact.source import is_scalar
from ckpt.engine.base import dtype_name, torch_dtype
from ckpt.errors import ReplayError
from ckpt.gradlog.record import Entry, read_options
from ckpt.gradlog.replaying.opened import only_call
from ckpt.layout.box import Box
from ckpt.layout.spec import Shard
from ckpt.plan.local_plan import CHUNK_BYTES
from ckpt.runtime.staging import as_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckpt.compact.records import OpenRecord
    from ckpt.compact.source import Source
    from ckpt.convert.assemble import Assembler
    from ckpt.gradlog.record import Call
    from ckpt.gradlog.replaying.recover import Stretch
    from ckpt.layout.spec import TensorSpec


class Judged(msgspec.Struct, array_like=True):
    """Stepped values beside those that the log remembers. ``compared``: how many; ``off``: how many are not the same
    bits; ``worst``: the largest difference, by the size of the value; ``first``: the first step with one (-1: none).
    """

    compared: int = 0
    off: int = 0
    worst: float = 0.0
    first: int = -1

    def add(self, step: int, now: float, value: float) -> None:
        """Compare one value."""
        self.compared += 1
        if now == value or (math.isnan(now) and math.isnan(value)):
            return
        self.off += 1
        worst = abs(now - value) / max(abs(value), 1e-30)
        self.worst = max(self.worst, worst if math.isfinite(worst) else math.inf)
        self.first = step if self.first < 0 else min(self.first, step)

    def join(self, other: Judged) -> None:
        """Take in what was compared elsewhere."""
        self.compared += other.compared
        self.off += other.off
        self.worst = max(self.worst, other.worst)
        if other.first >= 0:
            self.first = other.first if self.first < 0 else min(self.first, other.first)


@dataclass(slots=True)
class Stepped:
    """A slice in memory. ``state``: as its optimizer keeps it; empty before its first step. ``steps``: how many it has
    taken here. ``begin``: where its entry begins among all that the rank has logged. ``tensors``: names of its
    hyperparameters that are tensors. ``single``: the parameter has no dimensions, which torch computes by other code.
    """

    slice: Slice
    entry: Entry
    runs: list[Run]
    key: torch.Tensor
    begin: int
    kernel: Kernel
    tensors: list[str]
    single: bool
    state: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    grad: torch.Tensor | None = None

    def param(self) -> torch.Tensor:
        """Return what the optimizer steps, with its gradient."""
        param = self.key.view(()) if self.single else self.key
        param.grad = None if self.grad is None else self.grad.view(param.shape)
        return param


class Stepper:
    """Steps bundles, one after the other.

    Args:
        source: what is compacted.
        assembler: of the base.
        beat: called after each step with the bytes that were read.
    """

    def __init__(self, source: Source, assembler: Assembler, beat: Callable[[int], None]) -> None:
        self.source, self._assembler, self._beat = source, assembler, beat
        self._kernels: dict[str, Kernel] = {}
        self._logged: dict[int, Logged | None] = {}

    def run(self, bundle: Bundle) -> tuple[list[Stepped], Judged]:
        """Step a bundle through all logs.

        Raises:
            ReplayError, IntegrityError, FormatError: a log does not hold what it should, or does not fit the base.
            StoreError: the store does not answer.
        """
        held = [self._begin(one) for one in bundle.slices]
        self._read_state(held)
        judged = Judged()
        for stretch in self.source.stretches:
            with torch.no_grad():
                self._replay(stretch, held, judged)
        return held, judged

    # -- the state to begin with --------------------------------------------------------------------------------------

    def _begin(self, one: Slice) -> Stepped:
        entry = self.source.last[one.rank].entries[one.entry]
        most = max(1, CHUNK_BYTES // 4)
        begin = sum(e.numel for e in self.source.last[one.rank].entries[: one.entry])
        key = torch.zeros(one.size, dtype=torch_dtype(entry.dtype))
        tensors = tensors_in_groups(self.source, one.rank, entry)
        runs = list(runs_of(entry, one, most))
        single = one.size == 1 and all(run.shape == () for run in runs)
        return Stepped(one, entry, runs, key, begin, self._kernel(one.rank, entry), tensors, single)

    def _read_state(self, held: Sequence[Stepped]) -> None:
        wants: list[tuple[Shard, torch.Tensor, int]] = []
        singles: list[tuple[Stepped, TensorSpec, torch.Tensor]] = []
        for one in held:
            scalars: dict[str, TensorSpec] = {}
            for run in one.runs:
                key = self.source.key_spec(run.fqn)
                wants.append((Shard(key, run.box), one.key, run.at))
                for role, spec in self.source.state_specs(run.fqn).items():
                    if one.single or is_scalar(spec, key):
                        scalars.setdefault(role, spec)
                    elif spec.shape == key.shape:
                        if role not in one.state:
                            one.state[role] = torch.zeros(one.slice.size, dtype=torch_dtype(spec.dtype))
                        wants.append((Shard(spec, run.box), one.state[role], run.at))
                    else:
                        raise ReplayError(
                            f"{spec} of a parameter of shape {list(key.shape)} cannot be stepped in slices"
                        )
            for spec in scalars.values():
                value = torch.zeros(1, dtype=torch_dtype(spec.dtype))
                singles.append((one, spec, value))
                wants.append((Shard(spec, Box((), ())), value, 0))
        self._read(wants)
        for one, spec, value in singles:
            count = one.kernel.of_deepspeed and is_scalar(spec, self.source.key_spec(spec.fqn))
            one.state[spec.role] = value.item() if count else value[0].clone()

    def _read(self, wants: Sequence[tuple[Shard, torch.Tensor, int]]) -> None:
        done = [0] * len(wants)
        for piece in self._assembler.pieces(shard for shard, _, _ in wants):
            shard, tensor, at = wants[piece.number]
            count = piece.box.volume
            start = at + done[piece.number]
            tensor[start : start + count].copy_(as_tensor(piece.data, shard.spec.dtype, (count,)))
            done[piece.number] += count

    # -- one log ------------------------------------------------------------------------------------------------------

    def _kernel(self, rank: int, entry: Entry) -> Kernel:
        said = self.source.last[rank].kernels[entry.optimizer]
        name = repr(sorted((str(k), repr(v)) for k, v in said.items()))
        if name not in self._kernels:
            self._kernels[name] = Kernel(said)
        return self._kernels[name]

    def _feed(self, stretch: Stretch, one: Stepped) -> Feed:
        heads, last = self.source.heads[stretch.number], self.source.last
        if stretch.number not in self._logged:
            same = [[e.parts for e in head.entries] for head in heads] == [
                [e.parts for e in head.entries] for head in last
            ]
            self._logged[stretch.number] = None if same else Logged(stretch.number, heads)
        logged = self._logged[stretch.number]
        return own_feed(one.slice, one.runs) if logged is None else logged.feed(one.runs)

    def _replay(self, stretch: Stretch, held: Sequence[Stepped], judged: Judged) -> None:
        feeds = [self._feed(stretch, one) for one in held]
        own = self._logged[stretch.number] is None
        ranks = sorted(set().union(*(feed.ranks for feed in feeds)))
        heads = self.source.heads[stretch.number]
        readers = [records_of(self.source.store, stretch.number, r, stretch.first, stretch.last) for r in ranks]
        fresh = stretch is self.source.stretches[0]
        for records in zip(*readers, strict=True):
            read = {rank: (one, only_call(one)) for rank, one in zip(ranks, records, strict=True)}
            taken = {call is not None for _, call in read.values()}
            if len(taken) > 1:
                raise ReplayError(f"{records[0].where}: some ranks have taken the step and some skipped it")
            if taken == {True}:
                calls = {rank: (one, call) for rank, (one, call) in read.items() if call is not None}
                self._step(held, feeds, heads, calls, fresh=fresh)
                fresh = False
            for at, value in records[0].record.samples if own else ():
                place = element_of(held, at)
                if place is not None:
                    judged.add(records[0].record.step, float(place[0].key[place[1]]), value)
            self._beat(0)

    def _step(
        self,
        held: Sequence[Stepped],
        feeds: Sequence[Feed],
        heads: Sequence[Any],
        read: Mapping[int, tuple[OpenRecord, Call]],
        *,
        fresh: bool,
    ) -> None:
        groups: dict[int, list[tuple[Stepped, dict[str, Any]]]] = {}
        known: dict[tuple[int, int, int], dict[str, Any]] = {}
        for one, feed in zip(held, feeds, strict=True):
            if one.grad is None:
                one.grad = torch.zeros_like(one.key)
            if feed.fill(one.runs, heads, read, one.grad):
                whose = feed.group(heads)
                if whose not in known:
                    known[whose] = feed.options(heads, read)
                groups.setdefault(id(one.kernel), []).append((one, one.kernel.options(known[whose], one.tensors)))
        where = next(iter(read.values()))[0].where
        for mine in groups.values():
            kernel = mine[0][0].kernel
            apart = kernel.counts and _betas_differ(next(iter(read.values())), mine[0][0].entry.optimizer)
            if fresh or apart:  # of groups with different betas each makes the kernel begin anew in every step
                kernel.wind(mine[0][1], 0 if apart else int(mine[0][0].state.get("step", 0)))
            states = kernel.step([(one.param(), options, one.state) for one, options in mine], where)
            for (one, _), state in zip(mine, states, strict=True):
                one.state = state
                one.steps += 1


def _betas_differ(read: tuple[OpenRecord, Call], optimizer: int) -> bool:
    record, call = read
    options = [read_options(one, record.where) for one in call.options if one.optimizer == optimizer]
    return len({str(one.get("betas")) for one in options}) > 1


def element_of(held: Sequence[Stepped], at: int) -> tuple[Stepped, int] | None:
    """Return where in which slice an element is, by its position among all that the rank has logged."""
    for one in held:
        inside = at - one.begin
        if one.slice.first <= inside < one.slice.stop:
            for run in one.runs:
                if run.logged <= inside < run.logged + run.box.volume:
                    return one, run.at + inside - run.logged
    return None


def state_of(one: Stepped) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return what the optimizer keeps of a slice: what lies like it, and 0-d tensors of single values.

    Raises:
        ReplayError: something is neither.
    """
    like: dict[str, torch.Tensor] = {}
    scalars: dict[str, torch.Tensor] = {}
    kinds = {bool: torch.bool, int: torch.int64, float: torch.float64}
    for role, value in one.state.items():
        if value is None:
            continue
        if isinstance(value, torch.Tensor) and value.shape == one.key.shape and not one.single:
            like[role] = value
        elif isinstance(value, torch.Tensor) and value.numel() == 1:
            scalars[role] = value.reshape(())
        elif type(value) in kinds:
            scalars[role] = torch.tensor(value, dtype=kinds[type(value)])
        else:
            kind = dtype_name(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ReplayError(
                f"optimizer state {role!r} of {one.entry.members[0]!r} is a {kind}, expected one value "
                "for each element, or a single one"
            )
    return like, scalars
