"""The one way by which a writer gets bytes: any box of any tensor of an opened checkpoint, in bounded memory.

A writer says which boxes it wants, in the order in which it will write them. They are put together window by window:
consecutive wants that fit a part of the budget, filled by the plan and the reader that a load has, while the window
before is digested and written. What a window needs of the source is read once for it, in ranges as long as they lie.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ckpt.convert.options import MEMORY
from ckpt.convert.overflow import LOW, CountingChunks, Overflow
from ckpt.errors import BudgetTooSmall, CkptError, MissingState
from ckpt.layout.box import Box
from ckpt.layout.spec import MASTER, PARAM, Shard, TensorSpec
from ckpt.plan.load_plan import LoadPlan, build_load_plan, is_count
from ckpt.plan.read_plan import SPAN_BYTES, Places, Unit, plan_alone, runs_of_numbers
from ckpt.runtime.reading import GAP_BYTES, check_packs
from ckpt.runtime.sharing import block_bytes, place_in_page
from ckpt.runtime.staging import as_tensor
from ckpt.store.blocks import PAGE, Blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from concurrent.futures import Future

    import numpy.typing as npt

    from ckpt.convert.opened import Opened

    Memory = npt.NDArray[np.uint8]

LEAST_MEMORY = 32 << 20
"""Bytes below which nothing is assembled: chunks of the source are read whole, because only so they can be checked."""
MOST_WINDOW = 64 << 20
"""Bytes of a window at most. Longer ones read no faster, and the processor's cache is far smaller anyway."""
READERS, FAR_READERS = 2, 8
"""Ranges that are read and checked at once: from a disk, and from a store that takes its time to answer."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of ``box`` of want number ``number``, row by row; valid until the next piece is asked for."""

    number: int
    box: Box
    data: memoryview


@dataclass(slots=True)
class _Target:
    """A box of a want with the window's memory that it fills (what :mod:`ckpt.runtime.pieces` calls a piece)."""

    spec: TensorSpec
    box: Box
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Part:
    number: int
    shard: Shard
    start: int

    @property
    def nbytes(self) -> int:
        return self.shard.box.volume * self.shard.spec.itemsize


@dataclass(frozen=True, slots=True)
class _Planned:
    plan: LoadPlan
    places: Places
    units: list[Unit]


class Assembler:
    """Puts boxes of an opened checkpoint together. One for each worker; its pieces are asked for by one thread.

    Args:
        opened: the checkpoint.
        memory: bytes that it may hold at most; what the caller's writers hold is not in it.
        cast: may a parameter or buffer get another floating-point dtype than it has? A parameter may always be the
            rounding of its master: to nearest even, as torch and all engines round.

    Raises:
        BudgetTooSmall: ``memory`` is below :data:`LEAST_MEMORY`.
    """

    def __init__(
        self,
        opened: Opened,
        *,
        memory: int = MEMORY,
        cast: bool = False,
    ) -> None:
        if memory < LEAST_MEMORY:
            raise BudgetTooSmall(f"a memory budget of {memory} bytes for a worker, at least {LEAST_MEMORY} are needed")
        self.opened, self.cast = opened, cast
        self.bytes_read = 0
        """from the source, gaps that were read over included"""
        self.catalog = opened.catalog()
        self.overflow = Overflow(self.catalog)
        self._places: dict[bool, Places] = {}
        self.window = min(MOST_WINDOW, memory // 4) // PAGE * PAGE
        self._span = min(SPAN_BYTES, self.window // 4)
        near = hasattr(opened.store, "root") or memory < FAR_READERS * MOST_WINDOW
        self._readers = READERS if near else FAR_READERS
        self._blocks = Blocks((self._readers + 1) * block_bytes(self._span), block_bytes(self._span))
        self._windows: list[Memory] = []
        self._checked: set[TensorSpec] = set()

    def places(self, *, phased: bool = False) -> Places:
        """Return all places of the source; ``phased``: in the order in which they may be laid over each other.

        That is seldom needed, and reads what lies together in two passes.
        """
        if phased not in self._places:
            self._places[phased] = Places(self.opened.specs, self.opened.parts, phased=phased)
        return self._places[phased]

    @property
    def held(self) -> int:
        """Bytes that it holds at most, chunks of the source that are larger than a range left out."""
        return 2 * self.window + self._blocks.budget

    def check(self, specs: Iterable[TensorSpec]) -> None:
        """See that the source holds these tensors, in this shape, and in a dtype that they can be made from.

        Raises:
            MissingState: it does not hold them, or in a dtype that is only cast when asked for; all of them at once.
            LayoutError: a tensor has another shape; all of them at once.
        """
        new = [spec for spec in dict.fromkeys(specs) if spec not in self._checked]
        nothing = [Shard(spec, Box((0,) * len(spec.shape), (0,) * len(spec.shape))) for spec in new]
        plan = build_load_plan(self.catalog, nothing, (), own_copies_of=None)
        wrong = tuple(
            f"{new[t]}: the checkpoint has {source.dtype} ({source.role})"
            for t, source in plan.sources.items()
            if not self._may_become(source, new[t])
        )
        if plan.difference.missing or wrong:
            raise MissingState(
                f"{self.opened.where} does not hold the state that is wanted of it",
                missing=plan.difference.missing,
                dtypes=wrong,
            )
        self._checked.update(new)

    def _may_become(self, source: TensorSpec, target: TensorSpec) -> bool:
        if source.dtype == target.dtype or is_count(source, target):
            return True
        floats = source.dtype in LOW and target.dtype in LOW
        rounded = (source.role, target.role) == (MASTER, PARAM)
        return floats and (rounded or self.cast)

    def check_packs(self) -> None:
        """Raise :class:`MissingChunk` unless all files of the source are there in the size that its index says."""
        sizes = {pack.key: pack.nbytes for part in self.opened.parts for pack in part.packs}
        check_packs(self.opened.store, self.places().order, sizes)

    def estimate(self, wants: Iterable[Shard]) -> int:
        """Return the bytes that :meth:`pieces` would read; errors as there, of what can be known without reading."""
        return sum(sum(unit.stored for unit in self._plan(window, None).units) for window in self._cut(wants))

    def pieces(self, wants: Iterable[Shard], *, own_copies_of: int | None = None) -> Generator[Piece, None, None]:
        """Yield the bytes of boxes in their order, each in one piece unless it is larger than a window, then by rows.

        Args:
            wants: boxes of tensors, as the target has them.
            own_copies_of: rank whose own copies are wanted where replicas differed; None: everybody's copy.

        Whoever stops before the end closes it, so that nothing is read any more.

        Raises:
            MissingState, LayoutError: as :meth:`check`.
            DigestMismatch, MissingChunk, MalformedData: the source is damaged; names tensor, box and file.
            PlanError: a count that the target's dtype cannot hold exactly.
            StoreError: the source's store failed.
        """
        stop = threading.Event()
        with (
            ThreadPoolExecutor(1, "ckpt-assemble") as filler,
            ThreadPoolExecutor(self._readers, "ckpt-read") as readers,
        ):
            ahead: Future[None] | None = None
            try:
                before: list[_Part] = []
                turn = 0
                for window in self._cut(wants):
                    filling = filler.submit(self._fill, window, own_copies_of, self._memory(turn), readers, stop)
                    if ahead is not None:
                        ahead.result()
                        ahead = filling
                        yield from self._give(before, self._memory(1 - turn))
                    ahead, before, turn = filling, window, 1 - turn
                if ahead is not None:
                    ahead.result()
                    yield from self._give(before, self._memory(1 - turn))
            finally:
                stop.set()
                with suppress(BaseException):  # whoever did not wait for it has an error of its own
                    if ahead is not None:
                        ahead.result()

    def _memory(self, turn: int) -> Memory:
        while len(self._windows) <= turn:
            self._windows.append(np.empty(self.window, np.uint8))
        return self._windows[turn]

    @staticmethod
    def _give(window: Sequence[_Part], memory: Memory) -> Iterator[Piece]:
        whole = memoryview(memory.data)
        for part in window:
            yield Piece(part.number, part.shard.box, whole[part.start : part.start + part.nbytes])

    def _cut(self, wants: Iterable[Shard]) -> Iterator[list[_Part]]:
        """Yield windows: consecutive wants, cut by rows where one alone is larger."""
        window: list[_Part] = []
        filled = 0
        for number, want in enumerate(wants):
            size = want.spec.itemsize
            for box in want.box.cut(max(1, self.window // size)):
                start = filled + -filled % size
                nbytes = box.volume * size
                if window and start + nbytes > self.window:
                    yield window
                    window, start = [], 0
                window.append(_Part(number, Shard(want.spec, box), start))
                filled = start + nbytes
        if window:
            yield window

    def _plan(self, window: Sequence[_Part], own: int | None) -> _Planned:
        shards = [part.shard for part in window]
        self.check(shard.spec for shard in shards)
        plan = build_load_plan(self.catalog, shards, (), own_copies_of=own)
        places = self.places(phased=any(read.turn != 1 for read in plan.first))
        numbers = (places.number(read.entry) for read in plan.first if read.entry.nbytes)
        units = plan_alone(places.order, runs_of_numbers(numbers), 0, gap=GAP_BYTES, span=self._span)
        return _Planned(plan, places, units)

    def _fill(
        self,
        window: Sequence[_Part],
        own: int | None,
        memory: Memory,
        readers: ThreadPoolExecutor,
        stop: threading.Event,
    ) -> None:
        planned = self._plan(window, own)
        whole = memoryview(memory.data)
        targets = [
            _Target(p.shard.spec, p.shard.box, _tensor(whole[p.start : p.start + p.nbytes], p.shard)) for p in window
        ]
        cargo = CountingChunks(self.opened.store, planned.places, planned.plan.first, targets, self.overflow)
        coming: list[tuple[Unit, memoryview, Callable[[], None], Future[None]]] = []
        try:
            for unit in planned.units:
                if len(coming) > self._readers:
                    self._place(cargo, *coming.pop(0))
                if stop.is_set():
                    return
                live = cargo.live(unit)
                data, give_back = (live, _nothing) if live is not None else self._room(unit)
                coming.append((unit, data, give_back, readers.submit(cargo.read, unit, data)))
            while coming:
                self._place(cargo, *coming.pop(0))
            cargo.end()
        finally:
            for _, _, give_back, reading in coming:
                with suppress(BaseException):  # the first error is on its way already
                    reading.result()
                give_back()

    def _place(
        self, cargo: CountingChunks, unit: Unit, data: memoryview, give_back: Callable[[], None], reading: Future[None]
    ) -> None:
        try:
            reading.result()
            self.bytes_read += unit.stored
            if cargo.live(unit) is None:
                cargo.put(unit, data)
        finally:
            give_back()

    def _room(self, unit: Unit) -> tuple[memoryview, Callable[[], None]]:
        """Return memory for a unit, and what to call when it is free again."""
        at = place_in_page(unit)
        if at + unit.nbytes <= self._blocks.size:
            block = self._blocks.take()
            if block is None:
                raise CkptError("a pool of blocks gave none")
            return memoryview(block.data)[at : at + unit.nbytes], lambda: self._blocks.give(block)
        return memoryview(bytearray(unit.nbytes)), _nothing


def _nothing() -> None:
    """Give nothing back."""


def _tensor(data: memoryview, shard: Shard) -> torch.Tensor:
    return as_tensor(data, shard.spec.dtype, shard.box.sizes)
