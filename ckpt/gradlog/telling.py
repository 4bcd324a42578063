"""What one record of a log says, in numbers: for people who look at a log, not for a replay.

Only the words of a record are read here, not its gradients. Everything in them is of somebody's making: what is not a
number where one is expected is told as unknown, and what does not fit together is an error that names the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt.errors import CkptError, MalformedData
from ckpt.format.frames import HEADER
from ckpt.gradlog.record import Options, RankHead, Record, read_options
from ckpt.gradlog.replaying.opened import Opened
from ckpt.layout.spec import ITEMSIZE
from ckpt.runtime.extras import ENGINE
from ckpt.runtime.objects import decode_object

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckpt.repo.log_files import Place
    from ckpt.store.base import Store

MAX_NUMEL = 1 << 60
MAX_SECONDS = 1e9
_SCALERS = ("loss_scaler", "scaler")
_SCALES = ("cur_scale", "scale")
_COUNTERS = frozenset({"step"})
"""Options of a group that a kernel counts in."""

Group = tuple[int, int]
Groups = Mapping[Group, str]
"""(optimizer, group) -> JSON of its options"""


class Said(NamedTuple):
    """What a record says. ``nbytes``: in the file, header and padding included. ``stored``, ``raw``: bytes of gradients
    as they are in the file, and before the codec. ``square``: None if unknown. ``multipliers``: those of gradients that
    were stored in half precision. ``lr``: by group. ``loss_scale``: behind the step.
    """

    nbytes: int
    stored: int
    raw: int
    skipped: bool
    square: float | None
    seconds: float
    dtypes: frozenset[str]
    multipliers: frozenset[float]
    lr: dict[Group, float]
    loss_scale: float | None
    before: dict[Group, str]
    behind: dict[Group, str]


def read_words(store: Store, place: Place, rank: int) -> tuple[Record, int]:
    """Return the record at a place without its tensors, and how many bytes its gradients have.

    Raises:
        MalformedData: it is none, or another one.
    """
    opened = Opened(store, place, rank)
    record = opened.record
    names = {one.name for call in record.calls for one in call.gradients}
    spans = [opened.span(name) for name in names if name in opened]
    return record, sum(stop - start for start, stop in spans)


def numel_of(head: RankHead, where: str) -> list[int]:
    """Return how many elements a rank logs of each entry.

    Raises:
        MalformedData: boxes of a size that nothing has.
    """
    found = []
    for entry in head.entries:
        sizes = [size for part in entry.parts for size in part.sizes]
        numel = sum(math.prod(part.sizes) for part in entry.parts)
        if min(sizes, default=0) < 0 or numel > MAX_NUMEL:
            raise MalformedData(f"{where}: an entry of {numel} elements ({', '.join(entry.members[:3])})")
        found.append(numel)
    return found


def said_of(record: Record, stored: int, numel: Sequence[int], place: Place) -> Said:
    """Return what a record says.

    Raises:
        MalformedData: it speaks of gradients or options that cannot be.
    """
    where = f"{place.key}: the record of step {place.step}"
    raw, dtypes, multipliers = 0, set(), set()
    for one in (gradient for call in record.calls for gradient in call.gradients):
        if one.dtype not in ITEMSIZE or not all(0 <= entry < len(numel) for entry in one.entries):
            raise MalformedData(f"{where}: a gradient of {one.dtype[:40]!r} and entries {one.entries[:5]}")
        count = sum(numel[entry] for entry in one.entries)
        raw += ITEMSIZE[one.dtype] * count
        if count:  # else it only says what was stepped
            dtypes.add(one.dtype)
        if one.scale:
            multipliers.add(_multiplier(one.scale, where))
    behind = documents(record.options)
    before: dict[Group, str] = {}
    for call in record.calls:
        before = {**documents(call.options), **before}
    lr = {group: rate for group, text in {**behind, **before}.items() if (rate := _rate(text, where)) is not None}
    return Said(
        nbytes=HEADER + place.nbytes + -place.nbytes % 8,
        stored=stored,
        raw=raw,
        skipped=record.skipped,
        square=_finite(record.square),
        seconds=min(max(_finite(record.seconds) or 0.0, 0.0), MAX_SECONDS),
        dtypes=frozenset(dtypes),
        multipliers=frozenset(multipliers),
        lr=lr,
        loss_scale=_loss_scale(record, where),
        before=before,
        behind=behind,
    )


def documents(options: Iterable[Options]) -> dict[Group, str]:
    """Return the options of groups as they are stored, by group."""
    return {(one.optimizer, one.group): one.document for one in options}


def changed_between(behind: Groups, before: Groups, where: str) -> list[str]:
    """Return the names of options that are others in front of a step than they were behind the one before it."""
    names: set[str] = set()
    for group, now in before.items():
        then = behind.get(group)
        if then is not None and then != now:
            a, b = (read_options(Options(optimizer=0, group=0, document=text), where) for text in (then, now))
            names |= {name for name in {**a, **b} if name not in _COUNTERS and a.get(name) != b.get(name)}
    return sorted(names)


def _rate(text: str, where: str) -> float | None:
    return _finite(read_options(Options(optimizer=0, group=0, document=text), where).get("lr"))


def _multiplier(text: str, where: str) -> float:
    try:
        number = _finite(float.fromhex(text))
    except (ValueError, OverflowError):
        number = None
    if number is None:
        raise MalformedData(f"{where}: a multiplier {text[:40]!r}")
    return number


def _loss_scale(record: Record, where: str) -> float | None:
    for one in record.objects:
        if one.kind == ENGINE and one.name in _SCALERS and not one.tensors:
            try:
                tree = decode_object(one.document.encode(), [], where)
            except CkptError:  # says nothing to us; a replay tells what is wrong with it
                continue
            return _scale_in(tree)
    return None


def _scale_in(tree: Any) -> float | None:
    """Return the scale that a scaler's state has: at the top, or (of torch's) in ``state`` or ``autocast``."""
    if not isinstance(tree, Mapping):
        return None
    for inner in (tree, tree.get("state"), tree.get("autocast")):
        if isinstance(inner, Mapping):
            for name in _SCALES:
                if (scale := _finite(inner.get(name))) is not None:
                    return scale
    return None


def _finite(value: object) -> float | None:
    """Return a number that JSON and a plot can show; None of anything else."""
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
