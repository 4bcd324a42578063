"""The first half of a save on one rank: every chunk it holds is digested, and what it owns is on its way to the store.

A chunk that this rank owns goes into a pack as soon as it is digested, while it is still in the processor's cache,
though nobody has said yet that its replicas agree: they nearly always do, and where they do not, another copy is stored
afterwards. What can be known at once is not stored: params that are the cast of their master, and bytes that are there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ckpt.format.digest import from_raw, raw_digest
from ckpt.format.pack import PackItem, plan_packs
from ckpt.layout.spec import BUFFER
from ckpt.runtime.digesting import Digests, views
from ckpt.runtime.packing import Output, Packer
from ckpt.runtime.snapshot import changed
from ckpt.runtime.staging import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpt.plan.local_plan import Chunk
    from ckpt.plan.save_plan import SavePlan
    from ckpt.runtime.pieces import PieceTable
    from ckpt.store.base import Buffer


def stage_chunks(
    mine: Digests,
    plan: SavePlan,
    rank: int,
    pieces: PieceTable,
    objects: Sequence[Output],
    packer: Packer,
    beat: Callable[[int], None],
    *,
    behind: bool = False,
) -> None:
    """Fill ``mine``, and hand to ``packer`` what this rank will most likely have to store.

    ``objects``: what it stores of objects. ``beat``: called after every chunk, with the bytes that were looked at.
    ``behind``: training goes on meanwhile, so what is stored is copied before it is digested.
    """
    held = plan.held(rank)
    owned = [i for i in held if plan.owners[i] == rank and not _differs_by_right(plan.chunks[i])]
    items = [chunk_item(plan.chunks[i]) for i in owned] + [one.item for one in objects]
    # Buffers of several ranks come last, when it is known whose copies are kept, into the last pack: under either name.
    late = [plan.chunks[i] for i in held if _differs_by_right(plan.chunks[i])]
    coming = [replace(chunk_item(chunk), name=name) for chunk in late for name in (chunk.name, own_name(chunk, rank))]
    packs = plan_packs(items) or [[]]
    for n, keys in enumerate(packs, 1):
        packer.announce([items[k] for k in keys] + (coming if n == len(packs) else []))
        own = [owned[k] for k in keys if k < len(owned)]
        for i, data, cast in views(plan, own, rank, pieces, behind=behind, keep=True):
            chunk = plan.chunks[i]
            mine.held[i] = value = mine.of(data)
            read = partial(read_again, pieces, chunk, value, behind=behind)
            output = chunk_output(chunk, chunk.name, from_raw(value), read)
            if cast is None:
                packer.add(output, data)
            else:
                mine.casts[i] = mine.of(cast())
                if mine.casts[i] != value:
                    packer.add(output)
            beat(chunk.nbytes)
        for k in keys:
            if k >= len(owned):
                packer.add(objects[k - len(owned)])
    stored = set(owned)
    theirs = [i for i in held if i not in stored]
    for i, data, _ in views(plan, theirs, rank, pieces, behind=behind):
        mine.held[i] = mine.of(data)
        beat(plan.chunks[i].nbytes)


def _differs_by_right(chunk: Chunk) -> bool:
    return chunk.spec.role == BUFFER and len(chunk.ranks) > 1


def own_name(chunk: Chunk, rank: int) -> str:
    """Return the name in a pack of a rank's own copy of a chunk, where another rank was to store it, or has another."""
    return f"{chunk.name}#rank{rank}"


def read_again(pieces: PieceTable, chunk: Chunk, value: bytes, *, behind: bool) -> Buffer:
    """Return the bytes of a chunk that was digested before; ``value``: its digest.

    Raises:
        IntegrityError: with ``behind``, that they are not the same any more.
    """
    data = tensor_bytes(pieces.view(chunk.spec, chunk.box))
    if behind:
        data = memoryview(bytes(data))
        if raw_digest(data) != value:
            raise changed(f"{chunk.spec} chunk {chunk.box}")
    return data


def chunk_output(chunk: Chunk, name: str, digest: str, read: Callable[[], Buffer]) -> Output:
    """Return a chunk as a thing to be stored under ``name``."""
    return Output(name, chunk.spec.dtype, chunk.box.sizes, chunk.nbytes, digest, read, chunk.spec.role)


def chunk_item(chunk: Chunk) -> PackItem:
    """Return what a chunk is in a pack if its own bytes are stored."""
    return PackItem(chunk.name, chunk.spec.dtype, chunk.box.sizes, chunk.nbytes)
