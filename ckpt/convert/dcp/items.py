"""What stands at the places that a ``.metadata`` names: ``torch.save`` files, one a box or value, inside larger files.

Of a tensor only the archive's directory and the pickle are read. Where its numbers are is not computed from shape and
dtype: the length would give away a header of another release of torch, but not a tensor that lies column by column.
Small ones are fetched together, since a checkpoint may have a hundred thousand of them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt.convert.torchfile.file import Stored, read_tree
from ckpt.convert.torchfile.names import kind_of
from ckpt.errors import DigestMismatch, MalformedData, UnsupportedFeature
from ckpt.store.forward import Forward

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckpt.convert.dcp.metadata import Place, TensorItem
    from ckpt.convert.options import ReadOptions
    from ckpt.layout.box import Box
    from ckpt.store.base import Store

SMALL = 64 << 10
"""Bytes up to which an item is fetched whole, together with its neighbours in the file."""
SPAN = 1 << 20
"""Bytes fetched at once for neighbours."""
READERS = 8


class Item(NamedTuple):
    """``label``: its key in the state dict and its box, for messages."""

    label: str
    place: Place


@dataclass(frozen=True, slots=True)
class Found:
    """A tensor's place. ``data``: its bytes, if they are at most 8 (a count of steps)."""

    stored: Stored
    data: bytes | None


class _Span(Forward):
    """A store of which one range of one object is in memory already. ``sizes``: of all objects, asked for once."""

    def __init__(self, store: Store, sizes: dict[str, int | None], key: str, start: int, nbytes: int) -> None:
        super().__init__(store)
        self._sizes, self._key, self._start = sizes, key, start
        self._data = store.get(key, start, nbytes) if nbytes else b""

    def size(self, key: str) -> int | None:
        """See :class:`~ckpt.store.base.Store`."""
        if key not in self._sizes:
            self._sizes[key] = self.inner.size(key)
        return self._sizes[key]

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """See :class:`~ckpt.store.base.Store`."""
        at = start - self._start
        if nbytes is not None and key == self._key and at >= 0 and at + nbytes <= len(self._data):
            return self._data[at : at + nbytes]
        return self.inner.get(key, start, nbytes)


def read_items(store: Store, items: Sequence[Item], options: ReadOptions) -> list[Any]:
    """Return what each item holds: a :class:`Found`, or a tree of plain values (with ``Stored`` where tensors are).

    Raises:
        ObjectNotFound: a file is not there.
        UnsupportedFeature: a value needs a class that is not on the list.
        DigestMismatch: a pickle is not the one that was written.
        MalformedData: a file that is cut off, or not what the metadata says.
    """
    results: list[Any] = [None] * len(items)
    sizes: dict[str, int | None] = {}

    def read(group: list[int]) -> None:
        first, last = items[group[0]].place, items[group[-1]].place
        together = len(group) > 1 or last.nbytes <= SMALL
        span = _Span(store, sizes, first.key, first.start, last.start + last.nbytes - first.start if together else 0)
        for n in group:
            results[n] = _read(span, items[n], options)

    order = sorted(range(len(items)), key=lambda n: (items[n].place.key, items[n].place.start))
    with ThreadPoolExecutor(READERS, "ckpt-dcp") as pool:
        try:
            for _ in pool.map(read, _groups(items, order)):
                pass
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results


def _groups(items: Sequence[Item], order: Iterable[int]) -> Iterator[list[int]]:
    """Yield neighbours that are small and fit a span; all others alone."""
    group: list[int] = []
    for n in order:
        place = items[n].place
        if group:
            first = items[group[0]].place
            fits = place.key == first.key and place.start + place.nbytes - first.start <= SPAN
            if place.nbytes > SMALL or items[group[-1]].place.nbytes > SMALL or not fits:
                yield group
                group = []
        group.append(n)
    if group:
        yield group


def _read(store: Store, item: Item, options: ReadOptions) -> Any:
    place, trust = item.place, options.trust_pickle
    try:
        tree = read_tree(
            store, place.key, trust_pickle=trust, start=place.start, nbytes=place.nbytes, seen=options.seen
        )
    except (DigestMismatch, MalformedData, UnsupportedFeature) as error:
        raise type(error)(f"{item.label}: {error}") from error
    if not isinstance(tree, Stored):
        return tree
    return Found(tree, store.get(tree.key, tree.start, tree.nbytes) if tree.nbytes <= 8 else None)


def boxes_of(label: str, tensor: TensorItem) -> Iterator[Item]:
    """Yield the items that a tensor consists of."""
    for box, place in tensor.boxes:
        yield Item(f"{label} {box}" if box.ndim else label, place)


def check_found(item: Item, tensor: TensorItem, box: Box, found: Any) -> Stored:
    """Return the place of a box.

    Raises:
        MalformedData: no tensor is there, or one of another dtype or shape than the metadata says.
    """
    if not isinstance(found, Found):
        raise MalformedData(f"{item.label}: found a {kind_of(found)}, expected a tensor")
    stored = found.stored
    if (stored.dtype, stored.shape) != (tensor.dtype, box.sizes):
        raise MalformedData(
            f"{item.label}: found {stored.dtype}{list(stored.shape)}, the metadata says {tensor.dtype}{list(box.sizes)}"
        )
    return stored


def placed(tree: Any) -> Any:
    """Return what :func:`read_items` found, with ``Stored`` for a tensor that is an item by itself."""
    return tree.stored if isinstance(tree, Found) else tree


def equal_bytes(store: Store, a: Sequence[tuple[Box, Stored]], b: Sequence[tuple[Box, Stored]]) -> bool:
    """Are two tensors that are cut alike equal, byte for byte? Read in bounded memory."""
    first, second = dict(a), dict(b)
    if first.keys() != second.keys():
        return False
    for box, one in first.items():
        other = second[box]
        if one.strides != other.strides or one.nbytes != other.nbytes or not one.is_contiguous:
            return False
        for at in range(0, one.nbytes, SPAN):
            count = min(SPAN, one.nbytes - at)
            if store.get(one.key, one.start + at, count) != store.get(other.key, other.start + at, count):
                return False
    return True
