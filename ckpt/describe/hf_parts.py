"""What the families of ``huggingface`` are written with. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpt.describe.model import Described, Split, Tied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Shape = tuple[int, ...]


class Line(NamedTuple):
    """One tensor of a module, its name relative to the module."""

    name: str
    shape: Shape
    kind: str
    split: Split | None = None
    expert: int | None = None


class Builder:
    """Collects a model as blocks, so that it can be counted before it is made."""

    def __init__(self) -> None:
        self.count = 0
        self.tied: list[Tied] = []
        self.notes: list[str] = []
        self._blocks: list[tuple[str, int | None, str, Callable[[], Iterator[Line]]]] = []

    def block(
        self, prefix: str, lines: Callable[[], Iterator[Line]], count: int, *, layer: int | None = None, place: str = ""
    ) -> None:
        """Add ``count`` tensors below ``prefix``, made when :meth:`tensors` runs."""
        self.count += count
        self._blocks.append((prefix, layer, place or "first", lines))

    def one(self, line: Line, place: str) -> None:
        """Add one tensor that belongs to no layer."""
        self.block("", lambda: iter((line,)), 1, place=place)

    def tensors(self) -> Iterator[Described]:
        """Yield all tensors in order."""
        for prefix, layer, place, lines in self._blocks:
            for line in lines():
                yield Described(
                    prefix + line.name, line.shape, line.kind, layer, place, line.split, line.expert,
                    trainable=line.kind != "buffer",
                )  # fmt: skip


def columns(name: str, rows: int, width: int, heads: int | None = None) -> Line:
    """Return the weight ``[rows, width]`` of a linear layer whose outputs are split, between heads if it has some."""
    return Line(f"{name}.weight", (rows, width), "matrix", Split(0, ((rows, heads),) if heads else ()))


def rows(name: str, height: int, width: int, heads: int | None = None) -> Line:
    """Return the weight ``[height, width]`` of a linear layer whose inputs are split."""
    return Line(f"{name}.weight", (height, width), "matrix", Split(1, ((width, heads),) if heads else ()))


def bias(name: str, size: int, heads: int | None = None, *, split: bool) -> Line:
    """Return the bias of a linear layer: split with its outputs, or whole."""
    return Line(f"{name}.bias", (size,), "bias", Split(0, ((size, heads),) if heads else ()) if split else None)


def whole(name: str, *shape: int, kind: str = "norm") -> Line:
    """Return a tensor that every tensor-parallel rank has."""
    return Line(name, shape, kind)


def vocabulary(name: str, size: int, width: int) -> Line:
    """Return an embedding or output matrix ``[size, width]`` cut by the vocabulary."""
    return Line(name, (size, width), "embedding", Split(0, (), vocabulary=True))
