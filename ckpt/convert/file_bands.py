"""Several files that are written side by side, so that what they need of one chunk of the source is read once for all.

Under ZeRO-3 each tensor is cut over all ranks' files: written one after the other, each would read the same chunks
anew. Each file of a band has a thread, and gets its bytes piece by piece from the one that asks the assembler.
"""

from __future__ import annotations

import heapq
import threading
from typing import TYPE_CHECKING

from ckpt.convert.opened import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckpt.convert.assemble import Assembler
    from ckpt.convert.torchfile.write import Feed
    from ckpt.layout.spec import Shard
    from ckpt.store.base import Buffer, Store
    from ckpt.store.blocks import Blocks

    Write = Callable[[Callable[[Buffer], None], Feed], None]

MOST = 8
"""Files of a band at most: so many are lost if the run is killed, and so many are open."""
WIDE, WIDE_BYTES = 64, 1 << 30
"""The same of small files, so many bytes together, where an open file takes no memory: ranks of a large job have so
little of each tensor that many bands would read the same chunks of the source.
"""
LONG = 2 * CHUNK_BYTES
"""Bytes of a want from which on few of the bytes of its chunks are of no use to it."""


def width_of(wants: Sequence[Shard], nbytes: int = WIDE_BYTES, *, wide: int = 0) -> int:
    """Return how many files like one with these wants are worth writing side by side.

    Args:
        wants: of the file.
        nbytes: of the file.
        wide: files that may be open where they take no memory meanwhile.
    """
    most = max(MOST, min(wide, WIDE_BYTES // max(1, nbytes)))
    sizes = [want.box.volume * want.spec.itemsize for want in wants]
    typical = sum(n * n for n in sizes) // max(1, sum(sizes))  # of the want that a byte is in
    return 1 if typical >= LONG else min(most, -(-2 * LONG // max(1, typical)))


def merged(wants: Sequence[Sequence[Shard]]) -> Iterator[tuple[int, Shard]]:
    """Yield (file, want): those of each file in its order, those of one tensor side by side where that allows it."""
    order: dict[tuple[str, str], int] = {}
    for one in wants:
        for want in one:
            order.setdefault(want.spec.key, len(order))
    streams = [[((order[w.spec.key], w.box.offsets, n), w) for w in one] for n, one in enumerate(wants)]
    for (_, _, number), want in heapq.merge(*streams, key=lambda item: item[0]):
        yield number, want


class Lane:
    """One file and the thread that writes it."""

    def __init__(
        self, store: Store, key: str, nbytes: int, blocks: Blocks | None, write: Write, moved: Callable[[int], None]
    ):
        self._store, self._key, self._nbytes, self._blocks = store, key, nbytes, blocks
        self._write, self._moved = write, moved
        self._changed = threading.Condition()
        self._data: Buffer | None = None
        self._closed = self._ended = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ckpt-file", daemon=True)
        self._thread.start()

    def give(self, data: Buffer) -> None:
        """Hand over the next bytes and wait until they are stored or copied; raise what the writing failed with."""
        with self._changed:
            self._data = data
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._data is None or self._ended)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Wait for the end of the file. One that has not got all of its bytes is removed, and has an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._store.writer(self._key, size=self._nbytes, blocks=self._blocks) as writer:

                def write(data: Buffer) -> None:
                    writer.write(data)
                    self._moved(memoryview(data).nbytes)

                self._write(write, self._feed)
                writer.finish()
        except BaseException as error:  # told by give(), or after close()
            self.error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _feed(self, wants: Sequence[Shard]) -> Iterator[Buffer]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._data is not None or self._closed)
                data = self._data
            if data is None:
                return
            yield data
            with self._changed:
                self._data = None
                self._changed.notify_all()


def write_band(wants: Sequence[Sequence[Shard]], lanes: Sequence[Lane], assembler: Assembler) -> None:
    """Give each lane the bytes of its wants.

    Raises:
        CkptError: the source could not be read, or the first file that could not be written; no file is there then that
            has not got all of its bytes.
    """
    numbers: list[int] = []

    def shards() -> Iterator[Shard]:
        for number, want in merged(wants):
            numbers.append(number)
            yield want

    try:
        for piece in assembler.pieces(shards()):
            lanes[numbers[piece.number]].give(piece.data)
    finally:
        for lane in lanes:
            lane.close()
    for lane in lanes:
        if lane.error is not None:
            raise lane.error
