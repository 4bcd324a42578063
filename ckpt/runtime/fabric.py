"""How ranks hand bytes to each other: messages from one rank to one other, many on their way at once.

A gloo group of our own, made once and never used by anything else. Of gloo one must know: a wait cannot be interrupted,
but a wait that runs out of time closes all connections of the group and so ends all other waits. :meth:`Fabric.abort`
waits a millisecond for what nobody sends, and the group is not used again.
"""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from ckpt.runtime.torch_comm import TorchComm

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt.runtime.comm import Comm

POLL_SECONDS = 0.001
FOREVER = timedelta(days=7)
"""A message waits for as long as its peer makes progress, which :class:`~ckpt.runtime.watching.Watch` looks after."""
NEVER_SENT = 1 << 30
"""Tag of a message that nobody sends."""
GIVEN_UP = "the exchange between ranks was given up"


class Pending(Protocol):
    """A message on its way."""

    def wait(self) -> None:
        """Return when its bytes have left or arrived.

        Raises:
            RuntimeError: the peer is gone, or the fabric was aborted.
        """


class Fabric(Protocol):
    """Messages between the ranks of a job. Safe to use from several threads; buffers must live until the wait is over.

    ``tag``: tells messages between the same two ranks apart.
    """

    def send(self, data: memoryview, to: int, tag: int) -> Pending:
        """Begin to send."""

    def receive(self, into: memoryview, source: int, tag: int) -> Pending:
        """Begin to receive as many bytes as ``into`` has."""

    def abort(self) -> None:
        """Give up all messages that are on their way, and never carry one again."""


class GlooFabric:
    """Messages over a gloo group. The group is torch's to keep, as that of :class:`TorchComm`."""

    def __init__(self, timeout: float) -> None:
        limit = timedelta(seconds=max(timeout, 10.0))
        group = dist.new_group(backend="gloo", timeout=limit)  # type: ignore[no-untyped-call,unused-ignore]
        self._group_ref: weakref.ref[dist.ProcessGroup] = weakref.ref(group)
        self._lock = threading.Lock()
        self.broken = False

    def _begin(self, call: Callable[..., Any], data: memoryview, peer: int, tag: int) -> Pending:
        with self._lock:
            if self.broken:
                raise RuntimeError(GIVEN_UP)
            return self._message(call, data, peer, tag)

    def _message(self, call: Callable[..., Any], data: memoryview, peer: int, tag: int) -> _GlooPending:
        group = self._group_ref()
        if group is None:
            raise RuntimeError(GIVEN_UP)
        return _GlooPending(call(torch.frombuffer(data, dtype=torch.uint8), peer, group=group, tag=tag))

    def send(self, data: memoryview, to: int, tag: int) -> Pending:
        """See :class:`Fabric`."""
        return self._begin(dist.isend, data, to, tag)

    def receive(self, into: memoryview, source: int, tag: int) -> Pending:
        """See :class:`Fabric`."""
        return self._begin(dist.irecv, into, source, tag)

    def abort(self) -> None:
        """See :class:`Fabric`."""
        with self._lock:
            self.broken = True
            # A message of its own to run out of time with: of two who wait for one message gloo wakes only one.
            nothing = memoryview(bytearray(1))
            for peer in range(dist.get_world_size()):
                if peer != dist.get_rank():
                    with suppress(RuntimeError):
                        self._message(dist.irecv, nothing, peer, NEVER_SENT).wait(timedelta(milliseconds=1))


class _GlooPending:
    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, limit: timedelta = FOREVER) -> None:
        """See :class:`Pending`."""
        self._work.wait(limit)


class KeyValueFabric:
    """Messages through the key-value store, for ranks that have no process group."""

    def __init__(self, comm: Comm, generation: int) -> None:
        self.store, self.rank, self.prefix, self.broken = comm.store, comm.rank, f"fabric/{generation}", False

    def send(self, data: memoryview, to: int, tag: int) -> Pending:
        """See :class:`Fabric`."""
        self.store.set(f"{self.prefix}/{self.rank}/{to}/{tag}", bytes(data))
        return _Sent()

    def receive(self, into: memoryview, source: int, tag: int) -> Pending:
        """See :class:`Fabric`."""
        return _KeyValuePending(self, f"{self.prefix}/{source}/{self.rank}/{tag}", into)

    def abort(self) -> None:
        """See :class:`Fabric`."""
        self.broken = True


class _Sent:
    def wait(self) -> None:
        """See :class:`Pending`."""


class _KeyValuePending:
    def __init__(self, fabric: KeyValueFabric, key: str, into: memoryview) -> None:
        self.fabric, self.key, self.into = fabric, key, into

    def wait(self) -> None:
        """See :class:`Pending`."""
        store = self.fabric.store
        while not store.check([self.key]):
            if self.fabric.broken:
                raise RuntimeError(GIVEN_UP)
            time.sleep(POLL_SECONDS)
        self.into[:] = bytes(store.get(self.key))
        store.delete_key(self.key)


_fabrics: weakref.WeakKeyDictionary[Comm, GlooFabric | KeyValueFabric] = weakref.WeakKeyDictionary()
_made: weakref.WeakKeyDictionary[Comm, int] = weakref.WeakKeyDictionary()


def fabric_of(comm: Comm) -> Fabric | None:
    """Return the fabric between the ranks of ``comm``, None if there is one rank. Collective, in an entered operation.

    Raises:
        RankFailure: a rank is gone.
    """
    if comm.kv is None:
        return None
    found = _fabrics.get(comm)
    usable = found is not None and not found.broken
    # A collective decision: a rank that had done its part before the others gave up has a fabric that looks whole.
    if not all(comm.gather("fabric", lambda: b"1" if usable else b"")):
        _made[comm] = generation = _made.get(comm, 0) + 1
        made = GlooFabric(comm.timeout) if isinstance(comm, TorchComm) else KeyValueFabric(comm, generation)
        _fabrics[comm] = found = made
    return found
