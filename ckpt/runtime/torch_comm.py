"""The ranks of ``torch.distributed``'s default group."""

from __future__ import annotations

import weakref
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist

from ckpt.errors import RankFailure
from ckpt.runtime.agree import exchange_hellos, hello_of
from ckpt.runtime.comm import Comm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckpt.runtime.keyvalue import KeyValue

T = TypeVar("T")

FRAME_BYTES, LENGTH_BYTES = 512, 8
"""What each rank sends first when all tell each other something: the length of its message, and its beginning."""


class GuardedStore:
    """A ``torch.distributed`` store whose loss is an error of ours."""

    def __init__(self, store: KeyValue) -> None:
        self._store = store

    def set(self, key: str, value: bytes, /) -> object:
        """See :class:`~ckpt.runtime.keyvalue.KeyValue`."""
        return _mapped(lambda: self._store.set(key, value))

    def get(self, key: str, /) -> bytes:
        """See :class:`~ckpt.runtime.keyvalue.KeyValue`."""
        return _mapped(lambda: self._store.get(key))

    def add(self, key: str, amount: int, /) -> int:
        """See :class:`~ckpt.runtime.keyvalue.KeyValue`."""
        return _mapped(lambda: self._store.add(key, amount))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """See :class:`~ckpt.runtime.keyvalue.KeyValue`."""
        return _mapped(lambda: self._store.compare_set(key, expected, desired))

    def check(self, keys: list[str], /) -> bool:
        """See :class:`~ckpt.runtime.keyvalue.KeyValue`."""
        return _mapped(lambda: self._store.check(keys))

    def delete_key(self, key: str, /) -> bool:
        """See :class:`~ckpt.runtime.keyvalue.KeyValue`."""
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

    def __init__(self, generation: int, name: str = "ckpt", *, makes_groups: bool = True) -> None:
        store = dist.distributed_c10d._get_default_store()
        # torch's stub says that a store holds str; it takes and returns bytes.
        kv = cast("KeyValue", dist.distributed_c10d.PrefixStore(f"{name}/{generation}", store))
        super().__init__(GuardedStore(kv), dist.get_rank(), dist.get_world_size())
        self._group_ref: weakref.ref[dist.ProcessGroup] | None = None
        self._makes_groups = makes_groups
        self._grouped = False

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self._group_ref() if self._group_ref is not None else None

    def _own_group(self) -> dist.ProcessGroup:
        """Return the group; never None, which torch would take for the training's own."""
        group = self._group
        if group is None:
            raise RuntimeError("destroy_process_group() was called before the operation had ended")
        return group

    def make_group(self) -> None:
        """Make the group. A collective of the default group, so only for the thread that trains."""
        limit = timedelta(seconds=max(self.timeout, 10.0))
        group = dist.new_group(backend="gloo", timeout=limit)  # type: ignore[no-untyped-call,unused-ignore]
        self._group_ref = weakref.ref(group)

    def _prepare_entry(self, key: str) -> None:
        if self._group is None:
            self.store.add(f"{key}/groupless", 1)

    def _entered(self, key: str) -> None:
        # A collective decision: if one rank has lost its group, all make a new one together; or, in the background,
        # where making one could cross a collective of the training, all do without.
        groupless = bool(self.store.add(f"{key}/groupless", 0))
        if groupless and self._makes_groups:
            self.make_group()
        self._grouped = self._makes_groups or not groupless

    def _broken(self) -> None:
        self._group_ref = None

    def _exchange(self, payload: bytes) -> list[bytes]:
        if not self._grouped:
            return super()._exchange(payload)
        # Most of what ranks tell each other is short, and goes with its length in one collective; the rest needs two.
        frames = self._gathered(len(payload).to_bytes(LENGTH_BYTES, "little") + payload[: FRAME_BYTES - LENGTH_BYTES])
        sizes = [int.from_bytes(frame[:LENGTH_BYTES], "little") for frame in frames]
        longest = max(sizes)
        if longest <= FRAME_BYTES - LENGTH_BYTES:
            return [frame[LENGTH_BYTES : LENGTH_BYTES + n] for frame, n in zip(frames, sizes, strict=True)]
        return [row[:n] for row, n in zip(self._gathered(payload, longest), sizes, strict=True)]

    def _gathered(self, payload: bytes, width: int = FRAME_BYTES) -> list[bytes]:
        """Return all ranks' payloads, filled up to ``width`` bytes."""
        mine = torch.frombuffer(bytearray(payload.ljust(width, b"\0")), dtype=torch.uint8)
        rows = torch.empty(self.world * width, dtype=torch.uint8)
        dist.all_gather_into_tensor(rows, mine, group=self._own_group())
        data = rows.numpy().tobytes()
        return [data[at : at + width] for at in range(0, len(data), width)]

    def _deliver(self, payloads: Mapping[int, bytes], sizes: Mapping[int, int]) -> dict[int, bytes]:
        """One collective with a part for each pair of ranks; most pairs have none."""
        if not self._grouped:
            return super()._deliver(payloads, sizes)
        group = self._own_group()
        outgoing = [payloads.get(r, b"") for r in range(self.world)]
        incoming = [sizes.get(r, 0) for r in range(self.world)]
        flat = bytearray(b"".join(outgoing)) or bytearray(1)
        sent = torch.frombuffer(flat, dtype=torch.uint8)[: sum(map(len, outgoing))]
        got = torch.empty(sum(incoming), dtype=torch.uint8)
        dist.all_to_all_single(got, sent, incoming, list(map(len, outgoing)), group=group)
        data, ends = got.numpy().tobytes(), list(accumulate(incoming))
        return {r: data[end - n : end] for r, (n, end) in enumerate(zip(incoming, ends, strict=True)) if n}


_current: tuple[weakref.ref[Any], TorchComm] | None = None
_behind: tuple[weakref.ref[Any], TorchComm] | None = None
_generation = 0
"""How many default groups ckpt has met in this process. A job that destroys its group and makes another may get the
same store again, with the keys of the first."""


def communicator() -> Comm:
    """Return the communicator of the thread that trains: torch's default group, or a single rank without one."""
    global _current, _generation
    if not (dist.is_available() and dist.is_initialized()):
        return Comm(None, 0, 1)
    world = dist.group.WORLD
    if _current is None or _current[0]() is not world:  # a job may destroy its group and make another
        _generation += 1
        _current = (weakref.ref(world, _forget), TorchComm(_generation))
    return _current[1]


def background_communicator(timeout: float | None) -> Comm:
    """Return the communicator of the thread that saves behind the training: keys and a group of its own.

    To be called by the thread that trains. The first call of a job is a collective, which makes the group.

    Raises:
        RankFailure: not all ranks have called within ``timeout`` seconds (only the first time).
    """
    global _behind
    front = communicator()
    if not isinstance(front, TorchComm):
        return Comm(None, 0, 1)
    world = dist.group.WORLD
    if _behind is None or _behind[0]() is not world:
        comm = TorchComm(_generation, "ckpt-async", makes_groups=False)
        with front.joint("async_save", timeout):
            exchange_hellos(front, lambda: hello_of("async_save"))  # a rank that came to save would not make a group
            front.run("group", comm.make_group)  # all ranks have it, or all know that one has not
        _behind = (weakref.ref(world, _forget), comm)
    return _behind[1]


def _forget(world: weakref.ref[Any]) -> None:
    """Let go of the store of a default group that is gone."""
    global _current, _behind
    if _current is not None and _current[0] is world:
        _current = None
    if _behind is not None and _behind[0] is world:
        _behind = None
