"""What all ranks need alike goes through one rank: the index, and objects. A thousand ranks that all read the same
small files would be a load of its own for the store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ckpt.errors import ObjectNotFound
from ckpt.plan.read_plan import Unit, chain_from
from ckpt.repo.repository import Repository
from ckpt.runtime.broadcast import Transfer
from ckpt.runtime.reading_mode import HANDED_BYTES
from ckpt.store.forward import Forward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.format.manifest import BlobEntry, IndexPart, ObjectEntry
    from ckpt.runtime.comm import Comm
    from ckpt.runtime.fabric import Fabric
    from ckpt.store.base import Store

MAX_OBJECTS = 32 << 20
"""Bytes of all objects together up to which one rank reads them for all. They go to ranks that need but a few of them,
so larger ones (a user's replay buffer) are read by those who need them."""


class Handed(Forward):
    """A store of which some ranges are here already; ``ranges``: key -> position -> bytes.

    ``recording``: ranges that are read with :meth:`get` are added.
    """

    def __init__(self, store: Store, ranges: dict[str, dict[int, bytes]], *, recording: bool = False) -> None:
        super().__init__(store)
        self.ranges, self._recording = ranges, recording

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """See :class:`~ckpt.store.base.Store`."""
        if start in self.ranges.get(key, ()):
            return self.ranges[key][start][:nbytes]
        data = self.inner.get(key, start, nbytes)
        if self._recording:
            self.ranges.setdefault(key, {})[start] = data
        return data

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """See :class:`~ckpt.store.base.Store`."""
        for begin, data in self.ranges.get(key, {}).items():
            if begin <= start and start + len(buffer) <= begin + len(data):
                buffer[:] = data[start - begin : start - begin + len(buffer)]
                return len(buffer)
        return self.inner.read_into(key, start, buffer)


def hand_index(comm: Comm, fabric: Fabric | None, store: Store, step: int, hosts: Sequence[str]) -> Store:
    """Return a store in which the index of ``step`` and its objects are at hand: rank 0 reads them for all. Collective.

    Raises:
        FormatError, IntegrityError, StoreError: rank 0's, on all ranks.
        RankFailure: a rank is gone.
    """
    kept: list[bytes] = []

    def work() -> bytes:
        recorder = Handed(store, {}, recording=True)
        index = Repository(recorder).read_index(step)
        _add_objects(recorder, index.parts)
        kept.append(msgspec.msgpack.encode(recorder.ranges))
        return str(len(kept[0])).encode()

    nbytes = int(comm.on_root("index", work))
    payload = kept[0] if kept else b""
    data = hand_round(comm, fabric, payload, nbytes, hosts)
    return Handed(store, msgspec.msgpack.decode(data, type=dict[str, dict[int, bytes]]))


def _add_objects(recorder: Handed, parts: Sequence[IndexPart]) -> None:
    wanted: dict[str, dict[int, int]] = {}
    for part in parts:
        for blob in (blob for entry in part.objects for blob in _blobs(entry)):
            of_pack = wanted.setdefault(part.packs[blob.pack].key, {})
            of_pack[blob.start] = max(of_pack.get(blob.start, 0), blob.start + blob.nbytes)
    if sum(stop - start for of_pack in wanted.values() for start, stop in of_pack.items()) > MAX_OBJECTS:
        return
    for key, of_pack in wanted.items():
        runs: list[list[int]] = []
        for start, stop in sorted(of_pack.items()):
            if runs and start <= runs[-1][1]:
                runs[-1][1] = max(runs[-1][1], stop)
            else:
                runs.append([start, stop])
        try:
            for start, stop in runs:
                recorder.get(key, start, stop - start)
        except ObjectNotFound:
            continue  # whoever needs it says so


def _blobs(entry: ObjectEntry) -> list[BlobEntry]:
    return [entry.document, *(blob for tensor in entry.tensors for blob in tensor.blobs)]


class _Payload:
    """Bytes of rank 0 for all, as a :class:`~ckpt.runtime.cargo.Cargo` of equal pieces."""

    def __init__(self, data: bytes, nbytes: int) -> None:
        self.data, self.into = data, memoryview(bytearray(nbytes))

    def read(self, unit: Unit, into: memoryview) -> None:
        """Copy from what there is."""
        into[:] = self.data[unit.start : unit.start + unit.nbytes]

    def check(self, unit: Unit, data: memoryview) -> None:
        """Nothing to check: what is in it has digests of its own."""

    def live(self, unit: Unit) -> memoryview:
        """Return where the piece belongs."""
        return self.into[unit.start : unit.start + unit.nbytes]

    def put(self, unit: Unit, data: memoryview) -> None:
        """Nothing to do."""


def hand_round(comm: Comm, fabric: Fabric | None, data: bytes, nbytes: int, hosts: Sequence[str]) -> memoryview:
    """Return ``nbytes`` bytes, ``data`` of rank 0, on all ranks. Collective.

    Raises:
        RankFailure: a rank is gone.
    """
    chain = chain_from(0, range(comm.world), hosts)
    units = []
    for number, start in enumerate(range(0, nbytes, HANDED_BYTES)):
        size = min(HANDED_BYTES, nbytes - start)
        units.append(Unit(number, 0, "", start, size, size, (), False, chain))
    cargo = _Payload(data, nbytes)
    Transfer(comm, fabric, cargo, span=HANDED_BYTES).run("index", units)
    return cargo.into
