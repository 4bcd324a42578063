"""The yardsticks of the device: the layout's information written and read sequentially, by as many processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from benchmarks.peers.base import Peer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.engines import Job

BLOCK = 8 << 20
"""Bytes of one call of ``write`` or ``preadv``."""


class Raw(Peer):
    """Each rank writes its share of as many bytes as the layout has information, from its live tensors, and fsyncs.

    A load reads the shares into one reused buffer: nothing is parsed, checked, or put anywhere.
    """

    name: ClassVar[str] = "raw"
    fsyncs: ClassVar[bool] = True
    has_async: ClassVar[bool] = False
    yardstick: ClassVar[bool] = True
    stores: ClassVar[tuple[str, ...]] = ("tmpfs", "disk", "s3")

    def __init__(self, job: Job, scratch: Path) -> None:
        super().__init__(job, scratch)
        self._buffer = memoryview(bytearray(BLOCK))
        self._buffer[:] = bytes(BLOCK)  # its pages exist from now on

    def _share(self) -> int:
        size, rest = divmod(self.job.information, self.job.world)
        return size + (self.job.rank < rest)

    def _file(self, place: str) -> Path:
        return Path(place) / f"{self.job.rank}"

    def _blocks(self) -> Iterator[memoryview]:
        """Yield blocks of live tensors until the share is full; tensors that are too small for it come again."""
        left = self._share()
        tensors = [t.contiguous().reshape(-1).view(torch.uint8).numpy() for t in self.job.tensors() if t.numel()]
        # Not all ranks of a replicated job shall read the same memory.
        turn = self.job.rank * len(tensors) // self.job.world
        while left > 0:
            data = memoryview(tensors[turn % len(tensors)])[:left]
            yield from (data[at : at + BLOCK] for at in range(0, len(data), BLOCK))
            left -= len(data)
            turn += 1

    def save_sync(self, place: str) -> None:
        if place.startswith("s3://"):
            self._put(place)
            return
        Path(place).mkdir(parents=True, exist_ok=True)
        fd = os.open(self._file(place), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            for block in self._blocks():
                while block:
                    block = block[os.write(fd, block) :]
            os.fsync(fd)
        finally:
            os.close(fd)

    def load(self, place: str) -> None:
        if place.startswith("s3://"):
            self._get(place)
            return
        fd = os.open(self._file(place), os.O_RDONLY)
        try:
            at = 0
            while count := os.preadv(fd, [self._buffer], at):
                at += count
        finally:
            os.close(fd)

    def _put(self, place: str) -> None:
        """Upload by parts, one after the other in each process."""
        import boto3

        client = boto3.client("s3")
        bucket, _, prefix = place.removeprefix("s3://").partition("/")
        where = {"Bucket": bucket, "Key": f"{prefix}/{self.job.rank}"}
        upload = client.create_multipart_upload(**where)["UploadId"]
        parts = []
        waiting = bytearray()
        for block in (*self._blocks(), None):
            waiting += block or b""
            if waiting and (block is None or len(waiting) >= BLOCK):
                number = len(parts) + 1
                put = client.upload_part(**where, UploadId=upload, PartNumber=number, Body=bytes(waiting))
                parts.append({"ETag": put["ETag"], "PartNumber": number})
                waiting.clear()
        client.complete_multipart_upload(**where, UploadId=upload, MultipartUpload={"Parts": parts})

    def _get(self, place: str) -> None:
        import boto3

        bucket, _, prefix = place.removeprefix("s3://").partition("/")
        body = boto3.client("s3").get_object(Bucket=bucket, Key=f"{prefix}/{self.job.rank}")["Body"]
        while body.readinto(self._buffer):
            pass
