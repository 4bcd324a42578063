"""torch.distributed.checkpoint."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist

from benchmarks.peers.base import Handle, Peer

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.engines import Job

WAIT_SECONDS = 600


class Dcp(Peer):
    """``save``, ``async_save`` in its default mode (staged in the call, written by a thread) and ``load``.

    ZeRO's partitions are plain tensors to it: saved under keys of each rank, they load by as many ranks only.
    """

    name: ClassVar[str] = "DCP"
    fsyncs: ClassVar[bool] = True
    stores: ClassVar[tuple[str, ...]] = ("tmpfs", "disk", "s3")
    note: ClassVar[str] = "ZeRO: partitions under keys of each rank, a naive user's best"

    def __init__(self, job: Job, scratch: Path) -> None:
        super().__init__(job, scratch)
        self.group = dist.new_group(backend="gloo")  # its thread must not meet training's collectives

    def save_sync(self, place: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.job.state(), storage_writer=self._writer(place), process_group=self.group)

    def save_async(self, place: str) -> Handle:
        import torch.distributed.checkpoint as dcp

        future: Any = dcp.async_save(self.job.state(), storage_writer=self._writer(place), process_group=self.group)
        return Handle(lambda: None, lambda: future.result(WAIT_SECONDS))

    def load(self, place: str) -> None:
        import torch.distributed.checkpoint as dcp

        reader: Any = dcp.FileSystemReader(place)
        if place.startswith("s3://"):
            from s3torchconnector.dcp import S3StorageReader

            reader = S3StorageReader(os.environ["AWS_REGION"], place, s3client_config=_client())
        dcp.load(self.job.state(), storage_reader=reader, process_group=self.group)

    @staticmethod
    def _writer(place: str) -> Any:
        import torch.distributed.checkpoint as dcp

        if not place.startswith("s3://"):
            return dcp.FileSystemWriter(place)
        from s3torchconnector.dcp import S3StorageWriter

        return S3StorageWriter(os.environ["AWS_REGION"], place, s3client_config=_client())


def _client() -> Any:
    from s3torchconnector import S3ClientConfig

    return S3ClientConfig(force_path_style=True)
