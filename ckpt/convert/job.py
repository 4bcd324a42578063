"""One conversion from top to bottom: open the source, lay out the target, write it, compare if that was asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ckpt.convert.checking import Checked, check_source
from ckpt.convert.compare import EQUAL, Row, compare_written
from ckpt.convert.find import FORMATS, open_source, open_target, writer_of
from ckpt.convert.opened import Opened
from ckpt.convert.options import ALL, WEIGHTS, ReadOptions, Span, WriteOptions, Written
from ckpt.convert.overflow import lines, narrowed
from ckpt.convert.target import Target, target_of
from ckpt.store.open import check_apart

if TYPE_CHECKING:
    from collections.abc import Sequence

Bar = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]
"""From what is done (``writing``) to what is told of it (bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What a user asks for.

    ``source``, ``destination``: paths or URLs. ``kind``: the source's format; None: by looking. ``to``: the target's.
    ``step``: of the source; None: the newest. The degrees: see :func:`ckpt.convert.target.target_of`. ``verify``: read
    the target back. ``check_source``: compare the source with its checksums before anything is written.
    ``otherwise_whole``: see :func:`ckpt.convert.target.target_of`.
    """

    source: str
    destination: str
    to: str = "ckpt"
    kind: str | None = None
    step: int | None = None
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    zero: int | None = None
    stages: tuple[int, ...] = ()
    vocabulary_multiple: int | None = None
    reading: ReadOptions = field(default_factory=ReadOptions)
    writing: WriteOptions = field(default_factory=WriteOptions)
    verify: bool = False
    check_source: bool = False
    otherwise_whole: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """What was done. ``compared``: a row for each tensor of the target, None if it was not read back. ``checked``: what
    of the source has the checksums that it should have, None if that was not asked for.
    """

    opened: Opened
    target: Target
    written: Written
    seconds: float
    compared: tuple[Row, ...] | None = None
    checked: Checked | None = None

    @property
    def unequal(self) -> tuple[Row, ...]:
        """What the destination does not hold as the source does."""
        return tuple(row for row in self.compared or () if row.status != EQUAL)


def convert(asked: Conversion, bar: Bar, begun: Callable[[Opened, Target, str], None] | None = None) -> Result:
    """Convert.

    Args:
        asked: what is to be done.
        bar: see :data:`Bar`.
        begun: called with source, target and the URL of the destination as soon as they are known.

    Raises:
        DigestMismatch: with ``check_source``, records of the source are damaged; nothing was written.
        CkptError: whatever can be known before it is raised before anything is written.
    """
    writer, store = writer_of(asked.to), open_target(asked.destination)
    seen = set[Span]() if asked.check_source else None
    weights = FORMATS[asked.to].weights or asked.writing.roles == WEIGHTS
    reading = replace(asked.reading, seen=seen, roles=WEIGHTS if weights else ALL)
    opened = open_source(asked.source, step=asked.step, options=reading, format=asked.kind)
    check_apart(opened.store.url, store.url)
    format = FORMATS[asked.to]
    options = replace(asked.writing, roles=WEIGHTS) if format.weights else asked.writing
    target = target_of(
        opened,
        dp=asked.dp,
        tp=asked.tp,
        pp=asked.pp,
        ep=asked.ep,
        zero=asked.zero,
        rules=asked.reading.rules,
        engine=format.engine,
        stages=asked.stages,
        vocabulary_multiple=asked.vocabulary_multiple,
        roles=options.roles,
        dtype=options.dtype,
        cut=not format.whole,
        otherwise_whole=asked.otherwise_whole,
    )
    if begun is not None:
        begun(opened, target, store.url)
    planned, checked, began = None, None, time.monotonic()
    if options.dry_run or seen is not None:  # what cannot be written is told before all is read
        planned = writer(opened, store, target, replace(options, dry_run=True))
    if seen is not None:
        with bar("checking") as progress:
            checked = check_source(opened, seen, progress)
    if options.dry_run and planned is not None:
        planned = replace(planned, lost=(*opened.lost, *planned.lost))
        return Result(opened, target, planned, time.monotonic() - began, checked=checked)
    began = time.monotonic()
    with bar("writing") as progress:
        written = writer(opened, store, target, replace(options, progress=progress))
    result = Result(opened, target, written, time.monotonic() - began, checked=checked)
    if not asked.verify:
        return replace(result, written=_told(written, written.overflowed, opened, target))
    reading = replace(asked.reading, optimizer_step=None)
    again = open_source(asked.destination, step=written.step, options=reading, format=asked.to)
    with bar("verifying") as progress:
        rows = compare_written(opened, again, target.specs, memory=options.memory, progress=progress)
    found = [(row.fqn, row.role, row.overflowed) for row in rows if row.overflowed]
    return replace(result, written=_told(written, found, opened, target, whole=True), compared=tuple(rows))


def _told(
    written: Written, overflowed: Sequence[tuple[str, str, int]], opened: Opened, target: Target, *, whole: bool = False
) -> Written:
    """Return what was written, with what the reader has left out, and what a cast has made infinite, among what is
    lost. ``whole``: of all that is there, not only of what this run has written.
    """
    lost = lines(overflowed, {spec.key: spec.dtype for spec in target.specs})
    if written.bytes_present and not whole:
        own = opened.catalog()
        if any(narrowed(own, spec) is not None for spec in target.specs):
            lost.append("what an earlier run has written was not searched for numbers that are too large (--verify)")
    return replace(written, lost=(*opened.lost, *written.lost, *lost))
