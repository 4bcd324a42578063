"""The systems that are compared, one class each, and their registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.peers.bytecheckpoint import ByteCheckpoint
from benchmarks.peers.dcp import Dcp
from benchmarks.peers.deepspeed import DeepSpeed
from benchmarks.peers.dlrover import DLRover
from benchmarks.peers.ours import Ours, OursEach
from benchmarks.peers.torch_checkpointing import TorchCheckpointing
from benchmarks.peers.torchsnapshot import TorchSnapshot
from benchmarks.peers.yardsticks import SafeTensors, TorchSave

if TYPE_CHECKING:
    from benchmarks.peers.base import Peer

PEERS: dict[str, type[Peer]] = {
    peer.name: peer
    for peer in (
        Ours,
        OursEach,
        DeepSpeed,
        Dcp,
        TorchSnapshot,
        TorchCheckpointing,
        DLRover,
        ByteCheckpoint,
        TorchSave,
        SafeTensors,
    )
}
"""Name -> class, in the order of the tables. ckpt comes first."""

NOT_RUN = {
    "megatron-core": "dist_checkpointing needs CUDA stubs for the whole process, which would slow the others down",
    "nvidia-resiliency-ext": "on CPU tensors its staging is an alias, not a copy: the snapshot would not be one",
    "orbax": "JAX's; has no torch engine to save",
}
"""Known systems that this benchmark does not run, and why."""
