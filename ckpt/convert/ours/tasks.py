"""What a conversion into our own format has to do, cut into tasks that any worker can do by itself. Pure.

A task is a *band*: of a few neighbouring target ranks, what they own of a stretch of tensors, a pack for each of them.
So what these ranks need of one chunk of the source is read once for all of them, however source and target are cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ckpt.format.pack import MAX_CHUNKS
from ckpt.layout.box import Box
from ckpt.layout.spec import Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckpt.layout.spec import TensorSpec
    from ckpt.plan.local_plan import Chunk
    from ckpt.plan.save_plan import SavePlan

BAND_BYTES = 1 << 30
"""Bytes of a band at most: an interrupted run loses no more than one for each worker."""
LEAST_BAND_BYTES, SHARE = 64 << 20, 32
"""A smaller checkpoint is cut into so many bands, each of so many bytes at least: several workers need several tasks
each. How many workers there are must not matter, for the next run may go on with another number.
"""
BANDS = 256
"""Bands of a group of ranks at most; a larger checkpoint has larger ones, so that its packs are not too many."""
RANKS = 8
"""Ranks of a band at most: as many packs are being written at once."""


class Cast(msgspec.Struct, array_like=True, frozen=True):
    """A parameter (number ``spec``) in a box of a master's chunk, whose cast it should be. ``stored``: has the source
    bytes of its own for it, which may be others?
    """

    spec: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stored: bool

    @property
    def box(self) -> Box:
        """Which elements."""
        return Box(self.offsets, self.sizes)


class Content(msgspec.Struct, array_like=True, frozen=True):
    """A chunk that goes into pack number ``pack`` of the task, and the parameters that follow from it."""

    pack: int
    spec: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    casts: tuple[Cast, ...] = ()

    @property
    def box(self) -> Box:
        """Which elements."""
        return Box(self.offsets, self.sizes)


class Pack(msgspec.Struct, array_like=True, frozen=True):
    """Pack number ``number`` of a target rank."""

    rank: int
    number: int

    @property
    def key(self) -> str:
        """Key of the pack below the attempt."""
        return f"packs/rank{self.rank:05d}-{self.number:03d}.safetensors"

    @property
    def journal(self) -> str:
        """Key of its journal: an index part of just this pack, which says that it is whole."""
        return f"index/pack-{self.rank:05d}-{self.number:03d}.json.zst"


class Task(msgspec.Struct, array_like=True, frozen=True):
    """``nbytes``: of the chunks, if every cast is what it should be. ``contents``: in the order of writing."""

    nbytes: int
    packs: tuple[Pack, ...]
    contents: tuple[Content, ...]

    def wanted(self) -> list[tuple[int, Content | Cast]]:
        """Return what is asked of the source, with its pack: chunks, each followed by the casts to be compared."""
        found: list[tuple[int, Content | Cast]] = []
        for one in self.contents:
            found.append((one.pack, one))
            found += [(one.pack, cast) for cast in one.casts if cast.stored]
        return found

    def shards(self, specs: Sequence[TensorSpec]) -> list[Shard]:
        """Return the same as boxes of tensors; ``specs``: those of the target, by number."""
        return [Shard(specs[one.spec], one.box) for _, one in self.wanted()]

    def only(self, packs: Sequence[int]) -> Task:
        """Return the task with these of its packs, by number, and no others."""
        number = {old: new for new, old in enumerate(packs)}
        contents = [msgspec.structs.replace(one, pack=number[one.pack]) for one in self.contents if one.pack in number]
        return Task(self.nbytes, tuple(self.packs[n] for n in packs), tuple(contents))


def tasks_of(
    plan: SavePlan, stored: Callable[[Chunk], bool], *, ranks: int = RANKS, band_bytes: int = BAND_BYTES
) -> list[Task]:
    """Cut what the ranks own into tasks.

    Args:
        plan: of the target job.
        stored: may the source have bytes of its own for this chunk of a derived parameter?
        ranks: of one band at most.
        band_bytes: of one band at most, unless there would be more than :data:`BANDS`; less if all is little.
    """
    casts: dict[int, list[Cast]] = {}
    for i, master in plan.proofs.items():
        chunk = plan.chunks[i]
        one = Cast(plan.spec_ids[chunk.spec], chunk.box.offsets, chunk.box.sizes, stored(chunk))
        casts.setdefault(master, []).append(one)
    owned: dict[int, list[int]] = {}
    for i, owner in enumerate(plan.owners):
        if i not in plan.proofs:
            owned.setdefault(owner // ranks, []).append(i)
    total = sum(plan.chunks[i].nbytes for numbers in owned.values() for i in numbers)
    most = max(min(band_bytes, max(LEAST_BAND_BYTES, -(-total // SHARE))), -(-total // BANDS))
    tasks = []
    for group in sorted(owned):
        numbers = sorted(owned[group], key=lambda i: _order(plan, i))
        bands = _bands(plan, numbers, most)
        tasks += [_task(plan, band, n, casts) for n, band in enumerate(bands)]
    return tasks


def _order(plan: SavePlan, i: int) -> tuple[int, int, int, tuple[int, ...], int]:
    """Return the place of a chunk: falling item size, as packs have it; what one rank alone reads before the rest."""
    chunk = plan.chunks[i]
    return -chunk.spec.itemsize, len(chunk.ranks), plan.spec_ids[chunk.spec], chunk.box.offsets, i


def _bands(plan: SavePlan, numbers: Sequence[int], most: int) -> Iterator[list[int]]:
    band: list[int] = []
    filled = 0
    for i in numbers:
        if band and (filled + plan.chunks[i].nbytes > most or len(band) >= MAX_CHUNKS // 2):
            yield band
            band, filled = [], 0
        band.append(i)
        filled += plan.chunks[i].nbytes
    if band:
        yield band


def _task(plan: SavePlan, band: Sequence[int], number: int, casts: dict[int, list[Cast]]) -> Task:
    ranks = sorted({plan.owners[i] for i in band})
    contents = []
    for i in band:
        chunk = plan.chunks[i]
        pack = ranks.index(plan.owners[i])
        spec = plan.spec_ids[chunk.spec]
        contents.append(Content(pack, spec, chunk.box.offsets, chunk.box.sizes, tuple(casts.get(i, ()))))
    packs = tuple(Pack(rank, number) for rank in ranks)
    return Task(sum(plan.chunks[i].nbytes for i in band), packs, tuple(contents))
