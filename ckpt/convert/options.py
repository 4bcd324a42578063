"""What a user may say about how a source is read and how a target is written, and what a writer answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt.layout.rules import Rules

ALL, WEIGHTS = "all", "weights"
"""Which roles are written: everything, or parameters and buffers."""
MEMORY = 2 << 30
"""Bytes of host memory that a conversion takes at most, if nobody says."""


Span = tuple[str, int, int]
"""A key, the first byte, and the number of bytes."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """``trust_pickle``: unpickle whatever the files ask for, which runs code from them. ``rules``: how tensor
    parallelism cut what the source does not say itself (docs/rules.md). ``optimizer_step``: steps that the optimizer
    has taken, where files of DeepSpeed that count otherwise than their engine are right. ``seen``: gets the places of
    all archives of ``torch.save`` that are read of the checkpoint, for who wants to compare them with their checksums.
    ``roles``: :data:`WEIGHTS` if nothing else is wanted: what is wrong with an optimizer keeps nobody from them then.
    """

    trust_pickle: bool = False
    rules: Rules | None = None
    optimizer_step: int | None = None
    seen: set[Span] | None = field(default=None, compare=False)
    roles: str = ALL


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How a target is written. A writer says by name what it cannot do.

    ``memory``: bytes that all workers together may hold, buffers of stores included. ``workers``: processes that write
    at once. ``roles``: :data:`ALL` or :data:`WEIGHTS`. ``dtype``: of floating-point parameters and buffers in the
    target; None: that of the source; masters and moments keep theirs. ``step``: the number under which it is written;
    None: that of the source. ``progress``: called with (bytes written so far, bytes to write), by one thread at a time;
    what it raises ends the writing. ``dry_run``: write nothing, and answer what would be done: the bytes to read and to
    write, what would be lost and what made up. ``resume``: DST may hold what an earlier run of the same conversion
    left, of which files that are whole are kept; else a DST that holds anything is refused before anything is written.
    """

    memory: int = MEMORY
    workers: int = 1
    roles: str = ALL
    dtype: str | None = None
    step: int | None = None
    progress: Callable[[int, int], None] | None = None
    dry_run: bool = False
    resume: bool = True


@dataclass(frozen=True, slots=True)
class Written:
    """What a writer has done, or with ``dry_run`` would do.

    ``format`` and ``where`` of the target; ``step`` under which it stands there. ``bytes_read``: from the source,
    ``bytes_written``: to the target, files that are no tensors included; ``bytes_present``: were there already, left by
    a run that was interrupted. ``files``: keys below ``where``, written or present. ``lost``: a line for each thing
    that the source has and the target does not; ``made``: a line for each that the target has and the source does not.
    ``memory``: bytes of host memory that it takes at most, 0 if the writer does not tell. ``overflowed``: (name, role,
    elements) of what was finite and too large for its dtype in the target, of what is not ``bytes_present``.
    """

    format: str
    where: str
    step: int
    bytes_read: int
    bytes_written: int
    bytes_present: int = 0
    files: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    made: tuple[str, ...] = ()
    memory: int = 0
    overflowed: tuple[tuple[str, str, int], ...] = ()
