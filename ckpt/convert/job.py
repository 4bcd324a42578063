"""One conversion from top to bottom: open the source, lay out the target, write it, compare if that was asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from ckpt.convert.compare import EQUAL, Row, compare_written
from ckpt.convert.find import FORMATS, open_source, open_target, writer_of
from ckpt.convert.opened import Opened
from ckpt.convert.options import WEIGHTS, ReadOptions, WriteOptions, Written
from ckpt.convert.target import Target, target_of
from ckpt.store.open import check_apart
from ckpt.words import count

Bar = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]
"""From what is done (``writing``) to what is told of it (bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What a user asks for.

    ``source``, ``destination``: paths or URLs. ``kind``: the source's format; None: by looking. ``to``: the target's.
    ``step``: of the source; None: the newest. The degrees: see :func:`ckpt.convert.target.target_of`.
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


@dataclass(frozen=True, slots=True)
class Result:
    """What was done. ``compared``: a row for each tensor of the target, None if it was not read back."""

    opened: Opened
    target: Target
    written: Written
    seconds: float
    compared: tuple[Row, ...] | None = None

    @property
    def unequal(self) -> tuple[Row, ...]:
        """What the destination does not hold as the source does."""
        return tuple(row for row in self.compared or () if row.status != EQUAL)


def convert(asked: Conversion, bar: Bar) -> Result:
    """Convert.

    Raises:
        CkptError: whatever can be known before it is raised before anything is written.
    """
    writer, store = writer_of(asked.to), open_target(asked.destination)
    opened = open_source(asked.source, step=asked.step, options=asked.reading, format=asked.kind)
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
    )
    began = time.monotonic()
    with bar("writing") as progress:
        written = writer(opened, store, target, replace(options, progress=progress))
    result = Result(opened, target, written, time.monotonic() - began)
    if not asked.verify or options.dry_run:
        return result
    again = open_source(asked.destination, step=written.step, options=asked.reading, format=asked.to)
    with bar("verifying") as progress:
        rows = compare_written(opened, again, target.specs, memory=options.memory, progress=progress)
    dtypes = {spec.key: spec.dtype for spec in target.specs}
    lost = [
        f"{row.fqn} ({row.role}): {count(row.overflowed, 'finite element')} of SRC too large for "
        f"{dtypes[row.fqn, row.role]}, infinite in DST"
        for row in rows
        if row.overflowed
    ]
    return replace(result, written=replace(written, lost=(*written.lost, *lost)), compared=tuple(rows))
