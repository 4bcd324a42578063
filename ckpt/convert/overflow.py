"""Finite numbers that become infinite since the dtype that they are cast to is too narrow for them: counted, and told.

A conversion casts in one place, where chunks of the source are placed in what is put together. There it is known what
an element was before, which nobody can tell from the target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ckpt.engine.base import torch_dtype
from ckpt.layout.spec import MASTER, PARAM
from ckpt.runtime.placing import Chunks
from ckpt.words import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpt.layout.box import Box
    from ckpt.layout.spec import TensorSpec
    from ckpt.plan.load_plan import Catalog, ChunkRead
    from ckpt.plan.read_plan import Places
    from ckpt.runtime.pieces import Piece
    from ckpt.store.base import Store

LOW = ("float64", "float32", "float16", "bfloat16")
"""dtypes between which a cast loses precision and nothing else."""
LARGEST = {name: torch.finfo(getattr(torch, name)).max for name in LOW}
"""The largest finite number of each of them."""
WIDER = 2.0
"""How much larger it must be for a cast to lose numbers: bfloat16 ends less than a rounding before float32."""
SHOWN = 8
"""Tensors of which each has a line of its own."""

Row = tuple[str, str, int]
"""Name, role, and number of elements."""


def narrowed(own: Catalog, spec: TensorSpec) -> TensorSpec | None:
    """Return what the source has of a tensor of the target, if some of its numbers may be too large there."""
    if spec.dtype not in LOW:
        return None
    roles = (spec.role, MASTER) if spec.role == PARAM else (spec.role,)
    held = [one for role in roles if (one := own.find(spec.fqn, role)) is not None]
    if not held or any(one.dtype == spec.dtype for one in held) or held[0].dtype not in LOW:
        return None
    return held[0] if LARGEST[held[0].dtype] / WIDER > LARGEST[spec.dtype] else None


def overflowed(source: torch.Tensor, cast: torch.Tensor) -> torch.Tensor | None:
    """Return which elements are finite in ``source`` and not in ``cast``; None if none is."""
    if not source.numel():
        return None
    limit = torch.finfo(cast.dtype).max
    low, high = source.aminmax()  # many times faster than to look at each; false where there is a NaN
    if bool(low >= -limit) and bool(high <= limit):
        return None
    return torch.isfinite(source).logical_and_(~torch.isfinite(cast))


class Overflow:
    """How many elements of each tensor were too large, by the boxes that were put together: replicas of a tensor are
    put together anew for each file that has one, and count once.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._narrow: dict[TensorSpec, bool] = {}
        self.rounded: dict[str, TensorSpec] = {}
        """by name: parameters that stand nowhere in the target, since its engine rounds them from their masters"""
        self.found: dict[tuple[str, str], dict[Box, int]] = {}

    def may(self, spec: TensorSpec) -> bool:
        """May elements of the source be too large for this tensor of the target?"""
        if spec not in self._narrow:
            self._narrow[spec] = narrowed(self._catalog, spec) is not None
        return self._narrow[spec]

    def cast_of(self, spec: TensorSpec) -> TensorSpec | None:
        """Return the tensor of which elements may be too large when this one is put together: itself, or the parameter
        that will be made of this master.
        """
        made = self.rounded.get(spec.fqn, spec) if spec.role == MASTER else spec
        return made if self.may(made) else None

    def add(self, spec: TensorSpec, box: Box, number: int) -> None:
        """Note that of a box so many elements were too large."""
        if number:
            self.found.setdefault(spec.key, {})[box] = number

    def take(self) -> list[Row]:
        """Return what was found, and forget it."""
        rows = rows_of([self.found])
        self.found = {}
        return rows


def rows_of(found: Iterable[Mapping[tuple[str, str], Mapping[Box, int]]]) -> list[Row]:
    """Return the sums of what several have found, each box once."""
    boxes: dict[tuple[str, str], dict[Box, int]] = {}
    for one in found:
        for key, counts in one.items():
            boxes.setdefault(key, {}).update(counts)
    return [(*key, sum(counts.values())) for key, counts in sorted(boxes.items())]


def summed(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return one row for each tensor and role."""
    total: dict[tuple[str, str], int] = {}
    for fqn, role, number in rows:
        total[fqn, role] = total.get((fqn, role), 0) + number
    return tuple((*key, number) for key, number in sorted(total.items()))


def lines(rows: Sequence[Row], dtypes: Mapping[tuple[str, str], str]) -> list[str]:
    """Return what there is to tell; ``dtypes``: of the target's tensors."""
    told = [
        f"{fqn} ({role}): {count(number, 'finite element')} of SRC too large for "
        f"{dtypes.get((fqn, role), 'its dtype')}, infinite in DST"
        for fqn, role, number in rows[:SHOWN]
    ]
    if len(rows) > SHOWN:
        rest = sum(number for _, _, number in rows[SHOWN:])
        more = count(len(rows) - SHOWN, "more tensor")
        told.append(f"{more}: {count(rest, 'finite element')} of SRC too large, infinite in DST")
    return told


class CountingChunks(Chunks):
    """Chunks of which it is noted what becomes infinite as they are placed. Args: as of ``Chunks``, and where to."""

    def __init__(
        self, store: Store, places: Places, reads: Iterable[ChunkRead], targets: Sequence[Piece], overflow: Overflow
    ) -> None:
        super().__init__(store, places, reads, targets)
        self._overflow = overflow
        self._numbers = {id(target): n for n, target in enumerate(targets)}
        self._counts: dict[int, int] = {}
        self._laid_over: dict[int, torch.Tensor] = {}

    def copy(self, target: Piece, box: Box, source: torch.Tensor) -> None:
        """See :class:`~ckpt.runtime.placing.Chunks`."""
        super().copy(target, box, source)
        spec = self._overflow.cast_of(target.spec)
        if spec is None or (spec is target.spec and source.dtype == target.tensor.dtype):
            return
        where = box.relative_to(target.box)
        cast = target.tensor[where] if spec is target.spec else source.to(torch_dtype(spec.dtype))
        odd = overflowed(source, cast)
        number = self._numbers[id(target)]
        if number in self._twice:  # what another chunk is laid over later does not count
            if number not in self._laid_over:
                self._laid_over[number] = torch.zeros(target.box.sizes, dtype=torch.bool)
            self._laid_over[number][where] = False if odd is None else odd
        elif odd is not None:
            self._counts[number] = self._counts.get(number, 0) + int(odd.sum())

    def end(self) -> None:
        """Note what was found, when all chunks are placed."""
        self._counts.update({number: int(odd.sum()) for number, odd in self._laid_over.items()})
        for number, found in self._counts.items():
            target = self.targets[number]
            self._overflow.add(self._overflow.cast_of(target.spec) or target.spec, target.box, found)
