"""The header of a safetensors file, and the folders that Hugging Face makes of several: names, index, metadata."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.errors import MalformedData, MissingChunk, NoSuchCheckpoint, ObjectNotFound, UnsupportedFeature
from ckpt.format.pack import MAX_HEADER, SAFETENSORS_DTYPE, parse_header
from ckpt.layout.spec import ITEMSIZE
from ckpt.words import some

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt.store.base import Store

NAME_OF = {
    **SAFETENSORS_DTYPE,
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0", "complex64": "C64",
}  # fmt: skip
"""Our dtype -> what safetensors calls it; complex32 and complex128 have no name there."""
DTYPE_OF = {name: dtype for dtype, name in NAME_OF.items()}
_PARTLY = ("F4", "F6_E2M3", "F6_E3M2")
"""dtypes of which an element is no whole number of bytes"""
SINGLE = "model.safetensors"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MAX_INDEX = 256 << 20
"""Bytes of an index file."""
BUFFERS = "ckpt.buffers"
"""Our key in a file's metadata: a JSON list of those tensors that are buffers, since the format does not say it."""
_NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file. ``start``: its first byte."""

    dtype: str
    shape: tuple[int, ...]
    start: int


def read_header(store: Store, key: str) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the tensors of a file by name, and its metadata.

    Raises:
        ObjectNotFound: no such file.
        MalformedData: no safetensors file, or one that is cut off.
        UnsupportedFeature: a dtype of less than a byte.
    """
    where = f"{key!r} in {store.url}"
    nbytes = store.size(key)
    if nbytes is None:
        raise ObjectNotFound(f"read {where}: no such object", key)
    length = int.from_bytes(store.get(key, 0, 8), "little")
    if length > min(MAX_HEADER, nbytes - 8):
        raise MalformedData(f"{where}: a header of {length} bytes in a file of {nbytes}, cut off?")
    head = store.get(key, 0, 8 + length)
    widths = {name: ITEMSIZE[dtype] for name, dtype in DTYPE_OF.items()}
    try:
        found = parse_header(head, nbytes, where, widths)
    except MalformedData:
        partly = [name for name in _PARTLY if f'"{name}"'.encode() in head]
        if partly:
            raise UnsupportedFeature(f"{where}: has {partly[0]}, of which a byte holds several elements") from None
        raise
    metadata = json.loads(head[8:]).get("__metadata__") or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise MalformedData(f"{where}: its metadata is no table of texts")
    return {name: Entry(DTYPE_OF[dtype], shape, start) for name, (dtype, shape, start, _) in found.items()}, metadata


def header(entries: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str], where: str) -> bytes:
    """Return the bytes before the data of a file of these (name, dtype, shape), one behind the other.

    Raises:
        UnsupportedFeature: a dtype that safetensors has no name for, or more tensors than a header has room for.
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name, dtype, shape in entries:
        if dtype not in NAME_OF:
            raise UnsupportedFeature(f"{where}: tensor {name!r} is {dtype}, which safetensors does not have")
        nbytes = ITEMSIZE[dtype]
        for size in shape:
            nbytes *= size
        table[name] = {
            "dtype": NAME_OF[dtype],
            "shape": list(shape),
            "data_offsets": [position, position + nbytes],
        }
        position += nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise UnsupportedFeature(f"{where}: a header of {len(text)} bytes, its readers take at most {MAX_HEADER}")
    return len(text).to_bytes(8, "little") + text


def files_of(store: Store) -> tuple[list[str], dict[str, str] | None]:
    """Return the files of the one model in a folder, and which file its index says each tensor is in.

    As Hugging Face looks: ``model.safetensors``, else what an index names, else all ``*.safetensors``.

    Raises:
        NoSuchCheckpoint: there are none.
        MissingChunk: a file that an index or its own name says there is, is not.
        MalformedData: several indices, or one that cannot be read.
    """
    names = set(store.children(""))
    found = sorted(name for name in names if name.endswith(SUFFIX))
    indices = sorted(name for name in names if name.endswith(INDEX_SUFFIX))
    if SINGLE in found:
        return [SINGLE], None
    if len(indices) > 1:
        raise MalformedData(f"{store.url}: has {some(indices)}, expected one index")
    if indices:
        weight_map = _read_index(store, indices[0])
        found = sorted(set(weight_map.values()))
        _refuse_missing(store, found, names, indices[0])
        return found, weight_map
    if not found:
        raise NoSuchCheckpoint(f"{store.url}: no file *{SUFFIX}")
    for name in found:
        numbered = _NUMBERED.fullmatch(name)
        if numbered and int(numbered[3]) <= 10**6:
            stem, width, count = numbered[1], len(numbered[2]), int(numbered[3])
            wanted = [f"{stem}-{n:0{width}d}-of-{numbered[3]}{SUFFIX}" for n in range(1, count + 1)]
            _refuse_missing(store, wanted, names, f"the name {name!r}")
    return found, None


def _refuse_missing(store: Store, wanted: Sequence[str], names: set[str], said: str) -> None:
    missing = [name for name in wanted if name not in names]
    if missing:
        raise MissingChunk(f"{store.url}: {some(missing)} of {len(wanted)} files is not there, {said} says it should")


def _read_index(store: Store, key: str) -> dict[str, str]:
    where = f"{key!r} in {store.url}"
    data = store.get(key, 0, MAX_INDEX + 1)
    if len(data) > MAX_INDEX:
        raise MalformedData(f"{where}: an index of more than {MAX_INDEX} bytes")
    try:
        weight_map = json.loads(data)["weight_map"]
        names = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedData(f"{where}: no index of safetensors files ({error!r:.200})") from error
    odd = [file for file in names.values() if "/" in file or "\\" in file or not file.endswith(SUFFIX)]
    if odd:
        raise MalformedData(f"{where}: names the file {odd[0]!r:.200}, expected *{SUFFIX} beside it")
    return names
