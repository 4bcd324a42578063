"""A bundle that is stepped, stored: a pack, and beside it a journal that says that the pack is whole.

Who is interrupted goes on behind the last journal. Parameters that are the cast of a master are not stored, but their
digests are, as a save does it: so a reader can prove them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ckpt.compact.cuts import Bundle
from ckpt.compact.stepping import Judged, state_of
from ckpt.engine.base import dtype_name, torch_dtype
from ckpt.errors import CkptError, MalformedData, is_damage
from ckpt.format.digest import digest
from ckpt.format.manifest import PACK_KEY, ChunkEntry, PackRef
from ckpt.layout.box import Box
from ckpt.layout.spec import MASTER, PARAM, TensorSpec
from ckpt.plan.local_plan import Chunk
from ckpt.repo.transfer import Held, trouble_with
from ckpt.runtime.packing import Packer
from ckpt.runtime.stage import chunk_item, chunk_output
from ckpt.runtime.staging import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from ckpt.compact.source import Source
    from ckpt.compact.stepping import Stepped
    from ckpt.store.base import Store
    from ckpt.store.blocks import Blocks

JOURNAL = "compact-"
MAX_JOURNAL = 1 << 28
DERIVED = -1


class Made(msgspec.Struct, array_like=True, frozen=True):
    """A chunk of the new base. ``start``: in the bundle's pack; :data:`DERIVED`: it is the cast of the master there."""

    fqn: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    digest: str
    start: int

    @property
    def spec(self) -> TensorSpec:
        """Whose chunk it is."""
        return TensorSpec(self.fqn, self.role, self.dtype, self.shape)

    def entry(self, spec: int, pack: int) -> ChunkEntry:
        """Return what an index says of it."""
        nbytes = Box(self.offsets, self.sizes).volume * self.spec.itemsize
        place = (DERIVED, 0) if self.start == DERIVED else (pack, self.start)
        return ChunkEntry(spec, self.offsets, self.sizes, self.digest, *place, nbytes)


class Single(msgspec.Struct, array_like=True, frozen=True):
    """One value that the optimizer keeps for a whole parameter."""

    fqn: str
    role: str
    dtype: str
    data: bytes


class BundleDone(msgspec.Struct, kw_only=True):
    """What became of a bundle. ``idle``: parameters that had no gradient in any step; ``pack``: None if all had
    none.
    """

    bundle: Bundle
    pack: PackRef | None
    made: list[Made]
    singles: list[Single]
    idle: list[str]
    judged: Judged
    present: bool = False


class BundleWriter:
    """Stores bundles.

    Args:
        store: the repository's.
        prefix: folder of the attempt.
        source: what is compacted.
        blocks: host memory that the store's writers may hold.
    """

    def __init__(self, store: Store, prefix: str, source: Source, blocks: Blocks) -> None:
        self._store, self._prefix, self._source, self._blocks = store, prefix, source, blocks

    def journal(self, bundle: Bundle) -> str:
        """Return the key of a bundle's journal."""
        return f"{self._prefix}/index/{JOURNAL}{bundle.number:06d}.json"

    def _pack_key(self, bundle: Bundle) -> str:
        return f"{self._prefix}/packs/rank{bundle.rank:05d}-{bundle.number:06d}.safetensors"

    def done_before(self, bundle: Bundle) -> BundleDone | None:
        """Return what an earlier run says of a bundle, if its pack is there and is what the journal says.

        Raises:
            StoreError: the store is busy or refuses this user, which says nothing about the pack.
        """
        key = self.journal(bundle)
        if self._store.size(key) is None:
            return None
        try:
            done = msgspec.json.decode(self._store.get(key, 0, MAX_JOURNAL), type=BundleDone)
            if done.bundle != bundle:  # it was cut for other workers, or another memory
                return None
            if done.pack is not None and not self._is_whole(bundle, done, done.pack):
                return None
        except (msgspec.DecodeError, CkptError) as error:
            if isinstance(error, CkptError) and not is_damage(error):
                raise
            return None
        done.present = True
        return done

    def _is_whole(self, bundle: Bundle, done: BundleDone, pack: PackRef) -> bool:
        if pack.key != self._pack_key(bundle) or not PACK_KEY.fullmatch(pack.key):
            return False
        held = [Held(one.entry(0, 0), one.spec) for one in done.made if one.start != DERIVED]
        return (
            self._store.size(pack.key) == pack.nbytes and trouble_with(self._store, pack, held, lambda _: None) is None
        )

    def write(self, bundle: Bundle, held: Sequence[Stepped], judged: Judged) -> BundleDone:
        """Store what was stepped.

        Raises:
            ReplayError: an optimizer keeps what is no state of elements.
            StoreError: the store refused; what is half written is removed.
        """
        moved = [one for one in held if one.steps]
        moving = {run.fqn for one in moved for run in one.runs}
        done = BundleDone(
            bundle=bundle,
            pack=None,
            made=[],
            singles=[],
            idle=sorted({run.fqn for one in held for run in one.runs} - moving),
            judged=judged,
        )
        if moved:
            with Packer(self._store, self._blocks, partial(_same, self._pack_key(bundle))) as packer:
                chunks = [list(self._chunks(one)) for one in moved]
                packer.announce([chunk_item(Chunk(spec, box, ())) for some in chunks for spec, box, _ in some])
                for one, some in zip(moved, chunks, strict=True):
                    for spec, box, data in some:
                        self._store_chunk(packer, done, spec, box, data)
                    self._note_singles(one, done)
                (done.pack,) = packer.finish()
        self._store.put(self.journal(bundle), msgspec.json.encode(done), overwrite=True)
        return done

    def _chunks(self, one: Stepped) -> Iterator[tuple[TensorSpec, Box, torch.Tensor]]:
        """Yield what is stored of a slice: the stepped tensor and its state, box by box."""
        like, _ = state_of(one)
        for run in one.runs:
            key = self._source.key_spec(run.fqn)
            yield key, run.box, one.key[run.at : run.at + run.box.volume]
            for role, tensor in sorted(like.items()):
                spec = TensorSpec(run.fqn, role, dtype_name(tensor.dtype), run.shape)
                yield spec, run.box, tensor[run.at : run.at + run.box.volume]

    def _store_chunk(self, packer: Packer, done: BundleDone, spec: TensorSpec, box: Box, tensor: torch.Tensor) -> None:
        data = tensor_bytes(tensor)
        value, chunk = digest(data), Chunk(spec, box, ())
        start = packer.add(chunk_output(chunk, chunk.name, value, lambda: data), data).start
        done.made.append(Made(*spec.key, spec.dtype, spec.shape, box.offsets, box.sizes, value, start))
        param = self._source.catalog.specs.get((spec.fqn, PARAM)) if spec.role == MASTER else None
        if param is not None:
            cast = digest(tensor_bytes(tensor.to(torch_dtype(param.dtype))))
            done.made.append(Made(*param.key, param.dtype, param.shape, box.offsets, box.sizes, cast, DERIVED))

    def _note_singles(self, one: Stepped, done: BundleDone) -> None:
        _, scalars = state_of(one)
        for fqn in dict.fromkeys(run.fqn for run in one.runs):
            for role, value in sorted(scalars.items()):
                done.singles.append(Single(fqn, role, dtype_name(value.dtype), bytes(tensor_bytes(value))))


def _same(key: str, number: int) -> str:
    if number:
        raise MalformedData(f"{key}: a bundle has one pack, asked for number {number}")
    return key
