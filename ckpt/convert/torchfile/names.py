"""What stands for the classes and functions that a file of ``torch.save`` names: functions of our own, and records.

None of these runs code that a file brings, allocates what a file asks for, or imports anything by a file's words. The
list is that of ``torch.load(weights_only=True)`` with numpy's arrays; classes of DeepSpeed and Megatron, of which their
files are full, become records (:class:`Inert`) that know their name and attributes and can do nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from reprlib import repr as short
from typing import Any

import numpy as np
import torch

from ckpt.errors import MalformedData, UnsupportedFeature
from ckpt.layout.spec import ITEMSIZE

MAX_DIMS = 64
MAX_KEY = 100
"""Values in a tuple that is a key of a dictionary, or in a set."""
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8",
}  # fmt: skip
INERT = ("deepspeed.", "megatron.", "argparse.Namespace", "types.SimpleNamespace", "signal.Signals", "pathlib.")
"""Full names of classes that become records; those that end in a dot are packages."""
_NUMPY_KIND = re.compile(r"[biufcSU]\d{1,6}")
"""What numpy's own pickles call the types that hold no Python objects."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: where its bytes are. Two that are equal are tied (and a tensor without elements is nowhere).

    ``dtype``: our string. ``strides``: in elements. ``key``: the file. ``start``: byte of the file at which the first
    element is.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    key: str
    start: int

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.volume * ITEMSIZE[self.dtype]

    @property
    def is_contiguous(self) -> bool:
        """Do its elements stand row by row, one behind the other?"""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return not self.volume
            expected *= size
        return True


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage of the file: ``nbytes`` from byte ``start``. ``room``: bytes that a tensor in it may claim to have, as
    one that repeats its elements claims more than it has.
    """

    dtype: str
    key: str
    start: int
    nbytes: int
    room: int


@dataclass(slots=True, eq=False)
class Inert:
    """Stands for an object of a class that is not loaded. ``name``: of the class, in full. ``args``: what it was made
    with. ``attributes``: what was set on it; a state that is no dictionary stands under ``""``.
    """

    name: str
    args: tuple[Any, ...] = ()
    attributes: dict[Any, Any] = field(default_factory=dict)


def kind_of(value: Any) -> str:
    """Return what messages call a value of a file: its type, and not that of what stands for it here."""
    if isinstance(value, Stored):
        return "tensor"
    return value.name if isinstance(value, Inert) else type(value).__name__.strip("_")


@dataclass(frozen=True, slots=True)
class Named:
    """A class or function that a pickle may name and call: ``make`` does what calling it means here."""

    name: str
    make: Callable[..., Any]

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Return what stands for the result."""
        return self.make(*args, **keywords)


@dataclass(slots=True, eq=False)
class _NumpyType:
    """A numpy dtype between being made and being told its byte order. ``kind``: such as ``f8``."""

    kind: str
    order: str = "="

    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.kind).newbyteorder(self.order)  # type: ignore[arg-type]  # its stub wants literals


PLAIN = (
    type(None), bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, torch.device, np.generic,
    np.ndarray, Stored,
)  # fmt: skip
"""What may come out, beside lists, tuples, sets, dictionaries and :class:`Inert`."""


class Names:
    """The table. ``inert``: further classes that become records, in the form of :data:`INERT`."""

    def __init__(self, inert: tuple[str, ...] = ()) -> None:
        self._inert = (*INERT, *inert)

    def find(self, module: str, name: str) -> Any:
        """Return what stands for a class, function or constant; None if it is not on the list."""
        full = f"{_MOVED.get(module, module)}.{name}"
        if full in _TABLE:
            return _TABLE[full]
        if any(full.startswith(one) if one.endswith(".") else full == one for one in self._inert):
            return Named(full, lambda *args, **keywords: Inert(full, args, keywords))
        return None

    def set_state(self, target: Any, state: Any) -> bool:
        """Give what was made by :meth:`find` its state. Returns false for anything else."""
        if isinstance(target, Inert):
            slots = state[1] if isinstance(state, tuple) and len(state) == 2 else None
            for one in (state[0] or {}, slots) if isinstance(slots, dict) else (state,):
                target.attributes.update(one if isinstance(one, dict) else {"": one})
        elif isinstance(target, _NumpyType):
            _set_numpy_type(target, state)
        elif isinstance(target, np.ndarray):
            _set_array(target, state)
        else:
            return isinstance(target, dict)  # attributes of a dictionary: torch keeps the versions of modules there
        return True


_MOVED = {"numpy._core.multiarray": "numpy.core.multiarray", "numpy._core.numeric": "numpy.core.numeric"}
"""Where numpy 2 has what has another module in the table."""


# ------------------------------------------------------------------------------------------------------------ tensors


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Stored:
    """``torch._utils._rebuild_tensor_v2``; ``rest``: requires_grad, hooks, metadata."""
    if not isinstance(storage, Storage):
        raise MalformedData(f"a tensor in a {kind_of(storage)}, expected a storage")
    if len(rest) > 2 and rest[2]:
        raise UnsupportedFeature(f"a tensor that is conjugated or negated when it is read: {short(rest[2])}")
    return _placed(storage, storage.dtype, offset, size, stride)


def _tensor_of_dtype(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *rest: Any
) -> Stored:
    """``torch._utils._rebuild_tensor_v3``."""
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
        raise MalformedData(f"a tensor of {short(dtype)} in a {kind_of(storage)}")
    if rest and rest[0]:
        raise UnsupportedFeature(f"a tensor that is conjugated or negated when it is read: {short(rest[0])}")
    return _placed(storage, str(dtype).removeprefix("torch."), offset, size, stride)


def _placed(storage: Storage, dtype: str, offset: Any, size: Any, stride: Any) -> Stored:
    shape, strides = tuple(size), tuple(stride)
    numbers = (offset, *shape, *strides)
    if len(shape) != len(strides) or len(shape) > MAX_DIMS or any(type(n) is not int or n < 0 for n in numbers):
        raise MalformedData(f"a tensor at {short(offset)} of shape {short(shape)} and strides {short(strides)}")
    if dtype not in ITEMSIZE:
        raise UnsupportedFeature(f"a tensor of dtype {dtype}, which cannot be stored")
    width, volume = ITEMSIZE[dtype], prod(shape)
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) if volume else 0
    if (volume and (last + 1) * width > storage.nbytes) or volume * width > storage.room:
        raise MalformedData(
            f"a tensor of shape {shape} and strides {strides} at element {offset} in a storage of "
            f"{storage.nbytes} bytes ({dtype})"
        )
    return Stored(dtype, shape, strides, storage.key, storage.start + (offset * width if volume else 0))


def _parameter(data: Any, *rest: Any) -> Stored:
    if not isinstance(data, Stored):
        raise MalformedData(f"a parameter made of a {kind_of(data)}")
    return data


def _subclass(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """``torch._tensor._rebuild_from_type_v2``: a tensor with attributes, which are left out."""
    if not isinstance(function, Named) or not isinstance(kind, Named) or kind.name not in _TENSORS:
        raise UnsupportedFeature(f"a tensor of the class {_called(kind)}")
    return function(*args)


def _called(kind: Any) -> str:
    return kind.name if isinstance(kind, Named) else short(kind)


def _copied(data: Any, dtype: Any, device: Any, grad: Any) -> Stored:
    """``torch._utils._rebuild_device_tensor_from_cpu_tensor``: how tensors of some accelerators are saved."""
    if not isinstance(data, Stored) or not isinstance(dtype, torch.dtype) or f"torch.{data.dtype}" != str(dtype):
        raise UnsupportedFeature(f"a tensor of {short(dtype)} that is stored as something else")
    return data


def _refused(what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **keywords: Any) -> Any:
        raise UnsupportedFeature(f"{what} cannot be converted")

    return refuse


# -------------------------------------------------------------------------------------------------------- plain values


def check_keys(keys: Iterable[Any]) -> None:
    """Check that keys can be hashed: of tuples inside of tuples, few opcodes can make one that takes for ever.

    Raises:
        MalformedData: a key of more than :data:`MAX_KEY` values.
    """
    for key in keys:
        left, waiting = MAX_KEY, [key]
        while waiting:
            value = waiting.pop()
            if isinstance(value, tuple | frozenset):
                left -= len(value)
                if left < 0:
                    raise MalformedData(f"a key of more than {MAX_KEY} values")
                waiting += value


def _encoded(text: Any, encoding: Any = "latin1") -> bytes:
    """``_codecs.encode``: how the older protocols write bytes. No other codec: some of them unpack."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise MalformedData(f"bytes as a {kind_of(text)} in {short(encoding)}")
    return text.encode("latin1")


def _bytes(data: Any = b"", encoding: Any = "latin1") -> bytes:
    return bytes(data) if isinstance(data, bytes | bytearray) else _encoded(data, encoding)


def _bytearray(data: Any = b"", encoding: Any = "latin1") -> bytearray:
    return bytearray(_bytes(data, encoding))


def _collected(kind: type) -> Callable[..., Any]:
    def collect(items: Any = ()) -> Any:
        if not isinstance(items, list | tuple | set | frozenset | dict):
            raise MalformedData(f"a {kind.__name__} of a {kind_of(items)}")
        check_keys(items if kind is not dict or isinstance(items, dict) else (key for key, _ in items))
        return kind(items)

    return collect


def _default_dict(factory: Any = None, items: Any = ()) -> dict[Any, Any]:
    found: dict[Any, Any] = _collected(dict)(items)
    return found


def _complex(real: Any = 0.0, imag: Any = 0.0) -> complex:
    return complex(float(real), float(imag))


def _attribute(owner: Any, name: Any) -> Inert:
    """``getattr``: how some releases of Python write a member of an enumeration. Of a record only."""
    if not isinstance(owner, Named) or not isinstance(owner(), Inert):
        raise MalformedData(f"the pickle asks a {kind_of(owner)} for {short(name)}")
    return Inert(owner.name, (name,))


# --------------------------------------------------------------------------------------------------------------- numpy


def _numpy_type(kind: Any, *rest: Any) -> _NumpyType:
    if not isinstance(kind, str) or not _NUMPY_KIND.fullmatch(kind):
        raise UnsupportedFeature(f"a numpy type {short(kind)} cannot be converted")
    return _NumpyType(kind)


def _set_numpy_type(target: _NumpyType, state: Any) -> None:
    if not isinstance(state, tuple) or len(state) < 5 or state[1] not in ("<", ">", "|", "=") or any(state[2:5]):
        raise UnsupportedFeature("a numpy type of several fields cannot be converted")
    target.order = state[1]


def _set_array(array: np.ndarray[Any, Any], state: Any) -> None:
    _, shape, kind, by_column, data = state
    checked = _array(data, kind, shape, "F" if by_column else "C")
    # In place, since the pickle may refer to the array already; what it says of itself has been checked.
    array.__setstate__((1, checked.shape, checked.dtype, by_column, checked.tobytes("A")))


def _array(data: Any, kind: Any, shape: Any, order: Any = "C") -> np.ndarray[Any, Any]:
    raw = _bytes(data)
    if not isinstance(kind, _NumpyType) or not isinstance(shape, tuple) or order not in ("C", "F"):
        raise MalformedData(f"a numpy array of shape {short(shape)}")
    return np.frombuffer(raw, kind.dtype()).reshape(shape, order=order).copy(order=order)


def _scalar(kind: Any, data: Any) -> Any:
    return _array(data, kind, ())[()]


_QUANTIZED = (
    "QInt8Storage", "QUInt8Storage", "QInt32Storage", "QUInt4x2Storage", "QUInt2x4Storage", "per_tensor_affine",
    "per_channel_affine", "per_tensor_symmetric", "per_channel_symmetric", "per_channel_affine_float_qparams",
)  # fmt: skip
"""What pickles of quantized tensors name: known, so that the tensor is refused and not the class."""
_TENSORS = {"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"}


def _table() -> dict[str, Any]:
    makers: dict[str, Callable[..., Any]] = {
        "torch._utils._rebuild_tensor": _tensor,
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        "torch._utils._rebuild_device_tensor_from_cpu_tensor": _copied,
        "torch._utils._rebuild_meta_tensor_no_storage": _refused("a tensor without data (meta)"),
        "torch._utils._rebuild_sparse_tensor": _refused("a sparse tensor"),
        "torch._utils._rebuild_qtensor": _refused("a quantized tensor"),
        "torch._utils._rebuild_nested_tensor": _refused("a nested tensor"),
        "torch._utils._rebuild_wrapper_subclass": _refused("a tensor of a class of its own, such as a rank's DTensor,"),
        "torch._tensor._rebuild_from_type_v2": _subclass,
        **dict.fromkeys((f"torch.{name}" for name in _QUANTIZED), _refused("a quantized tensor")),
        **dict.fromkeys(_TENSORS, _refused("a tensor without a storage")),
        "torch.Size": lambda sizes=(): torch.Size(sizes),
        "torch.device": lambda *args: torch.device(*args),
        "torch.serialization._get_layout": _refused("a sparse tensor"),
        "collections.OrderedDict": _collected(dict),
        "collections.Counter": _collected(dict),
        "collections.defaultdict": _default_dict,
        "builtins.dict": _collected(dict),
        "builtins.list": _collected(list),
        "builtins.set": _collected(set),
        "builtins.frozenset": _collected(frozenset),
        "builtins.bytes": _bytes,
        "builtins.bytearray": _bytearray,
        "builtins.complex": _complex,
        "builtins.getattr": _attribute,
        "_codecs.encode": _encoded,
        "numpy.dtype": _numpy_type,
        "numpy.ndarray": _refused("a numpy array without data"),
        "numpy.core.multiarray._reconstruct": lambda *args: np.ndarray((0,), "b"),
        "numpy.core.multiarray.scalar": _scalar,
        "numpy.core.numeric._frombuffer": _array,
    }
    table: dict[str, Any] = {name: Named(name, make) for name, make in makers.items()}
    for name, dtype in _STORAGES.items():
        for module in ("torch", "torch.cuda", "torch.storage"):
            table[f"{module}.{name}"] = Named(f"torch.{name}", _refused(f"a storage of {dtype} by itself"))
    for name in ITEMSIZE:
        if isinstance(getattr(torch, name, None), torch.dtype):
            table[f"torch.{name}"] = getattr(torch, name)
    return table


_TABLE = _table()


def dtype_of_storage(kind: Any) -> str:
    """Return the dtype of a storage class that a pickle named.

    Raises:
        UnsupportedFeature: of quantized ones.
    """
    name = kind.name.removeprefix("torch.") if isinstance(kind, Named) else ""
    if name not in _STORAGES:
        raise UnsupportedFeature(f"a storage of the class {_called(kind)}")
    return _STORAGES[name]
