"""What every system under test can be asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.engines import Job


class PeerFailed(Exception):
    """A system failed on some rank; all ranks know."""


@dataclass(frozen=True)
class Handle:
    """A save that goes on: each call blocks until that much of it is done, and raises what went wrong.

    ``durable`` is the system's own "finished"; whether the files are on the disk then is told by ``Peer.fsyncs``.
    """

    staged: Callable[[], object]
    durable: Callable[[], object]


class Peer:
    """One system on one rank. Every method but :meth:`why_not` is a collective.

    A checkpoint lives at a *place*: the path of a folder of its own, or an ``s3://`` URL.
    """

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()
    """What must be importable."""
    fsyncs: ClassVar[bool] = False
    """Are the files on the disk when a save says that it is finished?"""
    has_async: ClassVar[bool] = True
    in_loops: ClassVar[bool] = True
    """Is what it costs a training loop of interest?"""
    yardstick: ClassVar[bool] = False
    """A writer of one rank's tensors: no plan, no layout, nothing that could be loaded elsewhere."""
    loads_only: ClassVar[bool] = False
    """Another way of loading what the peer before it in the registry can save too."""
    stores: ClassVar[tuple[str, ...]] = ("tmpfs", "disk")
    note: ClassVar[str] = ""
    """One line for the reader of the table."""

    def __init__(self, job: Job, scratch: Path) -> None:
        self.job, self.scratch = job, scratch

    @classmethod
    def why_not(cls, layout: str) -> str:
        """Return why this system cannot save a layout, "" if it can."""
        return ""

    @classmethod
    def why_not_here(cls, layout: str) -> str:
        """Return the same, or that a package is not installed."""
        missing = [name for name in cls.packages if not _importable(name)]
        return f"not installed: {', '.join(missing)}" if missing else cls.why_not(layout)

    def save_sync(self, place: str) -> None:
        """Save and return when the system says that it is done."""
        raise NotImplementedError

    def save_async(self, place: str) -> Handle:
        """Begin a save."""
        raise NotImplementedError

    def load(self, place: str) -> None:
        """Load into the live tensors."""
        raise NotImplementedError

    def guard(self) -> AbstractContextManager[Any]:
        """Return the context that the system wants an optimizer's step in, for its snapshots to be consistent."""
        return nullcontext()

    def close(self) -> None:
        """End what runs in the background."""


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
