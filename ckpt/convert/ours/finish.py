"""The end of a conversion into our own format: each rank's objects and index part, and what is told of it all."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ckpt.convert.options import Written
from ckpt.convert.ours.plan import assembler_of, shares
from ckpt.convert.ours.tasks import Pack
from ckpt.convert.overflow import Row, summed
from ckpt.format.digest import digest
from ckpt.format.manifest import DERIVED, ChunkEntry, IndexPart, ObjectEntry, PackRef
from ckpt.format.parts import decode_part
from ckpt.plan.local_plan import Chunk
from ckpt.repo.repository import MARKER, Repository, attempt_marker, commit_key
from ckpt.runtime.extras import item_entry, item_outputs
from ckpt.runtime.packing import Output, Packer
from ckpt.runtime.stage import chunk_output, own_name
from ckpt.runtime.writing import Done
from ckpt.store.blocks import Blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.convert.ours.committing import Place
    from ckpt.convert.ours.own_copies import OwnCopy
    from ckpt.convert.ours.packs import Wrote
    from ckpt.convert.ours.plan import Conversion
    from ckpt.format.manifest import FileRef
    from ckpt.layout.spec import TensorSpec
    from ckpt.store.base import Buffer, Store


def finish(made: Conversion, store: Store, place: Place, wrote: Sequence[Wrote]) -> tuple[list[Done], tuple[Row, ...]]:
    """Write each rank's objects and its part of the index. Returns also what of all that was written overflowed."""
    of_rank: dict[int, list[tuple[Pack, bytes]]] = {}
    for pack, journal in sorted((pair for one in wrote for pair in zip(one.packs, one.journals, strict=True)), key=_by):
        of_rank.setdefault(pack.rank, []).append((pack, journal))
    late = _Late(made, store, place)
    done = []
    for rank in range(made.job.graph.world):
        own = of_rank.get(rank, [])
        packs, chunks = _joined([decode_part(data, made.job.graph.specs, pack.journal) for pack, data in own])
        objects = late.write(Pack(rank, own[-1][0].number + 1 if own else 0), packs, chunks)
        part = IndexPart(rank=rank, packs=tuple(packs), chunks=tuple(chunks), objects=objects)
        ref = Repository(store).write_index(f"{place.prefix}/index/part-{rank:05d}.json.zst", part, overwrite=True)
        done.append(_done(part, ref, made.job.graph.specs))
    return done, summed([*late.overflowed(), *(row for one in wrote for row in one.overflowed)])


class _Late:
    """Writes what each rank has beside its chunks, in one more pack: objects, and copies of its own. They are small
    where there are any at all, so every run writes them anew.
    """

    def __init__(self, made: Conversion, store: Store, place: Place) -> None:
        self._made, self._store, self._prefix = made, store, place.prefix
        self._blocks = Blocks(shares(made.options)[1])
        self._assembler = assembler_of(made.opened, made.options) if made.own else None
        self._number = {spec: n for n, spec in enumerate(made.job.graph.specs)}

    def write(self, pack: Pack, packs: list[PackRef], chunks: list[ChunkEntry]) -> tuple[ObjectEntry, ...]:
        """Write a rank's pack, if it has anything; add it to ``packs`` and its chunks to ``chunks``."""
        own = self._made.own.get(pack.rank, ())
        items = [(item, ranks, item_outputs(item, pack.rank)) for item, ranks in self._made.items.get(pack.rank, ())]
        objects = []
        with Packer(self._store, self._blocks, partial(_same, f"{self._prefix}/{pack.key}")) as packer:
            packer.announce(
                [self._output(one, "", b"").item for one in own] + [o.item for _, _, outs in items for o in outs]
            )
            wants = [one.shard for one in own]
            pieces = self._assembler.pieces(wants, own_copies_of=pack.rank) if self._assembler is not None else ()
            for one, piece in zip(own, pieces, strict=True):
                output = self._output(one, digest(piece.data), piece.data)
                start, number = packer.add(output, piece.data).start, self._number[one.spec]
                box = one.box
                entry = ChunkEntry(
                    number, box.offsets, box.sizes, output.digest, len(packs), start, output.nbytes, one.ranks
                )
                chunks.append(entry)
            for item, ranks, outputs in items:
                places = [(len(packs), packer.add(output).start) for output in outputs]
                objects.append(item_entry(item, ranks, outputs, places))
            packs += packer.finish()
        return tuple(objects)

    def overflowed(self) -> list[Row]:
        """Return what was too large for its dtype."""
        return self._assembler.overflow.take() if self._assembler is not None else []

    @staticmethod
    def _output(one: OwnCopy, value: str, data: Buffer) -> Output:
        chunk = Chunk(one.spec, one.box, one.ranks)
        name = own_name(chunk, min(one.ranks))
        return chunk_output(chunk, name, value, lambda: data)


def _by(pair: tuple[Pack, bytes]) -> tuple[int, int]:
    return pair[0].rank, pair[0].number


def _same(key: str, _number: int) -> str:
    return key


def _joined(parts: Sequence[IndexPart]) -> tuple[list[PackRef], list[ChunkEntry]]:
    packs: list[PackRef] = []
    chunks: list[ChunkEntry] = []
    for part in parts:
        base = len(packs)
        packs += part.packs
        chunks += [c if c.pack == DERIVED else msgspec.structs.replace(c, pack=c.pack + base) for c in part.chunks]
    return packs, chunks


def _done(part: IndexPart, ref: FileRef, specs: Sequence[TensorSpec]) -> Done:
    """Return what a rank of a save would say that it has written."""
    places: dict[tuple[int, int], tuple[str, int]] = {}  # equal chunks of a pack share a place
    for chunk in part.chunks:
        if chunk.pack != DERIVED:
            places[chunk.pack, chunk.start] = (specs[chunk.spec].role, chunk.nbytes)
    totals: dict[str, int] = {}
    for role, nbytes in places.values():
        totals[role] = totals.get(role, 0) + nbytes
    return Done(
        part=ref,
        packs=list(part.packs),
        written=sum(totals.values()),
        reused=0,
        derived=sum(chunk.nbytes for chunk in part.chunks if chunk.pack == DERIVED),
        stored=sum(pack.nbytes for pack in part.packs) + ref.nbytes,
        codecs={role: ([""], nbytes, nbytes) for role, nbytes in totals.items()},
        reasons=dict.fromkeys(totals, "converted"),
    )


def written(
    made: Conversion,
    store: Store,
    place: Place,
    done: Sequence[Done],
    wrote: Sequence[Wrote],
    size: int,
    overflowed: tuple[Row, ...] = (),
) -> Written:
    """Return what a conversion has done; ``size``: of root and commit."""
    there = {f"{place.prefix}/{one.packs[n].key}" for one in wrote for n in one.present}
    present = sum(pack.nbytes for one in done for pack in one.packs if pack.key in there)
    files = [*(one.part.key for one in done), *(pack.key for one in done for pack in one.packs)]
    own = [MARKER, commit_key(place.step), attempt_marker(place.step, place.attempt)]
    return Written(
        format="ckpt",
        where=store.url,
        step=place.step,
        bytes_read=sum(one.read for one in wrote),
        bytes_written=sum(one.stored for one in done) + size - present,
        bytes_present=present,
        files=tuple(sorted([*files, f"{place.prefix}/index/root.json.zst", *own])),
        lost=made.lost,
        made=made.made,
        memory=made.memory,
        overflowed=overflowed,
    )


def all_present(made: Conversion, store: Store, place: Place) -> Written:
    """Return that this very conversion stands there already, whole."""
    infos = [*store.walk(place.prefix)]
    keys = [info.key for info in infos]
    return Written(
        format="ckpt",
        where=store.url,
        step=place.step,
        bytes_read=0,
        bytes_written=0,
        bytes_present=sum(info.nbytes for info in infos),
        files=tuple(sorted([*keys, MARKER, commit_key(place.step)])),
        lost=made.lost,
        made=made.made,
        memory=made.memory,
    )
