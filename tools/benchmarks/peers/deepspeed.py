"""DeepSpeed's own checkpoints."""

from __future__ import annotations

from typing import ClassVar

from benchmarks.engines import ZERO_LAYOUTS
from benchmarks.peers.base import Peer

TAG = "saved"


class DeepSpeed(Peer):
    """``engine.save_checkpoint`` and ``engine.load_checkpoint``."""

    name: ClassVar[str] = "DeepSpeed"
    packages: ClassVar[tuple[str, ...]] = ("deepspeed",)
    has_async: ClassVar[bool] = False

    @classmethod
    def why_not(cls, layout: str) -> str:
        return "" if layout in ZERO_LAYOUTS else "saves its own engine only"

    def save_sync(self, place: str) -> None:
        self.job.engine.save_checkpoint(place, tag=TAG)

    def load(self, place: str) -> None:
        if self.job.engine.load_checkpoint(place, tag=TAG)[0] is None:
            raise RuntimeError("DeepSpeed has not loaded its checkpoint")
