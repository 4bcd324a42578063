"""Streaming an object into S3: a multipart upload whose parts are sent by threads while the next one is being filled.

An S3 part is at least 5 MiB, and an upload has at most 10,000 of them. So bytes are copied into parts of one size (some
services insist on one), which are sent when they are full. The part that holds the end of the head waits for it.
"""

from __future__ import annotations

import mmap
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt.errors import AccessDenied, CkptError, StoreError, StoreUnavailable
from ckpt.store.base import Buffer, check_head
from ckpt.store.blocks import Blocks
from ckpt.store.s3_client import Body, crc32, told
from ckpt.store.s3_errors import Kind
from ckpt.store.s3_options import MAX_OBJECT, MAX_PART

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt.store.blocks import Block
    from ckpt.store.s3 import S3Store

NONCE = "ckpt-nonce"
"""Metadata by which a writer knows its own object again when an answer was lost."""

_ROUND = 1 << 20
_STEPS = 12
"""A writer that gets more than it was told doubles its parts so often over those that are left."""


def first_part_bytes(size: int, part_bytes: int, max_parts: int) -> int:
    """Return bytes of a part so that ``size`` bytes take half of the parts that there may be.

    Raises:
        StoreError: more than an S3 object can have.
    """
    if size > MAX_OBJECT:
        raise StoreError(f"an object of {size} bytes, an S3 object has {MAX_OBJECT} at most")
    least = -(-size // max(1, max_parts // 2))
    return min(max(part_bytes, -(-least // _ROUND) * _ROUND), MAX_PART)


def part_bytes_of(number: int, first: int, planned: int, max_parts: int) -> int:
    """Return bytes of part ``number`` (from 1): ``first`` for those planned, then more and more.

    So that 10,000 parts reach the largest object whatever the writer was told, and only who was told wrong pays.
    """
    beyond = number - planned - 1
    if beyond < 0:
        return first
    return min(first << (beyond * _STEPS // max(1, max_parts - planned)), MAX_PART)


class _Part:
    """Bytes of one part in blocks. ``number``: from 1; ``size``: bytes when full; ``used``: bytes filled."""

    def __init__(self, number: int, size: int, reserved: int = 0) -> None:
        self.number, self.size, self.used = number, size, reserved
        self.blocks: list[tuple[Block, bool]] = []  # and whether it is the pool's

    def views(self, start: int = 0) -> list[memoryview]:
        """Return what is filled, from byte ``start`` on."""
        found, at = [], 0
        for block, _ in self.blocks:
            low, high = max(start - at, 0), min(self.used - at, len(block))
            if low < high:
                found.append(block.data[low:high])
            at += len(block)
        return found


class S3Writer:
    """See :class:`~ckpt.store.base.ObjectWriter`. For one thread of one process; not to be taken over a fork."""

    def __init__(self, store: S3Store, key: str, head: int, size: int, blocks: Blocks | None) -> None:
        self.store, self.key, self.head, self.options = store, key, head, store.options
        self.name = store.name_of(key)
        self.nonce = os.urandom(8).hex()
        self.first = first_part_bytes(size, self.options.part_bytes, self.options.max_parts)
        if blocks is not None:  # whole blocks, so that none is half empty
            self.first = min(-(-self.first // blocks.size) * blocks.size, MAX_PART)
        self.planned = -(-size // self.first)
        self.blocks = blocks or Blocks((self.options.concurrency + 2) * self.first, self.first)
        self.upload = ""
        self.total = head
        self.sent: dict[int, dict[str, Any]] = {}
        self.running = 0
        self.error: CkptError | None = None
        self.changed = threading.Condition()
        self.stop = threading.Event()
        self.published = self.finished = False
        self.on_part: Callable[[int], None] | None = None
        self.kept: _Part | None = None  # the part that waits for the end of the head
        self.part = self._part_after_head()

    def _size_of(self, number: int) -> int:
        if number > self.options.max_parts:
            raise StoreError(
                f"write {self.key!r} in {self.store.url}: {self.total} bytes do not fit into"
                f" {self.options.max_parts} parts",
                self.key,
            )
        return part_bytes_of(number, self.first, self.planned, self.options.max_parts)

    def _part_after_head(self) -> _Part:
        """Return the part in which the head ends, with room for its end."""
        number, left = 1, self.head
        while left >= self._size_of(number):
            left -= self._size_of(number)
            number += 1
        return _Part(number, self._size_of(number), left)

    # ------------------------------------------------------------------------------------------------------- write

    def write(self, data: Buffer) -> None:
        """Copy the bytes into parts; a full one is sent when there are more bytes than it holds."""
        view = memoryview(data).cast("B")
        self.total += view.nbytes
        if self.total > MAX_OBJECT:
            raise StoreError(
                f"write {self.key!r} in {self.store.url}: {self.total} bytes, an S3 object has {MAX_OBJECT} at most",
                self.key,
            )
        source = np.frombuffer(view, np.uint8)
        while len(source):
            self._raise()
            if self.part.used == self.part.size:
                self._next()
            source = source[self._fill(source) :]

    def _fill(self, source: Block) -> int:
        """Copy the beginning of ``source`` into the part's next block; return how many bytes."""
        part, at = self.part, 0
        for block, _ in part.blocks:
            if part.used < at + len(block):
                break
            at += len(block)
        else:
            while at + self.blocks.size <= part.used:  # room for the head may be whole blocks
                part.blocks.append(self._block())
                at += self.blocks.size
            part.blocks.append(self._block())
        block = part.blocks[-1][0]
        low = part.used - at
        taken = min(len(source), len(block) - low, part.size - part.used)
        block[low : low + taken] = source[:taken]
        part.used += taken
        return taken

    def _block(self) -> tuple[Block, bool]:
        """Return a block, waiting for the pool only while parts of this writer will give some back.

        Others may hold all blocks and wait for us: a writer with nothing in flight must not wait for anybody.
        """
        while True:
            block = self.blocks.take(timeout=0)
            if block is not None:
                return block, True
            with self.changed:
                if not self.running:
                    return np.frombuffer(mmap.mmap(-1, self.blocks.size), np.uint8), False
                self.changed.wait()
            self._raise()

    def _next(self) -> None:
        """Send the full part, or keep it if the head's end is missing, and begin the next."""
        full = self.part
        if self.head and self.kept is None:
            self.kept = full
        else:
            self._send(full.number, full.views(), full)
        self.part = _Part(full.number + 1, self._size_of(full.number + 1))

    def _send(self, number: int, views: list[memoryview], part: _Part | None) -> None:
        """Upload a part in a thread of its own; waits while as many as allowed are under way."""
        if not self.upload:
            self._create()
        with self.changed:
            self.changed.wait_for(lambda: self.running < self.options.concurrency)
            self.running += 1
        # A thread a part costs nothing beside its bytes, and unlike a pool's can still be started while Python exits.
        thread = threading.Thread(target=self._upload, args=(number, views, part), name="ckpt-s3-part", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more: nobody will count this one down
            self.running -= 1
            raise _unexpected(self.key, self.store.url, error) from error

    def _create(self) -> None:
        def step(client: Any, sums: bool) -> str:
            extra = {"ChecksumAlgorithm": "CRC32"} if sums else {}
            answer = client.create_multipart_upload(**self.name, Metadata={NONCE: self.nonce}, **extra)
            return str(told(answer, "UploadId", doing, self.key, self.store.url))

        doing = "begin the upload of"
        self.upload = self.store.api.run(doing, self.key, step)

    def _upload(self, number: int, views: list[memoryview], part: _Part | None) -> None:
        def step(client: Any, sums: bool) -> dict[str, Any]:
            crc = {"ChecksumCRC32": crc32(views)} if sums else {}
            answer = client.upload_part(**self.name, UploadId=self.upload, PartNumber=number, Body=Body(views), **crc)
            return {"PartNumber": number, "ETag": told(answer, "ETag", doing, self.key, self.store.url), **crc}

        doing = f"write part {number} of"
        try:
            if not self.stop.is_set() and self.on_part is not None:
                self.on_part(sum(view.nbytes for view in views))
            if not self.stop.is_set():
                self.sent[number] = self.store.api.run(doing, self.key, step, stop=self.stop)
        except CkptError as error:
            self.error = self.error or error
        except BaseException as error:  # it must reach the writer's thread, whatever it is
            self.error = self.error or _unexpected(self.key, self.store.url, error)
        finally:
            views.clear()
            if part is not None:
                self._give(part)
            with self.changed:
                self.running -= 1
                self.changed.notify_all()

    def _give(self, part: _Part) -> None:
        for block, of_pool in part.blocks:
            if of_pool:
                self.blocks.give(block)
        part.blocks.clear()

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    def _wait(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: not self.running)

    # ------------------------------------------------------------------------------------------------------ finish

    def finish(self, head: Buffer = b"") -> None:
        """Send what is left, the first part last, and publish. S3 acknowledges what is durable."""
        front = memoryview(check_head(head, self.head, self.key)).cast("B")
        self._raise()
        pending = self._pending(front)
        if not self.upload and self.total <= self.first:
            self.published = True
            views = [view for _, more, _ in pending for view in more]
            self.store.put_views("write", self.key, views, self.nonce, overwrite=True)
        else:
            for number, views, part in pending:
                self._send(number, views, part)
            self._wait()
            self._raise()
            self.published = True
            self._complete()
        self.finished = True
        self._close()

    def _pending(self, head: memoryview) -> list[tuple[int, list[memoryview], _Part | None]]:
        """Return number and bytes of the parts that have not been sent, without empty ones."""
        found: list[tuple[int, list[memoryview], _Part | None]] = []
        mixed, at, number = self.kept or self.part, 0, 1
        while number < mixed.number and self.head:
            found.append((number, [head[at : at + self._size_of(number)]], None))
            at, number = at + self._size_of(number), number + 1
        found.append((mixed.number, [head[at:], *mixed.views(len(head) - at)], mixed))
        if self.kept is not None:
            found.insert(0, (self.part.number, self.part.views(), self.part))
        return [item for item in found if any(view.nbytes for view in item[1])]

    def _complete(self) -> None:
        def step(client: Any, sums: bool) -> None:
            parts = [dict(self.sent[number]) for number in sorted(self.sent)]
            for part in parts if not sums else ():
                part.pop("ChecksumCRC32", None)
            client.complete_multipart_upload(**self.name, UploadId=self.upload, MultipartUpload={"Parts": parts})

        # An upload that is gone may be one whose completion was answered into the void: the check below tells.
        answers = {Kind.NO_UPLOAD: lambda fault: None}
        self.store.api.run("publish", self.key, step, answers=answers)
        state = self._state()
        if state:
            raise StoreError(f"publish {self.key!r} in {self.store.url}: {state}", self.key)

    def _state(self, stop: threading.Event | None = None) -> str:
        """Return what is wrong with the object that should be there now; empty if it is ours and whole."""
        there = self.store.head("look at", self.key, stop)
        if there is None:
            return f"expected an object of {self.total} bytes, found none: was its upload aborted?"
        nonce, found = there.get("Metadata", {}).get(NONCE, self.nonce), int(there["ContentLength"])
        if nonce != self.nonce:
            return "found an object that somebody else has written"
        return "" if found == self.total else f"expected {self.total} bytes, found {found}"

    def _close(self) -> None:
        for part in (self.kept, self.part):
            if part is not None:
                self._give(part)

    def __enter__(self) -> S3Writer:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.finished:
            return
        self.stop.set()
        self._wait()  # a part that arrives after the abort would stay
        self._close()
        # The error that brought us here matters more, and gc finds what stays. If it is that the endpoint does not
        # answer, it was given its time already.
        once = self.stop if isinstance(exc[1], StoreUnavailable) else None
        with suppress(CkptError):
            if self.upload:
                self.store.abort_upload(self.key, self.upload, once)
            # Finished there, perhaps, and we could not know.
            if self.published and not isinstance(exc[1], AccessDenied) and not self._state(once):
                self.store.delete(self.key)


def _unexpected(key: str, url: str, error: BaseException) -> StoreError:
    mapped = StoreError(f"write {key!r} in {url}: {type(error).__name__}: {error}", key)
    mapped.__cause__ = error
    return mapped
