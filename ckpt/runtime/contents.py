"""Tensors of unknown layout as digests: what :mod:`ckpt.analysis.content` compares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from ckpt.analysis.content import CONSTANT, SHARED, VALUE, ContentReport, ContentTensor, RankContent, cuts
from ckpt.errors import ConfigError
from ckpt.format.digest import raw_digest
from ckpt.layout.box import Box
from ckpt.layout.spec import ITEMSIZE
from ckpt.runtime.agree import Hello, exchange_hellos
from ckpt.runtime.differing import is_constant
from ckpt.runtime.staging import cast_bytes, tensor_bytes
from ckpt.words import count

if TYPE_CHECKING:
    from ckpt.runtime.comm import Comm

CHUNK_ELEMENTS = 1 << 16
"""Largest chunk, in elements: tensors of one shape and different dtypes are cut alike, so that casts can be found."""
CASTS = ("bfloat16", "float16")
KIND = "state dict"

StateDict = Mapping[str, torch.Tensor]
Sizes = dict[str, list[int]]
"""16-bit dtype -> numbers of elements of the tensors that have it."""


def content_of(
    comm: Comm, state: Mapping[Any, Any], elements: int = CHUNK_ELEMENTS, call: str = "analyze"
) -> ContentReport:
    """Find what the ranks hold more than once. Collective, inside an operation that has been entered.

    Args:
        comm: all ranks.
        state: name -> tensor, or a mapping of the same kind; each rank's own.
        elements: largest chunk; the same on all ranks.
        call: name of the operation.

    Returns:
        The same report on every rank.

    Raises:
        ConfigError: with every leaf that has no plain bytes.
    """
    tensors: dict[str, torch.Tensor] = {}

    def describe() -> Hello:
        tensors.update(flatten(state))
        return Hello(call=call, root="", step=None, options=(f"elements={elements}",), engine=KIND)

    exchange_hellos(comm, describe)
    sizes = comm.gather("layout", lambda: msgspec.msgpack.encode(_sixteen_bit(tensors)))
    wanted: dict[str, set[int]] = {dtype: set() for dtype in CASTS}
    for data in sizes:
        for dtype, numbers in msgspec.msgpack.decode(data, type=Sizes).items():
            wanted[dtype].update(numbers)
    encoded = comm.gather("digest", lambda: msgspec.msgpack.encode(_digest(comm, tensors, wanted, elements)))
    return ContentReport(tuple(msgspec.msgpack.decode(data, type=RankContent) for data in encoded), elements)


def is_state_dict(state: Mapping[Any, Any]) -> bool:
    """Does it hold tensors, nested at will (or nothing at all)? A mapping of modules and optimizers is an engine."""
    seen: set[int] = set()
    todo: list[Any] = [state]
    empty = True
    while todo:
        node = todo.pop()
        if isinstance(node, torch.Tensor):
            return True
        if not isinstance(node, Mapping):
            empty = False
        elif id(node) not in seen:
            seen.add(id(node))
            todo += node.values()
    return empty


def flatten(state: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of nested mappings under dotted names.

    Raises:
        ConfigError: with everything that is no tensor with plain memory, and every name that is ambiguous.
    """
    found: dict[str, torch.Tensor] = {}
    problems: list[str] = []

    def visit(node: Mapping[Any, Any], prefix: str, above: tuple[int, ...]) -> None:
        for key, value in node.items():
            name = f"{prefix}{key}"
            if not isinstance(key, str | int):
                problems.append(f"{prefix}{key!r}: a key of type {type(key).__name__}, expected a name")
            elif isinstance(value, Mapping) and id(value) in above:
                problems.append(f"{name!r}: a mapping that holds itself")
            elif isinstance(value, Mapping):
                visit(value, f"{name}.", (*above, id(value)))
            elif name in found:
                problems.append(f"{name!r}: two leaves have this name")
            else:
                problem = _problem(value)
                problems.extend([f"{name!r}: {problem}"] if problem else [])
                found[name] = value

    visit(state, "", (id(state),))
    if problems:
        raise ConfigError("\n  - ".join([f"state dict: {count(len(problems), 'problem')}", *problems]))
    return found


def _problem(leaf: object) -> str | None:
    if not isinstance(leaf, torch.Tensor):
        return f"a {type(leaf).__name__}, expected a tensor"
    if hasattr(leaf, "to_local"):
        return f"a {type(leaf).__name__}, expected this rank's own part of it (to_local())"
    if leaf.is_meta:
        return "a meta tensor, which has no bytes"
    if leaf.layout != torch.strided:
        return f"a tensor of layout {leaf.layout}, expected a dense one"
    if _dtype(leaf) not in ITEMSIZE:
        return f"a tensor of dtype {_dtype(leaf)}, which cannot be compared"
    return None


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _sixteen_bit(tensors: Mapping[str, torch.Tensor]) -> Sizes:
    return {d: sorted({t.numel() for t in tensors.values() if _dtype(t) == d}) for d in CASTS}


def _digest(
    comm: Comm, tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, set[int]], elements: int
) -> RankContent:
    listed, digests, kinds = [], [], []
    casts: dict[int, dict[str, tuple[bytes, ...]]] = {}
    aliases: dict[int, int] = {}
    seen: dict[tuple[Any, ...], int] = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        shape, dtype = tuple(tensor.shape), _dtype(tensor)
        listed.append(ContentTensor(name, dtype, shape))
        targets = [d for d in CASTS if dtype == "float32" and tensor.numel() in wanted[d]]
        cast: dict[str, list[bytes]] = {d: [] for d in targets}
        owners = set()
        for box in cuts(shape, elements):
            view = tensor.detach()[box.relative_to(Box.whole(shape))]
            place = (str(view.device), view.data_ptr(), dtype, tuple(view.shape), view.stride())
            owners.add(seen.setdefault(place, number))
            data = tensor_bytes(view)
            digests.append(raw_digest(data))
            constant = CONSTANT if is_constant(data, ITEMSIZE[dtype]) else VALUE
            kinds.append(SHARED if seen[place] != number else constant)
            for target in targets:
                cast[target].append(raw_digest(cast_bytes(view, getattr(torch, target))))
            comm.beat()
        if targets:
            casts[number] = {d: tuple(ds) for d, ds in cast.items()}
        if len(owners) == 1 and owners != {number}:
            aliases[number] = owners.pop()
    return RankContent(tuple(listed), tuple(digests), tuple(kinds), casts, aliases)
