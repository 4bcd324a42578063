"""DLRover's flash checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from benchmarks.engines import leaves
from benchmarks.peers.base import Handle, Peer

if TYPE_CHECKING:
    from benchmarks.engines import Job

WAIT_SECONDS = 600


class DLRover(Peer):
    """``DdpCheckpointer``: state is copied to shared memory in the call, and written from there by a process.

    Replicated state is saved by rank 0; of sharded state each rank saves what it holds. A restore would take the copy
    in shared memory: here it reads the files, as after the loss of a host.
    """

    name: ClassVar[str] = "DLRover"
    packages: ClassVar[tuple[str, ...]] = ("dlrover", "grpc")
    note: ClassVar[str] = "restored from its files, not from its copy in shared memory"

    def __init__(self, job: Job, scratch: Path) -> None:
        super().__init__(job, scratch)
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        self.shards = 1 if job.layout in ("ddp", "zero0") else job.world
        self.folder = scratch / "dlrover"
        if job.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        self._saver = DdpCheckpointer(
            str(self.folder), local_shard_num=self.shards, global_shard_num=self.shards, comm_backend="gloo"
        )
        self._count = 0

    def _file(self, place: str) -> Path:
        return Path(place) / f"rank_{self.job.rank % self.shards}.pt"

    def save_sync(self, place: str) -> None:
        self.save_async(place).durable()

    def save_async(self, place: str) -> Handle:
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType

        self._count += 1
        count = self._count
        Path(place).mkdir(parents=True, exist_ok=True)
        path = str(self._file(place))
        self._saver.save_checkpoint(count, self.job.own_state(), path=path, storage_type=StorageType.DISK)
        return Handle(lambda: None, lambda: self._wait(count))

    def _wait(self, count: int) -> None:
        """Wait for the tracker file; its own ``wait_latest_checkpoint`` looks every three seconds."""
        tracker, deadline = self.folder / "dlrover_latest.txt", time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            try:
                if int(tracker.read_text()) >= count:
                    return
            except (OSError, ValueError):
                pass
            time.sleep(0.02)
        raise TimeoutError(f"DLRover has not finished save {count} in {WAIT_SECONDS} s")

    def load(self, place: str) -> None:
        found: Any = self._saver._engine._load_from_storage(str(self._file(place)))
        read = found.get("model_states", found)
        live = self.job.own_state()
        with torch.no_grad():
            for mine, theirs in zip(leaves(live), leaves({key: read[key] for key in live}), strict=True):
                mine.copy_(theirs)

    def close(self) -> None:
        self._saver._engine.close()
        process = self._saver._engine.saver_proc
        if process is not None:
            process.terminate()
