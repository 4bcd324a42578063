"""ModelSpec: the tensors of a model that is not there: names, shapes, and how tensor parallelism may cut each. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NoReturn

from ckpt.errors import ConfigError, LayoutError
from ckpt.layout.spec import ITEMSIZE
from ckpt.layout.tiling import Runs, balanced, chunked, fused, length, take
from ckpt.words import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpt.layout.rules import TensorRule

KINDS = ("matrix", "norm", "bias", "embedding", "expert", "router", "buffer")
"""What a tensor is. Only ``buffer`` (never stepped) and ``expert`` (dealt out over expert ranks) change a layout."""

PLACES = ("first", "last", "ends", "every")

MAX_TENSORS = 1_000_000
MAX_ELEMENTS = 2**50
"""of one tensor, so that with any dtype its bytes are an int64; ``Description`` bounds what a whole job holds"""


@dataclass(frozen=True, slots=True)
class Split:
    """How tensor parallelism cuts a tensor.

    ``dim``: the dimension. ``parts``: (size, heads) of the matrices that lie one behind the other along it, each cut by
    itself and only between its heads; with fewer heads than ranks, neighbours hold the same head. Without parts the
    dimension is cut evenly. ``vocabulary``: a framework may pad it. ``balanced``: ranks differ by one head of a part at
    most, the first ones hold more, and nothing is padded or held twice (DeepSpeed's AutoTP).
    """

    dim: int
    parts: tuple[tuple[int, int], ...] = ()
    vocabulary: bool = False
    balanced: bool = False

    @classmethod
    def of_rule(cls, rule: TensorRule, shape: Sequence[int]) -> Split | None:
        """Return the split that a rule of a rules file (``ckpt.layout.rules``) means for a tensor of this shape.

        Raises:
            ConfigError: the rule cuts a dimension that the tensor lacks, or its parts do not add up to it.
        """
        if rule.dim is None:
            return None
        dim = rule.dim + len(shape) if rule.dim < 0 else rule.dim
        if not 0 <= dim < len(shape):
            raise ConfigError(f"cuts dimension {rule.dim} of a tensor of shape {list(shape)}")
        size = shape[dim]
        if rule.size is not None:
            if rule.size != size:
                raise ConfigError(f"the rule says size {rule.size}, the tensor has {size} along dimension {dim}")
            return cls(dim, vocabulary=True)
        if rule.heads is not None:
            return cls(dim, ((size, rule.heads),))
        if rule.stride > 1:
            if size % rule.stride:
                raise ConfigError(f"{size} rows are not {rule.stride} equal parts")
            return cls(dim, ((size // rule.stride, size // rule.stride),) * rule.stride)
        parts = tuple(
            (part, part) if isinstance(part, int) else (part.size, part.heads or part.size) for part in rule.fused
        )
        if parts and sum(n for n, _ in parts) != size:
            raise ConfigError(f"the fused parts add up to {sum(n for n, _ in parts)}, expected {size}")
        return cls(dim, parts)

    def runs(
        self, size: int, degree: int, rank: int, *, uneven: bool, multiple: int | None, autotp: bool = False
    ) -> tuple[Runs, int]:
        """Return what ``rank`` of ``degree`` holds of a dimension of ``size``, and the length of its local dimension.

        Args:
            size: of the global dimension.
            degree: number of tensor-parallel ranks.
            rank: which of them.
            uneven: may a dimension be cut by the rule of ``torch.chunk`` (DTensor), rather than only evenly?
            multiple: pad a vocabulary until each rank has a multiple of this many rows (Megatron); None: do not pad.
            autotp: cut as DeepSpeed's AutoTP does, never padded (``get_shard_size`` of its
                ``module_inject/tp_shard.py``, with its default ``tp_grain_size`` of 1).

        Raises:
            LayoutError: the dimension cannot be cut that way.
        """
        if self.balanced:
            runs = _balanced(self.parts or ((size, size),), degree, rank)
            return runs, length(runs)
        if autotp:
            runs = _autotp(self.parts or ((size, size),), degree, rank)
            return runs, length(runs)
        if self.vocabulary and multiple is not None:
            rows = -(-size // (multiple * degree)) * multiple
            first = min(rank * rows, size)
            count = min(rows, size - first)
            return (((first, count),) if count else ()), rows
        if not self.parts and uneven:
            runs = chunked(((0, size),), degree, rank)
        else:
            runs = fused(self.parts or ((size, size),), degree, rank)
        return runs, length(runs)


def _balanced(parts: Sequence[tuple[int, int]], degree: int, rank: int) -> Runs:
    """Return what is left on a rank of matrices one behind the other, given as (size, heads), cut between the heads."""
    joined: list[tuple[int, int]] = []
    start = 0
    for size, units in parts:
        if units < degree:
            what = f"its {units} rows" if units == size else f"the {units} heads of keys between which AutoTP cuts"
            raise LayoutError(f"tp {degree} is more than {what}")
        each = size // units
        joined += [(start + first * each, n * each) for first, n in balanced(((0, units),), degree, rank)]
        start += size
    return take(tuple(joined), 0, length(tuple(joined)))


def _autotp(parts: Sequence[tuple[int, int]], degree: int, rank: int) -> Runs:
    """Return what AutoTP leaves on a rank of matrices one behind the other, given as (size, heads).

    It cuts what belongs to heads between key/value heads, of queries too, and unevenly if it must. How many those are,
    a part that has heads does not say, but if they divide evenly it makes no difference.
    """
    joined: list[tuple[int, int]] = []
    start = 0
    for size, units in parts:
        if units != size and (units % degree or size % degree):
            raise LayoutError(f"tp {degree} does not divide {units} heads, and where AutoTP cuts then is not described")
        joined += balanced(((start, size),), degree, rank)
        start += size
    return take(tuple(joined), 0, length(tuple(joined)))


@dataclass(frozen=True, slots=True)
class Described:
    """One parameter or persistent buffer.

    ``layer``: its number in the stack of layers, which says its pipeline stage; without one, ``place`` does:
    ``first``, ``last``, ``every``, or ``ends``: first and last, each with an optimizer state of its own. ``expert``:
    global number of the expert that it belongs to. ``dtype``: None for the training dtype, of a buffer for float32.
    ``trainable``: is it stepped by the optimizer? ``group``: number of its parameter group, where those are known.
    """

    fqn: str
    shape: tuple[int, ...]
    kind: str = "matrix"
    layer: int | None = None
    place: str = "first"
    split: Split | None = None
    expert: int | None = None
    dtype: str | None = None
    trainable: bool = True
    group: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Tied:
    """``alias`` is another name of the tensor ``target``, used at ``place``, which may be another pipeline stage."""

    alias: str
    target: str
    place: str = "last"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """All tensors in module order, which is the order in which flat optimizers lay them out.

    ``notes``: what a reader should know of how they were found.
    """

    name: str
    tensors: tuple[Described, ...]
    tied: tuple[Tied, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def from_named_shapes(
        cls,
        parameters: Mapping[str, Sequence[int]],
        buffers: Mapping[str, tuple[Sequence[int], str | None]] | None = None,
        tied: Mapping[str, str] | None = None,
        name: str = "model",
    ) -> ModelSpec:
        """Return a model of one stage from ``name -> shape`` in module order; buffers carry (shape, dtype).

        Raises:
            ConfigError: all problems of :meth:`check`.
        """
        tensors = [Described(fqn, tuple(shape), kind_of(shape)) for fqn, shape in parameters.items()]
        tensors += [
            Described(fqn, tuple(shape), "buffer", dtype=dtype, trainable=False)
            for fqn, (shape, dtype) in (buffers or {}).items()
        ]
        model = cls(name, tuple(tensors), tuple(Tied(a, t, "first") for a, t in (tied or {}).items()))
        model.check()
        return model

    @property
    def layers(self) -> int:
        """Number of layers."""
        return 1 + max((t.layer for t in self.tensors if t.layer is not None), default=-1)

    @property
    def experts(self) -> int:
        """Number of routed experts."""
        return 1 + max((t.expert for t in self.tensors if t.expert is not None), default=-1)

    @property
    def parameters(self) -> int:
        """Number of elements of all parameters, a tied one counted once."""
        return sum(t.numel for t in self.tensors if t.kind != "buffer")

    def check(self) -> None:
        """Raise :class:`ConfigError` with every tensor that cannot be."""
        problems = list(self.problems())
        if problems:
            refuse(f"model {self.name!r} cannot be", problems)

    def problems(self) -> Iterable[str]:
        """Yield everything that cannot be."""
        if not self.tensors:
            yield "it has no tensors"
        names: set[str] = set()
        for t in self.tensors:
            if t.fqn in names:
                yield f"{t.fqn!r} is listed twice"
            names.add(t.fqn)
            if any(n < 1 for n in t.shape) or t.numel > MAX_ELEMENTS:
                yield f"{t.fqn!r}: shape {list(t.shape)}, expected sizes from 1 on, at most {MAX_ELEMENTS} elements"
            if t.kind not in KINDS:
                yield f"{t.fqn!r}: kind {t.kind!r}, expected one of {', '.join(KINDS)}"
            if t.dtype is not None and t.dtype not in ITEMSIZE:
                yield f"{t.fqn!r}: dtype {t.dtype!r} is unknown"
            if t.place not in PLACES:
                yield f"{t.fqn!r}: stage {t.place!r}, expected one of {', '.join(PLACES)}"
        for tie in self.tied:
            if tie.target not in names:
                yield f"{tie.alias!r} is tied to {tie.target!r}, which is not there"
            if tie.alias in names:
                yield f"{tie.alias!r} is both a tensor and another name of {tie.target!r}"


def kind_of(shape: Sequence[int]) -> str:
    """Return the kind of a tensor of which only the shape is known."""
    return "matrix" if len(shape) > 1 else "norm"


def refuse(message: str, problems: Iterable[str]) -> NoReturn:
    """Raise :class:`ConfigError` that lists all problems."""
    listed = list(problems)
    shown = listed if len(listed) <= 20 else [*listed[:20], f"… and {len(listed) - 20} more"]
    raise ConfigError("\n  - ".join([f"{message} ({count(len(listed), 'problem')})", *shown]))
