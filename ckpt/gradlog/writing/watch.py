"""Changes that no logged step explains: a parameter set by hand, weights loaded into the job, another optimizer.

A log of gradients is the truth only as long as nothing but its steps changes what the optimizers step. So what they
step is digested behind each step and looked at again in front of the next one. What no optimizer steps (buffers,
averages of weights) is digested too, and logged whole where it has changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ckpt.format.digest import Running, from_raw, raw_digest
from ckpt.gradlog.record import Loose
from ckpt.gradlog.share import flat_of
from ckpt.runtime.staging import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckpt.engine.base import LiveShard, Stepped
    from ckpt.gradlog.share import Own, Run

MOST_LOOSE = 16 << 20
"""Bytes of tensors that no optimizer steps that a step may have changed; more belong into a checkpoint."""
_ROW = 1 << 20


def state_of(stepped: Stepped, held: Sequence[Run]) -> bytes:
    """Return what tells the content of a stepped tensor from other content; padding does not count."""
    flat = flat_of(stepped.key)
    if len(held) == 1:
        return fingerprint(held[0].of(flat))
    running = Running()
    for run in held:
        running.add(fingerprint(run.of(flat)) if flat.device.type != "cpu" else tensor_bytes(run.of(flat)))
    return running.raw()


def fingerprint(tensor: torch.Tensor) -> bytes:
    """Return what tells this content from other content: a digest on the CPU, two sums of integers on a device.

    On a device nothing leaves it but 16 bytes; each sum is over all elements' bits, the second one weighted by place.
    """
    flat = flat_of(tensor)
    if flat.device.type == "cpu":
        return raw_digest(tensor_bytes(flat))
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for at in range(0, flat.numel(), _ROW):
        bits = flat[at : at + _ROW].view(width).to(torch.int64)
        places = torch.arange(at, at + len(bits), device=flat.device, dtype=torch.int64)
        sums[0] += bits.sum()
        sums[1] += (bits * (2 * places + 1)).sum()
    return sums.cpu().numpy().tobytes()


class Buffers:
    """Which tensors are a job's buffers: a module may put a new one in the place of the old in every forward."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._tables = [child._buffers for module in modules for child in module.modules()]
        self._seen = [dict(table) for table in self._tables]

    def replaced(self) -> bool:
        """Has any been replaced, added or removed since the last call?"""
        changed = False
        for i, (table, seen) in enumerate(zip(self._tables, self._seen, strict=True)):
            if len(table) != len(seen) or any(seen.get(name) is not tensor for name, tensor in table.items()):
                self._seen[i] = dict(table)
                changed = True
        return changed


class Watch:
    """What this rank's optimizers step, and what nobody steps.

    Args:
        own: what is stepped.
        loose: buffers, and parameters that no optimizer steps and that follow from no master.
    """

    def __init__(self, own: Sequence[Own], loose: Sequence[LiveShard]) -> None:
        self._own, self._loose = own, loose
        self._seen: list[bytes] = []
        self._last: dict[object, bytes] = {}
        self.changed: str | None = None
        self.loose()  # first: nothing has changed yet
        self.look()

    def look(self) -> str:
        """Take note of all that is stepped, as it is now. Returns the digest over all of it."""
        self._seen = [state_of(one.stepped, one.held) for one in self._own]
        running = Running()
        for one in self._seen:
            running.add(one)
        return from_raw(running.raw())

    def check(self, entries: Iterable[int]) -> None:
        """Look at some entries again; what has changed since :meth:`look` is told in ``changed``."""
        for entry in entries:
            one = self._own[entry]
            if state_of(one.stepped, one.held) != self._seen[entry]:
                name = one.entry.members[0]
                self.changed = self.changed or f"{name!r} was changed by other means than a step of its optimizer"

    def watch_instead(self, loose: Sequence[LiveShard]) -> None:
        """Look at other tensors from now on: the job has put new ones in the place of the old."""
        self._loose = loose

    def loose(self) -> list[tuple[Loose, torch.Tensor]]:
        """Return copies of the tensors that nobody steps and that have changed since the last call."""
        found = []
        for i, shard in enumerate(self._loose):
            spec, box = shard.spec, shard.box
            now = fingerprint(shard.tensor)
            if now != self._last.get((spec.key, box)):
                self._last[spec.key, box] = now
                said = Loose(
                    name=f"{spec.role}/{i}",
                    fqn=spec.fqn,
                    role=spec.role,
                    dtype=spec.dtype,
                    shape=spec.shape,
                    offsets=box.offsets,
                    sizes=box.sizes,
                )
                found.append((said, shard.tensor.detach().to("cpu", copy=True).contiguous()))
        nbytes = sum(tensor.nbytes for _, tensor in found)
        if nbytes > MOST_LOOSE and self._seen:
            self.changed = self.changed or (
                f"{nbytes} bytes of tensors that no optimizer steps have changed ({found[0][0].fqn!r} first), at most "
                f"{MOST_LOOSE} are logged"
            )
        return found
