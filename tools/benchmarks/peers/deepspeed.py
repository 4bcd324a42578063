"""DeepSpeed's own checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from benchmarks.engines import ZERO_LAYOUTS
from benchmarks.peers.base import Peer


class DeepSpeed(Peer):
    """``engine.save_checkpoint`` and ``engine.load_checkpoint``."""

    name: ClassVar[str] = "DeepSpeed"
    packages: ClassVar[tuple[str, ...]] = ("deepspeed",)
    has_async: ClassVar[bool] = False

    @classmethod
    def why_not(cls, layout: str) -> str:
        return "" if layout in ZERO_LAYOUTS else "saves its own engine only"

    def save_sync(self, place: str) -> None:
        folder = Path(place)
        self.job.engine.save_checkpoint(str(folder.parent), tag=folder.name)

    def load(self, place: str) -> None:
        folder = Path(place)
        if self.job.engine.load_checkpoint(str(folder.parent), tag=folder.name)[0] is None:
            raise RuntimeError("DeepSpeed has not loaded its checkpoint")
