"""Do two checkpoints hold the same logical state, whatever their formats and layouts? Tensor by tensor, streaming.

Tensors are found by name and role, through tied names. A weight is one thing at two precisions: where one side has no
param (or no master) of its own, what the other role makes of it counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ckpt.convert.assemble import LEAST_MEMORY, Assembler, Piece
from ckpt.convert.options import MEMORY
from ckpt.convert.overflow import narrowed
from ckpt.errors import LayoutError
from ckpt.layout.box import Box
from ckpt.layout.spec import BUFFER, MASTER, PARAM, Shard, TensorSpec
from ckpt.plan.load_plan import is_count
from ckpt.runtime.differing import difference
from ckpt.runtime.staging import as_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ckpt.convert.opened import Opened
    from ckpt.plan.load_plan import Catalog

EQUAL, DIFFERENT, ONLY_A, ONLY_B = "equal", "different", "only_a", "only_b"
PIECE_BYTES = 4 << 20
"""Bytes of one tensor that are compared at once, on each side."""


@dataclass(frozen=True, slots=True)
class Row:
    """What there is to say of one tensor and role.

    ``status``: :data:`EQUAL` (bit for bit, or the same count), :data:`DIFFERENT`, :data:`ONLY_A`, :data:`ONLY_B`.
    ``elements``: how many differ, in any bit; ``unordered``: how many of those are NaN or infinite on a side;
    ``max_abs``: the largest distance of the others, None if there is none. ``note``: shapes or dtypes that differ, or
    what was compared instead. ``overflowed``: how many are finite in the source of a conversion, and were too large for
    the dtype that they were to be cast to (:func:`compare_written`).
    """

    fqn: str
    role: str
    status: str
    elements: int = 0
    unordered: int = 0
    max_abs: float | None = None
    note: str = ""
    overflowed: int = 0


@dataclass(frozen=True, slots=True)
class _Pair:
    a: TensorSpec
    b: TensorSpec
    note: str = ""
    narrowed: TensorSpec | None = None
    """what ``a`` is a cast of, if that may be too large for it"""


def compare(
    a: Opened,
    b: Opened,
    *,
    roles: Iterable[str] | None = None,
    memory: int = MEMORY,
    progress: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """Return a row for each tensor and role that either side has, ascending by name.

    Args:
        a: one side.
        b: the other.
        roles: only these; None: all.
        memory: bytes that may be held at most, both sides together.
        progress: called with (bytes of ``a`` compared, bytes to compare).

    Raises:
        BudgetTooSmall: of memory.
        CkptError: a side is damaged or cannot be read.
    """
    rows, pairs = _paired(a.catalog(), b.catalog(), None if roles is None else frozenset(roles))
    return _compared(a, b, rows, pairs, memory // 2, progress)


def compare_written(
    source: Opened,
    written: Opened,
    specs: Iterable[TensorSpec],
    *,
    memory: int = MEMORY,
    progress: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """Return a row for each tensor that a conversion was to write (``specs``); ``a`` is the source, ``b`` the target.

    What was to be written in another dtype is cast here once more. What else the target holds is not looked at.
    """
    rows, pairs, own, catalog = list[Row](), list[_Pair](), source.catalog(), written.catalog()
    for spec in specs:
        other, note = _counterpart(own, catalog, spec)
        if other is None:
            rows.append(Row(spec.fqn, spec.role, ONLY_A))
        else:
            # With a note the target keeps it in its master's precision, and nothing is too large for that.
            _add(_Pair(spec, other, note, None if note else narrowed(own, spec)), rows, pairs)
    share = max(LEAST_MEMORY, memory // 2)
    found = _compared(source, written, rows, pairs, share, progress)
    wide = {(pair.a.fqn, pair.a.role): pair.narrowed for pair in pairs}
    return [_only_overflowed(source, row, wide.get((row.fqn, row.role)), share) for row in found]


def _only_overflowed(source: Opened, row: Row, wide: TensorSpec | None, share: int) -> Row:
    """Return the row without what was infinite or NaN before the cast: seldom read, only where there is any."""
    if not row.overflowed or wide is None:
        return row
    shards = [Shard(wide, box) for box in _row_aligned(wide)]
    before = sum(_odd(piece, wide) for piece in Assembler(source, memory=share).pieces(shards))
    return replace(row, overflowed=row.overflowed - before)


def _odd(piece: Piece, spec: TensorSpec) -> int:
    values = as_tensor(piece.data, spec.dtype, (piece.box.volume,))
    return piece.box.volume - int(torch.isfinite(values).sum())


def _compared(
    a: Opened,
    b: Opened,
    rows: list[Row],
    pairs: Sequence[_Pair],
    share: int,
    progress: Callable[[int, int], None] | None,
) -> list[Row]:
    sides = Assembler(a, memory=share, cast=True), Assembler(b, memory=share, cast=True)
    wants = [_boxes(pair) for pair in pairs]
    left = sides[0].pieces(Shard(p.a, box) for p, boxes in zip(pairs, wants, strict=True) for box in boxes)
    right = sides[1].pieces(Shard(p.b, box) for p, boxes in zip(pairs, wants, strict=True) for box in boxes)
    total, done = sum(pair.a.nbytes for pair in pairs), 0
    for pair, boxes in zip(pairs, wants, strict=True):
        rows.append(_row(pair, boxes, left, right))
        done += pair.a.nbytes
        if progress is not None:
            progress(done, total)
    return sorted(rows, key=lambda row: (row.fqn, row.role))


def _paired(a: Catalog, b: Catalog, roles: frozenset[str] | None) -> tuple[list[Row], list[_Pair]]:
    """Return what can be said without reading, and what has to be read."""
    rows, pairs, seen = list[Row](), list[_Pair](), set[tuple[str, str]]()
    for spec in a.order:
        if roles is not None and spec.role not in roles:
            continue
        other, note = _counterpart(a, b, spec)
        if other is None:
            rows.append(Row(spec.fqn, spec.role, ONLY_A))
            continue
        seen.add(other.key)
        _add(_Pair(spec, other, note), rows, pairs)
    for spec in b.order:
        if spec.key in seen or (roles is not None and spec.role not in roles):
            continue
        other, note = _counterpart(b, a, spec)
        if other is None:
            rows.append(Row(spec.fqn, spec.role, ONLY_B))
        else:
            _add(_Pair(other, spec, note), rows, pairs)
    return rows, pairs


def _add(pair: _Pair, rows: list[Row], pairs: list[_Pair]) -> None:
    numbers = {spec.dtype.startswith("complex") for spec in (pair.a, pair.b)}
    if pair.a.shape != pair.b.shape:
        shapes = f"shape {list(pair.a.shape)} and {list(pair.b.shape)}"
        rows.append(Row(pair.a.fqn, pair.a.role, DIFFERENT, note=shapes))
    elif pair.a.dtype != pair.b.dtype and True in numbers:
        rows.append(Row(pair.a.fqn, pair.a.role, DIFFERENT, note=f"dtype {pair.a.dtype} and {pair.b.dtype}"))
    else:
        pairs.append(pair)


def _counterpart(own: Catalog, other: Catalog, spec: TensorSpec) -> tuple[TensorSpec | None, str]:
    """Return what the other side has in the place of a tensor of this side, and a note if it is another role's.

    A weight is one thing at two precisions (:mod:`ckpt.plan.load_plan`): what matches in dtype comes first, and what
    one side keeps in high precision only, the other side's param may be the rounding of.
    """
    found = other.find(spec.fqn, spec.role)
    if spec.role not in (PARAM, MASTER, BUFFER) or (found is not None and found.dtype == spec.dtype):
        return found, ""
    swapped = BUFFER if spec.role == PARAM else PARAM
    if found is None and spec.role != MASTER and own.find(spec.fqn, swapped) is None:
        found = other.find(spec.fqn, swapped)  # a plain state dict does not say what is a buffer
    if spec.role == BUFFER or (found is not None and found.role == BUFFER):
        return found, ""
    twin = other.find(spec.fqn, PARAM if spec.role == MASTER else MASTER)
    if twin is not None and twin.dtype == spec.dtype:
        return twin, f"compared with the other side's {twin.role}"
    if spec.role == MASTER:
        return found, ""
    if found is not None:  # does it stand for this side's master too?
        master = own.find(spec.fqn, MASTER)
        twin = found if twin is None and master is not None and master.dtype == found.dtype else None
    if twin is None:
        return found, ""
    rounded = TensorSpec(twin.fqn, PARAM, spec.dtype, twin.shape)
    return rounded, f"compared with the rounding of the other side's {twin.role}"


def _row_aligned(spec: TensorSpec) -> list[Box]:
    return list(Box.whole(spec.shape).cut(max(1, PIECE_BYTES // spec.itemsize)))


def _boxes(pair: _Pair) -> list[Box]:
    return _row_aligned(max(pair.a, pair.b, key=lambda spec: spec.itemsize))


def _row(pair: _Pair, boxes: Sequence[Box], left: Iterator[Piece], right: Iterator[Piece]) -> Row:
    elements = unordered = overflowed = 0
    largest: float | None = None
    for box in boxes:
        one, other = next(left), next(right)
        if one.box != box or other.box != box:  # pieces of at most PIECE_BYTES are never cut
            raise LayoutError(f"{pair.a}: asked for box {box}, got {one.box} and {other.box}")
        if pair.narrowed is not None:
            overflowed += _odd(one, pair.a)
        found = difference(*_alike(pair, box, one.data, other.data), box)
        if found is not None:
            elements += found.elements
            unordered += found.unordered
            largest = found.max_abs if largest is None else max(largest, found.max_abs or 0.0)
    note = pair.note
    counts = is_count(pair.a, pair.b)
    if pair.a.dtype != pair.b.dtype and not counts:
        note = "; ".join(filter(None, (f"dtype {pair.a.dtype} and {pair.b.dtype}", note)))
    same = not elements and (pair.a.dtype == pair.b.dtype or counts)
    key = (pair.a.fqn, pair.a.role)
    return Row(*key, EQUAL if same else DIFFERENT, elements, unordered, largest if elements else None, note, overflowed)


def _alike(pair: _Pair, box: Box, one: memoryview, other: memoryview) -> tuple[list[memoryview], str]:
    """Return both sides' bytes in one dtype: their own, or where they differ, float64."""
    if pair.a.dtype == pair.b.dtype:
        return [one, other], pair.a.dtype
    wide = list[memoryview]()
    for spec, data in ((pair.a, one), (pair.b, other)):
        values = as_tensor(data, spec.dtype, (box.volume,))
        # + 0.0: of two dtypes, zeros of either sign are the same number
        wide.append(memoryview((values.double() + 0.0).numpy().tobytes()))
    return wide, "float64"
