"""ByteCheckpoint."""

from __future__ import annotations

from typing import Any, ClassVar

from benchmarks.peers.base import Peer


class ByteCheckpoint(Peer):
    """``bytecheckpoint.save`` and ``load`` of a module and an optimizer."""

    name: ClassVar[str] = "ByteCheckpoint"
    packages: ClassVar[tuple[str, ...]] = ("bytecheckpoint", "grpc")
    has_async: ClassVar[bool] = False
    in_loops: ClassVar[bool] = False
    note: ClassVar[str] = "made for torch <= 2.5; its fast mode has no way to wait for the files"

    @classmethod
    def why_not(cls, layout: str) -> str:
        return "" if layout in ("ddp", "fsdp2", "hsdp") else "has no support for ZeRO"

    def _options(self) -> dict[str, Any]:
        job: Any = self.job
        framework = "ddp" if job.layout == "ddp" else "fsdp2"
        return {"checkpoint_state": {"model": job.model, "optimizer": job.optimizer}, "framework": framework}

    def save_sync(self, place: str) -> None:
        import bytecheckpoint

        bytecheckpoint.save(place, **self._options())

    def load(self, place: str) -> None:
        import bytecheckpoint

        bytecheckpoint.load(place, **self._options())
