"""The index of the new base: what was stepped, what ranks hold beside it, and of the base whatever stays as it is.

Chunks that no step has changed are not copied: the new base refers to the base's packs, as every save refers to those
of the step before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ckpt.compact.packs import DERIVED
from ckpt.compact.source import is_scalar
from ckpt.errors import LayoutError, ReplayError
from ckpt.format.digest import digest
from ckpt.format.manifest import ChunkEntry, Divergence, IndexPart, IndexRoot, ObjectEntry, PackRef
from ckpt.layout.box import Box
from ckpt.layout.graph import Cell, ShardGraph
from ckpt.layout.spec import TensorSpec
from ckpt.plan.local_plan import Chunk
from ckpt.repo.holders import graph_of_index, holder_table, hosts_of_index
from ckpt.runtime.extras import item_entry, item_outputs
from ckpt.runtime.packing import Packer
from ckpt.runtime.stage import chunk_output, own_name
from ckpt.words import some

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpt.compact.loose import Loose
    from ckpt.compact.packs import BundleDone
    from ckpt.compact.source import Source
    from ckpt.format.holders import HolderTable
    from ckpt.format.manifest import FileRef
    from ckpt.format.pack import PackItem
    from ckpt.repo.repository import Index
    from ckpt.runtime.extras import Item
    from ckpt.store.base import Store
    from ckpt.store.blocks import Blocks


@dataclass(slots=True)
class _Part:
    """A rank's part in the making."""

    packs: dict[PackRef, int] = field(default_factory=dict)
    chunks: list[ChunkEntry] = field(default_factory=list)
    objects: list[ObjectEntry] = field(default_factory=list)
    codecs: list[str] = field(default_factory=list)

    def pack(self, ref: PackRef) -> int:
        """Return the number of a pack, listed once."""
        return self.packs.setdefault(ref, len(self.packs))

    def codec(self, name: str) -> int:
        """Return the number of a codec as chunks refer to it."""
        if name not in self.codecs:
            self.codecs.append(name)
        return 1 + self.codecs.index(name)

    def take(self, chunk: ChunkEntry, spec: int, part: IndexPart) -> None:
        """Refer to a chunk of the base as it is."""
        codec = part.codec_of(chunk)
        self.chunks.append(
            msgspec.structs.replace(
                chunk,
                spec=spec,
                pack=DERIVED if chunk.pack == DERIVED else self.pack(part.packs[chunk.pack]),
                codec=self.codec(codec) if codec else 0,
            )
        )


class NewIndex:
    """The new base's index.

    Args:
        source: what is compacted.
        base: its index.
        done: all bundles.
        loose: what no optimizer steps.

    Raises:
        ReplayError: the ranks together have not logged all of some parameter, or tell different values of one.
    """

    def __init__(self, source: Source, base: Index, done: Sequence[BundleDone], loose: Loose) -> None:
        self._source, self._base, self._loose = source, base, loose
        self._copies = list(loose.copies())
        self.done = sorted(done, key=lambda one: one.bundle.number)
        self._singles = _singles(self.done)
        made = {one.spec for done in self.done for one in done.made}
        made |= {TensorSpec(fqn, role, dtype, ()) for (fqn, role), (dtype, _, _) in self._singles.items()}
        new = {spec.key: spec for spec in made}
        self.specs = tuple(sorted([*(spec for spec in base.specs if spec.key not in new), *new.values()]))
        self._changed = frozenset(new)
        self._replaced: dict[TensorSpec, list[Box]] = {}
        for spec, box in loose.boxes:
            self._replaced.setdefault(spec, []).append(box)
        self._number = {spec.key: n for n, spec in enumerate(self.specs)}
        self._check_covered()
        apart = {self._base.specs[c.spec] for part in base.parts for c in part.chunks if c.ranks}
        names = [f"{spec.fqn!r} ({spec.role})" for spec in sorted(apart) if spec.key in new]
        self.lost = [f"ranks had copies of their own of {some(names)}: everybody's was stepped"] if names else []

    def _check_covered(self) -> None:
        held: dict[TensorSpec, int] = {}
        for one in (one for done in self.done for one in done.made):
            held[one.spec] = held.get(one.spec, 0) + Box(one.offsets, one.sizes).volume
        for spec, volume in held.items():
            whole = Box.whole(spec.shape).volume
            if volume != whole:
                raise ReplayError(f"{spec}: the log has the gradient of {volume} of {whole} elements")

    # -- parts --------------------------------------------------------------------------------------------------------

    def parts(
        self,
        store: Store,
        prefix: str,
        blocks: Blocks,
        objects: Sequence[Sequence[tuple[Item, tuple[int, ...]]]],
    ) -> list[IndexPart]:
        """Store what is no bundle's, and return each rank's part of the index.

        Args:
            store: the repository's.
            prefix: folder of the attempt.
            blocks: host memory that the store's writers may hold.
            objects: of each rank what it stores, with the ranks that have the same.
        """
        parts = [_Part() for _ in range(self._source.world)]
        for part in self._base.parts:
            mine = parts[part.rank % len(parts)]
            for chunk in part.chunks:
                if self._stays(chunk):
                    mine.take(chunk, self._number[self._base.specs[chunk.spec].key], part)
        for done in self.done:
            mine = parts[done.bundle.rank]
            pack = mine.pack(done.pack) if done.pack is not None else 0
            mine.chunks += [one.entry(self._number[one.fqn, one.role], pack) for one in done.made]
        for rank, mine in enumerate(parts):
            with Packer(store, blocks, _only(f"{prefix}/packs/rank{rank:05d}-objects.safetensors")) as packer:
                self._late(rank, mine, packer, objects[rank])
        return [
            IndexPart(
                rank=rank,
                packs=tuple(mine.packs),
                chunks=tuple(mine.chunks),
                objects=tuple(mine.objects),
                codecs=tuple(mine.codecs),
            )
            for rank, mine in enumerate(parts)
        ]

    def _stays(self, chunk: ChunkEntry) -> bool:
        """Is a chunk of the base one of the new base's?"""
        spec = self._base.specs[chunk.spec]
        if spec.key in self._changed or (chunk.ranks and self._source.world != self._base.root.world):
            return False
        near = [box for box in self._replaced.get(spec, ()) if box.intersect(chunk.box) is not None]
        if near and not any(box.contains(chunk.box) for box in near):
            raise ReplayError(
                f"{spec}: the log has box {near[0]} of it, which the base stores as {chunk.box}: only a job that is "
                "loaded can put them together"
            )
        return not near

    def _late(self, rank: int, part: _Part, packer: Packer, objects: Sequence[tuple[Item, tuple[int, ...]]]) -> None:
        """Store a rank's objects, single values, and copies of what no optimizer steps, in one more pack."""
        held: list[tuple[Chunk, bytes]] = [
            (Chunk(TensorSpec(fqn, role, dtype, ()), Box((), ()), ()), data)
            for (fqn, role), (dtype, data, owner) in sorted(self._singles.items())
            if owner == rank
        ]
        held += [(Chunk(one.spec, one.box, one.ranks), one.data) for one in self._copies if one.owner == rank]
        outputs = [
            chunk_output(
                chunk, own_name(chunk, rank) if chunk.ranks else chunk.name, digest(data), partial(bytes, data)
            )
            for chunk, data in held
        ]
        items = [(item, ranks, item_outputs(item, rank)) for item, ranks in objects]
        coming: list[PackItem] = [one.item for one in outputs] + [one.item for _, _, outs in items for one in outs]
        if not coming:
            return
        packer.announce(coming)
        starts = [packer.add(one).start for one in outputs]
        places = [[packer.add(one).start for one in outs] for _, _, outs in items]
        number = part.pack(packer.finish()[0])
        for (chunk, _), output, start in zip(held, outputs, starts, strict=True):
            box, spec = chunk.box, self._number[chunk.spec.key]
            part.chunks.append(
                ChunkEntry(spec, box.offsets, box.sizes, output.digest, number, start, chunk.nbytes, chunk.ranks)
            )
        for (item, ranks, outs), own in zip(items, places, strict=True):
            part.objects.append(item_entry(item, ranks, outs, [(number, start) for start in own]))

    # -- the root -----------------------------------------------------------------------------------------------------

    def root(self, attempt: str, refs: Sequence[FileRef]) -> IndexRoot:
        """Return the index root; ``refs``: of the stored parts."""
        base, source = self._base.root, self._source
        moved = {one.fqn for done in self.done for one in done.made if one.start == DERIVED}
        return msgspec.structs.replace(
            base,
            step=source.step,
            attempt=attempt,
            world=source.world,
            specs=tuple((spec.fqn, spec.role, spec.dtype, spec.shape) for spec in self.specs),
            derived=tuple(sorted(moved.union(base.derived))),
            parts=tuple(refs),
            divergences=(*self._old_divergences(), *self._loose.divergences),
            holders=self._holders(),
        )

    def _old_divergences(self) -> list[Divergence]:
        if self._source.world != self._base.root.world:
            return []
        replaced = [(spec.key, box) for spec, box in self._loose.boxes]
        return [
            one
            for one in self._base.root.divergences
            if (one.fqn, one.role) not in self._changed
            and not any(
                key == (one.fqn, one.role) and box.contains(Box(one.offsets, one.sizes)) for key, box in replaced
            )
        ]

    def graph(self) -> ShardGraph | None:
        """Return who holds what, as far as the base says it for as many ranks.

        What an optimizer keeps lies where what it steps lies.
        """
        if self._source.world != self._base.root.world:
            return None
        try:
            graph = graph_of_index(self._base)
        except LayoutError:  # an earlier release did not record it
            return None
        cells = {spec: graph.cells[spec] for spec in self.specs if spec in graph.cells}
        for spec in self.specs:
            if spec not in cells:
                key = self._source.key_spec(spec.fqn)
                near = graph.cells[key]
                if not is_scalar(spec, key):
                    cells[spec] = tuple(Cell(spec, one.box, one.ranks) for one in near)
                else:
                    everyone = tuple(sorted({rank for one in near for rank in one.ranks}))
                    cells[spec] = (Cell(spec, Box((), ()), everyone),)
        return ShardGraph.of(graph.world, cells, dict(graph.aliases), set(graph.derived), ())

    def _holders(self) -> HolderTable | None:
        graph = self.graph()
        if graph is None:
            return None
        try:
            hosts = hosts_of_index(self._base)
        except LayoutError:
            hosts = ()
        return holder_table(graph, hosts)


def _singles(done: Sequence[BundleDone]) -> dict[tuple[str, str], tuple[str, bytes, int]]:
    """Return (name, role) -> dtype, bytes, and the rank that stores it, of values for whole parameters."""
    found: dict[tuple[str, str], tuple[str, bytes, int]] = {}
    for each in done:
        for one in each.singles:
            dtype, data, _ = found.setdefault((one.fqn, one.role), (one.dtype, one.data, each.bundle.rank))
            if (dtype, data) != (one.dtype, one.data):
                raise ReplayError(
                    f"{one.fqn!r}: the ranks of the log come to different values of {one.role!r}: a part of its "
                    "gradients was not logged"
                )
    return found


def _only(key: str) -> Callable[[int], str]:
    return lambda _number: key
