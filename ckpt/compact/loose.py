"""Buffers, and parameters that no optimizer steps: as the ranks logged them last, where they logged them at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.compact.records import records_of
from ckpt.errors import MalformedData
from ckpt.format.digest import digest
from ckpt.format.manifest import Divergence
from ckpt.layout.box import Box
from ckpt.layout.spec import ITEMSIZE, PARAM, TensorSpec
from ckpt.plan.local_plan import CHUNK_BYTES
from ckpt.runtime.staging import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from ckpt.compact.source import Source


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a box to be stored by ``owner``. ``ranks``: those who have it; empty: everybody's."""

    spec: TensorSpec
    box: Box
    data: bytes
    owner: int
    ranks: tuple[int, ...] = ()


_Key = tuple[TensorSpec, Box]


class Loose:
    """The last value of each box on each rank that has logged one; a few megabytes a rank, as logs allow.

    Raises:
        MalformedData: a record says what the base does not hold.
    """

    def __init__(self, source: Source) -> None:
        # Where ranks share out parameters, one steps what the others are sent and see as changed by nobody.
        stepped = {part.fqn for head in source.last for entry in head.entries for part in entry.parts}
        self._found: dict[_Key, dict[int, torch.Tensor]] = {}
        for stretch in source.stretches:
            for rank in range(stretch.world):
                for one in records_of(source.store, stretch.number, rank, stretch.first, stretch.last):
                    for said in one.record.loose:
                        if said.role == PARAM and said.fqn in stepped:
                            continue
                        where = f"{one.where}: {said.fqn!r}"
                        spec = source.catalog.specs.get((said.fqn, said.role))
                        if spec is None or (spec.dtype, spec.shape) != (said.dtype, said.shape):
                            raise MalformedData(f"{where} ({said.role}) {said.dtype}{said.shape}, the base has {spec}")
                        same = len(said.offsets) == len(said.sizes) == len(spec.shape)
                        if not same or min((*said.offsets, *said.sizes, 0)) < 0:
                            raise MalformedData(f"{where}: box {said.offsets}+{said.sizes}")
                        box = Box(said.offsets, said.sizes)
                        if not box.within(spec.shape):
                            raise MalformedData(f"{where}: box {box} of shape {list(spec.shape)}")
                        tensor = one.tensor(said.name, said.dtype, said.sizes)
                        self._found.setdefault((spec, box), {})[rank] = tensor
        self.divergences: list[Divergence] = []

    @property
    def boxes(self) -> list[_Key]:
        """What was logged."""
        return list(self._found)

    def copies(self) -> Iterator[Copy]:
        """Yield what is to be stored, and note in ``divergences`` where ranks differ, as a save does."""
        for (spec, box), of in sorted(self._found.items(), key=lambda one: one[0]):
            for piece in box.cut(max(1, CHUNK_BYTES // ITEMSIZE[spec.dtype])):
                sides: dict[bytes, list[int]] = {}
                for rank, tensor in sorted(of.items()):
                    sides.setdefault(bytes(tensor_bytes(tensor[piece.relative_to(box)])), []).append(rank)
                ordered = sorted(sides.items(), key=lambda one: (-len(one[1]), one[1]))
                kept, ranks = ordered[0]
                yield Copy(spec, piece, kept, ranks[0])
                for data, others in ordered[1:]:
                    yield Copy(spec, piece, data, others[0], tuple(others))
                if len(ordered) > 1:
                    told = {digest(data): tuple(who) for data, who in ordered}
                    self.divergences.append(
                        Divergence(
                            fqn=spec.fqn,
                            role=spec.role,
                            offsets=piece.offsets,
                            sizes=piece.sizes,
                            copies=told,
                            kept=digest(kept),
                        )
                    )
