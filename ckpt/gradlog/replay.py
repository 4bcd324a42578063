"""Repeating logged optimizer steps: the engine's own optimizers, the logged gradients and settings, step by step.

The same kernel on the same state with the same gradient gives the same bits, so a job of the same layout comes back to
exactly where it was. In another layout the gradients are put together from what the ranks had logged; then it depends
on the kernel whether the cut shows in the last bits, and what the log remembers of the values says by how much.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ckpt.errors import MalformedData, ReplayError
from ckpt.format.digest import Running, from_raw
from ckpt.gradlog.log import software
from ckpt.gradlog.mapping import CallGradients, check_logged, needed_ranks, targets_of
from ckpt.gradlog.reading import RankReader, read_rank_head
from ckpt.gradlog.record import RankHead, read_options
from ckpt.gradlog.share import held_runs, layout_digest, local_of
from ckpt.gradlog.supported import kernel_of
from ckpt.gradlog.watch import state_of
from ckpt.layout.box import Box
from ckpt.runtime.objects import decode_object

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ckpt.engine.base import LiveShard, Stepped
    from ckpt.gradlog.mapping import Target
    from ckpt.gradlog.record import Call, Options, Record, Tensors
    from ckpt.store.base import Store

_KERNEL_CHOICES = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that say how a step is computed: those of the machine at hand stay."""


@dataclass(slots=True)
class Outcome:
    """What replaying a log did on this rank.

    ``exact``: is what the optimizers step, bit for bit, what the log says that this rank had? None: another layout, so
    the log does not say. ``deviation``: the largest difference to the values that the log remembers, by the size of
    the value; None if this rank has none of them.
    """

    steps: int = 0
    skipped: int = 0
    exact: bool | None = None
    deviation: float | None = None
    bytes_read: int = 0
    objects: list[dict[str, Any]] = field(default_factory=list)
    kinds: dict[tuple[str, str], Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Replay:
    """Repeats the steps of one log on this rank. Nothing here is collective.

    Args:
        store: the repository's.
        number: of the log.
        rank: of this process.
        world: number of processes.
        stepped: what the engine's optimizers step here.
        loose: buffers, and parameters that no optimizer steps.

    Raises:
        ReplayError: the log does not have what is stepped here.
    """

    def __init__(
        self,
        store: Store,
        number: int,
        rank: int,
        world: int,
        stepped: Sequence[Stepped],
        loose: Sequence[LiveShard],
        log_world: int,
        *,
        strict: bool = True,
    ) -> None:
        self.store, self.number, self.rank = store, number, rank
        self._stepped, self._loose = stepped, loose
        self._heads = {r: read_rank_head(store, number, r) for r in range(log_world)}
        if {head.world for head in self._heads.values()} != {log_world}:
            raise MalformedData(f"log {number}: its ranks speak of different numbers of ranks")
        self._optimizers = list(dict.fromkeys(one.optimizer for one in stepped))
        self._shown = list(dict.fromkeys(one.shown for one in stepped))
        self._targets: list[Target] = []
        check_logged(stepped, self._heads)
        self._own = rank % log_world
        needed = needed_ranks(stepped, self._heads)
        self._needed = sorted(needed)
        # Of copies that differ (statistics of a BatchNorm) each rank of the same job gets its own, others the first.
        self._order = [rank, *range(log_world)] if log_world == world else [*range(log_world)]
        self._extra = [r for r in dict.fromkeys((self._own, self._order[0])) if r not in needed]
        self._same = log_world == world and [layout_digest(one) for one in stepped] == [
            entry.layout for entry in self._heads[rank].entries
        ]
        self._groups = self._match_groups()
        self.notes = self._kernel_notes()
        self._strict = strict and not self.notes  # the same code has to come to the same bits

    def check_stepped(self, held: Collection[str]) -> None:
        """Check that whatever was stepped in the log, and is held here, is stepped here too.

        Args:
            held: FQNs of parameters of this rank that are frozen, or of which nobody knows whether they are.

        Raises:
            ReplayError: some of it is frozen now, or in no optimizer; it would stay as it was in the checkpoint.
        """
        logged = {part.fqn for head in self._heads.values() for entry in head.entries for part in entry.parts}
        left = sorted((logged & set(held)) - {fqn for one in self._stepped for fqn in one.members})
        if left:
            shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
            raise ReplayError(
                f"log {self.number} has steps of {shown}, which no optimizer of this engine steps (frozen here?); "
                f"replay=False loads the checkpoint before it"
            )

    def run(self, first: int, last: int, beat: Callable[[], None]) -> Outcome:
        """Repeat steps ``first`` to ``last``.

        Raises:
            ReplayError, IntegrityError, FormatError: the log does not have them, or not as they were written.
        """
        outcome = Outcome(notes=list(self.notes))
        self._targets = targets_of(self._stepped, self._heads)
        readers = {r: RankReader(self.store, self.number, r, first) for r in (*self._needed, *self._extra)}
        record, tensors = None, None
        for step in range(first, last + 1):
            read = {r: reader.read(step) for r, reader in readers.items()}
            record, tensors = read[self._own]
            self._step(step, read, outcome)
            self._put_loose(read)
            self._collect(record, tensors, outcome)
            self._compare(step, record, outcome)
            beat()
        outcome.bytes_read = sum(reader.bytes_read for reader in readers.values())
        if record is not None:
            self._set_options(record.options)
            self._judge(last, record, outcome)
        self._targets = []
        return outcome

    # -- one step ---------------------------------------------------------------------------------------------------

    def _step(self, step: int, read: Mapping[int, tuple[Record, Tensors]], outcome: Outcome) -> None:
        counts = {len(record.calls) for r, (record, _) in read.items() if r in self._needed}
        if len(counts) > 1:
            raise ReplayError(f"log {self.number}, step {step}: some ranks have taken the step and some skipped it")
        outcome.steps += 1
        if counts == {0}:
            outcome.skipped += 1
        for n in range(max(counts, default=0)):
            calls = {r: (record.calls[n], tensors) for r, (record, tensors) in read.items() if r in self._needed}
            self._call(step, calls)

    def _call(self, step: int, calls: Mapping[int, tuple[Call, Tensors]]) -> None:
        gradients = {r: CallGradients(self._heads[r], call, tensors) for r, (call, tensors) in calls.items()}
        self._set_options([one for call, _ in calls.values() for one in call.options], calls)
        before = [one.key.grad for one in self._stepped]
        groups = [(opt, opt.param_groups, [g["params"] for g in opt.param_groups]) for opt in self._optimizers]
        try:
            for target in self._targets:
                target.stepped.key.grad = self._filled(step, target, gradients)
            for number, optimizer in enumerate(self._optimizers):
                keys: list[list[torch.Tensor]] = [[] for _ in optimizer.param_groups]
                for one in self._stepped:
                    if one.optimizer is optimizer and one.key.grad is not None:
                        keys[one.group].append(one.key)
                if any(keys):
                    for group, own in zip(optimizer.param_groups, keys, strict=True):
                        group["params"] = own
                    self._repeat(step, self._optimizers[number])
        finally:
            for optimizer, shown, params in groups:
                optimizer.param_groups = shown
                for group, own in zip(shown, params, strict=True):
                    group["params"] = own
            for one, grad in zip(self._stepped, before, strict=True):
                one.key.grad = grad

    def _repeat(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        try:
            optimizer.step()
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ReplayError(f"log {self.number}, step {step}: {type(optimizer).__name__} fails: {error}") from error

    def _filled(self, step: int, target: Target, gradients: Mapping[int, CallGradients]) -> torch.Tensor | None:
        there = [copy for copy in target.copies if copy.entry in gradients[copy.rank]]
        if not there:
            return None
        if len(there) != len(target.copies):
            name = target.stepped.members[0]
            raise ReplayError(f"log {self.number}, step {step}: a part of the gradient of {name!r} was not logged")
        with torch.no_grad():
            for copy in there:
                count = 1
                for size in copy.sizes:
                    count *= size
                whole = gradients[copy.rank].of(copy.entry)[copy.start : copy.start + count].view(copy.sizes)
                copy.view.copy_(whole[copy.inside])
        return target.grad

    # -- settings -----------------------------------------------------------------------------------------------------

    def _match_groups(self) -> dict[tuple[int, int], tuple[int, int, int]]:
        """Return (optimizer, group) here -> (rank, optimizer, group) in the log, by what they step."""
        home = {
            fqn: (r, entry.optimizer, entry.group)
            for r, head in sorted(self._heads.items(), reverse=True)
            for entry in head.entries
            for fqn in entry.members
        }
        for entry in self._heads[self._own].entries:  # this rank's own first
            home.update(dict.fromkeys(entry.members, (self._own, entry.optimizer, entry.group)))
        found: dict[tuple[int, int], tuple[int, int, int]] = {}
        for one in self._stepped:
            here = (self._optimizers.index(one.optimizer), one.group)
            source = next((home[fqn] for fqn in one.members if fqn in home), None)
            if source is not None:
                found.setdefault(here, source)
        return found

    def _set_options(self, options: Sequence[Options], calls: Mapping[int, tuple[Call, Tensors]] | None = None) -> None:
        """Give the groups the hyperparameters that they had: those of a step, or (without ``calls``) behind it."""
        where = f"log {self.number}"
        if calls is None:
            table = {(self._own, one.optimizer, one.group): one for one in options}
        else:
            table = {(r, one.optimizer, one.group): one for r, (call, _) in calls.items() for one in call.options}
        for (optimizer, group), (r, o, g) in self._groups.items():
            said = table.get((r, o, g)) or next((v for k, v in table.items() if k[1:] == (o, g)), None)
            if said is not None:
                for one in {id(o): o for o in (self._optimizers[optimizer], self._shown[optimizer])}.values():
                    update_group(one.param_groups[group], read_options(said, where))

    def _kernel_notes(self) -> list[str]:
        saved = self._heads[self._own]
        here = [kernel_of(one) for one in self._optimizers]
        notes = []
        for mine, theirs in zip(here, saved.kernels, strict=False):
            if mine["class"] != theirs.get("class"):
                raise ReplayError(
                    f"log {self.number} was made by {theirs.get('class')}, the engine's optimizer is {mine['class']}; "
                    f"replay=False loads the checkpoint before it"
                )
            if mine != theirs:
                notes.append(f"the log's steps were made with {theirs.get('options')}, here with {mine['options']}")
        here_are, of_deepspeed = software(), any("deepspeed" in one["class"] for one in here)
        for name in ("torch", "device", *(["deepspeed"] if of_deepspeed else [])):
            was, now = saved.software.get(name), here_are.get(name)
            if now != was:
                notes.append(f"the log's steps were made with {name} {was}, here it is {now}: the last bits may differ")
        return notes

    # -- beside the optimizers ----------------------------------------------------------------------------------------

    def _put_loose(self, read: Mapping[int, tuple[Record, Tensors]]) -> None:
        for shard in self._loose:
            left = shard.box.volume
            for r in self._order:
                if r in read and left:
                    left -= _put(shard, *read[r])

    def _collect(self, record: Record, tensors: Tensors, outcome: Outcome) -> None:
        for one in record.objects:
            inner = [tensors.tensor(t.name, t.dtype, t.shape).clone() for t in one.tensors]
            where = f"{tensors.where}: object {one.name!r}"
            outcome.kinds[one.kind, one.name] = decode_object(one.document.encode(), inner, where)

    def _compare(self, step: int, record: Record, outcome: Outcome) -> None:
        """See whether a step came out as it was, bit for bit, where the log can say it."""
        if not self._same:
            return
        running = Running()
        for one in self._stepped:
            running.add(state_of(one, held_runs(one)))
        outcome.exact = from_raw(running.raw()) == record.digest
        if not outcome.exact and self._strict:
            raise ReplayError(
                f"log {self.number}: step {step}, repeated, is not what it was: something has changed what the "
                f"optimizers step, or their state, that the log does not explain. step={step - 1} is as far as it "
                f"explains everything; strict=False goes on with what comes out"
            )

    def _judge(self, last: int, record: Record, outcome: Outcome) -> None:
        outcome.deviation = self._deviation(record)
        if outcome.exact is False:
            outcome.notes.append(
                f"step {last} was repeated with a deviation: what the optimizers step is not bit for bit what it was "
                f"(at most {outcome.deviation or 0:.3g} of the values that the log remembers)"
            )

    def _deviation(self, record: Record) -> float | None:
        """Return the largest relative difference to the values that this rank's record remembers, where held here."""
        head = self._heads[self._own]
        held = {(fqn, box): view for one in self._stepped for fqn, _, box, view in one.places(local_of(one.key))}
        worst = None
        for at, value in record.samples:
            where = _element(head, at)
            if where is None:
                continue
            fqn, place = where
            for (name, box), view in held.items():
                inside = name == fqn and all(
                    o <= p < o + n for p, o, n in zip(place, box.offsets, box.sizes, strict=True)
                )
                if inside:
                    now = float(view[tuple(p - o for p, o in zip(place, box.offsets, strict=True))])
                    off = abs(now - value) / max(abs(value), 1e-30)
                    worst = off if worst is None else max(worst, off)
        return worst


def _put(shard: LiveShard, record: Record, tensors: Tensors) -> int:
    """Put what a record has of a tensor into it; return how many elements that were."""
    count = 0
    for one in record.loose:
        if (one.fqn, one.role) != shard.spec.key:
            continue
        if one.shape != shard.spec.shape:
            raise ReplayError(f"{shard.spec}: the log has shape {list(one.shape)}")
        box = Box(one.offsets, one.sizes)
        common = box.intersect(shard.box)
        if common is not None:
            stored = tensors.tensor(one.name, one.dtype, one.sizes)
            with torch.no_grad():
                shard.tensor[common.relative_to(shard.box)].copy_(stored[common.relative_to(box)])
            count += common.volume
    return count


def _element(head: RankHead, at: int) -> tuple[str, tuple[int, ...]] | None:
    """Return (fqn, index in the global tensor) of an element by its position in the order of what a rank logs."""
    for entry in head.entries:
        for part in entry.parts:
            volume = part.box.volume
            if at < volume:
                place = []
                for size in reversed(part.sizes):
                    place.append(at % size)
                    at //= size
                return part.fqn, tuple(o + p for o, p in zip(part.offsets, reversed(place), strict=True))
            at -= volume
    return None


def update_group(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Give a group of an optimizer its hyperparameters; which kernel it uses stays as it is here."""
    for name, value in options.items():
        if name in _KERNEL_CHOICES or name == "params":
            continue
        present = group.get(name)
        if isinstance(present, torch.Tensor):
            with torch.no_grad():
                present.copy_(torch.as_tensor(value))
        else:
            group[name] = value
