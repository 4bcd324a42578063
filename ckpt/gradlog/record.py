"""What a gradient log says of one optimizer step on one rank, and of the rank that keeps it: typed, bounded, validated.

A record is a safetensors file: gradients and other tensors under names, and a tensor ``record`` of bytes, the JSON of
:class:`Record`. Unknown fields are ignored; a change that a reader must not ignore is another :data:`VERSION`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch

from ckpt.errors import MalformedData
from ckpt.format import frames
from ckpt.format.digest import Buffer
from ckpt.format.pack import PackItem, lay_out
from ckpt.layout.box import Box
from ckpt.layout.spec import ITEMSIZE
from ckpt.runtime.objects import decode_object, encode_object
from ckpt.runtime.staging import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VERSION = frames.VERSION
DOCUMENT = "record"
MAX_DOCUMENT = 1 << 28
"""Bytes of the JSON in a record; nothing larger is read."""
MAX_TENSORS = 65_536

T = TypeVar("T")


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A box of a parameter of which a rank logs the gradient: its elements come row by row."""

    fqn: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The elements."""
        return Box(self.offsets, self.sizes)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that an optimizer steps on one rank, and which of its elements that rank logs, in this order.

    ``optimizer``, ``group``: numbers. ``dtype``: of the stepped tensor. ``members``: FQNs of all that is in it on any
    rank. ``layout``: digest of what it holds here; equal for equal boxes in equal places. ``size``: elements of the
    tensor here, padding included (0: not known); ``held``: without padding; ``at``: where in it each part begins (-1:
    it does not lie there row by row).
    """

    optimizer: int
    group: int
    dtype: str
    members: tuple[str, ...]
    layout: str
    parts: tuple[Part, ...]
    size: int = 0
    held: int = 0
    at: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Elements that are logged."""
        return sum(part.box.volume for part in self.parts)


class RankHead(msgspec.Struct, frozen=True, kw_only=True):
    """What is said once of a rank's log: what its records hold, and which kernels made the steps.

    ``peers``: the other ranks that log something of what this one steps (None: written before they were told).
    ``kernels``: for each optimizer its class and the options that choose a kernel. ``software``: versions. ``run``: of
    the log, as ``log.json`` says it.
    """

    format: int
    rank: int
    world: int
    entries: tuple[Entry, ...]
    kernels: tuple[dict[str, Any], ...]
    software: dict[str, str]
    run: str = ""
    peers: tuple[int, ...] | None = None


class Gradient(msgspec.Struct, frozen=True, kw_only=True):
    """Gradients of some entries, one behind the other in one tensor.

    ``dtype``: of what is stored. ``wide``: of the gradient: what is stored, times ``scale`` (an fp32 number in
    hexadecimal; empty: times nothing). ``codec``: empty, or how the bytes are encoded; ``blocks``: then the encoded
    length of each block of ``block`` bytes.
    """

    name: str
    entries: tuple[int, ...]
    dtype: str
    wide: str
    scale: str = ""
    codec: str = ""
    block: int = 0
    blocks: tuple[int, ...] = ()


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Hyperparameters of a group while it was stepped. ``document``: JSON as ``ckpt.runtime.objects`` writes it."""

    optimizer: int
    group: int
    document: str


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One step of every optimizer that took one."""

    gradients: tuple[Gradient, ...]
    options: tuple[Options, ...]


class Inner(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in a tree."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Object(msgspec.Struct, frozen=True, kw_only=True):
    """A tree of plain values behind the step; ``kind`` as in a checkpoint."""

    name: str
    kind: str
    document: str
    tensors: tuple[Inner, ...] = ()


class Loose(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that no optimizer steps and that changed (a buffer, a parameter set by hand), whole, behind the step."""

    name: str
    fqn: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step of one rank.

    ``calls``: none if the step was skipped (an overflow). ``options``: of all groups behind the step. ``digest``: of
    what this rank's optimizers step, behind it. ``square``: sum of the squares of the gradients logged here, as the
    optimizers saw them. ``samples``: positions in the order of the logged elements, and the stepped values there.
    ``run``: of the log that it belongs to.
    """

    format: int
    step: int
    rank: int
    calls: tuple[Call, ...]
    options: tuple[Options, ...]
    objects: tuple[Object, ...]
    loose: tuple[Loose, ...]
    digest: str
    square: float | None = None
    samples: tuple[tuple[int, float], ...] = ()
    seconds: float = 0.0
    run: str = ""

    @property
    def skipped(self) -> bool:
        """Did no optimizer take a step?"""
        return not self.calls


def options_document(options: Mapping[str, Any], where: str) -> str:
    """Return a group's options as JSON.

    Raises:
        ConfigError: an option that cannot be stored.
    """
    plain = {k: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v for k, v in options.items()}
    document, tensors = encode_object(plain, where)
    if tensors:
        plain = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in plain.items()}
        document, _ = encode_object(plain, where)
    return document.decode()


def read_options(one: Options, where: str) -> dict[str, Any]:
    """Return a group's options.

    Raises:
        MalformedData: they are none.
    """
    found = decode_object(one.document.encode(), (), where)
    if not isinstance(found, dict):
        raise MalformedData(f"{where}: options of a group are a {type(found).__name__}")
    return found


def encode_record(record: Record, tensors: Mapping[str, torch.Tensor | tuple[str, Sequence[Buffer]]]) -> list[Buffer]:
    """Return the payload of a record: a safetensors file, as the buffers that make it.

    Args:
        record: what is said.
        tensors: name -> contiguous tensor on the CPU, or ("uint8", buffers) of what was encoded.
    """
    document = msgspec.json.encode(record)
    items, data = [], list[list[Buffer]]()
    for name, value in tensors.items():
        if isinstance(value, torch.Tensor):
            raw: list[Buffer] = [tensor_bytes(value)]
            item = PackItem(name, str(value.dtype).removeprefix("torch."), tuple(value.shape), raw[0].nbytes)  # type: ignore[union-attr]
        else:
            raw = list(value[1])
            nbytes = sum(memoryview(one).nbytes for one in raw)
            item = PackItem(name, value[0], (nbytes,), nbytes)
        items.append(item)
        data.append(raw)
    items.append(PackItem(DOCUMENT, "uint8", (len(document),), len(document)))
    data.append([document])
    order = sorted(range(len(items)), key=lambda i: -ITEMSIZE[items[i].dtype])
    layout = lay_out([items[i] for i in order])
    return [layout.header, *(part for i in order for part in data[i])]


def decode(data: bytes, kind: type[T], where: str) -> T:
    """Return JSON as a struct.

    Raises:
        MalformedData: it is none; ``where`` names the file.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise MalformedData(f"{where}: not a {kind.__name__} ({error})") from error
