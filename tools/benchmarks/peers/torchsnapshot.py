"""torchsnapshot."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from benchmarks.engines import leaves
from benchmarks.peers.base import Handle, Peer


class TorchSnapshot(Peer):
    """``Snapshot.take``, ``Snapshot.async_take`` and ``restore``; replicated state is declared by globs."""

    name: ClassVar[str] = "torchsnapshot"
    packages: ClassVar[tuple[str, ...]] = ("torchsnapshot",)

    @classmethod
    def why_not(cls, layout: str) -> str:
        return "knows no DTensor" if layout in ("fsdp2", "hsdp") else ""

    def _state(self) -> dict[str, Any]:
        import torchsnapshot

        return {"state": torchsnapshot.StateDict(**self.job.state())}

    def _options(self) -> dict[str, Any]:
        shared = {"ddp": ["**"], "zero0": ["**"], "zero1": ["state/model/**"], "zero2": ["state/model/**"]}
        return {"app_state": self._state(), "replicated": shared.get(self.job.layout)}

    def save_sync(self, place: str) -> None:
        import torchsnapshot

        torchsnapshot.Snapshot.take(path=place, **self._options())

    def save_async(self, place: str) -> Handle:
        import torchsnapshot

        pending = torchsnapshot.Snapshot.async_take(path=place, **self._options())
        return Handle(lambda: None, pending.wait)  # it returns when everything is staged

    def load(self, place: str) -> None:
        import torchsnapshot

        state = self._state()
        before = list(leaves(dict(state["state"])))
        torchsnapshot.Snapshot(path=place).restore(state)
        with torch.no_grad():
            for live, read in zip(before, leaves(dict(state["state"])), strict=True):
                if read.data_ptr() != live.data_ptr():
                    live.copy_(read)
