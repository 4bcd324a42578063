"""Tasks of a conversion into our own format, done: packs filled by the assembler, each with a journal beside it.

A journal is an index part of one pack. Who finds both whole has nothing to do; where a journal did not come, or does
not fit, the pack is written again.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ckpt.convert.ours.tasks import RANKS, Cast, Content, Pack, Task
from ckpt.convert.overflow import Overflow, Row, overflowed
from ckpt.engine.base import torch_dtype
from ckpt.errors import CkptError, is_damage
from ckpt.format.digest import digest
from ckpt.format.manifest import DERIVED, MAX_INDEX, ChunkEntry, IndexPart, encode_index
from ckpt.format.parts import decode_part
from ckpt.layout.spec import MASTER
from ckpt.plan.local_plan import Chunk
from ckpt.repo.transfer import Held, trouble_with
from ckpt.runtime.packing import Packer
from ckpt.runtime.stage import chunk_item, chunk_output
from ckpt.runtime.staging import as_tensor, tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpt.convert.assemble import Assembler
    from ckpt.format.pack import PackItem
    from ckpt.layout.box import Box
    from ckpt.layout.spec import TensorSpec
    from ckpt.store.base import Store
    from ckpt.store.blocks import Blocks


class Wrote(msgspec.Struct, array_like=True, frozen=True):
    """A task that is done. ``journals``: of each pack the bytes of its index part. ``read``: bytes from the source.
    ``present``: numbers of the packs that were there already. ``overflowed``: (name, role, elements) of what was too
    large for its dtype in the others.
    """

    packs: tuple[Pack, ...]
    journals: tuple[bytes, ...]
    read: int
    present: tuple[int, ...]
    overflowed: tuple[Row, ...] = ()


class PackWriter:
    """Does tasks, one after the other.

    Args:
        store: of the target.
        prefix: folder of the attempt.
        specs: of the target, numbered as the index will number them.
        assembler: of the source.
        blocks: host memory that the store's writers may hold.
        moved: called with the number of bytes after each chunk; what it raises ends the task.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        specs: Sequence[TensorSpec],
        assembler: Assembler,
        blocks: Blocks | None,
        moved: Callable[[int], None],
    ) -> None:
        self.store, self.prefix, self.specs, self.assembler = store, prefix, tuple(specs), assembler
        self._blocks, self._moved = blocks, moved
        self._overflow = Overflow(assembler.catalog)

    def run(self, task: Task, *, resume: bool) -> Wrote:
        """Do a task; with ``resume`` only what was not done before.

        Raises:
            CkptError: of the source or the target; what is half written is removed.
        """
        return self.begin(task, resume=resume)()

    def begin(self, task: Task, *, resume: bool) -> Callable[[], Wrote]:
        """Fill a task's packs; return what makes them durable. That must be called, once, and another thread may do it
        while the packs of the next task are filled here: both together hold no more than ``blocks``.

        Raises:
            CkptError: as :meth:`run`.
        """
        there = {n: self.done_before(pack) if resume else None for n, pack in enumerate(task.packs)}
        journals = {n: data for n, data in there.items() if data is not None}
        present = tuple(journals)
        before = self.assembler.bytes_read
        left = [n for n in there if n not in journals]
        missing = set(left)
        self._moved(task.nbytes - sum(self._nbytes(one) for one in task.contents if one.pack in missing))
        end = self._write(task.only(left)) if left else list
        read = self.assembler.bytes_read - before
        overflowed = (*self.assembler.overflow.take(), *self._overflow.take())

        def finish() -> Wrote:
            journals.update(zip(left, end(), strict=True))
            return Wrote(task.packs, tuple(journals[n] for n in there), read, present, overflowed)

        return finish

    def done_before(self, pack: Pack) -> bytes | None:
        """Return a pack's journal if the pack is there and every byte of it is what the journal says.

        Raises:
            StoreError: the store is busy or refuses this user, which says nothing about the pack.
        """
        key = f"{self.prefix}/{pack.journal}"
        if self.store.size(key) is None:
            return None
        try:
            data = self.store.get(key, 0, MAX_INDEX + 1)
            part = decode_part(data, self.specs, key)
        except CkptError as error:
            if not is_damage(error):
                raise
            return None
        ours = [ref.key for ref in part.packs] == [f"{self.prefix}/{pack.key}"] and part.rank == pack.rank
        if not ours or self.store.size(part.packs[0].key) != part.packs[0].nbytes:
            return None
        held = [Held(c, self.specs[c.spec]) for c in part.chunks if c.pack != DERIVED]
        return data if trouble_with(self.store, part.packs[0], held, lambda _: None) is None else None

    def _write(self, task: Task) -> Callable[[], list[bytes]]:
        with ExitStack() as stack:
            packers = []
            items: list[list[PackItem]] = [[] for _ in task.packs]
            for at, one in task.wanted():
                items[at].append(chunk_item(self._chunk(one)))
            # More packs than there are blocks would wait for each other; files on a disk are written without.
            blocks = self._blocks if len(task.packs) <= RANKS else None
            for pack, own in zip(task.packs, items, strict=True):
                packer = Packer(self.store, blocks, self._key_of(pack))
                packers.append(stack.enter_context(packer))
                packer.announce(own)
            chunks = self._fill(task, packers)
            return partial(self._finish, task, packers, chunks, stack.pop_all())

    def _finish(
        self, task: Task, packers: Sequence[Packer], chunks: Sequence[list[ChunkEntry]], stack: ExitStack
    ) -> list[bytes]:
        with stack:
            refs = [packer.finish() for packer in packers]
        journals = []
        for pack, own, made in zip(task.packs, chunks, refs, strict=True):
            journal = encode_index(IndexPart(rank=pack.rank, packs=tuple(made), chunks=tuple(own)))
            self.store.put(f"{self.prefix}/{pack.journal}", journal, overwrite=True)
            journals.append(journal)
        return journals

    def _key_of(self, pack: Pack) -> Callable[[int], str]:
        return lambda _number: f"{self.prefix}/{pack.key}"

    def _fill(self, task: Task, packers: Sequence[Packer]) -> list[list[ChunkEntry]]:
        """Write all chunks of a task; return the entries of each pack."""
        entries: list[list[ChunkEntry]] = [[] for _ in packers]
        expected: dict[int, str] = {}  # digests of casts of the last master, of params that are still to come
        wanted = task.wanted()
        with closing(self.assembler.pieces(task.shards(self.specs))) as pieces:
            for (at, one), piece in zip(wanted, pieces, strict=True):
                value = digest(piece.data)
                if isinstance(one, Cast) and expected.pop(id(one)) == value:
                    entries[at].append(self._entry(one, value, DERIVED, 0))
                    continue
                start = self._store(packers[at], one, value, piece.data)
                entries[at].append(self._entry(one, value, 0, start))
                if isinstance(one, Content):
                    entries[at] += self._casts(one, piece.data, expected)
                    self._moved(piece.data.nbytes)
        return entries

    def _casts(self, one: Content, data: memoryview, expected: dict[int, str]) -> list[ChunkEntry]:
        """Return the entries of parameters that are casts of a master; note what others are compared with."""
        entries = []
        for cast in one.casts:
            found = self._cast(one, cast, data)
            if cast.stored:
                expected[id(cast)] = found
            else:
                entries.append(self._entry(cast, found, DERIVED, 0))
        return entries

    def _store(self, packer: Packer, one: Content | Cast, value: str, data: memoryview) -> int:
        chunk = self._chunk(one)
        return packer.add(chunk_output(chunk, chunk.name, value, lambda: data), data).start

    def _chunk(self, one: Content | Cast) -> Chunk:
        return Chunk(self.specs[one.spec], one.box, ())

    def _nbytes(self, one: Content | Cast) -> int:
        return one.box.volume * self.specs[one.spec].itemsize

    def _entry(self, one: Content | Cast, value: str, pack: int, start: int) -> ChunkEntry:
        return ChunkEntry(one.spec, one.offsets, one.sizes, value, pack, start, self._nbytes(one))

    def _cast(self, master: Content, cast: Cast, data: memoryview) -> str:
        tensor = as_tensor(data, self.specs[master.spec].dtype, master.sizes)
        view, spec = tensor[cast.box.relative_to(master.box)], self.specs[cast.spec]
        made = view.detach().to(torch_dtype(spec.dtype))
        if not cast.stored and self._overflow.may(spec):  # of what is stored it is counted when that is read
            odd = overflowed(view, made)
            self._overflow.add(spec, cast.box, 0 if odd is None else int(odd.sum()))
        return digest(tensor_bytes(made))


def may_be_stored(assembler: Assembler) -> Callable[[Chunk], bool]:
    """Return a function that tells whether the source may have bytes of its own for a chunk of a derived parameter.

    Where it has none, because a save has proved it or because its format keeps masters only, the cast is the parameter.
    """
    catalog = assembler.catalog
    known: dict[str, list[Box]] = {}

    def stored(chunk: Chunk) -> bool:
        fqn = chunk.spec.fqn
        if fqn not in known:
            spec = catalog.find(fqn, chunk.spec.role)
            own = [entry.box for _, entry in catalog.stored(spec, None)] if spec is not None else []
            # Without a master there, its place is filled with the parameter itself.
            known[fqn] = own if catalog.find(fqn, MASTER) is not None else []
        return any(box.intersect(chunk.box) is not None for box in known[fqn])

    return stored
