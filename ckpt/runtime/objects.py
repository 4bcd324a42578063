"""Trees of plain Python values as JSON, without pickle: scheduler state, RNG state, a user's data loader.

JSON has no tuple, no bytes, no NaN and only string keys, so such values become ``{"$<kind>": …}``. Tensors are taken
out of the tree (``{"$tensor": n}``) and stored as raw bytes beside it, whatever their size. Nothing is ever
instantiated by name when reading: a file can only produce the types listed here.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckpt.errors import ConfigError, MalformedData
from ckpt.layout.spec import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_DEPTH = 100
_NUMPY_KINDS = "biufcSU"
_NUMPY_DTYPE = re.compile(rf"[<>|=][{_NUMPY_KINDS}]\d{{1,9}}")
"""What ``dtype.str`` gives for these kinds; anything else that numpy would parse is refused."""
MAX_DIGITS = 4000
"""Decimal digits of an integer; Python refuses to parse 4300 and more."""


def encode_object(tree: Any, name: str) -> tuple[bytes, list[torch.Tensor]]:
    """Return the JSON document of ``tree`` and the tensors that it refers to (detached, not copied).

    Raises:
        ConfigError: a value that cannot be stored; the message gives its path, e.g. ``loader['epochs'][3]``.
    """
    tensors: list[torch.Tensor] = []
    return json.dumps(_encode(tree, name, tensors, 0), separators=(",", ":"), sort_keys=False).encode(), tensors


def _encode(value: Any, path: str, tensors: list[torch.Tensor], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ConfigError(f"{path}: nested more than {MAX_DEPTH} deep (a tree that contains itself?)")
    kind = type(value)
    if kind is int and value.bit_length() > MAX_DIGITS * 3.32:
        raise ConfigError(f"{path}: an integer of {value.bit_length()} bits cannot be stored")
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list:
        if {*map(type, value)} == {str}:  # the names of a group's parameters, in every save
            return value
        return [_encode(v, f"{path}[{i}]", tensors, depth + 1) for i, v in enumerate(value)]
    if kind is tuple or kind in (set, frozenset):
        items = sorted(value, key=repr) if kind in (set, frozenset) else value
        return {f"${kind.__name__}": [_encode(v, f"{path}[{i}]", tensors, depth + 1) for i, v in enumerate(items)]}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, tensors, depth)
    if isinstance(value, torch.Tensor):
        _check_tensor(value, path)
        tensors.append(value.detach())
        return {"$tensor": len(tensors) - 1}
    return _encode_leaf(value, path)


def _encode_mapping(value: Mapping[Any, Any], path: str, tensors: list[torch.Tensor], depth: int) -> Any:
    items = [(k, _encode(v, f"{path}[{k!r}]", tensors, depth + 1)) for k, v in value.items()]
    if all(type(k) is str and not k.startswith("$") for k, _ in items):
        return dict(items)
    return {"$dict": [[_encode(k, f"{path} key {k!r}", tensors, depth + 1), v] for k, v in items]}


def _encode_leaf(value: Any, path: str) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        array = np.asarray(value)
        if array.dtype.kind not in _NUMPY_KINDS:
            raise ConfigError(f"{path}: numpy array of dtype {array.dtype} cannot be stored")
        data = base64.b64encode(array.tobytes()).decode()  # tobytes: C order, whatever the strides
        tag = "$numpy" if isinstance(value, np.ndarray) else "$scalar"
        return {tag: [array.dtype.str, list(array.shape), data]}
    if type(value) in (bytes, bytearray):
        return {f"${type(value).__name__}": base64.b64encode(value).decode()}
    if type(value) is complex:
        return {"$complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, torch.Size):
        return {"$size": list(value)}
    if isinstance(value, torch.dtype | torch.device):
        return {f"${type(value).__name__}": str(value)}
    raise ConfigError(
        f"{path}: a value of type {type(value).__module__}.{type(value).__qualname__} cannot be stored; "
        f"state must be made of None, bool, int, float, str, bytes, list, tuple, set, dict, numpy arrays and tensors"
    )


def _check_tensor(tensor: torch.Tensor, path: str) -> None:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in ITEMSIZE or tensor.layout is not torch.strided or tensor.is_meta:
        raise ConfigError(f"{path}: a {tensor.layout} tensor of {name} on {tensor.device} cannot be stored")


def decode_object(document: bytes, tensors: Sequence[torch.Tensor], where: str) -> Any:
    """Return the tree of :func:`encode_object`.

    Raises:
        MalformedData: not such a document; ``where`` names the file.
    """
    try:
        return _decode(json.loads(document), tensors)
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, RuntimeError) as error:
        raise MalformedData(f"{where}: not an object document ({error!r})") from error


def _decode(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        tag, content = next(iter(value.items()))
        if tag.startswith("$"):
            return _decode_tagged(tag, content, tensors)
    return {k: _decode(v, tensors) for k, v in value.items()}


def _decode_tagged(tag: str, content: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if tag in ("$tuple", "$set", "$frozenset"):
        kind = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}[tag]
        return kind(_decode(v, tensors) for v in content)
    if tag == "$dict":
        return {_decode(k, tensors): _decode(v, tensors) for k, v in content}
    if tag == "$tensor":
        if type(content) is not int or content < 0:
            raise ValueError(f"tensor number {content!r}")
        return tensors[content]
    if tag in ("$numpy", "$scalar"):
        dtype, shape, data = content
        if type(dtype) is not str or not _NUMPY_DTYPE.fullmatch(dtype):
            raise ValueError(f"numpy dtype {dtype!r}")
        array = np.frombuffer(base64.b64decode(data, validate=True), np.dtype(dtype)).reshape(_sizes(shape)).copy()
        return array if tag == "$numpy" else array[()]
    if tag in ("$bytes", "$bytearray"):
        data = base64.b64decode(content, validate=True)
        return data if tag == "$bytes" else bytearray(data)
    return _decode_small(tag, content)


def _sizes(content: Any) -> list[int]:
    if type(content) is not list or not all(type(n) is int and 0 <= n < 2**63 for n in content):
        raise ValueError(f"shape {str(content)[:80]}")
    return content


def _decode_small(tag: str, content: Any) -> Any:
    if tag == "$float":
        return float(content)
    if tag == "$complex":
        return complex(float(content[0]), float(content[1]))
    if tag == "$size":
        return torch.Size(_sizes(content))
    if tag == "$device":
        return torch.device(content)
    if tag == "$dtype":
        name = str(content).removeprefix("torch.")
        found = getattr(torch, name, None) if name.isidentifier() else None
        if isinstance(found, torch.dtype):
            return found
    raise ValueError(f"unknown tag {tag!r} with {content!r}")
