"""Packs: valid safetensors files whose tensors are chunks.

Layout (https://github.com/huggingface/safetensors, "Format"): 8 bytes little-endian header length, JSON header, data.
We write chunks in order of falling item size, so that every chunk is aligned to its item size in the file, and without
holes. dtypes that safetensors has no name for are stored as U8; the true dtype stands in the index.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from ckpt.errors import MalformedData
from ckpt.layout.spec import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_HEADER = 100_000_000
"""Readers of the reference implementation refuse longer headers, so we never write one."""
MAX_CHUNKS = 65_536
"""Chunks per pack; keeps the header far below :data:`MAX_HEADER`."""
MAX_BYTES = 16 << 30
"""Data bytes per pack."""

FRAME = 64
"""Bytes of an entry in a pack's header beside name, shape and numbers, at most."""

SAFETENSORS_DTYPE = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_WIDTHS = {name: ITEMSIZE[dtype] for dtype, name in SAFETENSORS_DTYPE.items()}


@dataclass(frozen=True, slots=True)
class PackItem:
    """One chunk to be written: its name in the pack, dtype, shape, and size in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class PackLayout:
    """The bytes that come before the data, and where each chunk starts in the *file* (same order as ``items``)."""

    header: bytes
    items: tuple[PackItem, ...]
    starts: tuple[int, ...]
    nbytes: int


def plan_packs(items: Sequence[PackItem]) -> list[list[int]]:
    """Distribute items over packs; return for each pack the positions of its items, in file order."""
    packs: list[list[int]] = []
    filled = MAX_BYTES + 1
    for k in sorted(range(len(items)), key=lambda k: (-_align(items[k].dtype), k)):
        if filled + items[k].nbytes > MAX_BYTES or len(packs[-1]) >= MAX_CHUNKS:
            packs.append([])
            filled = 0
        packs[-1].append(k)
        filled += items[k].nbytes
    return packs


def room_for(items: Sequence[PackItem]) -> int:
    """Return how many bytes suffice for what comes before the data, whichever of ``items`` are stored in the end.

    An item may also be stored encoded, as bytes (``U8``); encoding makes nothing larger than twice its size and 1 KiB.
    """
    digits = len(str(sum(2 * item.nbytes + 1024 for item in items)))
    size = len(_text([], []))
    for item in items:
        # Of its places, and of an encoded item's one dimension, nothing is known but how many digits they can have.
        size += len(json.dumps(item.name, ensure_ascii=False).encode()) + len(str(item.shape)) + FRAME + 3 * digits
    return 8 + size + -size % 8


def _align(dtype: str) -> int:
    return _WIDTHS[SAFETENSORS_DTYPE.get(dtype, "U8")]


def lay_out(items: Sequence[PackItem], room: int = 0) -> PackLayout:
    """Return the header and the chunk positions of one pack.

    ``room``: bytes before the data, if they have been set aside already (:func:`room_for`); else as few as possible.
    """
    starts, position = [], 0
    for item in items:
        starts.append(position)
        position += item.nbytes
    text = _text(items, starts)
    text += b" " * (max(-len(text) % 8, room - 8 - len(text)))
    names = {item.name for item in items}
    if len(names) != len(items) or len(text) > MAX_HEADER or 0 < room != 8 + len(text):
        raise MalformedData(f"pack header: {len(items)} chunks need unique names and at most {MAX_HEADER} bytes")
    header = len(text).to_bytes(8, "little") + text
    return PackLayout(header, tuple(items), tuple(len(header) + s for s in starts), len(header) + position)


def _text(items: Sequence[PackItem], starts: Sequence[int]) -> bytes:
    table: dict[str, object] = {"__metadata__": {"format": "ckpt"}}
    for item, start in zip(items, starts, strict=True):
        stored = SAFETENSORS_DTYPE.get(item.dtype)
        table[item.name] = {
            "dtype": stored or "U8",
            "shape": list(item.shape) if stored else [item.nbytes],
            "data_offsets": [start, start + item.nbytes],
        }
    return json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()


def _whole(numbers: object) -> tuple[int, ...]:
    """Return numbers of a table that have to be whole ones; JSON also has ``1.0`` and ``true``."""
    if not isinstance(numbers, list) or any(type(n) is not int for n in numbers):
        raise TypeError(f"{numbers!r:.80} is no list of whole numbers")
    return tuple(numbers)


def parse_header(
    head: bytes, nbytes: int, where: str, widths: Mapping[str, int] = _WIDTHS
) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Return name -> (safetensors dtype, shape, start, stop) in file coordinates, from the first bytes of a pack.

    ``head``: at least the length field and the header; ``nbytes``: size of the whole file; ``widths``: bytes of an
    element of each dtype that the file may have (those of packs, which have not all that safetensors knows).

    Raises:
        MalformedData: anything that the safetensors format forbids (holes, overlaps, sizes that do not fit).
    """
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 or length > MAX_HEADER or 8 + length > min(nbytes, len(head)):
        raise MalformedData(f"{where}: header length {length} does not fit a file of {nbytes} bytes")
    try:
        table = json.loads(head[8 : 8 + length])
        entries = {name: value for name, value in table.items() if name != "__metadata__"}
        found: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for name, value in entries.items():
            begin, end = _whole(value["data_offsets"])
            found[name] = (str(value["dtype"]), _whole(value["shape"]), 8 + length + begin, 8 + length + end)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise MalformedData(f"{where}: header is not a safetensors table ({error!r})") from error
    position = 8 + length
    for name, (dtype, shape, start, stop) in sorted(found.items(), key=lambda pair: (pair[1][2], pair[1][3])):
        if start != position or stop < start or min(shape, default=0) < 0:
            raise MalformedData(f"{where}: chunk {name!r} at [{start}, {stop}), expected it to start at {position}")
        if dtype not in widths or stop - start != prod(shape) * widths[dtype]:
            raise MalformedData(f"{where}: chunk {name!r}: {stop - start} bytes for {dtype}{list(shape)}")
        position = stop
    if position != nbytes:
        raise MalformedData(f"{where}: chunks end at {position}, the file has {nbytes} bytes")
    return found
