"""What an opened checkpoint of any format holds, read by its index alone: without planner, reader or assembler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt.engine.base import torch_dtype
from ckpt.layout.box import Box
from ckpt.layout.spec import MASTER, PARAM
from tests.harness.conversions import Arrays, raw, tensor

if TYPE_CHECKING:
    from ckpt.convert.opened import Opened


def arrays_of(opened: Opened) -> Arrays:
    """Every tensor's bytes, each element there exactly once; derived parameters are the casts of their masters.

    Chunks must be stored as they are.
    """
    found = {spec.key: np.zeros((*spec.shape, spec.itemsize), np.uint8) for spec in opened.specs}
    count = {spec.key: np.zeros(spec.shape, np.int64) for spec in opened.specs}
    for part in opened.parts:
        for chunk in part.chunks:
            if chunk.pack < 0 or chunk.ranks:  # the copy that everybody gets
                continue
            spec = opened.specs[chunk.spec]
            data = opened.store.get(part.packs[chunk.pack].key, chunk.start, chunk.nbytes)
            assert len(data) == chunk.nbytes == chunk.box.volume * spec.itemsize, (spec, chunk)
            at = chunk.box.relative_to(Box.whole(spec.shape))
            found[spec.key][at] = np.frombuffer(data, np.uint8).reshape(*chunk.sizes, spec.itemsize)
            count[spec.key][at] += 1
    specs = {spec.key: spec for spec in opened.specs}
    for key, spec in specs.items():
        assert int(count[key].max(initial=0)) <= 1, spec
        if spec.role == PARAM and spec.fqn in opened.derived and (spec.fqn, MASTER) in specs:
            master = specs[spec.fqn, MASTER]
            cast = tensor(found[master.key].reshape(-1), master).to(torch_dtype(spec.dtype))
            missing = count[key] == 0
            found[key][missing] = raw(cast).reshape(*spec.shape, spec.itemsize)[missing]
        else:
            assert int(count[key].min(initial=1)) == 1, spec
    return {key: array.reshape(-1) for key, array in found.items()}


def objects_of(opened: Opened, *, but: tuple[str, ...] = ()) -> dict[tuple[str, str, tuple[int, ...]], Any]:
    """The objects beside the tensors, generators left out."""
    kept: list[Any] = [one for one in opened.objects if one.kind != "rng" and one.name not in but]
    return {(one.name, one.kind, one.ranks): one.tree for one in kept}
