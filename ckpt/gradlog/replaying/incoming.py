"""What the records of one step bring to this rank: gradients go where they are wanted, small tensors are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ckpt.errors import MalformedData, ReplayError
from ckpt.gradlog.replaying.empty import Told, empty_that_step
from ckpt.gradlog.replaying.filling import Filling
from ckpt.gradlog.replaying.mapping import by_source
from ckpt.gradlog.replaying.streaming import Keeping, Scratch, read_verified
from ckpt.layout.box import Box
from ckpt.runtime.objects import decode_object
from ckpt.runtime.staging import as_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt.engine.base import LiveShard
    from ckpt.gradlog.record import Call, Loose, RankHead
    from ckpt.gradlog.replaying.mapping import Target
    from ckpt.gradlog.replaying.opened import Opened
    from ckpt.gradlog.replaying.streaming import Taker


class Arrived(NamedTuple):
    """What was read of a step, each record proved. ``filled``: targets that are stepped, with their gradients.
    ``loose``: (shard, what the log has of it, its bytes); ``kinds``: (kind, name) -> tree of the rank's own record.
    """

    filled: list[Target]
    loose: list[tuple[LiveShard, Loose, memoryview]]
    kinds: dict[tuple[str, str], Any]


class Incoming:
    """Reads the records of one step after the other; holds a few MiB, whatever their size.

    Args:
        number: of the log, for messages.
        heads: of the ranks whose gradients are wanted.
        targets: the gradients, and where they come from.
        loose: tensors that no optimizer steps.
        own: the rank of the log whose objects are wanted.
        order: ranks of the log whose loose tensors are wanted, first come first served.
        same: are the targets what ``own`` stepped, in the same order?
    """

    def __init__(
        self,
        number: int,
        heads: Mapping[int, RankHead],
        targets: Sequence[Target],
        loose: Sequence[LiveShard],
        own: int,
        order: Sequence[int],
        *,
        same: bool = False,
    ) -> None:
        self._number, self._heads, self._targets, self._loose = number, heads, targets, loose
        self._own, self._order, self._same = own, order, same
        self._copies = by_source(targets)
        self._scratch = Scratch()

    def read(self, step: int, opened: Mapping[int, Opened]) -> Arrived:
        """Read all of the records of a step, which this rank needs; the gradients of ``filled`` are complete then.

        Raises:
            ReplayError: there is only a part of a gradient.
            DigestMismatch, MalformedData: a record is not what was written.
        """
        calls = {r: one.record.calls[0] for r, one in opened.items() if one.record.calls and r in self._heads}
        loose = self._wanted(opened)
        found = Arrived(self._complete(step, opened, calls), [], {})
        for r, one in opened.items():
            takers: dict[str, Taker] = {}
            kept: dict[str, Keeping] = {}
            if r in calls and r in self._copies:
                for gradient in calls[r].gradients:
                    if any(entry in self._copies[r] for entry in gradient.entries):
                        takers[gradient.name] = Filling(one, self._heads[r], gradient, self._copies[r])
            for name in [said.name for _, said in loose.get(r, [])] + self._object_names(r, one):
                start, stop = one.span(name)
                kept[name] = Keeping(stop - start)
            with torch.no_grad():
                read_verified(one, {**takers, **kept}, self._scratch)
            found.loose.extend((shard, said, kept[said.name].data) for shard, said in loose.get(r, []))
            if r == self._own:
                found.kinds.update(self._objects(one, kept))
        return found

    def _complete(self, step: int, opened: Mapping[int, Opened], calls: Mapping[int, Call]) -> list[Target]:
        logged = {r: self._entries(r, opened[r], call) for r, call in calls.items()}
        found = []
        for target in self._targets:
            there = sum(copy.entry in logged.get(copy.rank, ()) for copy in target.copies)
            if there and there != len(target.copies):
                name = target.stepped.members[0]
                raise ReplayError(f"log {self._number}, step {step}: a part of the gradient of {name!r} was not logged")
            if there:
                found.append(target)
        told = {r: Told(self._heads[r], call, logged[r]) for r, call in calls.items()}
        return found + empty_that_step(self._targets, found, told.get(self._own), told, same=self._same)

    def _entries(self, rank: int, one: Opened, call: Call) -> set[int]:
        there, count = set[int](), len(self._heads[rank].entries)
        for entry in (entry for gradient in call.gradients for entry in gradient.entries):
            if not 0 <= entry < count or entry in there:
                raise MalformedData(f"{one.where}: a gradient of entry {entry}, there are {count}")
            there.add(entry)
        return there

    def _object_names(self, rank: int, one: Opened) -> list[str]:
        return [inner.name for said in one.record.objects for inner in said.tensors] if rank == self._own else []

    def _objects(self, one: Opened, kept: Mapping[str, Keeping]) -> dict[tuple[str, str], Any]:
        found = {}
        for said in one.record.objects:
            inner = [as_tensor(kept[t.name].data, t.dtype, t.shape) for t in said.tensors]
            where = f"{one.where}: object {said.name!r}"
            found[said.kind, said.name] = decode_object(said.document.encode(), inner, where)
        return found

    def _wanted(self, opened: Mapping[int, Opened]) -> dict[int, list[tuple[LiveShard, Loose]]]:
        """Return which loose tensors of whose record go where."""
        found: dict[int, list[tuple[LiveShard, Loose]]] = {}
        for shard in self._loose:
            left = shard.box.volume
            for r in self._order:
                for said in opened[r].record.loose if r in opened and left > 0 else ():
                    common = _common(shard, said)
                    if common is not None:
                        found.setdefault(r, []).append((shard, said))
                        left -= common.volume
        return found


def put_loose(shard: LiveShard, said: Loose, data: memoryview) -> None:
    """Put what a record has of a tensor into it."""
    common = _common(shard, said)
    if common is not None:
        stored = as_tensor(data, said.dtype, said.sizes)
        with torch.no_grad():
            shard.tensor[common.relative_to(shard.box)].copy_(stored[common.relative_to(Box(said.offsets, said.sizes))])


def _common(shard: LiveShard, said: Loose) -> Box | None:
    if (said.fqn, said.role) != shard.spec.key:
        return None
    if said.shape != shard.spec.shape:
        raise ReplayError(f"{shard.spec}: the log has shape {list(said.shape)}")
    return Box(said.offsets, said.sizes).intersect(shard.box)
