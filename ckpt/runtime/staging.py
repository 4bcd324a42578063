"""Live tensors as bytes, a chunk at a time, so that extra host memory is one chunk whatever the model's size."""

from __future__ import annotations

from math import prod

import torch

from ckpt.errors import MalformedData, UnsupportedLayout


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the row-major bytes of a tensor.

    No copy for a contiguous CPU tensor: the view is the live memory, to be used before training goes on. A strided or
    device tensor is copied (at most one chunk).

    Raises:
        UnsupportedLayout: a tensor without plain memory (meta, sparse, a wrapper subclass).
    """
    try:
        return memoryview(flat_bytes(tensor.detach().cpu()).numpy().data).cast("B")
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise UnsupportedLayout(f"a {type(tensor).__name__} on {tensor.device} has no plain bytes: {error}") from error


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the row-major bytes of a tensor as a 1-D ``uint8`` tensor on its device; a view if it is contiguous.

    Raises:
        UnsupportedLayout: as :func:`tensor_bytes`.
    """
    try:
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
        # Not reshape: a tensor of one element is contiguous whatever its stride, and keeps it (a slice of a transpose).
        return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise UnsupportedLayout(f"a {type(tensor).__name__} on {tensor.device} has no plain bytes: {error}") from error


def cast_bytes(tensor: torch.Tensor, dtype: torch.dtype) -> memoryview:
    """Return the bytes of ``tensor`` cast to ``dtype``, with the rounding that the engines use (to nearest even)."""
    return tensor_bytes(tensor.detach().to(dtype))


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` into live memory of the same shape, in place, converting the dtype if it differs.

    Along a dimension of stride 0 (an expanded tensor) all elements are one memory: the first stands for all.
    """
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and size > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    with torch.no_grad():
        target.copy_(source)


_NOTHING = torch.empty(0, dtype=torch.uint8)


def as_tensor(data: memoryview | bytearray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor over ``data`` (writable memory, not copied); ``dtype`` is this project's name of it.

    Raises:
        MalformedData: ``data`` is not as long as such a tensor.
    """
    # Bytes first: a chunk may start anywhere in a pack's span.
    return tensor_over(torch.frombuffer(data, dtype=torch.uint8) if len(data) else _NOTHING, dtype, shape)


def tensor_over(raw: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor over bytes (1-D ``uint8``, on any device); a copy only if they are not aligned for the dtype.

    Raises:
        MalformedData: there are more or fewer than such a tensor has.
    """
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise UnsupportedLayout(f"this torch ({torch.__version__}) has no dtype {dtype!r}")
    if len(raw) != prod(shape) * kind.itemsize or min(shape, default=0) < 0:
        raise MalformedData(f"{len(raw)} bytes for a tensor {dtype}{list(shape)}")
    if not len(raw):
        return torch.empty(shape, dtype=kind, device=raw.device)
    apart = raw.data_ptr() % kind.itemsize or raw.storage_offset() % kind.itemsize  # torch asks for both
    aligned = raw.clone() if apart else raw
    return aligned.view(kind).reshape(shape)
