"""Live tensors as bytes, one after the other, from wherever they are.

On a CPU the bytes are the live memory itself. From a CUDA device they come through pinned host buffers, which are made
once, on a stream of our own: while the bytes of one tensor are digested and stored, the next ones are on their way.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from ckpt.runtime.staging import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

AHEAD = 3
"""Device copies under way or in use at a time."""


def moment() -> torch.cuda.Event | None:
    """Return the point that the device's work of this thread has reached, or None without a device."""
    if not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream())
    return event


def capture(
    sources: Iterable[Callable[[], torch.Tensor]], after: torch.cuda.Event | None = None
) -> Iterator[memoryview]:
    """Yield the row-major bytes of each tensor; valid until the next is asked for.

    Args:
        sources: called in order, a few ahead of what is yielded, by the thread that iterates.
        after: the point in the device's work at which the tensors are what they should be; by default everything that
            this thread has asked of the device so far.
    """
    side = _side_stream(after)
    copies: deque[_Copy | torch.Tensor] = deque()
    for source in sources:
        # What a source computes on the device (a cast) belongs into our stream as well.
        with torch.cuda.stream(side) if side is not None else nullcontext():
            tensor = source().detach()
            copies.append(_Copy(tensor, side) if side is not None and tensor.is_cuda else tensor)
        while copies and len(copies) >= (AHEAD if isinstance(copies[-1], _Copy) else 1):
            yield from _drain(copies.popleft())
    while copies:
        yield from _drain(copies.popleft())


def _drain(one: _Copy | torch.Tensor) -> Iterator[memoryview]:
    if isinstance(one, torch.Tensor):
        yield tensor_bytes(one)
        return
    try:
        yield one.bytes()
    finally:
        _free.append(one.buffer)


class _Copy:
    """One tensor on its way from a device into a pinned buffer, on the current stream."""

    def __init__(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        source = tensor.resolve_conj().resolve_neg().contiguous()
        self._nbytes = source.numel() * source.element_size()
        self.buffer = _pinned(self._nbytes)
        self.buffer[: self._nbytes].copy_(source.reshape(-1).view(torch.uint8), non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record(stream)
        # The caching allocator must not hand out the memory again before this stream has read it.
        source.record_stream(stream)

    def bytes(self) -> memoryview:
        """Wait for the copy."""
        self._done.synchronize()
        return memoryview(self.buffer[: self._nbytes].numpy().data).cast("B")


_streams: dict[int, torch.cuda.Stream] = {}
_free: list[torch.Tensor] = []
_lock = threading.Lock()


def _side_stream(after: torch.cuda.Event | None) -> torch.cuda.Stream | None:
    """Return our stream on the current device, which waits for that point; None without a device."""
    if not torch.cuda.is_initialized():
        return None
    device = torch.cuda.current_device()
    stream = _streams.get(device)
    if stream is None:
        stream = _streams[device] = torch.cuda.Stream(device)
    if after is None:
        stream.wait_stream(torch.cuda.current_stream())
    else:
        stream.wait_event(after)
    return stream


def _pinned(nbytes: int) -> torch.Tensor:
    """Return a pinned buffer of at least so many bytes; pinning is slow, so they are kept."""
    with _lock:  # an audit may look at the state while a save behind the training does
        for k, buffer in enumerate(_free):
            if buffer.numel() >= nbytes:
                return _free.pop(k)
        if _free:
            _free.pop()  # too small for what this job's chunks are: replaced
    return torch.empty(max(nbytes, 1), dtype=torch.uint8, pin_memory=True)
