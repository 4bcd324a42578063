"""Chunks from a store into live tensors, and live tensors as the memory that bytes are read into."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from ckpt.errors import PlanError
from ckpt.plan.load_plan import is_count
from ckpt.runtime.reading import read_unit, verify_unit
from ckpt.runtime.staging import copy_into, tensor_over

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckpt.layout.box import Box
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
        """Return the live memory that the bytes of a unit fill from end to end, if there is such on the CPU."""
        begin, _ = self._filled(unit, "cpu")
        return memoryview((ctypes.c_ubyte * unit.nbytes).from_address(begin)).cast("B") if begin else None

    def live_on(self, unit: Unit, device: torch.device) -> torch.Tensor | None:
        """Return the same as bytes (1-D ``uint8``) on ``device``, if it is one piece of one allocation."""
        begin, tensors = self._filled(unit, str(device))
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        if not begin or len(storages) != 1:
            return None
        [(base, storage)] = storages.items()
        raw = torch.empty(0, dtype=torch.uint8, device=device)
        raw.set_(storage, begin - base, (unit.nbytes,), (1,))
        return raw

    def _filled(self, unit: Unit, device: str) -> tuple[int, list[torch.Tensor]]:
        """Return the address of what the bytes of a unit fill from end to end, and its tensors; 0 if it is no piece."""
        begin = end = 0
        tensors: list[torch.Tensor] = []
        for number, at in unit.items:
            tensor = self._only_target(number, device)
            if tensor is None or (end and not tensor.data_ptr() == begin + at == end):
                return 0, []
            begin = begin or tensor.data_ptr()
            end = begin + at + self.places[number].entry.nbytes
            tensors.append(tensor)
        return (begin, tensors) if end - begin == unit.nbytes else (0, [])

    def _only_target(self, number: int, device: str) -> torch.Tensor | None:
        """Return the live memory of a chunk that goes whole, unchanged and once to one contiguous place on a device."""
        reads = self.wanted.get(number, [])
        if len(reads) != 1 or len(reads[0].uses) != 1:
            return None
        read, use = reads[0], reads[0].uses[0]
        target = self.targets[use.target]
        # What another chunk is laid over must be placed in turn.
        if use.target in self._twice or use.box != read.entry.box or str(target.tensor.device) != device:
            return None
        tensor = target.tensor[use.box.relative_to(target.box)]
        same = str(tensor.dtype) == f"torch.{read.spec.dtype}"
        return tensor if same and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj() else None

    def put(self, unit: Unit, data: memoryview) -> None:
        """Copy the verified bytes of a unit into the live tensors that want them. Errors as of :meth:`place`.

        The memory is free again at the return, wherever the tensors are: a copy from ordinary host memory to a device
        is over when the call is.
        """
        self.place(unit, torch.frombuffer(data, dtype=torch.uint8))

    def place(self, unit: Unit, raw: torch.Tensor) -> None:
        """Copy the bytes of a unit (1-D ``uint8``, on any device) into the live tensors that want them.

        Raises:
            PlanError: a number (0-d) that the target's dtype cannot hold exactly.
        """
        for number, at in unit.items:
            for read in self.wanted.get(number, ()):
                chunk = tensor_over(raw[at : at + read.entry.nbytes], read.spec.dtype, read.entry.sizes)
                for use in read.uses:
                    target = self.targets[use.target]
                    source = chunk[use.box.relative_to(read.entry.box)]
                    if source.dtype != target.tensor.dtype and is_count(read.spec, target.spec):
                        source = _exact(source, target)
                    self.copy(target, use.box, source)

    def copy(self, target: Piece, box: Box, source: torch.Tensor) -> None:
        """Copy what a chunk has of elements ``box`` into a target; who wants to know of each copy overrides it."""
        copy_into(target.tensor[box.relative_to(target.box)], source)


def _exact(number: torch.Tensor, target: Piece) -> torch.Tensor:
    converted = number.to(target.tensor.dtype)
    if converted.item() != number.item():
        raise PlanError(f"{target.spec}: the stored value {number.item()} is not exact in this dtype")
    return converted
