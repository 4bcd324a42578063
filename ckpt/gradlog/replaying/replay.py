"""Repeating logged optimizer steps: the engine's own optimizers, the logged gradients and settings, step by step.

The same kernel on the same state with the same gradient gives the same bits, so a job of the same layout comes back to
exactly where it was. In another layout the gradients are put together from what the ranks had logged; then it depends
on the kernel whether the cut shows in the last bits, and what the log remembers of the values says by how much.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ckpt.engine.shared_ending import resting
from ckpt.errors import ReplayError
from ckpt.format.digest import Running, from_raw
from ckpt.gradlog.record import read_options
from ckpt.gradlog.replaying.deviation import NONE, Deviation, deviation_of
from ckpt.gradlog.replaying.empty import begin_padding
from ckpt.gradlog.replaying.incoming import Incoming, put_loose
from ckpt.gradlog.replaying.mapping import needed_ranks, ranks_with, targets_of
from ckpt.gradlog.replaying.needed import read_heads
from ckpt.gradlog.replaying.opened import Opened, only_call
from ckpt.gradlog.replaying.reading import RankReader, read_rank_head, run_of
from ckpt.gradlog.share import held_runs, layout_digest
from ckpt.gradlog.supported import kernel_of
from ckpt.gradlog.writing.log import software
from ckpt.gradlog.writing.watch import state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ckpt.engine.base import LiveShard, Stepped
    from ckpt.gradlog.copies.near import Near
    from ckpt.gradlog.record import Options, Record
    from ckpt.gradlog.replaying.incoming import Arrived
    from ckpt.store.base import Store

_KERNEL_CHOICES = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that say how a step is computed: those of the machine at hand stay."""


@dataclass(slots=True)
class Outcome:
    """What replaying a log did on this rank.

    ``exact``: is what the optimizers step, bit for bit, what the log says that this rank had? None: another layout, so
    the log does not say. ``deviation``: from the values that the log remembers and this rank holds.
    """

    steps: int = 0
    skipped: int = 0
    exact: bool | None = None
    deviation: Deviation = NONE
    bytes_read: int = 0
    bytes_from_memory: int = 0
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
        near: records that need not be read from the store.

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
        near: Near | None = None,
    ) -> None:
        self.store, self.number, self.rank, self._near = store, number, rank, near
        self._stepped, self._loose = stepped, loose
        self._own, self._run = rank % log_world, run_of(store, number)
        own = read_rank_head(store, number, self._own, self._run)
        self._same = log_world == world and [layout_digest(one) for one in stepped] == [
            entry.layout for entry in own.entries
        ]
        self._heads, self._logged = read_heads(store, number, own, log_world, stepped, same=self._same)
        self._optimizers = list(dict.fromkeys(one.optimizer for one in stepped))
        self._shown = list(dict.fromkeys(one.shown for one in stepped))
        needed = needed_ranks(stepped, self._heads)
        if not needed and stepped:  # nothing but shards without elements: were they stepped?
            needed = {self._own} if self._same else ranks_with(stepped, self._heads) or {self._own}
        self._needed = sorted(needed)
        # Of copies that differ (statistics of a BatchNorm) each rank of the same job gets its own, others the first.
        self._order = [rank, *range(log_world)] if log_world == world else [*range(log_world)]
        beside = (self._own, self._order[0]) if loose else (self._own,)
        self._extra = [r for r in dict.fromkeys(beside) if r not in needed]
        self._groups = self._match_groups()
        self.notes = self._kernel_notes()
        self._strict = strict and not self.notes  # the same code has to come to the same bits

    @property
    def ranks(self) -> list[int]:
        """Ranks of the log whose records this rank reads."""
        return [*self._needed, *self._extra]

    def check_stepped(self, held: Collection[str]) -> None:
        """Check that whatever was stepped in the log, and is held here, is stepped here too.

        Args:
            held: FQNs of parameters of this rank that are frozen, or of which nobody knows whether they are.

        Raises:
            ReplayError: some of it is frozen now, or in no optimizer; it would stay as it was in the checkpoint.
        """
        left = sorted((self._logged & set(held)) - {fqn for one in self._stepped for fqn in one.members})
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
        readers = {r: RankReader(self.store, self.number, r, first, self._near, self._run) for r in self.ranks}
        targets = targets_of(self._stepped, self._heads)
        incoming = Incoming(self.number, self._heads, targets, self._loose, self._own, self._order, same=self._same)
        opened: dict[int, Opened] = {}
        begin_padding(self._stepped)
        for step in range(first, last + 1):
            opened = {r: reader.open(step, Opened) for r, reader in readers.items()}
            self._step(step, opened, incoming, outcome)
            self._compare(step, opened[self._own].record, outcome)
            beat()
        outcome.bytes_read = sum(reader.bytes_read for reader in readers.values())
        outcome.bytes_from_memory = sum(reader.bytes_from_memory for reader in readers.values())
        if opened:
            self._set_options({self._own: opened[self._own].record.options})
            self._judge(last, opened, outcome)
        return outcome

    # -- one step ---------------------------------------------------------------------------------------------------

    def _step(self, step: int, opened: Mapping[int, Opened], incoming: Incoming, outcome: Outcome) -> None:
        calls = {r: only_call(opened[r]) for r in self._needed}
        taken = {call is not None for call in calls.values()}
        if len(taken) > 1:
            raise ReplayError(f"log {self.number}, step {step}: some ranks have taken the step and some skipped it")
        arrived = incoming.read(step, opened)
        outcome.steps += 1
        if taken == {True}:
            self._set_options({r: call.options for r, call in calls.items() if call is not None})
            self._call(step, arrived)
        else:
            outcome.skipped += 1
        for shard, said, data in arrived.loose:
            put_loose(shard, said, data)
        outcome.kinds.update(arrived.kinds)

    def _call(self, step: int, arrived: Arrived) -> None:
        before = [one.key.grad for one in self._stepped]
        groups = [(opt, opt.param_groups, [g["params"] for g in opt.param_groups]) for opt in self._optimizers]
        try:
            for one in self._stepped:
                one.key.grad = None
            for target in arrived.filled:
                target.stepped.key.grad = target.grad
            for optimizer in self._optimizers:
                keys: list[list[torch.Tensor]] = [[] for _ in optimizer.param_groups]
                for one in self._stepped:
                    if one.optimizer is optimizer and one.key.grad is not None:
                        keys[one.group].append(one.key)
                if any(keys):
                    for group, own in zip(optimizer.param_groups, keys, strict=True):
                        group["params"] = own
                    self._repeat(step, optimizer)
        finally:
            for optimizer, shown, params in groups:
                optimizer.param_groups = shown
                for group, own in zip(shown, params, strict=True):
                    group["params"] = own
            for one, grad in zip(self._stepped, before, strict=True):
                one.key.grad = grad

    def _repeat(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        try:
            with resting():
                optimizer.step()
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            why = str(error)
            if isinstance(error, KeyError):  # the words of such an error are the key alone
                why = f"its state has no {error}; was an option that needs it (amsgrad, …) switched on?"
            raise ReplayError(f"log {self.number}, step {step}: {type(optimizer).__name__} fails: {why}") from error

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

    def _set_options(self, said: Mapping[int, Sequence[Options]]) -> None:
        """Give the groups the hyperparameters that they had, as ranks say it."""
        where = f"log {self.number}"
        table = {(r, one.optimizer, one.group): one for r, options in said.items() for one in options}
        for (optimizer, group), (r, o, g) in self._groups.items():
            found = table.get((r, o, g)) or next((v for k, v in table.items() if k[1:] == (o, g)), None)
            if found is not None:
                for one in {id(o): o for o in (self._optimizers[optimizer], self._shown[optimizer])}.values():
                    update_group(one.param_groups[group], read_options(found, where))

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

    # -- is it what it was? ------------------------------------------------------------------------------------------

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
                f"optimizers step, or their state, that the log does not explain, or steps of the job were compiled "
                f"(torch.compile), which rounds otherwise. step={step - 1} is as far as it explains everything; "
                f"strict=False goes on with what comes out"
            )

    def _judge(self, last: int, opened: Mapping[int, Opened], outcome: Outcome) -> None:
        if outcome.exact:
            return
        said = [(self._heads[r], one.record) for r, one in opened.items() if r in self._heads]
        outcome.deviation = found = deviation_of(self._stepped, said)
        if outcome.exact is False:
            outcome.notes.append(
                f"step {last} was repeated with a deviation: what the optimizers step is not bit for bit what it was "
                f"({found.differ} of {found.compared} values that the log remembers differ, by at most "
                f"{found.largest:.3g} of the value)"
            )


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
