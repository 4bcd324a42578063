"""Chunks from a store into live tensors, and live tensors as the memory that bytes are read into."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from ckpt.errors import PlanError
from ckpt.plan.load_plan import is_count
from ckpt.runtime.reading import read_unit, verify_unit
from ckpt.runtime.staging import as_tensor, copy_into

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from ckpt.plan.load_plan import ChunkRead
    from ckpt.plan.read_plan import Places, Unit
    from ckpt.runtime.pieces import Piece
    from ckpt.store.base import Store


class Chunks:
    """What one rank does with the chunks that it reads or receives (a :class:`~ckpt.runtime.cargo.Cargo`).

    Args:
        store: used by several threads at once.
        places: of the checkpoint.
        reads: what this rank needs.
        targets: its pieces, which the reads' uses number.
    """

    def __init__(self, store: Store, places: Places, reads: Iterable[ChunkRead], targets: Sequence[Piece]) -> None:
        self.store, self.places, self.targets = store, places.order, targets
        self.wanted: dict[int, list[ChunkRead]] = {}
        self._twice: set[int] = set()
        for read in reads:
            if read.entry.nbytes:
                self.wanted.setdefault(places.number(read.entry), []).append(read)
            if read.turn != 1:
                self._twice.update(use.target for use in read.uses)

    def read(self, unit: Unit, into: memoryview) -> None:
        """Fill ``into`` from the store, decoded and verified. Errors as of :func:`~ckpt.runtime.reading.read_unit`."""
        read_unit(self.store, self.places, unit, into)

    def check(self, unit: Unit, data: memoryview) -> None:
        """Verify what came from another rank. Raises :class:`DigestMismatch`."""
        verify_unit(self.places, unit, data)

    def live(self, unit: Unit) -> memoryview | None:
        """Return the live memory that the bytes of a unit fill from end to end, if there is such."""
        begin = end = 0
        for number, at in unit.items:
            tensor = self._only_target(number)
            if tensor is None or (end and not tensor.data_ptr() == begin + at == end):
                return None
            begin = begin or tensor.data_ptr()
            end = begin + at + self.places[number].entry.nbytes
        if end - begin != unit.nbytes:
            return None
        return memoryview((ctypes.c_ubyte * unit.nbytes).from_address(begin)).cast("B")

    def _only_target(self, number: int) -> torch.Tensor | None:
        """Return the live memory of a chunk that goes whole, unchanged and once to one contiguous place on the CPU."""
        reads = self.wanted.get(number, [])
        if len(reads) != 1 or len(reads[0].uses) != 1:
            return None
        read, use = reads[0], reads[0].uses[0]
        target = self.targets[use.target]
        # What another chunk is laid over must be placed in turn.
        if use.target in self._twice or use.box != read.entry.box or target.tensor.device.type != "cpu":
            return None
        tensor = target.tensor[use.box.relative_to(target.box)]
        same = str(tensor.dtype) == f"torch.{read.spec.dtype}"
        return tensor if same and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj() else None

    def put(self, unit: Unit, data: memoryview) -> None:
        """Copy the verified bytes of a unit into the live tensors that want them.

        Raises:
            PlanError: a number (0-d) that the target's dtype cannot hold exactly.
        """
        for number, at in unit.items:
            for read in self.wanted.get(number, ()):
                chunk = as_tensor(data[at : at + read.entry.nbytes], read.spec.dtype, read.entry.sizes)
                for use in read.uses:
                    target = self.targets[use.target]
                    source = chunk[use.box.relative_to(read.entry.box)]
                    if source.dtype != target.tensor.dtype and is_count(read.spec, target.spec):
                        source = _exact(source, target)
                    copy_into(target.tensor[use.box.relative_to(target.box)], source)


def _exact(number: torch.Tensor, target: Piece) -> torch.Tensor:
    converted = number.to(target.tensor.dtype)
    if converted.item() != number.item():
        raise PlanError(f"{target.spec}: the stored value {number.item()} is not exact in this dtype")
    return converted
