"""What one process does of a compaction: bundle after bundle, within its share of the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ckpt.compact.cuts import GRAIN
from ckpt.compact.packs import BundleDone, BundleWriter
from ckpt.compact.source import Source, open_base
from ckpt.compact.stepping import Stepper
from ckpt.convert.assemble import LEAST_MEMORY, Assembler
from ckpt.errors import BudgetTooSmall
from ckpt.gradlog.replaying.recover import Stretch
from ckpt.layout.spec import ITEMSIZE
from ckpt.store.blocks import BLOCK_BYTES, Blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt.compact.cuts import Bundle
    from ckpt.store.base import Store

WRITER = 4 * BLOCK_BYTES
BESIDE = 24
"""Bytes of an element beside tensor and state: its gradient, as it is stored, widened and in place, and what the kernel
makes on its way.
"""
MOMENTS = 8
"""Bytes of an element's state where the base has none yet."""


class Work(msgspec.Struct, kw_only=True):
    """What every process has to know. ``address``: of the repository, never to be shown; ``memory``: bytes of one."""

    address: str
    base: int
    stretches: tuple[Stretch, ...]
    prefix: str
    memory: int
    threads: int
    resume: bool


class Worker:
    """Does bundles.

    Args:
        store: the repository's.
        source: what is compacted.
        prefix: folder of the attempt.
        memory: bytes that it may hold.
        beat: called after each step of a bundle.
    """

    def __init__(self, store: Store, source: Source, prefix: str, memory: int, beat: Callable[[int], None]) -> None:
        self._assembler = Assembler(source.opened, memory=max(LEAST_MEMORY, memory // 4))
        self._stepper = Stepper(source, self._assembler, beat)
        self._writer = BundleWriter(store, prefix, source, Blocks(WRITER))

    def run(self, bundle: Bundle, *, resume: bool) -> BundleDone:
        """Do a bundle, unless an earlier run has.

        Raises:
            CkptError: of log, base or store; what is half written is removed.
        """
        done = self._writer.done_before(bundle) if resume else None
        if done is None:
            held, judged = self._stepper.run(bundle)
            done = self._writer.write(bundle, held, judged)
        return done


def opened(store: Store, work: Work) -> Source:
    """Return what is compacted, as another process opens it."""
    return open_base(store, work.base, work.stretches)


def elements_of(source: Source, memory: int) -> int:
    """Return how many elements a bundle may have in a process that holds ``memory`` bytes.

    Raises:
        BudgetTooSmall: fewer than the kernels take at once.
    """
    widest = 0
    for head in source.last:
        for entry in head.entries:
            for part in entry.parts:
                key = source.key_spec(part.fqn)
                states = [one.itemsize for one in source.state_specs(part.fqn).values() if one.shape == key.shape]
                widest = max(widest, ITEMSIZE[entry.dtype] + (sum(states) or MOMENTS) + BESIDE)
    left = memory - max(LEAST_MEMORY, memory // 4) - WRITER
    found = left // max(widest, 1)
    if found < GRAIN:
        least = LEAST_MEMORY + WRITER + GRAIN * widest
        raise BudgetTooSmall(f"a memory budget of {memory} bytes for each worker, at least {least} are needed")
    return found
