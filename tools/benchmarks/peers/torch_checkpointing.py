"""torch_checkpointing (Meta)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist

from benchmarks.peers.base import Handle, Peer

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from benchmarks.engines import Job

WAIT_SECONDS = 600


class TorchCheckpointing(Peer):
    """``CheckpointManager`` with its synchronous and its asynchronous saver.

    Two repairs for a CPU: direct I/O is off (it writes unaligned buffers, which the kernel refuses), and its exchange
    of metadata, which asks for CUDA tensors by name, goes through torch's own collective of objects.
    """

    name: ClassVar[str] = "torch_checkpointing"
    packages: ClassVar[tuple[str, ...]] = ("torch_checkpointing",)
    note: ClassVar[str] = "direct I/O off and its CUDA-only exchange of metadata replaced: neither runs here"

    def __init__(self, job: Job, scratch: Path) -> None:
        super().__init__(job, scratch)
        from torch_checkpointing.metadata_manager import DefaultMetadataManager

        DefaultMetadataManager._all_gather_pickled_data = _gather
        self._managers: dict[str, Any] = {}

    def _manager(self, mode: str) -> Any:
        if mode not in self._managers:
            from torch_checkpointing import CheckpointManager, ItemSpec
            from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
            from torch_checkpointing.default_resharder import DefaultResharder
            from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

            config = {"sync": SyncCheckpointSaverConfig, "async": AsyncCheckpointSaverConfig}[mode]
            # A rank's own tensors have no place in a layout, so there is nothing to reshard.
            items = {
                key: ItemSpec() if key.startswith("rank") else ItemSpec(resharder=DefaultResharder())
                for key in self.job.state()
            }
            self._managers[mode] = CheckpointManager(
                CheckpointManager.Config(
                    storage_config=LocalFileSystemStorageConfig(use_direct_io=False), items=items, save=config()
                )
            )
        return self._managers[mode]

    def save_sync(self, place: str) -> None:
        self._manager("sync").save(place, self.job.state())

    def save_async(self, place: str) -> Handle:
        manager = self._manager("async")
        future = manager.save(place, self.job.state())
        staged = manager._staging_future
        return Handle(lambda: staged and staged.result(WAIT_SECONDS), lambda: future.result(WAIT_SECONDS))

    def guard(self) -> AbstractContextManager[Any]:
        return self._manager("async").lock()

    def load(self, place: str) -> None:
        self._manager("sync").load(place, into=self.job.state())

    def close(self) -> None:
        for manager in self._managers.values():
            manager.close()


def _gather(_: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
    found: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, data, group=process_group)
    return dict(enumerate(found))
