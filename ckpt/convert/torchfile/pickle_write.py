"""The pickle in a torch file, written opcode by opcode: nothing of ours is pickled, and no class decides how it is.

A tree of plain values, with :class:`Planned` where tensors will be. What comes out is what ``torch.save`` would write
of the same tree, without memos: ``torch.load(weights_only=True)`` reads it as long as no :class:`Instance` is in it.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.errors import ConfigError
from ckpt.layout.spec import ITEMSIZE, Shard

_STORAGES = {
    "float64": "DoubleStorage", "float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage",
    "int64": "LongStorage", "int32": "IntStorage", "int16": "ShortStorage", "int8": "CharStorage",
    "uint8": "ByteStorage", "bool": "BoolStorage", "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}  # fmt: skip
"""Dtypes that torch stores by a class of their own; all others as untyped bytes with the dtype beside them."""
_MAX_DEPTH = 100


Piece = Shard | bytes | int
"""What a storage is put together from: a box of a tensor of the source, row by row and in the dtype of its spec; bytes
as they are; or so many zero bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A contiguous tensor that will be written: ``pieces``, one behind the other, are its bytes.

    The same object in two places of a tree is one storage, as a weight that is tied.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return sum(map(piece_bytes, self.pieces))


@dataclass(frozen=True, slots=True)
class Named:
    """A class or function, by name: it is found there by whoever reads the file."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Instance:
    """An object of a framework's class with these attributes: ``weights_only`` refuses it, its framework wants it."""

    kind: Named
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Call:
    """What a function or class returns when it is called with these arguments by whoever reads the file."""

    function: Named
    arguments: tuple[Any, ...]


def piece_bytes(piece: Piece) -> int:
    """Return how many bytes a piece has."""
    if isinstance(piece, Shard):
        return piece.box.volume * piece.spec.itemsize
    return piece if isinstance(piece, int) else len(piece)


def encode(tree: Any) -> tuple[bytes, list[Planned]]:
    """Return the bytes of ``data.pkl`` and the storages ``data/0`` … that it refers to.

    Raises:
        ConfigError: something that is no plain value, or a tensor whose bytes are not as many as its shape needs.
    """
    out = _Emitter()
    out.parts.append(b"\x80\x02")
    out.emit(tree, "tree", 0)
    out.parts.append(b".")
    return b"".join(out.parts), out.storages


class _Emitter:
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.storages: list[Planned] = []
        self._numbers: dict[int, int] = {}

    def emit(self, value: Any, path: str, depth: int) -> None:
        """Append the opcodes that leave ``value`` on the stack."""
        if depth > _MAX_DEPTH:
            raise ConfigError(f"{path}: nested more than {_MAX_DEPTH} deep")
        kind = type(value)
        for known, method in _METHODS.items():
            if kind is known or (known in _ALSO_BASES and isinstance(value, known)):
                method(self, value, path, depth)
                return
        raise ConfigError(f"{path}: a {kind.__module__}.{kind.__qualname__} cannot be written into a torch file")

    def _none(self, value: None, path: str, depth: int) -> None:
        self.parts.append(b"N")

    def _bool(self, value: bool, path: str, depth: int) -> None:
        self.parts.append(b"\x88" if value else b"\x89")

    def _int(self, value: int, path: str, depth: int) -> None:
        if -(2**31) <= value < 2**31:
            self.parts.append(b"J" + struct.pack("<i", value))
            return
        data = int(value).to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        if len(data) > 255:
            raise ConfigError(f"{path}: a whole number of {len(data)} bytes")
        self.parts.append(b"\x8a" + bytes([len(data)]) + data)

    def _float(self, value: float, path: str, depth: int) -> None:
        self.parts.append(b"G" + struct.pack(">d", value))

    def _str(self, value: str, path: str, depth: int) -> None:
        data = value.encode("utf-8", "surrogatepass")
        self.parts.append(b"X" + struct.pack("<I", len(data)) + data)

    def _bytes(self, value: bytes, path: str, depth: int) -> None:  # protocol 2 has no opcode for them
        self._call(Named("_codecs", "encode"), (value.decode("latin1"), "latin1"), path, depth)

    def _tuple(self, value: tuple[Any, ...], path: str, depth: int) -> None:
        if type(value) is not tuple and not isinstance(value, torch.Size):
            raise ConfigError(f"{path}: a {type(value).__qualname__}, expected a plain tuple")
        if not value:
            self.parts.append(b")")
            return
        self.parts.append(b"(")
        self._all(value, path, depth)
        self.parts.append(b"t")

    def _all(self, values: Any, path: str, depth: int) -> None:
        for n, item in enumerate(values):
            self.emit(item, f"{path}[{n}]", depth + 1)

    def _size(self, value: torch.Size, path: str, depth: int) -> None:
        self._call(Named("torch", "Size"), (tuple(value),), path, depth)

    def _list(self, value: list[Any], path: str, depth: int) -> None:
        self.parts.append(b"](" if value else b"]")
        self._all(value, path, depth)
        self.parts.append(b"e" if value else b"")

    def _dict(self, value: Mapping[Any, Any], path: str, depth: int) -> None:
        self.parts.append(b"}")
        self._items(value, path, depth)

    def _ordered(self, value: Mapping[Any, Any], path: str, depth: int) -> None:
        self._call(Named("collections", "OrderedDict"), (), path, depth)
        self._items(value, path, depth)

    def _items(self, value: Mapping[Any, Any], path: str, depth: int) -> None:
        if value:
            self.parts.append(b"(")
            for key, item in value.items():
                self.emit(key, f"{path} key", depth + 1)
                self.emit(item, f"{path}[{key!r}]", depth + 1)
            self.parts.append(b"u")

    def _named(self, value: Named, path: str, depth: int) -> None:
        self.parts.append(f"c{value.module}\n{value.name}\n".encode())

    def _dtype(self, value: torch.dtype, path: str, depth: int) -> None:
        self._named(Named("torch", str(value).removeprefix("torch.")), path, depth)

    def _call(self, function: Named, arguments: tuple[Any, ...], path: str, depth: int) -> None:
        self._named(function, path, depth)
        self._tuple(arguments, path, depth)
        self.parts.append(b"R")

    def _called(self, value: Call, path: str, depth: int) -> None:
        self._call(value.function, value.arguments, path, depth)

    def _instance(self, value: Instance, path: str, depth: int) -> None:
        self._named(value.kind, path, depth)
        self.parts.append(b")\x81")
        self._dict(value.attributes, path, depth)
        self.parts.append(b"b")

    def _tensor(self, value: torch.Tensor, path: str, depth: int) -> None:
        from ckpt.runtime.staging import tensor_bytes

        dtype = str(value.dtype).removeprefix("torch.")
        self._planned(Planned(dtype, tuple(value.shape), (bytes(tensor_bytes(value)),)), path, depth)

    def _planned(self, value: Planned, path: str, depth: int) -> None:
        count = torch.Size(value.shape).numel()
        if value.dtype not in ITEMSIZE or value.nbytes != count * ITEMSIZE[value.dtype]:
            shown = f"{value.dtype}{list(value.shape)}"
            raise ConfigError(f"{path}: {value.nbytes} bytes are planned for a tensor {shown}")
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.storages)
            self.storages.append(value)
        key = str(self._numbers[id(value)])
        typed = _STORAGES.get(value.dtype)
        where = Named("torch", typed) if typed else Named("torch.storage", "UntypedStorage")
        self._named(Named("torch._utils", f"_rebuild_tensor_v{2 if typed else 3}"), path, depth)
        self.parts.append(b"(")
        self._tuple(("storage", where, key, "cpu", count if typed else value.nbytes), path, depth)
        self.parts.append(b"Q")
        strides = [1]
        for size in reversed(value.shape[1:]):
            strides.insert(0, strides[0] * max(size, 1))
        rest: tuple[Any, ...] = (0, tuple(value.shape), tuple(strides[: len(value.shape)]), False, OrderedDict())
        self._all(rest if typed else (*rest, getattr(torch, value.dtype)), path, depth)
        self.parts.append(b"tR")


_METHODS: dict[type, Callable[[_Emitter, Any, str, int], None]] = {
    type(None): _Emitter._none,
    bool: _Emitter._bool,
    int: _Emitter._int,
    float: _Emitter._float,
    str: _Emitter._str,
    bytes: _Emitter._bytes,
    torch.Size: _Emitter._size,
    tuple: _Emitter._tuple,
    list: _Emitter._list,
    OrderedDict: _Emitter._ordered,
    dict: _Emitter._dict,
    Named: _Emitter._named,
    Instance: _Emitter._instance,
    Call: _Emitter._called,
    Planned: _Emitter._planned,
    torch.dtype: _Emitter._dtype,
    torch.Tensor: _Emitter._tensor,
}
_ALSO_BASES = frozenset({int, float, str, OrderedDict, dict, torch.Tensor})
"""Kinds whose subclasses (an ``IntEnum``, a ``defaultdict``, a parameter) are written as what they are based on."""
