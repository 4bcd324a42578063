"""Where the gradients of a bundle come from in one log: its own ranks' records, or, of another layout, several."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from ckpt.compact.cuts import strides_of
from ckpt.errors import ReplayError
from ckpt.gradlog.record import read_options
from ckpt.layout.box import Box, Overlaps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from ckpt.compact.cuts import Run, Slice
    from ckpt.compact.records import OpenRecord
    from ckpt.gradlog.record import Call, Part, RankHead

PIECE = 1 << 20
"""Elements of a piece of a box that is cut out of another one."""


@dataclass(slots=True)
class _Piece:
    """Elements ``[first, stop)`` of what ``rank`` has logged of ``entry``: of them, with ``strides``, a box of
    ``sizes`` that goes to ``box`` (relative to a run of a slice).
    """

    rank: int
    entry: int
    first: int
    stop: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    run: int
    box: tuple[slice, ...]


@dataclass(slots=True)
class Feed:
    """What fills the gradient of one slice. ``rank``, ``entry``: whose options it is stepped with. ``plain``: (place
    among the logged elements, place in the slice's tensor, elements), if it is that entry's own; else ``pieces``.
    """

    rank: int
    entry: int
    plain: list[tuple[int, int, int]] = field(default_factory=list)
    pieces: list[_Piece] = field(default_factory=list)

    @property
    def ranks(self) -> set[int]:
        """Whose records are read."""
        return {self.rank, *(one.rank for one in self.pieces)}

    def fill(
        self,
        runs: Sequence[Run],
        heads: Sequence[RankHead],
        read: Mapping[int, tuple[OpenRecord, Call]],
        grad: torch.Tensor,
    ) -> bool:
        """Put a step's gradient into ``grad``, a slice's tensor; False: there is none in this step.

        Raises:
            ReplayError: there is only a part of it.
        """
        if self.plain:
            record, call = read[self.rank]
            for logged, at, count in self.plain:
                found = record.gradient(call, heads[self.rank], self.entry, logged, logged + count)
                if found is None:
                    return False
                grad[at : at + count].copy_(found)
            return True
        done = 0
        for one in self.pieces:
            record, call = read[one.rank]
            found = record.gradient(call, heads[one.rank], one.entry, one.first, one.stop)
            if found is not None:
                run = runs[one.run]
                target = grad[run.at : run.at + run.box.volume].view(run.box.sizes)[one.box]
                target.copy_(found.as_strided(one.sizes, one.strides))
                done += 1
        if done not in (0, len(self.pieces)):
            record, _ = read[self.rank]
            raise ReplayError(f"{record.where}: a part of the gradient of {runs[0].fqn!r} was not logged")
        return done > 0

    def group(self, heads: Sequence[RankHead]) -> tuple[int, int, int]:
        """Return rank, optimizer and group whose hyperparameters it is stepped with."""
        entry = heads[self.rank].entries[self.entry]
        return self.rank, entry.optimizer, entry.group

    def options(self, heads: Sequence[RankHead], read: Mapping[int, tuple[OpenRecord, Call]]) -> dict[str, Any]:
        """Return the hyperparameters of this step.

        Raises:
            ReplayError: the record does not say them.
        """
        record, call = read[self.rank]
        entry = heads[self.rank].entries[self.entry]
        for one in call.options:
            if (one.optimizer, one.group) == (entry.optimizer, entry.group):
                return read_options(one, record.where)
        raise ReplayError(f"{record.where}: no options of optimizer {entry.optimizer}, group {entry.group}")


def own_feed(one: Slice, runs: Sequence[Run]) -> Feed:
    """Return what fills a slice from its own entry."""
    found = Feed(one.rank, one.entry)
    for run in runs:
        last = found.plain[-1] if found.plain else None
        if last is not None and (last[0] + last[2], last[1] + last[2]) == (run.logged, run.at):
            found.plain[-1] = (last[0], last[1], last[2] + run.box.volume)
        else:
            found.plain.append((run.logged, run.at, run.box.volume))
    return found


class Logged:
    """Who has logged which boxes in one log, to be looked up by name and box."""

    def __init__(self, number: int, heads: Sequence[RankHead]) -> None:
        self.number = number
        self._of: dict[str, list[tuple[int, int, int, Part]]] = {}
        self._overlaps: dict[str, Overlaps] = {}
        for rank, head in enumerate(heads):
            for n, entry in enumerate(head.entries):
                start = 0
                for part in entry.parts:
                    self._of.setdefault(part.fqn, []).append((rank, n, start, part))
                    start += part.box.volume

    def feed(self, runs: Sequence[Run]) -> Feed:
        """Return what fills a slice.

        Raises:
            ReplayError: nobody has logged some of it.
        """
        pieces: list[_Piece] = []
        for r, run in enumerate(runs):
            covered = 0
            for source, common in self._sources(run):
                rank, entry, start, part = source
                covered += common.volume
                pieces += [_piece(rank, entry, start, part, r, run, box) for box in common.cut(PIECE)]
            if covered != run.box.volume:
                raise ReplayError(
                    f"{run.fqn!r} box {run.box}: log {self.number} has the gradient of {covered} of "
                    f"{run.box.volume} elements"
                )
        return Feed(pieces[0].rank, pieces[0].entry, pieces=pieces)

    def _sources(self, run: Run) -> list[tuple[tuple[int, int, int, Part], Box]]:
        parts = self._of.get(run.fqn, [])
        if any(part.shape != run.shape for _, _, _, part in parts):
            raise ReplayError(
                f"{run.fqn!r}: log {self.number} has shape {list(parts[0][3].shape)}, expected {list(run.shape)}"
            )
        if run.fqn not in self._overlaps:
            self._overlaps[run.fqn] = Overlaps([part.box for _, _, _, part in parts])
        return [(parts[s], common) for s, _, common in self._overlaps[run.fqn].of([run.box])]


def _piece(rank: int, entry: int, start: int, part: Part, number: int, run: Run, box: Box) -> _Piece:
    strides = strides_of(part.sizes)
    inside = [a - b for a, b in zip(box.offsets, part.offsets, strict=True)]
    first = sum(a * s for a, s in zip(inside, strides, strict=True))
    last = first + sum((n - 1) * s for n, s in zip(box.sizes, strides, strict=True))
    if not prod(box.sizes):
        raise ReplayError(f"{run.fqn!r}: an empty box of a gradient")
    return _Piece(rank, entry, start + first, start + last + 1, box.sizes, strides, number, box.relative_to(run.box))
