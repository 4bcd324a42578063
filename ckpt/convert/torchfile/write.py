"""A file that ``torch.load`` reads, written from front to back in bounded memory, whatever the size of its tensors.

It works on a store that only appends (S3). The tensors' bytes are asked for once, in the order of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt.convert.torchfile.pickle_write import Piece, Planned, encode, piece_bytes
from ckpt.convert.torchfile.zip_stream import Archive
from ckpt.errors import MalformedData
from ckpt.format.digest import raw_digest
from ckpt.layout.spec import Shard

if TYPE_CHECKING:
    from ckpt.store.base import Buffer

Feed = Callable[[Sequence[Shard]], Iterable["Buffer"]]
"""Returns the bytes of these wants, one behind the other, in buffers of any length."""

_ZEROS = bytes(1 << 20)
_PIECE = 16 << 20
"""bytes given at once of what is in memory already"""


class TorchFile:
    """A tree of plain values with :class:`~ckpt.convert.torchfile.pickle_write.Planned` tensors, as a file.

    ``nbytes``: of the file, exactly. ``wants``: what of the source goes into it, in the order of the file.
    ``identity``: equal for files that will be filled alike.

    Raises:
        ConfigError: something in the tree cannot be written.
    """

    def __init__(self, tree: Any) -> None:
        self._pickle, self._storages = encode(tree)
        self._fixed = [("data.pkl", self._pickle), ("byteorder", b"little")]
        sizes = [(name, len(data)) for name, data in self._fixed]
        sizes += [(f"data/{n}", storage.nbytes) for n, storage in enumerate(self._storages)]
        self._archive = Archive((f"archive/{name}", nbytes) for name, nbytes in [*sizes, ("version", 2)])
        self.nbytes = self._archive.nbytes
        self.identity = _identity(self._pickle, self._storages)
        self.wants = [p for storage in self._storages for p in storage.pieces if isinstance(p, Shard) and p.box.volume]

    def write(self, write: Callable[[Buffer], None], feed: Feed) -> None:
        """Hand the file's bytes to ``write``, front to back.

        Raises:
            MalformedData: ``feed`` gave fewer bytes than were wanted.
        """
        taken = Taken(feed(self.wants))

        def content(number: int) -> Iterable[Buffer]:
            if number < len(self._fixed):
                return [self._fixed[number][1]]
            number -= len(self._fixed)
            return _buffers(self._storages[number].pieces, taken) if number < len(self._storages) else [b"3\n"]

        self._archive.write(write, content)


def _identity(tree: bytes, storages: Sequence[Planned]) -> bytes:
    said = [raw_digest(tree)]
    said += [msgspec.msgpack.encode([*map(_said, storage.pieces)]) for storage in storages]
    return raw_digest(b"|".join(said))


def _said(piece: Piece) -> object:
    if not isinstance(piece, Shard):
        return piece
    spec, box = piece.spec, piece.box
    return spec.fqn, spec.role, spec.dtype, spec.shape, box.offsets, box.sizes


class Taken:
    """The bytes of a feed, handed out in whatever lengths are asked for; buffers are passed on, not copied."""

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        self._buffers = iter(buffers)
        self._rest = memoryview(b"")

    def take(self, nbytes: int) -> Iterator[memoryview]:
        """Yield the next ``nbytes`` bytes."""
        while nbytes:
            if not self._rest:
                following = next(self._buffers, None)
                if following is None:
                    raise MalformedData(f"the source gave {nbytes} bytes less than it said that it has")
                self._rest = memoryview(following).cast("B")
            piece, self._rest = self._rest[:nbytes], self._rest[nbytes:]
            nbytes -= len(piece)
            yield piece


def _buffers(pieces: Sequence[Piece], taken: Taken) -> Iterator[Buffer]:
    for piece in pieces:
        if isinstance(piece, Shard):
            yield from taken.take(piece_bytes(piece))
        elif isinstance(piece, int):
            yield from (memoryview(_ZEROS)[: piece - at] for at in range(0, piece, len(_ZEROS)))
        else:
            yield from (memoryview(piece)[at : at + _PIECE] for at in range(0, len(piece), _PIECE))
