"""State beside tensors: what the adapter hands over, each rank's RNG, and the user's ``extra`` objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.errors import ConfigError
from ckpt.format.digest import digest
from ckpt.format.manifest import MAX_CHUNK, BlobEntry, ObjectEntry, ObjectTensor
from ckpt.plan.local_plan import CHUNK_BYTES
from ckpt.runtime.objects import encode_object
from ckpt.runtime.packing import Output
from ckpt.runtime.rng import capture_rng
from ckpt.runtime.staging import tensor_bytes

ENGINE, RNG, EXTRA, VALUE = "engine", "rng", "extra", "value"
"""Kinds of objects: the adapter's, generators, a user's stateful object, a user's plain value."""


@dataclass(frozen=True, slots=True)
class Item:
    """One named object of this rank, encoded. ``identity``: equal for equal content."""

    name: str
    kind: str
    document: bytes
    tensors: tuple[torch.Tensor, ...]
    identity: str


def collect(engine_objects: Mapping[str, Any], extra: Mapping[str, Any] | None) -> list[Item]:
    """Encode everything that is not a tensor of the engine.

    Raises:
        ConfigError: a value that cannot be stored, named by its path.
    """
    items = [encode_item(name, ENGINE, tree, f"engine state {name!r}") for name, tree in engine_objects.items()]
    items.append(encode_item("rng", RNG, capture_rng(), "random generator state"))
    for name, value in checked_extra(extra).items():
        if is_stateful(value):
            items.append(encode_item(name, EXTRA, value.state_dict(), f"extra[{name!r}].state_dict()"))
        else:
            items.append(_plain_item(name, value))
    return items


def _plain_item(name: str, value: Any) -> Item:
    try:
        return encode_item(name, VALUE, value, f"extra[{name!r}]")
    except ConfigError as error:
        if isinstance(value, Mapping | list | tuple):
            raise
        raise ConfigError(f"{error}; an object of your own needs state_dict and load_state_dict") from error


def checked_extra(extra: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return what the user passed as ``extra``, empty for None.

    Raises:
        ConfigError: no mapping, or a name that is none.
    """
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise ConfigError(f"extra is a {type(extra).__name__}, expected a mapping of names to objects and values")
    for name in extra:
        if type(name) is not str or not name:
            raise ConfigError(f"extra: name {name!r} is not a non-empty string")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"extra: name {name!r} is not Unicode text: {error.reason}") from error
    return extra


def is_stateful(value: object) -> bool:
    """Has ``value`` both ``state_dict`` and ``load_state_dict``?"""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def encode_item(name: str, kind: str, tree: Any, path: str) -> Item:
    """Return an object of a kind, encoded. ``path``: what errors call it. Raises :class:`ConfigError`."""
    document, tensors = encode_object(tree, path)
    if len(document) > MAX_CHUNK:
        raise ConfigError(
            f"{path}: {len(document)} bytes as JSON, at most {MAX_CHUNK} are possible; keep bulk data in tensors"
        )
    parts = [digest(document), *(f"{t.dtype}{list(t.shape)}{digest(tensor_bytes(t))}" for t in tensors)]
    return Item(name, kind, document, tuple(tensors), digest("".join(parts).encode()))


def owned_items(items: Sequence[Item], everyone: list[dict[str, str]], rank: int) -> list[tuple[Item, tuple[int, ...]]]:
    """Return the objects that ``rank`` writes, with all ranks that have exactly the same.

    ``everyone``: for each rank, object name -> identity. Equal objects are written once, in turn by their holders.
    """
    mine = []
    # Turns count the objects of all ranks, not this one's: ranks may hold different ones and must agree on each owner.
    turns = {key: turn for turn, key in enumerate(sorted({key for names in everyone for key in names}))}
    for item in items:
        key = f"{item.kind}:{item.name}"
        ranks = tuple(r for r, names in enumerate(everyone) if names.get(key) == item.identity)
        if ranks[turns[key] % len(ranks)] == rank:
            mine.append((item, ranks))
    return mine


def item_outputs(item: Item, rank: int) -> list[Output]:
    """Return the byte strings to store for one object: its document, then its tensors in pieces."""
    base = f"object:{item.kind}:{item.name}#rank{rank}"
    outputs = [_blob(f"{base}/document", memoryview(item.document))]
    for i, tensor in enumerate(item.tensors):
        data = tensor_bytes(tensor)
        pieces = range(0, len(data), CHUNK_BYTES)
        outputs += [_blob(f"{base}/{i}/{at}", data[at : at + CHUNK_BYTES]) for at in pieces]
    return outputs


def _blob(name: str, data: memoryview) -> Output:
    return Output(name, "uint8", (len(data),), len(data), digest(data), lambda: data)


def item_entry(item: Item, ranks: tuple[int, ...], outputs: list[Output], places: list[tuple[int, int]]) -> ObjectEntry:
    """Return the index entry of an object whose :func:`item_outputs` were stored at ``places``."""
    blobs = [BlobEntry(o.digest, pack, start, o.nbytes) for o, (pack, start) in zip(outputs, places, strict=True)]
    document, at, tensors = blobs[0], 1, []
    for tensor in item.tensors:
        count = -(-tensor.numel() * tensor.element_size() // CHUNK_BYTES)
        dtype = str(tensor.dtype).removeprefix("torch.")
        tensors.append(ObjectTensor(dtype=dtype, shape=tuple(tensor.shape), blobs=tuple(blobs[at : at + count])))
        at += count
    return ObjectEntry(name=item.name, kind=item.kind, ranks=ranks, document=document, tensors=tuple(tensors))
