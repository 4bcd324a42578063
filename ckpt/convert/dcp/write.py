"""A checkpoint of ``torch.distributed.checkpoint``, which ``dcp.load`` of a plain torch job reads.

One file for each rank of the target, with what it holds (of replicas one rank has each box, chosen by load), each box
as ``torch.save`` would write it; then ``.metadata``, without which there is no checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from ckpt.convert.dcp.entries import Entries, entries_of
from ckpt.convert.dcp.metadata import METADATA
from ckpt.convert.file_writing import write_files
from ckpt.convert.torchfile.pickle_write import Call, Named, Planned, encode
from ckpt.convert.torchfile.write import Taken, TorchFile
from ckpt.errors import ConfigError
from ckpt.format.digest import raw_digest
from ckpt.layout.box import Box
from ckpt.layout.graph import Cell, ShardGraph
from ckpt.layout.spec import Shard, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ckpt.convert.dcp.metadata import Path
    from ckpt.convert.opened import Opened
    from ckpt.convert.options import WriteOptions, Written
    from ckpt.convert.target import Target
    from ckpt.convert.torchfile.write import Feed
    from ckpt.store.base import Buffer, Store

_VERSION = "1.0.0"


def write_dcp(opened: Opened, store: Store, target: Target, options: WriteOptions) -> Written:
    """Write ``__<rank>_0.distcp`` for each rank of the target and, last, ``.metadata``.

    Args:
        opened: the source.
        store: root of the target: what ``dcp.load`` gets as ``checkpoint_id``.
        target: the ranks among which the files are spread; any other number of ranks loads them as well.
        options: see :class:`~ckpt.convert.options.WriteOptions`.

    Raises:
        ConfigError: the place is not free.
        LayoutError, MissingState: the source lacks what the target is to hold.
        StoreError, IntegrityError, FormatError: reading or writing failed.
    """
    plan = _Plan(opened, target, options)
    files = [(_file(rank), partial(DistcpFile, trees)) for rank, trees in sorted(plan.files.items())]
    written = write_files(opened, store, options, files, {METADATA: plan.metadata()})
    return replace(written, format="dcp", lost=tuple(plan.entries.lost), made=tuple(plan.entries.made))


class DistcpFile:
    """Several files of ``torch.save``, one behind the other, filled from one feed; as :class:`TorchFile` is used.

    Args:
        contents: the tree of each.
    """

    def __init__(self, contents: Sequence[Any]) -> None:
        self._files = [TorchFile(tree) for tree in contents]
        self.sizes = [one.nbytes for one in self._files]
        self.nbytes = sum(self.sizes)
        self.identity = raw_digest(b"".join(one.identity for one in self._files))
        self.wants = [want for one in self._files for want in one.wants]

    def write(self, write: Callable[[Buffer], None], feed: Feed) -> None:
        """Hand the file's bytes to ``write``, front to back."""
        taken = Taken(feed(self.wants))

        def part(wants: Sequence[Shard]) -> Iterable[Buffer]:
            return taken.take(sum(want.box.volume * want.spec.itemsize for want in wants))

        for one in self._files:
            one.write(write, part)


class _Plan:
    """Which file has which box. ``files``: rank -> the tree of each part of its file, in their order."""

    def __init__(self, opened: Opened, target: Target, options: WriteOptions) -> None:
        self.entries: Entries = entries_of(opened, target, options)
        self._drop_unwritable()
        self.boxes, owners = _spread(target, dict.fromkeys(self.entries.tensors.values()))
        self.files: dict[int, list[Any]] = defaultdict(list)
        self._places: dict[Any, Call] = {}
        """path of a value, or (tensor, box) -> where it is"""
        self._ends: dict[int, int] = defaultdict(int)
        for path, value in self.entries.values.items():
            self._put(0, path, value)
        for spec, boxes in self.boxes.items():
            for box in boxes:
                self._put(owners[spec, box], (spec, box), Planned(spec.dtype, box.sizes, (Shard(spec, box),)))

    def _drop_unwritable(self) -> None:
        for path, value in list(self.entries.values.items()):
            try:
                encode(value)
            except ConfigError as error:
                del self.entries.values[path]
                self.entries.lost.append(f"{_key(path)}: {error}")

    def _put(self, rank: int, what: Any, tree: Any) -> None:
        nbytes = TorchFile(tree).nbytes
        self._places[what] = _made("filesystem._StorageInfo", _file(rank), self._ends[rank], nbytes)
        self._ends[rank] += nbytes
        self.files[rank].append(tree)

    def metadata(self) -> bytes:
        """Return ``.metadata``: calls of torch's own dataclasses."""
        items: dict[str, Call] = {}
        storage: dict[Call, Call] = {}
        for path, spec in self.entries.tensors.items():
            key, boxes = _key(path), self.boxes[spec]
            items[key] = _tensor_item(spec.dtype, spec.shape, boxes)
            storage.update((_index(key, box), self._places[spec, box]) for box in boxes)
        for path, value in self.entries.values.items():
            key = _key(path)
            box = Box.whole(tuple(value.shape)) if isinstance(value, torch.Tensor) else None
            if box is None:
                items[key] = _made("metadata.BytesStorageMetadata")
            else:
                items[key] = _tensor_item(str(value.dtype).removeprefix("torch."), box.sizes, [box])
            storage[_index(key, box)] = self._places[path]
        paths = {_key(path): path for path in (*self.entries.tensors, *self.entries.values)}
        for path, other in self.entries.shared.items():
            key = _key(path)
            if other in self.entries.values and paths.setdefault(key, path) == path:
                items[key] = _made("metadata.BytesStorageMetadata")
                storage[_index(key, None)] = self._places[other]
        about = _made("metadata.StorageMeta")
        return encode(_made("metadata.Metadata", items, paths, storage, about, _VERSION))[0]


def _spread(
    target: Target, wanted: Iterable[TensorSpec]
) -> tuple[dict[TensorSpec, tuple[Box, ...]], dict[tuple[TensorSpec, Box], int]]:
    """Return the boxes of each tensor, and which rank's file each is in: of those that hold it the one with least."""
    graph = ShardGraph.build(target.layouts)
    graph.check()
    boxes: dict[TensorSpec, tuple[Box, ...]] = {}
    owners: dict[tuple[TensorSpec, Box], int] = {}
    cells: list[Cell] = []
    for spec in wanted:
        held = graph.cells.get(spec, ()) if prod(spec.shape) else (Cell(spec, Box.whole(spec.shape), (0,)),)
        boxes[spec] = tuple(cell.box for cell in held)
        cells += held
    load = [0] * len(target.layouts)
    for cell in sorted(cells, key=lambda cell: -cell.nbytes):  # stable: the same plan for the same target
        rank = min(cell.ranks, key=load.__getitem__)
        load[rank] += cell.nbytes
        owners[cell.spec, cell.box] = rank
    return boxes, owners


def _file(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _key(path: Path) -> str:
    return ".".join(map(str, path))


def _made(name: str, *arguments: Any) -> Call:
    module, _, kind = name.rpartition(".")
    return Call(Named(f"torch.distributed.checkpoint.{module}", kind), arguments)


def _tensor_item(dtype: str, shape: tuple[int, ...], boxes: Iterable[Box]) -> Call:
    chunks = [_made("metadata.ChunkStorageMetadata", torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
    properties = _made("metadata.TensorProperties", getattr(torch, dtype))
    return _made("metadata.TensorStorageMetadata", properties, torch.Size(shape), chunks)


def _index(key: str, box: Box | None) -> Call:
    return _made("metadata.MetadataIndex", key, None if box is None else torch.Size(box.offsets))
