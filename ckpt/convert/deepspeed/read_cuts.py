"""How tensor parallelism cut what a DeepSpeed checkpoint holds: by the user's rules, else by what the files say.

What the files say is DeepSpeed's ``universal_checkpoint_info``, which AutoTP writes and Megatron-DeepSpeed's users do.
It is believed of a name that it names, and of the others only if it names those that are not cut: an empty record,
which many scripts pass, would make every layer norm as many times longer as there are ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt.describe.model import Split, refuse
from ckpt.errors import LayoutError, UnsupportedLayout
from ckpt.layout.rules import Rules, tiling_of
from ckpt.layout.tiling import Runs, Tiling, balanced, length, take

if TYPE_CHECKING:
    from collections.abc import Sequence

Shape = tuple[int, ...]

_MAX_PATTERNS = 100_000
_REPLICATED = ("tp_replicated_parameter_patterns",)
_ROW = ("parameter_with_row_parallelism_patterns",)


@dataclass(slots=True)
class Cuts:
    """Tilings of one checkpoint. ``info``: its ``universal_checkpoint_info``. ``problems``: what cannot be placed;
    ``wrong``: what rules say that cannot be. ``splits``: see :class:`~ckpt.convert.opened.Opened`.
    """

    where: str
    tp: int
    rules: Rules
    info: Mapping[str, Any]
    problems: dict[str, None] = field(default_factory=dict)
    wrong: dict[str, None] = field(default_factory=dict)
    splits: dict[str, Split | None] = field(default_factory=dict)
    _known: dict[tuple[str, Shape, int], Tiling] = field(default_factory=dict)

    def tiling(
        self, fqn: str, local: str, shapes: Sequence[Shape | None], rank: int, *, buffer: bool = False
    ) -> Tiling:
        """Return which part of the global tensor a rank's tensor is; the whole of it, and a problem, if unknown.

        Args:
            fqn: its name in the whole model, which rules see.
            local: its name in the files, which DeepSpeed's record sees.
            shapes: on each tensor-parallel rank.
            rank: number of this one.
            buffer: it is one, of which DeepSpeed's record says nothing: where there is a record, all have the whole.
        """
        own = shapes[rank]
        if own is None:
            self._problem(f"tensor {fqn!r}: rank {rank} of the tensor-parallel group does not hold it")
            return Tiling.whole(())
        key = (fqn, own, rank)
        if key not in self._known:
            try:
                self._known[key] = self._find(fqn, local, shapes, rank, own, buffer)
            except LayoutError as error:
                self._problem(f"tensor {fqn!r}: {error}")
                self._known[key] = Tiling.whole(own)
        return self._known[key]

    @property
    def _recorded(self) -> bool:
        return any(self.info.get(name) for name in _REPLICATED)

    def check(self) -> None:
        """Raise an error with every problem, if there is any.

        Raises:
            ConfigError: rules do not fit the tensors of the files.
            UnsupportedLayout: nothing says how they were cut.
        """
        if self.wrong:
            refuse(f"{self.where}: a rule is wrong, or of another layout", self.wrong)
        if self.problems:
            raise UnsupportedLayout(
                f"{self.where}: nothing says how tensor parallelism cut its tensors: give --rules (docs/rules.md)",
                tuple(self.problems),
            )

    def _problem(self, text: str) -> None:
        self.problems.setdefault(text)

    def _find(
        self, fqn: str, local: str, shapes: Sequence[Shape | None], rank: int, own: Shape, buffer: bool
    ) -> Tiling:
        rule = self.rules.rule_for(fqn)
        if rule is not None:
            try:
                return tiling_of(rule, own, rank, self.tp)
            except LayoutError as error:
                said = str(error) if str(error).startswith("rule ") else f"rule '{rule.match}': {error}"
                self.wrong.setdefault(f"tensor {fqn!r}: {said}")
                return Tiling.whole(own)
        if self.tp == 1:
            return Tiling.whole(own)
        if any(shape is None for shape in shapes):
            raise LayoutError("not every rank of the tensor-parallel group holds it")
        if buffer and not self.rules.tensors and self._recorded:
            self.splits[fqn] = None
            return Tiling.whole(own)
        return self._by_record(fqn, local, [shape for shape in shapes if shape is not None], rank)

    def _by_record(self, fqn: str, local: str, shapes: Sequence[Shape], rank: int) -> Tiling:
        info, own = self.info, shapes[rank]
        reasons = info.get("autotp_unsupported_parameter_patterns") or {}
        for pattern, reason in reasons.items() if isinstance(reasons, dict) else ():
            if _matches(pattern, local):
                raise LayoutError(f"AutoTP has cut it in a way that it cannot describe: {reason!s:.200}")
        if _any(info, ("parameter_to_average_patterns",), local):
            raise LayoutError("it differs between tensor-parallel ranks, and is averaged when DeepSpeed converts it")
        if _any(info, _REPLICATED, local):
            self.splits[fqn] = None
            return Tiling.whole(own)
        fused = _fused(info, local, shapes, self.tp)
        if fused is not None:
            dim, widths = fused
            return self._cut(fqn, shapes, rank, dim, widths)
        if _any(info, _ROW, local):
            return self._cut(fqn, shapes, rank, 1, [[shape[1] for shape in shapes if len(shape) > 1]])
        if not self._recorded:
            raise LayoutError("no rule explains it (a whole one needs a rule without dim)")
        if not own:
            raise LayoutError("a single number, which the record does not name as whole")
        size = info.get("original_vocab_size") if _any(info, ("vocabulary_parameter_patterns",), local) else None
        size = size if isinstance(size, int) else None
        return self._cut(fqn, shapes, rank, 0, [[shape[0] for shape in shapes]], size)

    def _cut(
        self,
        fqn: str,
        shapes: Sequence[Shape],
        rank: int,
        dim: int,
        widths: Sequence[Sequence[int]],
        size: int | None = None,
    ) -> Tiling:
        found = _cut(shapes, rank, dim, widths, size)
        split = _split(dim, widths, size)
        if split is not None:
            self.splits[fqn] = split
        return found


def _split(dim: int, widths: Sequence[Sequence[int]], size: int | None) -> Split | None:
    """Return what is recorded as widths; None if ranks differ, and by more than one row."""
    parts = tuple((sum(one), sum(one)) for one in widths) if len(widths) > 1 else ()
    if size is not None:
        return Split(dim, vocabulary=True)
    if all(len(set(one)) == 1 for one in widths):
        return Split(dim, parts)
    even = [[length(balanced(((0, sum(one)),), len(one), n)) for n in range(len(one))] for one in widths]
    return Split(dim, parts, balanced=True) if even == [list(one) for one in widths] else None


def _cut(
    shapes: Sequence[Shape], rank: int, dim: int, widths: Sequence[Sequence[int]], size: int | None = None
) -> Tiling:
    """Return the tiling along ``dim`` of matrices that are cut by ``widths[matrix][rank]``.

    ``size``: of the dimension without padding.
    """
    own = shapes[rank]
    if not 0 <= dim < len(own) or any(len(one) != len(shapes) for one in widths):
        raise LayoutError(f"it is said to be cut along dimension {dim}, its shape is {list(own)}")
    if sum(one[rank] for one in widths) != own[dim]:
        raise LayoutError(f"it is said to have {sum(one[rank] for one in widths)} rows here, its shape is {list(own)}")
    runs: list[tuple[int, int]] = []
    start = 0
    for one in widths:
        runs.append((start + sum(one[:rank]), one[rank]))
        start += sum(one)
    total = start if size is None else min(size, start)
    joined: Runs = take(tuple(runs), 0, length(tuple(runs)))
    held = tuple((first, min(count, total - first)) for first, count in joined if first < total)
    return Tiling.of_runs((*own[:dim], total, *own[dim + 1 :]), {dim: held}, own)


def _fused(info: Mapping[str, Any], local: str, shapes: Sequence[Shape], tp: int) -> tuple[int, list[list[int]]] | None:
    """Return (dimension, widths) of a tensor of several matrices, if the record says that it is one."""
    if _any(info, ("parameter_with_2_sub_params_cat_dim_0",), local):
        halves = [shape[0] // 2 for shape in shapes if shape]
        return 0, [halves, halves]
    recorded = info.get("sub_param_shard_widths") or {}
    for one in info.get("parameter_with_sub_params") or ():
        for pattern in (one.get("patterns") or ()) if isinstance(one, dict) else ():
            if not _matches(pattern, local):
                continue
            dim, shape, widths = one.get("partition_dim"), one.get("shape"), recorded.get(pattern)
            if not isinstance(dim, int) or not isinstance(shape, list | tuple) or not 0 <= dim < len(shape):
                raise LayoutError(f"its record {pattern!r} gives no dimension along which it is cut")
            if widths is None:
                sizes = shape[dim]
                total = sum(s[dim] for s in shapes if len(s) > dim)
                sizes = list(sizes) if isinstance(sizes, list | tuple) else [total // sizes] * sizes
                if any(n % tp for n in sizes):
                    raise LayoutError(f"its record {pattern!r} does not say how {tp} ranks cut {sizes} rows")
                widths = [[n // tp] * tp for n in sizes]
            return dim, [[int(n) for n in one] for one in widths]
    return None


def _any(info: Mapping[str, Any], names: Sequence[str], local: str) -> bool:
    patterns = [pattern for name in names for pattern in info.get(name) or ()]
    if len(patterns) > _MAX_PATTERNS:
        raise LayoutError(f"a record of {len(patterns)} patterns")
    return any(_matches(pattern, local) for pattern in patterns)


def _matches(pattern: Any, local: str) -> bool:
    """Does a name start as a pattern says, which is how DeepSpeed matches?"""
    try:
        return isinstance(pattern, str) and re.match(pattern, local) is not None
    except re.error as error:
        raise LayoutError(f"its record has {pattern!r:.80}, which is no regular expression: {error}") from error
