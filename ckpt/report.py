"""What a save and a load tell about themselves."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt.words import count, size

if TYPE_CHECKING:
    from collections.abc import Iterator


class Stopwatch:
    """Seconds since it was made, and of named phases."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.phases: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        """Seconds since the watch was made."""
        return time.perf_counter() - self._started

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block that ends without an error."""
        start = time.perf_counter()
        yield
        self.phases[name] = time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class SaveReport:
    """One save, the same on every rank except ``seconds`` and ``phases``. All sizes are bytes over all ranks."""

    step: int
    root: str
    attempt: str
    world: int
    bytes_held: int
    """tensor bytes in the memory of all ranks together"""
    bytes_unique: int
    """tensor bytes of one copy of everything that cannot be derived"""
    bytes_written: int
    """tensor bytes that this save wrote"""
    bytes_reused: int
    """tensor bytes referenced from an earlier step because they are unchanged"""
    bytes_derived: int
    """bytes of parameters not written because this save proved them equal to cast(master)"""
    bytes_stored: int
    """bytes of all files that this save made: packs with headers and objects, index, commit"""
    written_by_rank: tuple[int, ...]
    """tensor bytes that each rank wrote"""
    divergences: tuple[str, ...]
    """declared replicas whose bytes differed, in words"""
    seconds: float
    bytes_underived: int = 0
    """bytes of parameters written because they are not cast(master), which stochastic rounding does by right"""
    underived: tuple[str, ...] = ()
    """a few of them, in words"""
    phases: dict[str, float] = field(default_factory=dict)
    """seconds of this rank by phase: describe, plan, stage (of which: digest), settle, write, commit"""

    def __str__(self) -> str:
        more = f", {size(self.bytes_reused)} unchanged" if self.bytes_reused else ""
        more += f", {count(len(self.divergences), 'diverging replica')}" if self.divergences else ""
        return (
            f"step {self.step}: {size(self.bytes_written)} written of {size(self.bytes_held)} held "
            f"({self.share_redundant:.0%} redundant{more}) in {self.seconds:.2f} s"
        )

    @property
    def largest_writer(self) -> int:
        """Tensor bytes of the rank that wrote most."""
        return max(self.written_by_rank)

    @property
    def share_redundant(self) -> float:
        """Share of the held bytes that need not be stored (0 to 1)."""
        return 1 - self.bytes_unique / self.bytes_held if self.bytes_held else 0.0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One load, as this rank saw it."""

    step: int
    root: str
    saved_world: int
    bytes_read: int
    """bytes that this rank read from packs"""
    seconds: float
    missing: tuple[str, ...] = ()
    """wanted by the engine, absent from the checkpoint (only with ``strict=False``)"""
    unexpected: tuple[str, ...] = ()
    """in the checkpoint, not wanted by the engine (only with ``strict=False``)"""
    casts: tuple[str, ...] = ()
    """tensors whose dtype was converted (only with ``cast=True``; exact conversions of counters are notes)"""
    notes: tuple[str, ...] = ()
    """whatever could not be carried over as it was, in plain words: on this rank, and what other ranks' engines note"""
    skipped: tuple[str, ...] = ()
    """newer steps that were damaged, and how (only with ``fallback=True``)"""
    extra: dict[str, Any] = field(default_factory=dict)
    """the ``extra`` of the save: plain values, and the state of objects that were not passed to load"""
    phases: dict[str, float] = field(default_factory=dict)
    """seconds of this rank by phase: plan, read, finish"""
    read: str = "each"
    """``each``: every rank read what it needed; ``once``: each chunk was read by one rank and handed on;
    ``once per host``: the same, on every host"""
    read_by_rank: tuple[int, ...] = ()
    """bytes that each rank got from the store: chunks, objects and index"""
    bytes_received: int = 0
    """bytes of chunks that this rank got from other ranks"""
    base: int | None = None
    """the checkpoint that was read; None: it is that of ``step``, and no step was replayed"""
    exact: bool | None = None
    """is what the optimizers of all ranks step, behind the last step that was replayed, bit for bit what it was? None:
    nothing was replayed, or in another layout, where the log does not say"""
    deviation: float | None = None
    """if it is not known to be exact: the largest difference of replayed values to those that the log remembers, by the
    size of the value, over all ranks; None: there are none of them"""
    compared: int = 0
    """values, over all ranks, that ``deviation`` is of"""
    differing: int = 0
    """those of them that are not the same number"""
    log_bytes: int = 0
    """bytes of the gradient log's records that this rank read from the store"""
    log_bytes_from_memory: int = 0
    """bytes of records that it took from copies in its host's memory (``Checkpointer(peers=1)``)"""

    @property
    def replayed(self) -> int:
        """Optimizer steps that were repeated from the gradient log."""
        return 0 if self.base is None else self.step - self.base

    @property
    def bytes_from_store(self) -> int:
        """Bytes that all ranks together got from the store."""
        return sum(self.read_by_rank)

    @property
    def replay(self) -> str:
        """What was replayed, and how exact it is, in a line; empty if nothing was."""
        if self.base is None:
            return ""
        way = {True: "bit for bit", False: "with a deviation", None: "in another layout"}[self.exact]
        off = "" if self.exact or not self.replayed else f": {self._off()}"
        return f"step {self.base} and {count(self.replayed, 'step')} replayed from the log, {way}{off}"

    def _off(self) -> str:
        if self.deviation is None:
            return "the log remembers no value to compare"
        differ = f"{self.differing:,} differ, by at most {self.deviation:.2g} of the value"
        said = differ if self.differing else "none differs"
        return f"of {count(self.compared, 'value')} that the log remembers, {said}"

    def __str__(self) -> str:
        by = f"saved by {count(self.saved_world, 'rank')}, {size(self.bytes_read)} read by this one"
        lines = [f"step {self.step}: {by} in {self.seconds:.2f} s"]
        lines += [self.replay] if self.replay else []
        for title in ("missing", "unexpected", "casts", "notes", "skipped"):
            lines += [f"{title}: {line}" for line in getattr(self, title)]
        return "\n  ".join(lines)
