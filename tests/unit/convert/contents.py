"""What an opened checkpoint holds, as tensors, through the plan and the reader that every writer uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ckpt.convert.assemble import Assembler
from ckpt.engine.base import torch_dtype
from ckpt.layout.box import Box
from ckpt.layout.spec import Shard

if TYPE_CHECKING:
    from ckpt.convert.opened import Opened

MEMORY = 64 << 20


def contents(opened: Opened) -> dict[tuple[str, str], torch.Tensor]:
    """Return every tensor by name and role."""
    wants = [Shard(spec, Box.whole(spec.shape)) for spec in opened.specs]
    data: dict[int, bytearray] = {n: bytearray() for n in range(len(wants))}
    for piece in Assembler(opened, memory=MEMORY).pieces(wants):
        data[piece.number] += piece.data
    return {want.spec.key: _tensor(want, data[n]) for n, want in enumerate(wants)}


def _tensor(want: Shard, data: bytearray) -> torch.Tensor:
    dtype = torch_dtype(want.spec.dtype)
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(want.spec.shape)
