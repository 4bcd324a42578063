"""Outputs of one rank on their way into packs: each content once, as it comes, in bounded memory.

A pack's header tells where every chunk is, and which chunks are stored is known only when the last one has been
digested: proved, unchanged and equal ones are not. So room for the longest header is set aside, chunks follow as they
come, and the header is written last.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from ckpt.format.codec import codec_of, encode
from ckpt.format.digest import digest
from ckpt.format.manifest import PackRef
from ckpt.format.pack import PackItem, lay_out, room_for
from ckpt.layout.spec import ITEMSIZE
from ckpt.runtime.choosing import observe
from ckpt.store.base import Buffer, ObjectWriter, WatchedWriter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.store.base import Store
    from ckpt.store.blocks import Blocks


@dataclass(frozen=True, slots=True)
class Output:
    """One thing to be stored: its identity, its bytes when asked, and what its entries in pack and index need."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    digest: str
    read: Callable[[], Buffer]
    role: str = ""
    """of the tensor that this is a chunk of; empty for a piece of an object, which is never encoded"""

    @property
    def item(self) -> PackItem:
        """What it is in a pack if its own bytes are stored."""
        return PackItem(self.name, self.dtype, self.shape, self.nbytes)

    @property
    def identity(self) -> Identity:
        """What makes two outputs one: the same bytes, of which pieces of objects must not be encoded."""
        return self.digest, self.nbytes, bool(self.role)


Identity = tuple[str, int, bool]


@dataclass(frozen=True, slots=True)
class Place:
    """Where bytes are: ``stored`` bytes from ``start`` of a pack; ``codec``: how they are encoded, empty if raw."""

    pack: str
    start: int
    stored: int
    codec: str = ""


@dataclass(slots=True)
class RoleTotal:
    """What was newly written of one role: bytes of chunks, bytes in packs, and the codecs used."""

    raw: int = 0
    stored: int = 0
    codecs: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Open:
    """A pack in the making."""

    key: str
    writer: ObjectWriter
    room: int
    items: list[PackItem] = field(default_factory=list)
    position: int = 0
    waited: float = 0.0
    """seconds that the store took of the caller's time"""

    def append(self, item: PackItem, data: Buffer) -> int:
        """Append an item; return where it starts in the file."""
        start = self.room + self.position
        before = perf_counter()
        self.writer.write(data)
        self.waited += perf_counter() - before
        self.items.append(item)
        self.position += item.nbytes
        return start


def _unknown(_: Identity) -> None:
    return None


class Packer:
    """Stores outputs in packs of one attempt; a context manager, so that an error removes what is half written.

    Args:
        store: where packs go.
        blocks: host memory that writers may hold.
        pack_key: number -> key of a new pack of this attempt.
        on_part: told of bytes that are about to be stored, by another thread; may raise to end it.
    """

    def __init__(
        self,
        store: Store,
        blocks: Blocks | None,
        pack_key: Callable[[int], str],
        on_part: Callable[[int], None] | None = None,
    ) -> None:
        self._store, self._blocks, self._pack_key, self._on_part = store, blocks, pack_key, on_part
        self.known: Callable[[Identity], tuple[PackRef, Place] | None] = _unknown
        """where an earlier step has these bytes, with its pack; or None"""
        self.encoded: frozenset[str] = frozenset()
        """roles whose chunks are encoded where that makes them smaller"""
        self.totals: dict[str, RoleTotal] = {}
        self.reused_bytes = 0
        self.file_bytes = 0
        self._places: dict[Identity, Place] = {}
        self._earlier: dict[str, PackRef] = {}
        self._packs: list[_Open] = []
        self._current: _Open | None = None
        self._coming: tuple[PackItem, ...] = ()
        self._exit = ExitStack()
        self._encoding = 0.0
        self._encoded = 0

    def __enter__(self) -> Packer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._exit.close()

    @property
    def written(self) -> int:
        """Bytes of chunks, before any encoding, that were newly written."""
        return sum(total.raw for total in self.totals.values())

    def announce(self, items: Sequence[PackItem]) -> None:
        """Say which outputs may come next: some of ``items``, in one pack of their own."""
        self._current, self._coming = None, tuple(items)

    def add(self, output: Output, data: Buffer | None = None) -> Place:
        """Store an output unless its content is stored already; return where it is.

        ``data``: its bytes, if they are at hand. On return they may change.
        """
        place = self._places.get(output.identity)
        if place is None:
            earlier = self.known(output.identity)
            if earlier is None:
                place = self._write(output, output.read() if data is None else data)
            else:
                ref, place = earlier
                self._earlier[ref.key] = ref
                self.reused_bytes += output.nbytes if output.role else 0
            self._places[output.identity] = place
        return place

    def add_late(self, outputs: Sequence[Output], beat: Callable[[], None]) -> list[Place]:
        """Store what was not stored yet: in the last pack if it was announced for that, else in a pack of its own.

        ``beat``: called before each.
        """
        new = [o.item for o in outputs if o.identity not in self._places]
        if not {item.name for item in new} <= {item.name for item in self._coming}:
            self.announce(new)
        places = []
        for output in outputs:
            beat()
            places.append(self.add(output))
        return places

    def finish(self) -> list[PackRef]:
        """Write all headers and make all packs durable. Returns the packs that were made."""
        made = []
        for pack in self._packs:
            layout = lay_out(pack.items, pack.room)
            before = perf_counter()
            pack.writer.finish(layout.header)
            pack.waited += perf_counter() - before
            made.append(PackRef(key=pack.key, nbytes=layout.nbytes, header=digest(layout.header)))
            self.file_bytes += layout.nbytes
        waited = sum(pack.waited for pack in self._packs)
        observe(self._store.url, self.file_bytes, waited + self._encoding, self._encoding, self._encoded)
        return made

    def earlier(self) -> list[PackRef]:
        """Return the packs of earlier steps that were referred to."""
        return list(self._earlier.values())

    def _write(self, output: Output, data: Buffer) -> Place:
        codec, item = "", output.item
        if output.role in self.encoded and output.nbytes:
            width = ITEMSIZE[output.dtype]
            before = perf_counter()
            encoded = encode(data, codec_of(width), width)
            self._encoding += perf_counter() - before
            self._encoded += output.nbytes
            if len(encoded) < output.nbytes:
                codec, data = codec_of(width), encoded
                item = PackItem(output.name, "uint8", (len(encoded),), len(encoded))
        pack = self._pack()
        start = pack.append(item, data)
        if output.role:
            total = self.totals.setdefault(output.role, RoleTotal())
            total.raw += output.nbytes
            total.stored += item.nbytes
            total.codecs.add(codec)
        return Place(pack.key, start, item.nbytes, codec)

    def _pack(self) -> _Open:
        if self._current is None:
            room = room_for(self._coming)
            key = self._pack_key(len(self._packs))
            size = room + sum(item.nbytes for item in self._coming)
            writer = self._exit.enter_context(self._store.writer(key, head=room, size=size, blocks=self._blocks))
            if isinstance(writer, WatchedWriter):
                writer.on_part = self._on_part
            self._current = _Open(key, writer, room)
            self._packs.append(self._current)
        return self._current
