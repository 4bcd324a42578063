"""The ranks of ``torch.distributed``'s default group."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist

from ckpt.errors import RankFailure
from ckpt.runtime.comm import Comm, KeyValue

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class GuardedStore:
    """A ``torch.distributed`` store whose loss is an error of ours."""

    def __init__(self, store: KeyValue) -> None:
        self._store = store

    def set(self, key: str, value: bytes, /) -> object:
        """See :class:`~ckpt.runtime.comm.KeyValue`."""
        return _mapped(lambda: self._store.set(key, value))

    def get(self, key: str, /) -> bytes:
        """See :class:`~ckpt.runtime.comm.KeyValue`."""
        return _mapped(lambda: self._store.get(key))

    def add(self, key: str, amount: int, /) -> int:
        """See :class:`~ckpt.runtime.comm.KeyValue`."""
        return _mapped(lambda: self._store.add(key, amount))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """See :class:`~ckpt.runtime.comm.KeyValue`."""
        return _mapped(lambda: self._store.compare_set(key, expected, desired))

    def check(self, keys: list[str], /) -> bool:
        """See :class:`~ckpt.runtime.comm.KeyValue`."""
        return _mapped(lambda: self._store.check(keys))

    def delete_key(self, key: str, /) -> bool:
        """See :class:`~ckpt.runtime.comm.KeyValue`."""
        return _mapped(lambda: self._store.delete_key(key))


def _mapped(call: Callable[[], T]) -> T:
    try:
        return call()
    except RuntimeError as error:  # DistNetworkError, DistStoreError: the process that hosts the store is gone
        cause = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        text = f"the job's key-value store, which rank 0 or the launcher hosts, does not answer ({cause})"
        raise RankFailure("rendezvous", {0: text}) from error


class TorchComm(Comm):
    """The ranks of ``torch.distributed``'s default group, with a gloo group of our own for bulk data.

    Groups are torch's to keep. If a reference here outlived ``destroy_process_group()``, gloo's threads would not be
    joined there, and one that frees a tensor while the interpreter ends aborts the process ("terminate called without
    an active exception") after all has gone well.
    """

    def __init__(self, generation: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        # torch's stub says that a store holds str; it takes and returns bytes.
        kv = cast("KeyValue", dist.distributed_c10d.PrefixStore(f"ckpt/{generation}", store))
        super().__init__(GuardedStore(kv), dist.get_rank(), dist.get_world_size())
        self._group_ref: weakref.ref[dist.ProcessGroup] | None = None

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self._group_ref() if self._group_ref is not None else None

    def _prepare_entry(self, key: str) -> None:
        if self._group is None:
            self.store.add(f"{key}/groupless", 1)

    def _entered(self, key: str) -> None:
        # A collective decision: if one rank has lost its group, all make a new one together.
        if self.store.add(f"{key}/groupless", 0):
            limit = timedelta(seconds=max(self.timeout, 10.0))
            group = dist.new_group(backend="gloo", timeout=limit)  # type: ignore[no-untyped-call,unused-ignore]
            self._group_ref = weakref.ref(group)

    def _broken(self) -> None:
        self._group_ref = None

    def _exchange(self, payload: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(payload)], dtype=torch.int64), group=self._group)
        longest = max(1, *(int(s) for s in sizes))
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else mine[:0]
        rows = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(rows, mine, group=self._group)
        return [row[: int(n)].numpy().tobytes() for row, n in zip(rows, sizes, strict=True)]


_current: tuple[weakref.ref[Any], Comm] | None = None
_generation = 0
"""How many default groups ckpt has met in this process. A job that destroys its group and makes another may get the
same store again, with the keys of the first."""


def communicator() -> Comm:
    """Return the one communicator of this process: torch's default group, or a single rank without one."""
    global _current, _generation
    if not (dist.is_available() and dist.is_initialized()):
        return Comm(None, 0, 1)
    world = dist.group.WORLD
    if _current is None or _current[0]() is not world:  # a job may destroy its group and make another
        _generation += 1
        _current = (weakref.ref(world, _forget), TorchComm(_generation))
    return _current[1]


def _forget(world: weakref.ref[Any]) -> None:
    """Let go of the store of a default group that is gone."""
    global _current
    if _current is not None and _current[0] is world:
        _current = None
