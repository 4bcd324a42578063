"""Parts of tensors in safetensors files, as DCP's ``HuggingFaceStorageWriter(save_distributed=True)`` leaves them.

Each rank has a file, whose metadata says where in each tensor its part begins. The whole shape is recorded nowhere: it
is as large as the parts that are there, and all of it must be covered by them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.convert.safetensors.file import Entry
from ckpt.convert.torchfile.state_dict import clean_names, role_of
from ckpt.errors import MalformedData
from ckpt.layout.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckpt.convert.opened import Builder

SHARDING = "DCP_SHARDING_INFO"
"""DCP's key in a file's metadata: JSON, name -> ``saved_offsets``."""


@dataclass(frozen=True, slots=True)
class PartFile:
    """A file of parts: its tensors by name, and its metadata."""

    key: str
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


def add_parts(builder: Builder, files: Iterable[PartFile]) -> None:
    """Add all tensors of such files.

    Raises:
        MalformedData: metadata that does not say where a part is, or parts of one tensor that do not fit together.
    """
    parts: dict[str, list[tuple[Box, PartFile]]] = {}
    for file in files:
        said = _offsets(file, builder.where)
        for name, entry in file.entries.items():
            at = said.get(name)
            offsets = at.get("saved_offsets") if isinstance(at, dict) else None
            if not isinstance(offsets, list) or len(offsets) != len(entry.shape) or not all(map(_is_offset, offsets)):
                raise MalformedData(f"{builder.where}: {file.key!r} does not say where its part of {name!r} is")
            if 0 not in entry.shape:
                parts.setdefault(name, []).append((Box(tuple(offsets), entry.shape), file))
    names = clean_names(parts, builder.where)
    for name, held in parts.items():
        dims = {box.ndim for box, _ in held}
        dtype = held[0][1].entries[name].dtype
        if len(dims) > 1:
            raise MalformedData(f"{builder.where}: parts of {name!r} have {sorted(dims)} dimensions")
        shape = tuple(map(max, zip(*(box.ends for box, _ in held), strict=True)))
        for box, file in held:
            spec = builder.spec(names[name], role_of(name, dtype), file.entries[name].dtype, shape)
            builder.add(spec, box, file.key, file.entries[name].start)
    builder.notes.append("the files are parts by DCP, which records no shapes: each tensor is as large as its parts")


def _offsets(file: PartFile, where: str) -> dict[str, Any]:
    try:
        found = json.loads(file.metadata[SHARDING])
    except (ValueError, RecursionError) as error:
        raise MalformedData(f"{where}: {SHARDING} in {file.key!r} is no JSON") from error
    return found if isinstance(found, dict) else {}


def _is_offset(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62
