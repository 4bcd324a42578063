"""A checkpoint of any format, opened: what it holds by name, role and box, and where the bytes of each box lie.

A foreign checkpoint becomes an index like our own, whose "packs" are the foreign files: the planner and the reader that
load our own checkpoints then work on it unchanged, and read nothing but the ranges that are needed. What a foreign
index lacks is digests: nothing in those files says what their bytes should be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from ckpt.describe.model import Split
from ckpt.errors import MalformedData
from ckpt.format.manifest import ChunkEntry, IndexPart, PackRef
from ckpt.layout.box import Box, boxes_of_range
from ckpt.layout.spec import PARAM, TensorSpec
from ckpt.plan.load_plan import Catalog
from ckpt.store.base import Store
from ckpt.store.forward import Forward

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK_BYTES = 4 << 20
"""Boxes of foreign files are cut by rows into entries of at most this many bytes: the unit of reading and of memory."""
INLINE = "inline/"
"""Keys below it are no files: bytes that were made up while opening (a step count that stood in a Python object)."""


@dataclass(frozen=True, slots=True)
class Loose:
    """A named tree of plain values and small tensors, as ``ckpt.save`` keeps it beside the tensors.

    ``kind``: ``engine``, ``rng``, ``extra`` or ``value`` (:mod:`ckpt.runtime.extras`); ``ranks`` of the job that saved
    exactly this one.
    """

    name: str
    kind: str
    ranks: tuple[int, ...]
    tree: Any


@dataclass(frozen=True, slots=True)
class Opened:
    """What a converter needs to know of a source.

    ``format``: ``ckpt``, ``deepspeed``, ``universal``, ``dcp``, ``megatron``, ``safetensors`` or ``torch``. ``where``:
    for messages. ``store``: where the keys of ``parts`` are read; thread-safe. ``engine``: kind of the engine that
    saved it (:mod:`ckpt.engine`), empty if unknown. ``notes``: a line for each thing that was made up or
    assumed. ``lost``: a line for each thing that the files hold and that is left out here.
    ``usual``: notes on state beside tensors that every checkpoint of this format gets.
    ``degrees``: ``dp``, ``tp``, ``pp``, ``ep`` and ``zero`` of the job that saved it, those that are known: what a user
    leaves open stays so in the target. ``splits``: how tensor parallelism cut which tensor (None: not at all), where
    the files say it themselves; it holds for degrees that divide that of the source, as they do not say where heads
    are.
    """

    format: str
    where: str
    store: Store
    step: int
    world: int
    engine: str
    specs: tuple[TensorSpec, ...]
    parts: tuple[IndexPart, ...]
    derived: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    objects: tuple[Loose, ...] = ()
    notes: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    usual: tuple[str, ...] = ()
    degrees: Mapping[str, int] = field(default_factory=dict)
    splits: Mapping[str, Split | None] = field(default_factory=dict)

    def catalog(self) -> Catalog:
        """Return what it holds, by name."""
        return Catalog(self.specs, self.parts, self.derived, self.aliases, keep=True)


class Bytes(Protocol):
    """An object below :data:`INLINE`: ``bytes``, or what makes each part of it when it is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes: ...


class WithInline(Forward):
    """A store that also has a few objects of no file, below :data:`INLINE`; read only there."""

    def __init__(self, store: Store, inline: Mapping[str, Bytes]) -> None:
        super().__init__(store)
        self.inline = dict(inline)

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """See :class:`~ckpt.store.base.Store`."""
        if key in self.inline:
            return self.inline[key][start : None if nbytes is None else start + nbytes]
        return self.inner.get(key, start, nbytes)

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """See :class:`~ckpt.store.base.Store`."""
        if key in self.inline:
            data = self.inline[key][start : start + len(buffer)]
            buffer[: len(data)] = data
            return len(data)
        return self.inner.read_into(key, start, buffer)

    def size(self, key: str) -> int | None:
        """See :class:`~ckpt.store.base.Store`."""
        return len(self.inline[key]) if key in self.inline else self.inner.size(key)


class Builder:
    """Collects what a foreign checkpoint holds. All names are those of the model, without a framework's prefixes.

    Args:
        format: see :class:`Opened`.
        where: the checkpoint, for messages.
        store: where its files are.
    """

    def __init__(self, format: str, where: str, store: Store) -> None:
        self.format, self.where, self._store = format, where, store
        self.step, self.world, self.engine = 0, 1, ""
        self.derived: set[str] = set()
        self.aliases: dict[str, str] = {}
        self.objects: list[Loose] = []
        self.notes: list[str] = []
        self.lost: list[str] = []
        self.usual: list[str] = []
        self.degrees: dict[str, int] = {}
        self.splits: dict[str, Split | None] = {}
        self._specs: dict[tuple[str, str], TensorSpec] = {}
        self._boxes: dict[tuple[str, str], dict[Box, tuple[str, int]]] = {}
        self._inline: dict[str, Bytes] = {}

    def spec(self, fqn: str, role: str, dtype: str, shape: Sequence[int]) -> TensorSpec:
        """Return the tensor of this name and role; made the first time.

        Raises:
            MalformedData: it was said to have another dtype or shape before.
        """
        new = TensorSpec(fqn, role, dtype, tuple(shape))
        old = self._specs.setdefault(new.key, new)
        if old != new:
            raise MalformedData(f"{self.where}: {new} stands elsewhere as {old}")
        return old

    def known(self, fqn: str, role: str) -> TensorSpec | None:
        """Return the tensor of this name and role if :meth:`spec` has made it."""
        return self._specs.get((fqn, role))

    def add(self, spec: TensorSpec, box: Box, key: str, start: int) -> None:
        """Say where a box is: its elements row by row, one behind the other, from byte ``start`` of file ``key``.

        The same box again is a replica; the first one counts. A spec that has no boxes at all (an empty tensor) is
        kept.
        """
        self._boxes.setdefault(spec.key, {}).setdefault(box, (key, start))

    def add_range(self, spec: TensorSpec, first: int, stop: int, key: str, start: int) -> None:
        """Say where the elements ``[first, stop)`` of the tensor, counted row by row, are: from byte ``start``."""
        at = start
        for box in boxes_of_range(spec.shape, first, stop):
            self.add(spec, box, key, at)
            at += box.volume * spec.itemsize

    def add_value(self, spec: TensorSpec, data: bytes) -> None:
        """Give the bytes of a small tensor that stands in no file as such.

        Raises:
            MalformedData: they are more or fewer than the tensor has.
        """
        if len(data) != spec.nbytes:
            raise MalformedData(f"{self.where}: {spec} got {len(data)} bytes")
        self.add_virtual(spec, Box.whole(spec.shape), bytes(data))

    def add_virtual(self, spec: TensorSpec, box: Box, data: Bytes) -> None:
        """Give the bytes of a box, row by row, or what makes them when it is asked for a part of them."""
        key = f"{INLINE}{len(self._inline)}"
        self._inline[key] = data
        self.add(spec, box, key, 0)

    def uncovered(self) -> list[str]:
        """Return one line for each tensor of which elements are missing, or counted twice."""
        found = []
        for key, spec in sorted(self._specs.items()):
            if key not in self._boxes and spec.role == PARAM and spec.fqn in self.derived:
                continue  # the cast of its master
            held = sum(box.volume for box in self._boxes.get(key, ()))
            if held != prod(spec.shape):
                found.append(f"{spec}: the files hold {held} of {prod(spec.shape)} elements")
        return found

    def _no_text(self) -> list[str]:
        """Return one line for each name that no format can write: pickles and JSON allow half of a surrogate pair."""
        names = [*(("tensor", fqn) for fqn in {fqn for fqn, _ in self._specs} | self.aliases.keys())]
        names += [*(("state", role) for role in {role for _, role in self._specs})]
        names += [*(("object", one.name) for one in self.objects)]
        wrong = {pair for pair in names if any(0xD800 <= ord(letter) < 0xE000 for letter in pair[1])}
        return [f"{what} {name!a}: its name is no text (half of a surrogate pair)" for what, name in sorted(wrong)]

    def build(self) -> Opened:
        """Return the checkpoint.

        Raises:
            MalformedData: the files do not hold each tensor exactly once, or a name is no text; all of them at once.
        """
        problems = self.uncovered() + self._no_text()
        if problems:
            more = f"; … and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise MalformedData(f"{self.where}: {'; '.join(problems[:8])}{more}")
        specs = tuple(sorted(self._specs.values()))
        store = WithInline(self._store, self._inline)
        keys = sorted({key for boxes in self._boxes.values() for key, _ in boxes.values()})
        packs = tuple(PackRef(key=key, nbytes=store.size(key) or 0) for key in keys)
        number = {key: n for n, key in enumerate(keys)}
        chunks: list[ChunkEntry] = []
        for n, spec in enumerate(specs):
            for box, (key, start) in self._boxes.get(spec.key, {}).items():
                at = start
                for piece in box.cut(max(1, CHUNK_BYTES // spec.itemsize)) if box.volume else ():
                    nbytes = piece.volume * spec.itemsize
                    chunks.append(ChunkEntry(n, piece.offsets, piece.sizes, "", number[key], at, nbytes))
                    at += nbytes
        return Opened(
            format=self.format,
            where=self.where,
            store=store,
            step=self.step,
            world=self.world,
            engine=self.engine,
            specs=specs,
            parts=(IndexPart(rank=0, packs=packs, chunks=tuple(chunks)),),
            derived=tuple(sorted(self.derived)),
            aliases=dict(self.aliases),
            objects=tuple(self.objects),
            notes=tuple(self.notes),
            lost=tuple(dict.fromkeys(self.lost)),
            usual=tuple(dict.fromkeys(self.usual)),
            degrees=dict(self.degrees),
            splits=dict(self.splits),
        )
