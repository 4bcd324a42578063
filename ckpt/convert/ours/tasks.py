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
WIDE = 128
"""The same where a pack takes no memory while it is written, and ranks own so little of each tensor that many bands
would read the same chunks of the source.
"""
REACH = 16 << 20
"""Bytes of one tensor that the ranks of a wide band should own together: the chunks at its ends, which its neighbours
read too, are few of those then.
"""
PACK_BYTES = 16 << 20
"""Bytes of a pack of a wide band, as far as :data:`BAND_BYTES` allows: smaller ones are too many files."""


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
    plan: SavePlan,
    stored: Callable[[Chunk], bool],
    *,
    ranks: int = RANKS,
    wide: int = 0,
    band_bytes: int = BAND_BYTES,
) -> list[Task]:
    """Cut what the ranks own into tasks.

    Args:
        plan: of the target job.
        stored: may the source have bytes of its own for this chunk of a derived parameter?
        ranks: of one band at most.
        wide: of one band at most if ranks own little of each tensor; not used if it is less than ``ranks``.
        band_bytes: of one band at most, unless there would be more than :data:`BANDS`; less if all is little.
    """
    sizes = [chunk.nbytes for chunk in plan.chunks]
    casts: dict[int, list[Cast]] = {}
    for i, master in plan.proofs.items():
        chunk = plan.chunks[i]
        one = Cast(plan.spec_ids[chunk.spec], chunk.box.offsets, chunk.box.sizes, stored(chunk))
        casts.setdefault(master, []).append(one)
    numbers = [i for i in range(len(sizes)) if i not in plan.proofs]
    total = sum(sizes[i] for i in numbers)
    width = max(ranks, min(wide, plan.world, _width([sizes[i] for i in numbers])))
    most = max(min(band_bytes, max(LEAST_BAND_BYTES, -(-total // SHARE))), -(-total // BANDS))
    if width > ranks:
        most = max(most, min(band_bytes, width * PACK_BYTES))
    owned: dict[int, list[int]] = {}
    for i in numbers:
        owned.setdefault(plan.owners[i] // width, []).append(i)
    tasks = []
    for group in sorted(owned):
        ordered = sorted(_order(plan, i) for i in owned.pop(group))
        bands = _bands(ordered, sizes, most, plan.owners if width > ranks else None)
        tasks += [_task(plan, band, n, sizes, casts) for n, band in enumerate(bands)]
    return tasks


_Order = tuple[int, int, int, tuple[int, ...], int]


def _width(sizes: Sequence[int]) -> int:
    """Return how many neighbouring ranks own :data:`REACH` of a tensor together, by the chunk that a byte is in."""
    typical = sum(n * n for n in sizes) // max(1, sum(sizes))
    return -(-REACH // max(1, typical))


def _order(plan: SavePlan, i: int) -> _Order:
    """Return the place of a chunk: falling item size, as packs have it; what one rank alone reads before the rest. Its
    number comes last, and the one of its tensor in the middle.
    """
    chunk = plan.chunks[i]
    return -chunk.spec.itemsize, len(chunk.ranks), plan.spec_ids[chunk.spec], chunk.box.offsets, i


def _bands(
    ordered: Sequence[_Order], sizes: Sequence[int], most: int, owners: Sequence[int] | None
) -> Iterator[list[_Order]]:
    """Yield bands of at most so many bytes, and chunks: as a pack may have, of each owner if ``owners`` says whose they
    are, else together.
    """
    band: list[_Order] = []
    counts: dict[int, int] = {}
    filled = 0
    for one in ordered:
        nbytes, owner = sizes[one[-1]], owners[one[-1]] if owners is not None else 0
        if band and (filled + nbytes > most or counts.get(owner, 0) >= MAX_CHUNKS // 2):
            yield band
            band, counts, filled = [], {}, 0
        band.append(one)
        counts[owner] = counts.get(owner, 0) + 1
        filled += nbytes
    if band:
        yield band


def _task(
    plan: SavePlan, band: Sequence[_Order], number: int, sizes: Sequence[int], casts: dict[int, list[Cast]]
) -> Task:
    ranks = sorted({plan.owners[i] for *_, i in band})
    pack_of = {rank: pack for pack, rank in enumerate(ranks)}
    contents = [
        Content(pack_of[plan.owners[i]], spec, offsets, plan.chunks[i].box.sizes, tuple(casts.get(i, ())))
        for _, _, spec, offsets, i in band
    ]
    packs = tuple(Pack(rank, number) for rank in ranks)
    return Task(sum(sizes[i] for *_, i in band), packs, tuple(contents))
