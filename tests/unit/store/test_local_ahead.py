"""What the writer behind the caller promises beyond the conformance suite."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from ckpt.store.base import WatchedWriter
from ckpt.store.blocks import Blocks
from ckpt.store.limited import Limited, Rate
from ckpt.store.local import LocalStore
from ckpt.store.local_ahead import PATIENCE_SECONDS, AheadWriter

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt.store.base import Buffer
    from ckpt.store.blocks import Block

BLOCK = 1 << 20


def ahead(root: Path, blocks: Blocks) -> AheadWriter:
    return AheadWriter(LocalStore(root).writer("a/b"), blocks, 0)


def test_it_tells_of_every_part_and_ends_where_it_is_told_to(tmp_path):
    blocks, told = Blocks(8 * BLOCK, BLOCK), []

    def on_part(nbytes: int) -> None:
        if not nbytes:
            return
        told.append(nbytes)
        if len(told) == 2:
            raise ValueError("enough")

    def write() -> None:
        with ahead(tmp_path, blocks) as out:
            assert isinstance(out, WatchedWriter)
            out.on_part = on_part
            out.write(bytes(3 * BLOCK + 5))
            out.finish()

    with pytest.raises(ValueError, match="enough"):
        write()
    assert told[:2] == [BLOCK, BLOCK]
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
    assert blocks.in_use == 0


def test_what_a_rate_holds_up_is_given_up_when_its_caller_is_told_to_end(tmp_path):
    blocks, slept = Blocks(8 * BLOCK, BLOCK), []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        threading.Event().wait(0.01)

    store = Limited(LocalStore(str(tmp_path)), Rate(64 << 10, clock=lambda: 0.0, sleep=sleep))

    def on_part(nbytes: int) -> None:
        if not nbytes:  # while the caller waits for the end
            raise ValueError("enough")

    def write() -> None:
        with store.writer("a/b", blocks=blocks) as out:
            assert isinstance(out, WatchedWriter)
            out.on_part = on_part
            out.write(bytes(4 * BLOCK))
            out.finish()

    with pytest.raises(ValueError, match="enough"):
        write()
    assert len(slept) < 4 * BLOCK // store.rate.slice
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
    assert blocks.in_use == 0


class Stuck:
    """A writer below that stores nothing until it is let go."""

    def __init__(self) -> None:
        self.go, self.parts = threading.Event(), bytearray()

    def write(self, data: Buffer) -> None:
        self.go.wait(30)
        self.parts += data

    def finish(self, head: Buffer = b"") -> None:
        """Do nothing."""

    def __enter__(self) -> Stuck:
        return self

    def __exit__(self, *exc: object) -> None:
        """Do nothing."""


def test_two_writers_that_share_two_blocks_both_come_to_their_end():
    """Each keeps a block that is half full: the one that gets none any more writes without."""
    blocks = Blocks(2 * BLOCK, BLOCK)
    below = [Stuck(), Stuck()]
    writers = [AheadWriter(one, blocks, 0) for one in below]
    for one in below:
        one.go.set()
    for writer in writers:
        writer.write(b"x" * 10)
    writers[0].write(b"y" * (2 * BLOCK))
    writers[1].write(b"z" * (2 * BLOCK))
    for writer in writers:
        writer.finish()
        writer.__exit__(None, None, None)
    assert bytes(below[0].parts) == b"x" * 10 + b"y" * (2 * BLOCK)
    assert bytes(below[1].parts) == b"x" * 10 + b"z" * (2 * BLOCK)


def test_a_writer_that_gets_no_block_waits_once_and_takes_the_next_that_is_free():
    """All blocks are kept by others that write nothing more: packs that are full, up to their headers."""
    waits: list[float | None] = []

    class Counted(Blocks):
        def take(self, timeout: float | None = None) -> Block | None:
            waits.append(timeout)
            return super().take(timeout)

    blocks = Counted(2 * BLOCK, BLOCK)
    below = [Stuck(), Stuck(), Stuck()]
    writers = [AheadWriter(one, blocks, 0) for one in below]
    for writer, one in zip(writers, below, strict=True):
        one.go.set()
        writer.write(b"x")
    for _ in range(20):
        writers[2].write(b"y")
    assert waits == [PATIENCE_SECONDS] * 3 + [0.0] * 20
    writers[0].finish()
    writers[2].write(b"z")
    assert blocks.in_use == 2 * BLOCK
    for writer in writers[1:]:
        writer.finish()
    assert bytes(below[2].parts) == b"x" + b"y" * 20 + b"z"
    assert blocks.in_use == 0


def test_the_caller_goes_on_while_the_store_is_stuck_and_waits_when_all_blocks_are_on_their_way():
    blocks, below = Blocks(2 * BLOCK, BLOCK), Stuck()
    writer, done = AheadWriter(below, blocks, 0), threading.Event()

    def fill() -> None:
        writer.write(bytes(2 * BLOCK))  # both blocks: returns at once
        done.set()
        writer.write(bytes(1))

    thread = threading.Thread(target=fill)
    thread.start()
    assert done.wait(30)
    assert thread.is_alive()
    below.go.set()
    thread.join(30)
    writer.finish()
    writer.__exit__(None, None, None)
    assert (len(below.parts), blocks.in_use) == (2 * BLOCK + 1, 0)
