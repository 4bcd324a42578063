"""Live tensors as bytes, one after the other, from wherever they are.

On a CPU the bytes are the live memory itself. From a CUDA device they come through pinned host buffers, on a stream of
our own: while the bytes of one tensor are digested and stored, the next ones are on their way.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ckpt.runtime.staging import flat_bytes, tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import numpy.typing as npt

    Source = tuple[torch.device, Callable[[], torch.Tensor]]
    """A device, and a function that returns a tensor on it; what it computes, it computes on our stream."""

AHEAD = 3
"""Device copies under way or in use at a time."""
PINNED_BYTES = 4 << 20
"""Least size of a pinned buffer: that of an ordinary chunk, so that any will do for any."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The point in each device's work at which a state is what is to be saved."""

    events: tuple[torch.cuda.Event, ...] = ()

    @classmethod
    def now(cls, devices: Iterable[torch.device]) -> Moment:
        """Return the point that this thread's work has reached on each of these devices that is a CUDA device."""
        events = []
        for device in sorted({d for d in devices if d.type == "cuda"}, key=str):
            event = torch.cuda.Event(blocking=True)  # who waits does not spin on a core that training needs
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        return cls(tuple(events))

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run a block in the background from this moment on: nothing in it waits for what training does later."""
        for event in self.events:
            event.synchronize()
        if not torch.cuda.is_initialized():
            yield
            return
        with torch.cuda.stream(_side(torch.device("cuda", torch.cuda.current_device()))):
            yield


def capture(sources: Iterable[Source], *, behind: bool = False, keep: bool = True) -> Iterator[memoryview]:
    """Yield the row-major bytes of each tensor; valid until the next is asked for.

    Args:
        sources: called in order, a few ahead of what is yielded, by the thread that iterates.
        behind: training goes on meanwhile, and what it does is not waited for (:meth:`Moment.beside`).
        keep: the bytes are to be stored, so they must not change any more once they are digested; with ``behind`` those
            of CPU tensors are copied therefore, one at a time.
    """
    copies: deque[_Copy | torch.Tensor] = deque()
    waited: set[torch.device] = set()
    scratch = _Scratch() if behind and keep else None
    for device, source in sources:
        side = _side(device) if device.type == "cuda" else None
        if side is not None and not behind and device not in waited:
            side.wait_stream(torch.cuda.current_stream(device))
            waited.add(device)
        with torch.cuda.stream(side) if side is not None else nullcontext():
            tensor = source().detach()
            copies.append(_Copy(tensor, side) if side is not None else tensor)
        while copies and len(copies) >= (AHEAD if isinstance(copies[-1], _Copy) else 1):
            yield _bytes_of(copies.popleft(), scratch)
    while copies:
        yield _bytes_of(copies.popleft(), scratch)


def _bytes_of(one: _Copy | torch.Tensor, scratch: _Scratch | None) -> memoryview:
    if isinstance(one, _Copy):
        return one.bytes()
    return tensor_bytes(one) if scratch is None else scratch.copy(tensor_bytes(one))


class _Scratch:
    """Memory for one chunk, used again and again."""

    def __init__(self) -> None:
        self._memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def copy(self, data: memoryview) -> memoryview:
        if len(self._memory) < len(data):
            self._memory = np.empty(max(len(data), PINNED_BYTES), np.uint8)
        np.copyto(self._memory[: len(data)], np.frombuffer(data, np.uint8))
        return self._memory[: len(data)].data


class _Copy:
    """One tensor on its way from a device into a pinned buffer, on the current stream, which is ``stream``.

    The buffer is torch's: its host allocator gives the same pinned memory out again, and not before the copy is done.
    """

    def __init__(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        source = flat_bytes(tensor)
        self._nbytes = source.numel()
        self._buffer = torch.empty(max(self._nbytes, PINNED_BYTES), dtype=torch.uint8, pin_memory=True)
        self._buffer[: self._nbytes].copy_(source, non_blocking=True)
        self._done = torch.cuda.Event(blocking=True)
        self._done.record(stream)
        # The caching allocator must not hand out the memory again before this stream has read it.
        source.record_stream(stream)

    def bytes(self) -> memoryview:
        """Wait for the copy."""
        self._done.synchronize()
        return memoryview(self._buffer[: self._nbytes].numpy().data).cast("B")


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side(device: torch.device) -> torch.cuda.Stream:
    """Return our stream on a device."""
    found = _streams.get(device)
    if found is None:
        found = _streams[device] = torch.cuda.Stream(device)
    return found
