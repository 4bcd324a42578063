"""The ``.metadata`` of ``torch.distributed.checkpoint``: which tensors there are, in which boxes, and where each is.

It is a pickle of torch's dataclasses. They come as inert records, so that nothing of torch's checkpoint package is
needed to read it, and every number in it is checked before it is used.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ckpt.convert.torchfile.names import MAX_DIMS, Inert, Named, Names, kind_of
from ckpt.convert.torchfile.pickle_machine import run_pickle
from ckpt.convert.torchfile.zip_read import RangeFile
from ckpt.errors import ConfigError, MalformedData, ObjectNotFound, UnsupportedFeature
from ckpt.layout.box import Box
from ckpt.layout.spec import ITEMSIZE
from ckpt.store.base import check_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckpt.store.base import Store

METADATA = ".metadata"

_TORCH = "torch.distributed.checkpoint."
_CLASSES = {
    *(f"{_TORCH}metadata.{name}" for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    *(f"{_TORCH}filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")),
    # Megatron-core leaves the plans of all ranks in it.
    *(f"{_TORCH}planner.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    *(f"megatron.core.dist_checkpointing.strategies.torch.{name}" for name in ("MCoreMetadata", "MCoreSavePlan")),
    *(f"pathlib.{name}" for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
    *(f"pathlib._local.{name}" for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
}  # fmt: skip
_FIELDS = {
    f"{_TORCH}metadata.Metadata": ("state_dict_metadata", "planner_data", "storage_data"),
    f"{_TORCH}metadata.MetadataIndex": ("fqn", "offset"),
    f"{_TORCH}metadata.TensorStorageMetadata": ("properties", "size", "chunks"),
    f"{_TORCH}metadata.TensorProperties": ("dtype",),
    f"{_TORCH}metadata.ChunkStorageMetadata": ("offsets", "sizes"),
    f"{_TORCH}filesystem._StorageInfo": ("relative_path", "offset", "length"),
}
"""What the arguments of a class are, where a writer (ours) calls it instead of setting attributes."""
_FILE = re.compile(r"__(\d{1,6})_\d+\.distcp")
"""``__<rank>_<number>.distcp``; longer numbers are no rank's."""
_LAYOUT = "torch.serialization._get_layout"
_PLAIN = {"torch.Size", "collections.OrderedDict", "builtins.getattr"}
"""``getattr`` of one of these classes only: so the first releases of Python 3.11 write a member of an enumeration."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """``nbytes`` bytes from byte ``start`` of file ``key``: what ``torch.save`` wrote of a tensor or a value."""

    key: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorItem:
    """A tensor of a state dict, by boxes; those without elements are left out."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, Place], ...]


Path = tuple[str | int, ...]
"""Keys of nested dictionaries and lists."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """``tensors`` and ``values``: by their key in the flattened state dict. ``paths``: key -> path in the state dict as
    it was before it was flattened, in its order; empty if the writer did not say.
    """

    tensors: dict[str, TensorItem]
    values: dict[str, Place]
    paths: dict[str, Path]

    def path(self, key: str) -> Path:
        """Return where in the state dict a key was; the key itself where that is not known."""
        return self.paths.get(key, (key,))

    def keys(self) -> list[str]:
        """Return all keys, in the state dict's order as far as it is known."""
        held = self.tensors.keys() | self.values.keys()
        first = [key for key in self.paths if key in held]
        return [*first, *(key for key in (*self.tensors, *self.values) if key not in self.paths)]


class _Classes(Names):
    """Exactly the classes that such a file has; all of them come as records."""

    def find(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _CLASSES:
            return Named(full, lambda *args, **keywords: Inert(full, args, keywords))
        if full == _LAYOUT:
            return Named(full, _layout)
        found = super().find(module, name)
        return found if full in _PLAIN or isinstance(found, torch.dtype) else None


def _layout(name: Any) -> str:
    """A tensor's layout; all that DCP writes are strided."""
    if name != "torch.strided":
        raise UnsupportedFeature(f"a tensor of layout {name!r:.40}: only dense tensors can be converted")
    return "torch.strided"


def read_metadata(store: Store, where: str, folder: str = "", *, trust: bool = False) -> Metadata:
    """Read ``.metadata``.

    Args:
        store: where the checkpoint is.
        where: what messages call it.
        folder: what stands before all of its keys, empty or with a slash at its end.
        trust: import and call what other classes the pickle names, which runs code from the file.

    Raises:
        ObjectNotFound: there is none; DCP writes it last, so the checkpoint was never finished.
        UnsupportedFeature: a class that such a file does not have, a dtype, or data that was transformed (compressed).
        MalformedData: no such file, or one whose numbers do not fit together.
    """
    size = store.size(folder + METADATA)
    if size is None:
        raise ObjectNotFound(f"{where}: no {METADATA}: the save was not finished, it comes last", folder + METADATA)
    name = f"{METADATA} in {where}"
    data = RangeFile(store, folder + METADATA, name, 0, size).read()
    tree = run_pickle(io.BytesIO(data), name, _Classes(), trust=trust)
    return _Reader(name, folder).metadata(tree)


def world_of(files: Iterable[str]) -> int:
    """Return how many ranks wrote these files, as their names tell."""
    found = (_FILE.fullmatch(key.rpartition("/")[2]) for key in set(files))
    return max((int(m[1]) for m in found if m), default=0) + 1


class _Reader:
    def __init__(self, where: str, folder: str) -> None:
        self.where, self.folder = where, folder

    def metadata(self, tree: Any) -> Metadata:
        fields = self.fields(tree, f"{_TORCH}metadata.Metadata")
        places = self.places(self.of(dict, fields.get("storage_data"), "storage_data"))
        tensors: dict[str, TensorItem] = {}
        values: dict[str, Place] = {}
        for key, item in self.of(dict, fields.get("state_dict_metadata"), "state_dict_metadata").items():
            self.of(str, key, "a key")
            if isinstance(item, Inert) and item.name == f"{_TORCH}metadata.BytesStorageMetadata":
                values[key] = self.place(places, key, None)
            else:
                tensors[key] = self.tensor(key, self.fields(item, f"{_TORCH}metadata.TensorStorageMetadata"), places)
        paths = fields.get("planner_data")
        return Metadata(tensors, values, self.paths(paths) if isinstance(paths, dict) else {})

    def tensor(self, key: str, fields: dict[Any, Any], places: dict[Any, Place]) -> TensorItem:
        shape = self.numbers(fields.get("size"), f"size of {key!r:.200}")
        about = self.fields(fields.get("properties"), f"{_TORCH}metadata.TensorProperties")
        properties = about.get("", (about.get("dtype"),))
        dtype = str(properties[0] if isinstance(properties, tuple) and properties else None).removeprefix("torch.")
        if dtype not in ITEMSIZE:
            raise UnsupportedFeature(f"{self.where}: tensor {key!r:.200} of dtype {dtype:.40}, which cannot be stored")
        boxes: dict[Box, Place] = {}
        for chunk in self.of(list, fields.get("chunks"), f"chunks of {key!r:.200}"):
            about = self.fields(chunk, f"{_TORCH}metadata.ChunkStorageMetadata")
            sizes = self.numbers(about.get("sizes"), f"chunk of {key!r:.200}")
            offsets = self.numbers(about.get("offsets"), f"chunk of {key!r:.200}")
            if len(sizes) != len(shape) or len(offsets) != len(shape) or not Box(offsets, sizes).within(shape):
                raise self.wrong(f"tensor {key!r:.200} of shape {list(shape)} has a chunk {offsets}+{sizes}")
            if prod(sizes):  # of a rank that has no rows nothing needs to be there
                boxes[Box(offsets, sizes)] = self.place(places, key, offsets)
        return TensorItem(dtype, shape, tuple(boxes.items()))

    def places(self, storage: dict[Any, Any]) -> dict[Any, Place]:
        """Return (key, offsets; None for a value) -> place."""
        found: dict[Any, Place] = {}
        for index, info in storage.items():
            about = self.fields(index, f"{_TORCH}metadata.MetadataIndex")
            key = self.of(str, about.get("fqn"), "a name in storage_data")
            offset = about.get("offset")
            where = self.fields(info, f"{_TORCH}filesystem._StorageInfo")
            if where.get("transform_descriptors"):
                raise UnsupportedFeature(
                    f"{self.where}: {key!r:.200} was written through {where['transform_descriptors']!r:.80}: data that "
                    "was transformed (compressed) cannot be read by ranges"
                )
            file = self.of(str, where.get("relative_path"), f"file of {key!r:.200}")
            try:
                check_key(file)
            except ConfigError as error:
                raise self.wrong(f"file of {key!r:.200}: {error}") from error
            start, nbytes = (self.number(where.get(name), f"{name} of {key!r:.200}") for name in ("offset", "length"))
            at = None if offset is None else self.numbers(offset, f"offset of {key!r:.200}")
            found[key, at] = Place(self.folder + file, start, nbytes)
        return found

    def place(self, places: dict[Any, Place], key: str, offsets: tuple[int, ...] | None) -> Place:
        found = places.get((key, offsets))
        if found is None:
            at = "" if offsets is None else f" at {list(offsets)}"
            raise self.wrong(f"{key!r:.200}{at} is listed, and storage_data does not say where it is")
        return found

    def paths(self, data: dict[Any, Any]) -> dict[str, Path]:
        for key, path in data.items():
            self.of(str, key, "a key of planner_data")
            if any(type(step) not in (str, int) for step in self.of(tuple, path, f"path of {key!r:.200}")) or not path:
                raise self.wrong(f"path of {key!r:.200} is {path!r:.200}")
        return data

    def fields(self, record: Any, kind: str) -> dict[Any, Any]:
        if not isinstance(record, Inert) or record.name != kind:
            found = kind_of(record)
            raise self.wrong(f"a {found} where a {kind} is expected")
        return {**dict(zip(_FIELDS.get(kind, ()), record.args, strict=False)), **record.attributes}

    def numbers(self, value: Any, what: str) -> tuple[int, ...]:
        if not isinstance(value, tuple) or len(value) > MAX_DIMS:
            raise self.wrong(f"{what} is {value!r:.200}, expected a tuple of at most {MAX_DIMS} numbers")
        return tuple(self.number(one, what) for one in value)

    def number(self, value: Any, what: str) -> int:
        if type(value) is not int or not 0 <= value < 2**63:
            raise self.wrong(f"{what}: {value!r:.80} where a count is expected")
        return value

    def of(self, kind: type[T], value: Any, what: str) -> T:
        if not isinstance(value, kind):
            raise self.wrong(f"{what} is a {kind_of(value)}, expected a {kind.__name__}")
        return value

    def wrong(self, what: str) -> MalformedData:
        return MalformedData(f"{self.where}: {what}")
