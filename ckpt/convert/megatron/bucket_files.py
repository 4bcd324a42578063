"""The buckets of Megatron's distributed optimizer as its checkpoints have them: flat tensors in parts, and settings.

``dp_reshardable`` has a tensor for each bucket and role, ``dp_zero_gather_scatter`` one for each buffer, in a tree.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ckpt.convert.megatron.buckets import Bucket
from ckpt.convert.torchfile.file import Stored
from ckpt.convert.torchfile.stored import Gathered, loaded
from ckpt.errors import MalformedData, UnsupportedFeature
from ckpt.layout.spec import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ckpt.store.base import Store

BELOW = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
"""What the keys of a distributed optimizer begin with."""
_KEY = re.compile(
    r"(?:chained_(?P<chain>\d{1,6})\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d{1,6})\.(?P<what>[^/]+)"
    r"(?:/shard_[\d._]+)?"
)
_BUCKET = re.compile(
    r"gbuf_idx_(?P<buffer>\d{1,6})\.dtype_\(torch\.(?P<dtype>\w+), torch\.\w+\)"
    r"\.bucket_idx_(?P<bucket>\d{1,6})\.(?P<role>\w+)"
)
_SETTINGS = ("optimizer", "grad_scaler")
_STATE, _SIZES, _PADDED = "param_state", "per_bucket_numel_unpadded", "per_bucket_numel"


@dataclass(frozen=True, slots=True)
class Flat:
    """A flat tensor: ``parts`` as (first element, place), one behind the other."""

    dtype: str
    numel: int
    parts: tuple[tuple[int, Stored], ...]

    def ranges(self, start: int, stop: int) -> Iterator[tuple[int, int, Stored]]:
        """Yield (first, stop, place of the first one) of the stored elements in ``[start, stop)``."""
        begin = max(0, bisect_right(self.parts, start, key=itemgetter(0)) - 1)
        for first, stored in islice(self.parts, begin, None):
            low, high = max(start, first), min(stop, first + stored.volume)
            if low >= high:
                break
            at = stored.start + (low - first) * ITEMSIZE[self.dtype]
            yield low, high, replace(stored, shape=(high - low,), strides=(1,), start=at)

    def read(self, store: Store, start: int, stop: int) -> bytes:
        """Return the bytes of the elements ``[start, stop)``."""
        return b"".join(Gathered(store, stored)[:] for _, _, stored in self.ranges(start, stop))


@dataclass(frozen=True, slots=True)
class Buffer:
    """What a group of data-parallel ranks has of one dtype of parameters. ``flats``: role -> tensor, by bucket."""

    dtype: str
    buckets: list[Bucket]
    flats: list[dict[str, Flat]]


@dataclass(slots=True)
class Chain:
    """One of the optimizers that a job has. ``groups``: buffers by group of data-parallel ranks."""

    number: int
    groups: list[list[Buffer]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def experts(self) -> bool:
        """Is it that of the experts, whose groups are others?"""
        groups = self.settings["optimizer"].get("param_groups")
        first = groups[0] if isinstance(groups, list) and groups else None
        return isinstance(first, dict) and bool(first.get("is_expert_parallel"))


class BucketFiles:
    """Collects what a checkpoint has below ``optimizer.distributed``.

    Args:
        where: the checkpoint, for messages.
        store: where its files are.
        world: ranks that wrote it.
    """

    def __init__(self, where: str, store: Store, world: int) -> None:
        self.where, self._store, self._world = where, store, world
        self._flats: dict[tuple[int, int], dict[tuple[int, int], tuple[str, dict[str, Flat]]]] = {}
        self._values: dict[tuple[int, int], dict[str, Any]] = {}

    def add_tensor(
        self, key: str, dtype: str, shape: tuple[int, ...], parts: Iterable[tuple[tuple[int, ...], Stored]]
    ) -> None:
        """Take a tensor, in parts with their offsets."""
        chain, group, what = _split(key)
        found = _BUCKET.fullmatch(what)
        if found is None or len(shape) != 1:
            raise UnsupportedFeature(
                f"{self.where}: {key!r:.200} of shape {list(shape)}: not known of Megatron's distributed optimizer"
            )
        ordered = sorted(((offset[0], stored) for offset, stored in parts), key=lambda one: one[0])
        flat = Flat(dtype, shape[0], tuple(ordered))
        at = 0
        for first, stored in flat.parts:
            if first != at or not stored.is_contiguous:
                raise MalformedData(f"{self.where}: {key!r:.200}: element {at} is missing, or stored twice")
            at += stored.volume
        if at != flat.numel:
            raise MalformedData(f"{self.where}: {key!r:.200}: {at} of {flat.numel} elements are stored")
        place = int(found["buffer"]), int(found["bucket"])
        _, flats = self._flats.setdefault((chain, group), {}).setdefault(place, (found["dtype"], {}))
        flats[found["role"]] = flat

    def add_value(self, key: str, value: Any) -> None:
        """Take an object."""
        chain, group, what = _split(key)
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        self._values.setdefault((chain, group), {})[what] = value

    def chains(self) -> list[Chain]:
        """Return the optimizers.

        Raises:
            MalformedData: objects that do not fit the tensors.
            UnsupportedFeature: groups with settings of their own.
        """
        found: dict[int, Chain] = {}
        for chain, group in sorted(self._flats.keys() | self._values.keys()):
            one = found.setdefault(chain, Chain(chain))
            values = self._values.get((chain, group), {})
            settings = {name: values[name] for name in _SETTINGS if name in values}
            if group != len(one.groups) or not isinstance(settings.get("optimizer"), dict):
                raise self._wrong(chain, group, "there is nothing of the group before it, or no settings")
            if repr(loaded(self._store, settings)) != repr(loaded(self._store, one.settings or settings)):
                raise UnsupportedFeature(
                    f"{self.where}: the optimizer's settings differ between groups of data-parallel ranks"
                )
            one.settings = settings
            joined = values.get(_STATE)
            one.groups.append(self._joined(chain, group, joined) if joined else self._apart(chain, group, values))
        for one in found.values():
            ranks = max(1, self._world // len(one.groups))
            one.groups = [[_cut_for(buffer, ranks) for buffer in group] for group in one.groups]
        return list(found.values())

    def _apart(self, chain: int, group: int, values: Mapping[str, Any]) -> list[Buffer]:
        """Return the buffers of a group whose buckets are stored one by one."""
        sizes, padded = (self._numbers(chain, group, values.get(name)) for name in (_SIZES, _PADDED))
        flats = self._flats.get((chain, group), {})
        if [len(one) for one in sizes] != [len(one) for one in padded]:
            raise self._wrong(chain, group, f"{sizes} elements, {padded} with what fills up")
        if sorted(flats) != [(n, k) for n, one in enumerate(sizes) for k in range(len(one))]:
            raise self._wrong(chain, group, f"buckets {sorted(flats)}, expected such of {sizes} elements")
        buffers = []
        for n, numels in enumerate(sizes):
            buffer = Buffer(flats[n, 0][0], [], [])
            for k, numel in enumerate(numels):
                dtype, roles = flats[n, k]
                if any(flat.numel != numel for flat in roles.values()) or dtype != buffer.dtype:
                    raise self._wrong(
                        chain, group, f"bucket {k} of buffer {n} has not {numel} elements of {buffer.dtype}"
                    )
                if not numel <= padded[n][k]:
                    raise self._wrong(
                        chain, group, f"bucket {k} of buffer {n} has {padded[n][k]} elements with padding"
                    )
                cuts = {first for flat in roles.values() for first, _ in flat.parts if first}
                label = f"bucket {k} of buffer {n} of group {group}"
                buffer.buckets.append(Bucket(label, numel, padded[n][k], tuple(sorted(cuts))))
                buffer.flats.append(roles)
            buffers.append(buffer)
        return buffers

    def _joined(self, chain: int, group: int, tree: Any) -> list[Buffer]:
        """Return the buffers of a group whose buckets were joined, without padding, on one rank."""
        if not isinstance(tree, dict) or tree.get("buckets_coalesced") is not True:
            raise UnsupportedFeature(
                f"{self.where}: {_STATE} of group {group} is of a release before buckets were joined"
            )
        buffers = []
        for n in range(len(tree) - 1):
            one = tree.get(n)
            if not isinstance(one, dict) or len(one) != 1:
                raise self._wrong(chain, group, f"buffer {n} is no dictionary of one dtype")
            ((dtypes, roles),) = one.items()
            if not isinstance(dtypes, tuple) or not dtypes or not isinstance(roles, dict):
                raise self._wrong(chain, group, f"buffer {n} is of {dtypes!s:.80}")
            flats = {role: _flat(stored) for role, stored in roles.items() if isinstance(stored, Stored)}
            numels = {flat.numel for flat in flats.values()}
            if len(numels) != 1:
                raise self._wrong(chain, group, f"buffer {n} has {sorted(numels)} elements")
            bucket = Bucket(f"buffer {n} of group {group}", numels.pop())
            buffers.append(Buffer(str(dtypes[0]).removeprefix("torch."), [bucket], [flats]))
        return buffers

    def _numbers(self, chain: int, group: int, value: Any) -> list[list[int]]:
        try:
            found = [next(iter(one.values())) for one in value]
        except (TypeError, AttributeError, StopIteration) as error:
            raise self._wrong(chain, group, "no sizes of buckets") from error
        if not all(isinstance(one, list) and one and all(type(n) is int and n > 0 for n in one) for one in found):
            raise self._wrong(chain, group, f"sizes of buckets are {found!s:.80}")
        return found

    def _wrong(self, chain: int, group: int, what: str) -> MalformedData:
        return MalformedData(f"{self.where}: optimizer {chain}, group {group} of data-parallel ranks: {what}")


def _split(key: str) -> tuple[int, int, str]:
    found = _KEY.fullmatch(key)
    if found is None:
        raise UnsupportedFeature(f"{key!r:.200}: not known of Megatron's distributed optimizer")
    return int(found["chain"] or 0), int(found["group"]), found["what"]


def _flat(stored: Stored) -> Flat:
    if len(stored.shape) != 1 or not stored.is_contiguous:
        raise MalformedData(f"{stored.key!r}: a flat tensor of shape {list(stored.shape)}, strides {stored.strides}")
    return Flat(stored.dtype, stored.volume, ((0, stored),))


def _cut_for(buffer: Buffer, ranks: int) -> Buffer:
    return replace(buffer, buckets=[replace(bucket, ranks=ranks) for bucket in buffer.buckets])
