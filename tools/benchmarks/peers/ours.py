"""ckpt itself."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import ckpt
from benchmarks.peers.base import Handle, Peer


class Ours(Peer):
    """``ckpt.save``, ``ckpt.async_save`` and ``ckpt.load``; each chunk read by one rank."""

    name: ClassVar[str] = "ckpt"
    fsyncs: ClassVar[bool] = True
    has_async: ClassVar[bool] = "async_save" in ckpt.__all__
    stores: ClassVar[tuple[str, ...]] = ("tmpfs", "disk", "s3")
    read: ClassVar[str] = "once"
    note: ClassVar[str] = "every byte digested at a save and verified at a load"

    def save_sync(self, place: str) -> None:
        ckpt.save(self.job.engine, place, step=1)

    def save_async(self, place: str) -> Handle:
        save: Any = ckpt.async_save  # type: ignore[attr-defined, unused-ignore]  # while releases without it are compared
        handle = save(self.job.engine, place, step=1)
        return Handle(lambda: handle.staged.wait(), lambda: handle.durable.wait())

    def load(self, place: str) -> None:
        options: dict[str, Any] = {"read": self.read} if reads_once() else {}
        ckpt.load(self.job.engine, place, step=1, **options)


class OursEach(Ours):
    """The same checkpoint, each rank reading all that it needs."""

    name: ClassVar[str] = "ckpt-each"
    read: ClassVar[str] = "each"
    loads_only: ClassVar[bool] = True

    @classmethod
    def why_not(cls, layout: str) -> str:
        return "" if reads_once() else "this release of ckpt has one way of reading only"


def reads_once() -> bool:
    """Can this release of ckpt be told who reads?"""
    return "read" in inspect.signature(ckpt.load).parameters
